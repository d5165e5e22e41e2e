"""Preconditioned conjugate gradients for A x = b, many right-hand sides at once.

Each right-hand side runs its own recursion and leaves the block when done, so that products are spent only on the
others. The recursive residual drifts from b - A x in floating point; before a solve is called converged the true
residual is computed, and where it is still too large the recursion restarts from it. The exception is a solve to an
`energy_tolerance`, for callers that correct the solution themselves and count every product: there the recursive
residual decides, and no product is spent on the true one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lapis.errors import NotPositiveDefiniteError
from lapis.options import check_arguments, check_count
from lapis.progress import track
from lapis.solvers.operator import Operator, checked_block, checked_tolerance, dots, norms, require
from lapis.solvers.preconditioners import Identity, Preconditioner

Stop = Literal["converged", "max_iterations", "stagnated", "negative_curvature", "callback"]
OnNegativeCurvature = Literal["raise", "flag"]

STAGNATION = 0.5
"""A restart must at least halve the true residual; less is rounding, and more restarts would not help."""


@dataclass(frozen=True)
class CGProgress:
    """What a callback sees after each iteration. `solution` is the live block (k, P): clone it to keep it."""

    iteration: int
    residual_norms: Tensor
    solution: Tensor


@dataclass(frozen=True)
class CGResult:
    """Solutions with their statistics; entry i of each belongs to right-hand side i.

    solution (k, P); iterations (k,) int64; residual_norms (k,) float64: |b - A x|, computed anew at the end (the
    recursive one with `energy_tolerance`);
    relative_residuals (k,): the same over |b| (0 for b = 0); stopped: why, one of "converged", "max_iterations",
    "stagnated" (rounding allows no better), "negative_curvature" (x is the last iterate before it), "callback";
    products: vectors that A was applied to.
    """

    solution: Tensor
    iterations: Tensor
    residual_norms: Tensor
    relative_residuals: Tensor
    stopped: tuple[Stop, ...]
    products: int

    @property
    def converged(self) -> Tensor:
        """(k,) bool: which right-hand sides reached the tolerance."""
        return torch.tensor([reason == "converged" for reason in self.stopped])


def conjugate_gradients(
    operator: Operator,
    rhs: Tensor,
    *,
    preconditioner: Preconditioner | None = None,
    start: Tensor | None = None,
    tolerance: float | None = None,
    energy_tolerance: float | None = None,
    max_iterations: int = 1000,
    on_negative_curvature: OnNegativeCurvature = "raise",
    callback: Callable[[CGProgress], bool | None] | None = None,
    progress: bool | None = False,
) -> CGResult:
    """Solve A x = b for each row b of `rhs` until |b - A x| <= tolerance |b|.

    After i iterations |x_i - x|_A <= 2 ((sqrt(c) - 1) / (sqrt(c) + 1))^i |x_0 - x|_A, c the condition number of M^-1 A.

    Args:
        operator: A, declared positive definite.
        rhs: (k, P).
        preconditioner: M, close to A and cheap to invert.
        start: (k, P), where to start: zero, or an earlier solution. A solve cut short goes on from its own solution.
        tolerance: relative; sqrt(eps) of the dtype when None.
        energy_tolerance: a stopping rule in the preconditioner's metric that replaces `tolerance`: stop as soon as the
            recursive residual r has r^T M^-1 r at most this, an absolute number > 0. For M = A that is the squared
            error |x_i - x|^2_A. Takes exactly as many products as iterations, one more with a `start`.
        max_iterations: of the block, restarts included.
        on_negative_curvature: a direction with p^T A p <= 0 proves that A is not positive definite: "raise" a
            NotPositiveDefiniteError, or "flag" that right-hand side in the result and go on with the others.
        callback: called after each iteration; returning True stops the solve.
        progress: show a bar (None: on a terminal only). Off by default, for solves run inside other tracked work.

    Memory: 4 to 6 blocks of (k, P) beyond what A takes.
    """
    check_arguments(conjugate_gradients, locals(), signed=("max_iterations",))
    require(operator, "positive_definite", "Conjugate gradients")
    check_count("max_iterations", max_iterations, least=0)
    rhs = checked_block(operator, rhs, "The right-hand side")
    if start is not None:
        start = checked_block(operator, start, "The starting point", rows=len(rhs))
    preconditioner = preconditioner or Identity()
    preconditioner.check(operator)
    relative = checked_tolerance(operator, tolerance)
    run = _Run(operator, preconditioner, rhs, start, relative if energy_tolerance is None else 0.0)
    run.energy_target = energy_tolerance
    run.flag = on_negative_curvature == "flag"
    for iteration in track(run.iterate(max_iterations), "conjugate gradients", max_iterations, progress):
        if callback is not None and callback(CGProgress(iteration, run.norms.clone(), run.solution)):
            run.halted = True
    return run.result()


class _Run:
    """The solve in flight. Its arrays are indexed by right-hand side; the recursion holds the active ones only."""

    def __init__(
        self, operator: Operator, preconditioner: Preconditioner, rhs: Tensor, start: Tensor | None, tolerance: float
    ) -> None:
        self.operator, self.preconditioner, self.rhs = operator, preconditioner, rhs
        self.scale = norms(rhs)
        self.target = tolerance * self.scale
        self.solution = torch.zeros_like(rhs) if start is None else start.clone()
        self.solution[self.scale == 0] = 0  # the exact solution of A x = 0, which no relative tolerance can reach
        self.iterations = torch.zeros(len(rhs), dtype=torch.int64, device=rhs.device)
        self.stopped: list[Stop | None] = [None] * len(rhs)
        self.products, self.flag, self.halted = 0, False, False
        self.energy_target: float | None = None
        self.norms = self.scale.clone()
        self.rows = torch.arange(len(rhs), device=rhs.device)
        self.residual = rhs.clone() if start is None else self._true_residual(self.rows)
        self._settle("converged", self.norms <= self.target)

    def iterate(self, max_iterations: int) -> Iterator[int]:
        """Run the recursion from the true residual, as often as it takes; yields after each iteration."""
        left = max_iterations
        while left > 0 and not self.halted:
            unsettled = torch.tensor([self.stopped[i] is None for i in self.rows.tolist()], device=self.rows.device)
            if not unsettled.any():
                return
            self.rows, self.residual = self.rows[unsettled], self.residual[unsettled]
            before = self.norms[self.rows]
            for _ in self._recursion(left):
                left -= 1
                yield max_iterations - left
            if self.energy_target is None:
                self.residual = self._true_residual(self.rows)
            self._settle("converged", self.norms <= self.target)
            if self.energy_target is not None:
                break
            if left > 0 and not self.halted:
                stuck = torch.zeros_like(self.norms, dtype=torch.bool)
                stuck[self.rows] = self.norms[self.rows] > STAGNATION * before
                self._settle("stagnated", stuck)
        self._settle("callback" if self.halted else "max_iterations", torch.ones_like(self.norms, dtype=torch.bool))

    def _recursion(self, budget: int) -> Iterator[None]:
        """The textbook recursion on `rows` from `residual`, which it uses up, until its own residuals are small."""
        rows, residual, target = self.rows, self.residual, self.target
        if self.energy_target is None:
            # A recursive residual below eps |b| says nothing any more (and its square would underflow in float32).
            target = torch.maximum(target, torch.finfo(residual.dtype).eps * self.scale)
        direction = self.preconditioner.solve(residual).clone()
        energy = self._energy(residual, direction)
        active = self._above_energy_target(rows, energy)
        if not active.any():
            return
        if not active.all():
            rows, residual, direction, energy = rows[active], residual[active], direction[active], energy[active]
        for _ in range(budget):
            image = self._apply(direction)
            curvature = dots(direction, image)
            sound = curvature > 0
            if not sound.all():
                self._negative_curvature(rows[~sound], curvature / dots(direction, direction))
                rows, residual, direction, image = rows[sound], residual[sound], direction[sound], image[sound]
                energy, curvature = energy[sound], curvature[sound]
                if len(rows) == 0:
                    return
            step = (energy / curvature).to(residual.dtype)[:, None]
            if len(rows) == len(self.solution):
                self.solution.addcmul_(step, direction)
            else:
                self.solution.index_add_(0, rows, step * direction)
            residual.addcmul_(step, image, value=-1)
            self.norms[rows] = norms(residual)
            self.iterations[rows] += 1
            yield
            active = self.norms[rows] > target[rows]
            if self.halted or not active.any():
                return
            if not active.all():
                rows, residual, direction, energy = rows[active], residual[active], direction[active], energy[active]
            conditioned = self.preconditioner.solve(residual)
            previous, energy = energy, self._energy(residual, conditioned)
            direction.mul_((energy / previous).to(direction.dtype)[:, None]).add_(conditioned)
            active = self._above_energy_target(rows, energy)
            if not active.any():
                return
            if not active.all():
                rows, residual, direction, energy = rows[active], residual[active], direction[active], energy[active]

    def _apply(self, vectors: Tensor) -> Tensor:
        self.products += len(vectors)
        return self.operator(vectors)

    def _energy(self, residual: Tensor, conditioned: Tensor) -> Tensor:
        """r^T M^-1 r, positive for a sound preconditioner; next to an energy target, not positive is rounding."""
        energy = dots(residual, conditioned)
        if self.energy_target is None and not (energy > 0).all():
            raise NotPositiveDefiniteError(
                "The preconditioner is not positive definite",
                expected="r^T M^-1 r > 0",
                got=f"{float(energy.min()):.3g}",
                do="use another one, or none",
            )
        return energy

    def _above_energy_target(self, rows: Tensor, energy: Tensor) -> Tensor:
        """Which of `rows` are to go on; the others are settled. All of them when the energy is not the criterion."""
        if self.energy_target is None:
            return torch.ones_like(rows, dtype=torch.bool)
        above = energy > self.energy_target
        mask = torch.zeros_like(self.norms, dtype=torch.bool)
        mask[rows[~above]] = True
        self._settle("converged", mask)
        return above

    def _negative_curvature(self, rows: Tensor, quotients: Tensor) -> None:
        if not self.flag:
            raise NotPositiveDefiniteError(
                "Conjugate gradients met a direction of negative or zero curvature",
                expected="p^T A p > 0 for every p",
                got=f"p^T A p / p^T p = {float(quotients.min()):.3g}",
                do='add a larger prior precision, use float64, or pass on_negative_curvature="flag"',
            )
        mask = torch.zeros_like(self.norms, dtype=torch.bool)
        mask[rows] = True
        self._settle("negative_curvature", mask)

    def _true_residual(self, rows: Tensor) -> Tensor:
        residual = self.rhs[rows] - self._apply(self.solution[rows])
        self.norms[rows] = norms(residual)
        return residual

    def _settle(self, reason: Stop, mask: Tensor) -> None:
        for i, hit in enumerate(mask.tolist()):
            if hit and self.stopped[i] is None:
                self.stopped[i] = reason

    def result(self) -> CGResult:
        relative = torch.where(self.scale > 0, self.norms / self.scale, torch.zeros_like(self.norms))
        reasons = tuple(reason for reason in self.stopped if reason is not None)
        return CGResult(self.solution, self.iterations, self.norms, relative, reasons, self.products)
