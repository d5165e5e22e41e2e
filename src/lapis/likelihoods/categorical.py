"""Classification into C classes by a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lapis.errors import DataError, LikelihoodError
from lapis.likelihoods._draws import seeded
from lapis.likelihoods._probabilities import final_function, sum_to_one
from lapis.likelihoods._targets import (
    as_tensor,
    check_finite,
    describe,
    flatten_channels,
    flatten_positions,
    other_channels,
    raise_at,
)
from lapis.likelihoods.base import Kind, Likelihood
from lapis.options import check_arguments

SUM_TOLERANCE = 1e-4
"""Sums of soft labels may differ from one by this much (half-precision files); the labels are then normalised."""

LIFT, SMALLEST_SUM = 2.0**60, 1e-100
"""Scaling in `factor`, chosen so that sqrt(sum) / (sum * LIFT) is representable in float32 for sum >= SMALLEST_SUM."""


class Categorical(Likelihood):
    """p(y = c | f) = softmax(f)_c; with soft labels q, -log p = -sum_c q_c log softmax(f)_c.

    Args:
        ignore_index: class index of positions that do not count (padding); None when every position counts.
        channels: see `Likelihood`.

    Targets are class indices (B, *positions) of an integer dtype, or probabilities of a floating dtype laid
    out as the outputs: (B, C), (B, *positions, C), or (B, C, *positions) with channels="first".
    """

    name: ClassVar[str] = "categorical"
    kind: ClassVar[Kind] = "classification"

    def __init__(self, ignore_index: int | None = -100, *, channels: Literal["last", "first"] = "last") -> None:
        check_arguments(Categorical.__init__, locals(), signed=("ignore_index",))
        super().__init__(channels=channels)
        self.ignore_index = ignore_index

    def check_outputs(self, f: Tensor) -> None:
        super().check_outputs(f)
        if f.shape[-1] < 2:
            raise LikelihoodError(
                "The categorical likelihood needs one output per class",
                expected="C >= 2",
                got=f"C = {f.shape[-1]}",
                do='use likelihood="bernoulli" for one logit, or channels="first" if the classes come first',
            )

    def suspicion(self, f: Tensor) -> str | None:
        """Outputs that are probabilities already; log-probabilities are proper logits."""
        last = final_function(f)
        if last == "softmax" or sum_to_one(f):
            seen = "the network ends in a softmax" if last else "every row of outputs is >= 0 and sums to one"
        elif last == "sigmoid":
            seen = "the network ends in a sigmoid"
        else:
            return None
        return (
            f"Outputs look like probabilities: {seen}. The categorical likelihood takes logits and applies a softmax "
            "itself. Remove the network's last softmax or sigmoid, or return log-probabilities (log_softmax)."
        )

    def targets(self, y: Any, f: Tensor, raw_shape: Sequence[int] | None = None) -> Tensor:
        """Class indices (B, T) int64, or probabilities (B, T, C) in f's dtype, each row summing to one."""
        tensor = as_tensor(y, f)
        positions = None if raw_shape is None else self.positions(raw_shape)
        if tensor.dtype == torch.bool:
            raise DataError(
                "Class labels are booleans",
                expected="integer classes or floating-point probabilities",
                got="torch.bool",
                do="call .long() on the targets, or use the bernoulli likelihood",
            )
        if tensor.is_floating_point():
            return self._probabilities(tensor, f, positions)
        return self._indices(tensor, f, positions)

    def _indices(self, y: Tensor, f: Tensor, positions: Sequence[int] | None) -> Tensor:
        indices = flatten_positions(y, f, positions)
        if indices is None:
            raise DataError(
                "Class labels have the wrong shape",
                expected=describe(f, None, self.channels, positions),
                got=f"{tuple(y.shape)} of {y.dtype}",
                do=other_channels(y, f, self.channels, positions)
                or "pass one class per position, or one-hot rows as floating-point numbers",
            )
        y, indices = y.long(), indices.long()
        if not y.numel() or all(0 <= int(bound) < f.shape[-1] for bound in y.aminmax()):
            return indices
        bad = (y < 0) | (y >= f.shape[-1])
        if self.ignore_index is not None:
            bad &= y != self.ignore_index
        if bad.any():
            ignored = "" if self.ignore_index is None else f", or {self.ignore_index} to ignore a position"
            raise_at(
                y,
                bad,
                f"out of range for {f.shape[-1]} classes",
                expected=f"classes 0 to {f.shape[-1] - 1}{ignored}",
                do="relabel the targets, or give the network one output per class",
            )
        return indices

    def _probabilities(self, y: Tensor, f: Tensor, positions: Sequence[int] | None) -> Tensor:
        probabilities = flatten_channels(y, f, f.shape[-1], self.channels, positions)
        if probabilities is None:
            raise DataError(
                "Soft labels have the wrong shape",
                expected=describe(f, f.shape[-1], self.channels, positions),
                got=f"{tuple(y.shape)} of {y.dtype}",
                do="pass one probability per class, or integer classes (.long())",
            )
        check_finite(y)
        if (probabilities < 0).any():
            raise_at(
                probabilities,
                (probabilities < 0).any(-1),
                "no probabilities: some are negative",
                expected="non-negative rows that sum to one",
                do="normalise the soft labels, or pass integer classes",
            )
        probabilities = probabilities.double()
        sums = probabilities.sum(-1, keepdim=True)
        off = (sums - 1).abs().squeeze(-1) > SUM_TOLERANCE
        if off.any():
            raise_at(
                probabilities,
                off,
                "no probabilities: they do not sum to one",
                expected=f"rows that sum to one within {SUM_TOLERANCE}",
                do="normalise the soft labels, or pass integer classes (.long())",
            )
        return (probabilities / sums).to(f.dtype)

    def position_nll(self, f: Tensor, y: Tensor) -> Tensor:
        log_p = f.log_softmax(-1)
        if y.is_floating_point():
            return -(y * log_p).sum(-1)
        chosen = log_p.gather(-1, self._safe(y).unsqueeze(-1)).squeeze(-1)
        return torch.where(self._counts(y), -chosen, 0.0)

    def statistics(self, f: Tensor, y: Tensor) -> Tensor:
        if y.is_floating_point():
            return super().statistics(f, y)
        rows, ignored = f.detach().double().flatten(0, 1), -1 if self.ignore_index is None else self.ignore_index
        return -cross_entropy(rows, y.flatten(), ignore_index=ignored, reduction="sum").reshape(1)  # one fused kernel

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """softmax(f) - y."""
        p = f.softmax(-1)
        if y.is_floating_point():
            return p - y
        return self._masked(p - torch.nn.functional.one_hot(self._safe(y), f.shape[-1]).to(p), y)

    def link(self, f: Tensor) -> Tensor:
        return f.softmax(-1)

    def curvature_trace(self, f: Tensor, y: Tensor) -> Tensor:
        """sum_c p_c (1 - p_c), with 1 - p of the most probable class as the sum of the others."""
        p = f.softmax(-1, dtype=torch.float64)
        best, index = p.max(-1, keepdim=True)
        rest = p.scatter(-1, index, 0.0)
        trace = best[..., 0] * rest.sum(-1) + (rest * (1 - rest)).sum(-1)
        return trace if y.is_floating_point() else torch.where(self._counts(y), trace, 0.0)

    def factor(self, f: Tensor, y: Tensor) -> Tensor:
        """A factor of diag(p) - p p^T, (B, T, C, C - 1): one column fewer than outputs saves a backward pass.

        With r_j = p_1 + ... + p_j, column j = 2 .. C has d_j = sqrt(p_j r_{j-1} / r_j) in row j and -p_i d_j / r_{j-1}
        in the rows i above. Sums and roots are float64, and both operands of the product are rescaled by LIFT: for a
        nearly certain network S is representable in float32, but p is not.
        """
        p = f.softmax(-1, dtype=torch.float64)
        sums = p.cumsum(-1).clamp_(min=torch.finfo(p.dtype).tiny)
        above = sums[..., :-1]
        root = (p[..., 1:] * above / sums[..., 1:]).sqrt()
        wide = torch.promote_types(f.dtype, torch.float32)
        # columns contiguous in memory: each is the seed of a backward pass
        scale = (root / (-LIFT * above.clamp(min=SMALLEST_SUM))).to(wide).movedim(-1, 0).contiguous().unsqueeze(-1)
        s = (LIFT * p).to(wide) * scale
        s.masked_fill_(_not_above(f.shape[-1], f.device), 0.0)  # not times zero: products there may overflow
        s[..., 1:].diagonal(dim1=0, dim2=-1).copy_(root)
        s = s.to(f.dtype).movedim(0, -1)
        if y.is_floating_point() or bool((counts := self._counts(y)).all()):
            return s
        return s.masked_fill_(~counts[..., None, None], 0.0)

    def curved(self, f: Tensor, y: Tensor, u: Tensor) -> Tensor:
        """p (w - p . w) with w = u - u_m, where m is the most probable class.

        The product is invariant to a shift of u; this shift avoids cancellation where the network is nearly certain.
        """
        p = f.softmax(-1).to(u.dtype)
        w = u - u.gather(-1, f.argmax(-1, keepdim=True).expand(*u.shape[:-1], 1))
        w.sub_(torch.einsum("btc,kbtc->kbt", p, w).unsqueeze(-1)).mul_(p)
        return w if y.is_floating_point() else self._masked(w, y)

    def expected_hessian(self, draws: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """diag(E[p]) - E[p p^T]."""
        p = draws.softmax(-1)
        root = p * weights.sqrt()[:, None, None, None]
        mean = torch.einsum("s,sbtc->btc", weights, p)
        expected = torch.diag_embed(mean) - torch.einsum("sbtc,sbtd->btcd", root, root)
        return expected if y.is_floating_point() else self._masked(expected.flatten(-2), y).reshape(expected.shape)

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = f.detach().softmax(-1)
        source = seeded(generator, f.device)
        drawn = torch.multinomial(p.reshape(-1, f.shape[-1]).to(source.device), 1, generator=source).to(f.device)
        gradient = p - torch.nn.functional.one_hot(drawn.reshape(f.shape[:-1]), f.shape[-1]).to(p)
        return gradient if y.is_floating_point() else self._masked(gradient, y)

    def to_config(self) -> dict[str, Any]:
        return {**super().to_config(), "ignore_index": self.ignore_index}

    def _counts(self, y: Tensor) -> Tensor:
        """Mask of the positions that are not ignored, (B, T)."""
        if self.ignore_index is None:
            return torch.ones_like(y, dtype=torch.bool)
        return y != self.ignore_index

    def _safe(self, y: Tensor) -> Tensor:
        """Class indices, with ignored positions replaced by the valid class 0."""
        return torch.where(self._counts(y), y, 0)

    def _masked(self, gradient: Tensor, y: Tensor) -> Tensor:
        return torch.where(self._counts(y).unsqueeze(-1), gradient, 0.0)


@lru_cache(maxsize=8)
def _not_above(classes: int, device: torch.device) -> Tensor:
    """For columns 2 .. C of the factor, (C - 1, 1, 1, C): where they are not above the diagonal."""
    return torch.ones(classes - 1, classes, dtype=torch.bool, device=device).triu(1)[:, None, None]
