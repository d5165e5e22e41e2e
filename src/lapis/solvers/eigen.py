"""The leading eigenpairs of a symmetric operator: largest in absolute value first, one eigenvector per row.

Two methods with the same result type. Lanczos needs the fewest products, one vector at a time, and memory for all its
steps; it may overlook further copies of a repeated eigenvalue. Subspace iteration multiplies blocks, uses memory for
the rank only, takes a starting block, and finds repeated eigenvalues.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lapis.errors import OptionError
from lapis.options import check_arguments, check_count
from lapis.progress import track
from lapis.solvers.krylov import lanczos
from lapis.solvers.operator import (
    Operator,
    checked_block,
    checked_tolerance,
    normal_block,
    norms,
    require,
)

Stop = Literal["rank", "threshold", "limit"]

OVERSAMPLE = 8
"""Extra directions of subspace iteration: they let the wanted ones converge at the rate |l_(r+9) / l_r|."""

FIRST_RANK = 16
"""Where an adaptive rank starts; it doubles until the threshold is passed."""


@dataclass(frozen=True)
class Eigenpairs:
    """values (r,) float64 by falling absolute value; vectors (r, P), orthonormal rows; residuals (r,) float64:
    |A u - l u|, which bounds the distance from each value to an eigenvalue; converged (r,) bool.

    stopped: "rank" (the r asked for have converged), "threshold" (all at or above the threshold were found), "limit"
    (steps or iterations ran out; see `converged`). products: vectors that A was applied to.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: Tensor
    stopped: Stop
    products: int


@dataclass(frozen=True)
class _Goal:
    rank: int
    threshold: float | None
    tolerance: float

    def reached(self, values: Tensor, residuals: Tensor) -> tuple[int, Stop | None]:
        """How many leading pairs to keep, and why it is time to stop, if it is.

        The threshold is passed only once the first pair below it has converged too: a small Ritz value with a small
        bound says that some eigenvalue is near, not that no larger one is still to come.
        """
        values, residuals = values[: self.rank + 1].abs(), residuals[: self.rank + 1]
        settled = self.settled(values, residuals)
        if self.threshold is not None:
            below = values < self.threshold
            count = int((~below).sum())
            if count < len(values):
                if bool(settled[: count + 1].all()):
                    return count, "threshold"
                if count < self.rank:
                    return count, None
        enough = len(values) >= self.rank and bool(settled[: self.rank].all())
        return min(self.rank, len(values)), "rank" if enough else None

    def settled(self, values: Tensor, residuals: Tensor) -> Tensor:
        return residuals <= self.tolerance * values.abs().max()


def lanczos_eigenpairs(
    operator: Operator,
    *,
    rank: int,
    threshold: float | None = None,
    tolerance: float | None = None,
    max_steps: int | None = None,
    generator: torch.Generator,
    progress: bool | None = False,
) -> Eigenpairs:
    """The `rank` leading eigenpairs by Lanczos; with a `threshold`, only those with |l| >= threshold, at most `rank`.

    A pair has converged when |A u - l u| <= tolerance |l_1| (sqrt(eps) when None); its value is then accurate to about
    the square of that over the gap. At most `max_steps` products (4 rank + 40 when None), memory (max_steps, P).
    """
    check_arguments(lanczos_eigenpairs, locals())
    goal = _goal(operator, rank, threshold, tolerance)
    steps = min(operator.size, 4 * rank + 40) if max_steps is None else max_steps
    check_count("max_steps", steps, least=min(rank, operator.size), most=operator.size)

    def enough(values: Tensor, bounds: Tensor) -> bool:
        return goal.reached(values, bounds)[1] is not None

    run = lanczos(operator, steps, generator=generator, enough=enough, progress=progress)
    values, rotation, bounds = run.ritz()
    count, stop = goal.reached(values, bounds)
    settled = goal.settled(values, bounds)[:count]
    return Eigenpairs(
        values[:count], run.vectors(rotation[:, :count]), bounds[:count], settled, stop or "limit", run.products
    )


