"""Quasi-Monte Carlo: expectations over Gaussian logits by a few fixed, evenly spread points.

The same points serve every example, so results are deterministic. For N examples with C classes and S points it takes
O(N C (C + S) min(C, RANK)) operations, and the memory of a chunk of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lapis.errors import NotPositiveDefiniteError

RANK = 128
"""Directions of a covariance that points follow; what lies outside is treated as independent noise of each logit."""

CHUNK = 2**16
"""Logits processed together: the working set then fits a processor's cache."""

COVARIANCES = 2**19
"""Entries of covariances that are factorised together (4 MB in float64, of which there are about six copies)."""

SOBOL_DIMENSIONS = 4096
"""Dimensions with evenly spread points; further ones, for classes beyond these, take random points."""


def default_points(classes: int) -> int:
    """Powers of two, as Sobol points need. More classes take more points, and their predictions cost more anyway."""
    return 128 if classes <= 16 else 512


@lru_cache(maxsize=8)
def normal_points(count: int, dimensions: int, seed: int) -> Tensor:
    """Scrambled Sobol points, mapped to N(0, I) by the normal quantile: (dimensions, count), float64."""
    with torch.inference_mode(False):  # the result is cached, and must be usable outside inference mode
        if dimensions == 0:
            return torch.empty(0, count, dtype=torch.float64)
        spread = min(dimensions, SOBOL_DIMENSIONS)
        engine = torch.quasirandom.SobolEngine(spread, scramble=True, seed=seed)  # type: ignore[no-untyped-call]
        uniform = engine.draw(count, dtype=torch.float64)
        smallest = 2.0**-31  # Sobol points have 30 bits: half their spacing keeps the quantile finite
        points: Tensor = torch.special.ndtri(uniform.clamp(smallest, 1 - smallest))
        if dimensions > spread:
            generator = torch.Generator().manual_seed(seed)
            rest = torch.randn(count, dimensions - spread, dtype=torch.float64, generator=generator)
            points = torch.cat([points, rest], 1)
        return points.T.contiguous()


@dataclass(frozen=True, eq=False)
class Points:
    """S points for each of N Gaussians over C logits.

    Args:
        mean: (N, C).
        variance: (N, C); the logits are independent where `covariance` is None.
        covariance: (N, C, C), or None.
        count: number of points, S.
        seed: of the points' scrambling.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    count: int
    seed: int

    def log_mean_probs(self) -> Tensor:
        """log E[softmax(f)], (N, C)."""
        return self._each(torch.empty_like(self.mean), lambda log_probs: log_probs.logsumexp(-1)).log_softmax(-1)

    def mean_entropy(self) -> Tensor:
        """E[entropy of softmax(f)], (N,)."""
        return self._each(
            torch.empty_like(self.mean[:, 0]), lambda log_probs: -(log_probs.exp() * log_probs).sum(1).mean(-1)
        )

    def _each(self, result: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """`result`, filled with a function of `_log_probs`, chunk by chunk."""
        done = 0
        for log_probs in self._log_probs():
            result[done : done + len(log_probs)] = function(log_probs)
            done += len(log_probs)
        return result

    def _log_probs(self) -> Iterator[Tensor]:
        """log softmax(f) at the points, (N', C, S), in chunks of examples.

        Classes are not the last dimension: sums over them are then sums of contiguous vectors, and much faster.
        """
        number, classes = self.mean.shape
        rank = 0 if self.covariance is None else min(RANK, classes - 1)
        alone = self.covariance is None or rank < classes - 1  # whether logits have noise of their own
        z = normal_points(self.count, rank + classes * alone, self.seed).to(self.mean)
        together = max(1, COVARIANCES // classes**2)
        step = max(1, CHUNK // (classes * self.count))
        for start in range(0, number, together):
            mean = self.mean[start : start + together].unsqueeze(-1)
            if self.covariance is None:
                root, variance = None, self.variance[start : start + together].clamp_min(0)
            else:
                root, variance = shift_free_root(self.covariance[start : start + together], rank)
                root = root.to(mean.dtype)
            deviation = variance.sqrt().to(mean.dtype).unsqueeze(-1)
            for first in range(0, len(mean), step):
                part = slice(first, first + step)
                f = mean[part].expand(-1, -1, self.count)
                if root is not None:
                    f = f + (root[part].flatten(0, 1) @ z[:rank]).reshape(f.shape)
                if alone:
                    f = f + deviation[part] * z[rank:]
                yield f.log_softmax(1)


def shift_free_root(covariance: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """R (N, C, rank) and d (N, C), float64, with R R^T + diag(d) = covariance, but for a shift common to all logits.

    The softmax does not feel such a shift, so it is projected out first: V <- (I - 11^T/C) V (I - 11^T/C), which leaves
    C - 1 directions. Then `rank` steps of Cholesky's algorithm, each on the logit with the largest variance left
    (pivoting): the first columns matter most, as do the first dimensions of Sobol points; singular matrices need no
    jitter; and the cost is O(C rank^2). With rank = C - 1 nothing is left for d but rounding.
    """
    number, classes, _ = covariance.shape
    wide = covariance.double()
    rounding = torch.finfo(covariance.dtype).eps
    largest = wide.diagonal(dim1=-2, dim2=-1).abs().amax(-1, keepdim=True)
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide - wide.mean(-2, keepdim=True)
    left = wide.diagonal(dim1=-2, dim2=-1).clone()
    rows = wide.new_zeros(rank, number, classes)  # columns of the root
    # The last two logits always tie, as all sum to zero: the first of equals must win, whatever the rounding.
    precedence = torch.linspace(1.0, 0.999, classes, dtype=wide.dtype, device=wide.device)
    for step in range(rank):
        index = (left * precedence).argmax(-1, keepdim=True)
        pivot = left.gather(-1, index)
        column = wide.gather(1, index.unsqueeze(-1).expand(-1, 1, classes))
        if step:
            done = rows[:step].transpose(0, 1)  # (N, step, C)
            at_pivot = done.gather(2, index.unsqueeze(1).expand(-1, step, 1))
            column = torch.baddbmm(column, at_pivot.mT, done, alpha=-1)
        # A pivot within rounding is zero: dividing by it would blow up the rounding of its column.
        usable = pivot > classes * rounding * largest
        rows[step] = torch.where(usable, column.squeeze(1) / torch.where(usable, pivot, 1.0).sqrt(), 0.0)
        left = (left - rows[step] ** 2).scatter(1, index, 0.0)
    # Rounding leaves at least about -eps, relative to the largest variance; -sqrt(eps) tells it from truly negative.
    if not bool((left >= -(rounding**0.5) * largest).all()):
        raise NotPositiveDefiniteError(
            "A covariance of the outputs has negative eigenvalues",
            expected="eigenvalues >= 0",
            got=f"a variance of {left.min().item():.4g} given other outputs",
            do="refit in float64, or with a larger prior precision",
        )
    return rows.permute(1, 2, 0).contiguous(), left.clamp_min(0)
