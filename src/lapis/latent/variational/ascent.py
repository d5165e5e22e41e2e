"""Up the ELBO: steps by turns in q and in theta, and a search of all at the end, which tells whether it is the top.

Steps of Adam with a falling rate end flat wherever they are, so their trace says nothing about convergence. The search
(`search`) is of the ELBO under fixed draws, which is an ordinary function: L-BFGS climbs it fast, also along the narrow
ridges on which turns in q and theta are slow. What it gains is measured by other draws, the same before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapis.errors import DataError, ModelError
from lapis.latent.variational.approximation import Approximation, Gaussians
from lapis.options import checked_tensor, shown

BETAS = (0.9, 0.99)
"""Of Adam: squares of a hundred steps, so that the large gradients of a wide start are soon forgotten."""

LAST_RATE = 0.01
"""What is left of the learning rate in the last round."""

CLIMBED = 64
"""Draws of the function that is searched."""

JUDGED = 256
"""Draws that measure a gain."""

SEARCHES = 10
"""At most; each has other draws."""

EVALUATIONS, FEWEST = 40, 10
"""Of the ELBO in one search: at most, and at least."""

BLOCK = 16
"""Draws evaluated at once, at most: there are several blocks, whose means tell the standard error."""

TOLERANCE = 1e-3, 1e-4
"""Nats a datum, and a share of the ELBO: the larger of both is no gain."""

Function = Callable[[Any, Tensor], Tensor]


class Ascent:
    """Steps up the ELBO: by turns in q, and in theta."""

    def __init__(
        self,
        function: Function,
        family: Approximation,
        theta: Mapping[str, Tensor],
        data: Any,
        steps: int,
        draws: int,
        batch_size: int | None,
        source: torch.Generator,
    ) -> None:
        self.function, self.family, self.data, self.source = function, family, data, source
        self.steps, self.draws, self.count = steps, draws, count_of(data)
        self.batch_size = min(batch_size or self.count, self.count)
        groups: list[list[Tensor]] = [[p for p in family.parameters() if p.requires_grad], list(theta.values())]
        self.halves = [(half, g, torch.optim.Adam(g, betas=BETAS)) for half, g in enumerate(groups) if g]
        self.parameters = [p for group in groups for p in group]

    def round(self, rate: float) -> None:
        """Some steps in q, then some in theta."""
        for half, group, optimiser in self.halves:
            optimiser.param_groups[0]["lr"] = rate
            for _ in range(self.steps):
                rows = torch.arange(self.count)
                if self.batch_size < self.count:
                    rows = torch.randperm(self.count, generator=self.source)[: self.batch_size]
                part = _rows(self.data, rows)
                gaussians = self.family(rows, part)
                noise = noise_of(self.draws, gaussians, self.source)
                values = integrand(self.function, gaussians if half == 0 else gaussians.detached(), part, noise)
                loss = -values.mean(0).sum() * (self.count / len(rows))
                if not loss.requires_grad:
                    raise ModelError(
                        "log_joint does not depend on theta", expected="a function of the parameters", got="another",
                        do="leave parameters out, or use them in log_joint",
                    )  # fmt: skip
                found = torch.autograd.grad(loss, group, allow_unused=True)
                for p, gradient in zip(group, found, strict=True):
                    p.grad = gradient
                optimiser.step()
                optimiser.zero_grad()

    @torch.no_grad()
    def draw(self, draws: int, source: torch.Generator) -> Tensor:
        """The ELBO's integrand, summed over the data: means of blocks of draws, which are independent."""
        block = min(self.draws, BLOCK)
        found = []
        for _ in range(-(-draws // block)):
            total = torch.zeros((), dtype=torch.float64)
            for rows in torch.split(torch.arange(self.count), self.batch_size):
                part = _rows(self.data, rows)
                gaussians = self.family(rows, part)
                values = integrand(self.function, gaussians, part, noise_of(block, gaussians, source))
                total = total + values.sum(1).double().mean()
            found.append(total)
        return torch.stack(found)

    def elbo(self, draws: int) -> float:
        """An estimate."""
        value = float(self.draw(draws, self.source).mean())
        if not value > -float("inf"):
            raise DataError(
                "The ELBO is not finite", expected="a number", got=str(value),
                do="lower learning_rate, or check log_joint",
            )  # fmt: skip
        return value

    # the end -------------------------------------------------------------------------------------------

    def finish(self, rounds: int, rate: float) -> tuple[float, float]:
        """Search for more, and keep it; what the last search gained in nats, and its standard error.

        Searches see all data, and do no more work than the rounds did: where that is too little, as with small
        minibatches of many data, and where fixed draws mislead (they are too few for very many latent variables), some
        more rounds with larger steps are tried instead. A gain of nothing means that nothing was found.
        """
        passes = -(-CLIMBED // self.draws) * -(-self.count // self.batch_size)
        left = rounds * self.steps * len(self.halves) // passes
        found = None
        for _ in range(SEARCHES):
            if left < FEWEST:
                break
            gain, error = self._tried(partial(self._search, min(left, EVALUATIONS)))
            if not gain > -2 * error:  # misled
                found = None
                break
            found, left = (gain, error), left - EVALUATIONS
            if not self.higher(gain, error):
                break
        return found or self._tried(partial(self._wander, max(rounds // 10, 5), rate))

    def higher(self, gain: float, error: float) -> bool:
        """Whether this is a gain, beyond two standard errors."""
        a_datum, share = TOLERANCE
        size = abs(float(self.draw(CLIMBED, torch.Generator().manual_seed(0)).mean()))
        return gain - 2 * error > max(a_datum * self.count, share * size)

    def _tried(self, climb: Callable[[], None]) -> tuple[float, float]:
        """The gain of this, by draws of its own, and its standard error; without a clear gain all is put back."""
        kept = [p.detach().clone() for p in self.parameters]
        seed = int(torch.randint(2**31, (), generator=self.source))
        before = self.draw(JUDGED, torch.Generator().manual_seed(seed))
        climb()
        gains = self.draw(JUDGED, torch.Generator().manual_seed(seed)) - before
        gain, error = float(gains.mean()), float(gains.std() / len(gains) ** 0.5)
        if not gain > 2 * error:
            with torch.no_grad():
                for p, old in zip(self.parameters, kept, strict=True):
                    p.copy_(old)
        return gain, error

    def _search(self, evaluations: int) -> None:
        """L-BFGS on all data, under fixed draws."""
        everything = torch.arange(self.count)
        with torch.no_grad():
            noise = _whitened(noise_of(CLIMBED, self.family(everything, self.data), self.source))
        optimiser = torch.optim.LBFGS(
            self.parameters, max_iter=evaluations, max_eval=evaluations, history_size=20, line_search_fn="strong_wolfe",
            tolerance_grad=1e-9, tolerance_change=1e-12,
        )  # fmt: skip

        def closure() -> float:
            optimiser.zero_grad()
            total = 0.0
            for rows in torch.split(everything, self.batch_size):
                part = _rows(self.data, rows)
                for draws in torch.split(noise[:, rows], self.draws):
                    gaussians = self.family(rows, part)
                    # log q(z) of z = mean + S noise is that of the noise, less log |S|
                    sizes = gaussians.factors.diagonal(dim1=-2, dim2=-1).abs().log().sum()
                    values = self.function(part, gaussians.draw(draws)).sum() + len(draws) * sizes
                    loss = -values / CLIMBED
                    found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
                    for p, gradient in zip(self.parameters, found, strict=True):
                        if gradient is not None:
                            p.grad = gradient if p.grad is None else p.grad + gradient
                    total += float(loss.detach())
            return total

        optimiser.step(closure)  # type: ignore[no-untyped-call]
        optimiser.zero_grad()

    def _wander(self, rounds: int, rate: float) -> None:
        """More rounds, with larger steps."""
        for done in range(rounds):
            self.round(rate * LAST_RATE ** (done / (2 * rounds)))


def integrand(function: Function, q: Gaussians, data: Any, noise: Tensor) -> Tensor:
    """log p(y, z) - log q(z), (draws, N), with log q differentiated through z only."""
    z = q.draw(noise)
    found = function(data, z)
    if not isinstance(found, Tensor) or found.shape != z.shape[:2]:
        raise ModelError(
            "log_joint has values of another shape",
            expected=f"(draws, N) = {tuple(z.shape[:2])}",
            got=shown(found),
            do="sum over all but the first two axes of z",
        )
    return found - q.detached().log_prob(z)


def noise_of(draws: int, q: Gaussians, source: torch.Generator) -> Tensor:
    """Standard normal (draws, N, L), the second half of them the first one mirrored."""
    half = torch.randn((draws + 1) // 2, *q.means.shape, generator=source, dtype=q.means.dtype)
    return torch.cat([half, -half])[:draws]


def _whitened(noise: Tensor) -> Tensor:
    """Draws (S, N, L) with second moments of exactly I for each datum: of a quadratic log joint no error is left.

    With more latent variables than a quarter of the draws, moments of single variables only.
    """
    draws, _, latent = noise.shape
    if latent > draws // 4:
        return noise / noise.square().mean(0).sqrt()
    moments = torch.einsum("sni,snj->nij", noise, noise) / draws
    root = torch.linalg.cholesky(moments)
    found: Tensor = torch.linalg.solve_triangular(root, noise.permute(1, 2, 0), upper=False)
    return found.permute(2, 0, 1)


def count_of(data: Any) -> int:
    """Rows of the data, checked."""
    sizes = {
        len(checked_tensor("data", part)) if checked_tensor("data", part).dim() else 0 for part in tensors_of(data)
    }
    if len(sizes) != 1 or 0 in sizes:
        raise DataError(
            "Bad data", expected="tensors with one row a datum", got=f"{sorted(sizes)} rows", do="check them"
        )
    return sizes.pop()


def tensors_of(data: Any) -> tuple[Tensor, ...]:
    """Data of one tensor as of several."""
    return data if isinstance(data, tuple) else (data,)


def _rows(data: Any, rows: Tensor) -> Any:
    return tuple(part[rows] for part in data) if isinstance(data, tuple) else data[rows]