def subspace_eigenpairs(
    operator: Operator,
    *,
    rank: int,
    threshold: float | None = None,
    tolerance: float | None = None,
    max_iterations: int = 100,
    start: Tensor | None = None,
    generator: torch.Generator,
    progress: bool | None = False,
) -> Eigenpairs:
    """The `rank` leading eigenpairs by randomised subspace iteration, Q <- orth(A Q), with Rayleigh-Ritz each time.

    With a `threshold` the block starts small and doubles until a value falls below it. `start` (m, P) holds vectors
    worth trying (the first rank + 8 are used), such as the eigenvectors of a nearby A. Convergence as in
    `lanczos_eigenpairs`. `max_iterations` counts products with the whole block; memory 4 blocks of (rank + 8, P).
    """
    check_arguments(subspace_eigenpairs, locals())
    goal = _goal(operator, rank, threshold, tolerance)
    check_count("max_iterations", max_iterations)
    if start is not None:
        start = checked_block(operator, start, "The starting block")
    run = _Subspace(operator, goal, start, generator)
    for _ in track(run.iterate(max_iterations), "subspace iteration", max_iterations, progress):
        pass
    count = goal.reached(run.values, run.residuals)[0]
    settled = goal.settled(run.values, run.residuals)[:count]
    stop = run.stopped or "limit"
    return Eigenpairs(run.values[:count], run.block[:count], run.residuals[:count], settled, stop, run.products)


class _Subspace:
    def __init__(self, operator: Operator, goal: _Goal, start: Tensor | None, generator: torch.Generator) -> None:
        self.operator, self.goal, self.generator = operator, goal, generator
        self.wanted = goal.rank if goal.threshold is None else min(FIRST_RANK, goal.rank)
        self.block = torch.empty(0, operator.size, dtype=operator.dtype, device=operator.device)
        if start is not None:
            self.wanted = min(goal.rank, max(self.wanted, len(start)))
            self.block = start[: self._width()]
        self.values = self.residuals = torch.empty(0, dtype=torch.float64)
        self.products = 0
        self.stopped: Stop | None = None

    def _width(self) -> int:
        return min(self.operator.size, self.wanted + OVERSAMPLE)

    def iterate(self, max_iterations: int) -> Iterator[None]:
        image = torch.cat([self.block, self._fresh()])
        for _ in range(max_iterations):
            basis = torch.linalg.qr(image.mT).Q.mT
            image = self.operator(basis)
            self.products += len(basis)
            small = (basis @ image.mT).to(torch.float64)
            values, rotation = torch.linalg.eigh((small + small.mT) / 2)
            order = values.abs().argsort(descending=True)
            self.values = values[order]
            turn = rotation[:, order].mT.to(basis.dtype)
            self.block, image = turn @ basis, turn @ image
            self.residuals = norms(image - self.values.to(image.dtype)[:, None] * self.block)
            yield
            trusted = self.wanted if self.wanted < self.goal.rank else self.goal.rank + 1
            stop = self.goal.reached(self.values[:trusted], self.residuals[:trusted])[1]
            if stop is None and self._grown():
                image = torch.cat([image, self._fresh()])
            elif stop is not None:
                self.stopped = stop
                return

    def _grown(self) -> bool:
        """Widen the block, and return True, if all its values have converged and none is below the threshold."""
        if self.wanted == self.goal.rank:
            return False
        values, residuals = self.values[: self.wanted], self.residuals[: self.wanted]
        if not bool(self.goal.settled(values, residuals).all()):
            return False
        self.wanted = min(2 * self.wanted, self.goal.rank)
        return True

    def _fresh(self) -> Tensor:
        missing = self._width() - len(self.block)
        if missing <= 0:
            return self.block[:0]
        return normal_block(self.operator, missing, self.generator)


def largest_eigenvalue(operator: Operator, *, steps: int = 20, generator: torch.Generator) -> float:
    """An upper estimate of A's largest eigenvalue: the top Ritz value plus its error bound, from `steps` products.

    Ritz values approach from below; adding the bound makes the estimate err upwards once the top value is resolved.
    """
    check_arguments(largest_eigenvalue, locals())
    check_count("steps", steps)
    run = lanczos(operator, min(steps, operator.size), generator=generator)
    values, _, bounds = run.ritz()
    top = int(values.argmax())
    return float(values[top] + bounds[top])


def _goal(operator: Operator, rank: int, threshold: float | None, tolerance: float | None) -> _Goal:
    require(operator, "symmetric", "An eigenvalue solver")
    check_count("rank", rank, most=operator.size)
    if threshold is not None and not threshold > 0:
        raise OptionError(
            "No threshold on eigenvalues",
            expected="a number > 0",
            got=repr(threshold),
            do="leave it out to get exactly `rank` pairs",
        )
    return _Goal(rank, threshold, checked_tolerance(operator, tolerance))
