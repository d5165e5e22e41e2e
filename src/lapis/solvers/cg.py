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
from typing import Any, Literal

import torch
from torch import Tensor

from lapis.errors import NotPositiveDefiniteError
from lapis.options import check_arguments, check_count
from lapis.progress import track
from lapis.schema import count, entry, tensor, wrong
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
    state: Callable[[], CGState | None]
    """What a solve needs to go on exactly from where it is when called; None in the midst of a change."""


@dataclass(frozen=True)
class CGState:
    """A solve that was cut short: tensors by name, and plain numbers that JSON can hold."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def check(self, vectors: int, size: int, dtype: torch.dtype) -> CGState:
        """FileError unless this may be the state of a solve for so many vectors (k, size)."""
        shapes = {"solution": (vectors, size), "residual": (-1, size), "direction": (-1, size)}
        for name, shape in shapes.items():
            tensor(self.tensors, name, shape, dtype)
        tensor(self.tensors, "norms", (vectors,), least=0)
        active, chosen = len(self.tensors["direction"]), len(tensor(self.tensors, "chosen", (-1,), torch.int64))
        tensor(self.tensors, "residual", (active, size), dtype)
        tensor(self.tensors, "energy", (active,), None)
        tensor(self.tensors, "before", (chosen,), least=0)
        tensor(self.tensors, "iterations", (vectors,), torch.int64)
        for rows in (self.tensors["chosen"], tensor(self.tensors, "rows", (active,), torch.int64)):
            if not len(rows) or bool((rows < 0).any() | (rows >= vectors).any()) or len(set(rows.tolist())) < len(rows):
                raise wrong("rows", f"numbers below {vectors}, each once", str(rows.tolist())[:80])
        count(self.facts, "left", least=0)
        count(self.facts, "products", least=0)
        entry(self.facts, "advanced", bool)
        if len(entry(self.facts, "stopped", list[Stop | None])) != vectors:
            raise wrong("stopped", f"{vectors} reasons", str(self.facts["stopped"])[:80])
        return self


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
    resumed: CGState | None = None,
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
        resumed: the `state` that a callback saw of this very solve, which then ends as if it had not been cut short.
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
    run.left = max_iterations
    if resumed is not None:
        run.resume(resumed)
    for iteration in track(run.iterate(max_iterations), "conjugate gradients", max_iterations, progress):
        if callback is not None and callback(CGProgress(iteration, run.norms.clone(), run.solution, run.state)):
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
        self.left = 0
        """Iterations that may still be made."""
        self.chosen = torch.arange(len(rhs), device=rhs.device)
        """Right-hand sides that are solved for; those of them with a large residual are `rows` of the recursion."""
        self.before = self.norms
        """Their residuals when the recursion began."""
        self.residual = rhs.clone() if start is None else self._true_residual(self.chosen)
        self.rows, self.direction, self.energy = self.chosen, rhs[:0], self.norms[:0]
        self._ready, self._advanced, self._begun = False, False, False
        self._settle("converged", self.norms <= self.target)

    def state(self) -> CGState | None:
        """What `resume` takes; None in the midst of a change, where an interruption may have come."""
        if not self._ready:
            return None
        names = ("solution", "residual", "direction", "energy", "norms", "before", "chosen", "rows", "iterations")
        facts = {"stopped": list(self.stopped), "products": self.products, "left": self.left}
        return CGState({name: getattr(self, name) for name in names}, facts | {"advanced": self._advanced})

    def resume(self, state: CGState) -> None:
        """Go on from there."""
        for name, found in state.tensors.items():
            setattr(self, name, found.to(self.rhs.device, copy=True))
        facts = state.facts
        self.stopped, self.products, self.left = list(facts["stopped"]), facts["products"], facts["left"]
        self._advanced, self._begun = facts["advanced"], True

    def iterate(self, max_iterations: int) -> Iterator[int]:
        """Run the recursion from the true residual, as often as it takes; yields after each iteration."""
        while (self.left > 0 or self._begun) and not self.halted:
            if not self._begun:
                unsettled = [self.stopped[i] is None for i in self.chosen.tolist()]
                if not any(unsettled):
                    return
                keep = torch.tensor(unsettled, device=self.chosen.device)
                self.chosen, self.residual = self.chosen[keep], self.residual[keep]
                self.before = self.norms[self.chosen]
            for _ in self._recursion():
                self.left -= 1
                self._ready = True
                yield max_iterations - self.left
            self._ready = self._begun = False
            if self.energy_target is None:
                self.residual = self._true_residual(self.chosen)
            self._settle("converged", self.norms <= self.target)
            if self.energy_target is not None:
                break
            if self.left > 0 and not self.halted:
                stuck = torch.zeros_like(self.norms, dtype=torch.bool)
                stuck[self.chosen] = self.norms[self.chosen] > STAGNATION * self.before
                self._settle("stagnated", stuck)
        self._settle("callback" if self.halted else "max_iterations", torch.ones_like(self.norms, dtype=torch.bool))

    def _recursion(self) -> Iterator[None]:
        """The textbook recursion on `chosen` from `residual`, which it uses up, until its own residuals are small."""
        if not self._begun:
            self.rows, self._begun, self._advanced = self.chosen, True, True
            self.direction = self.preconditioner.solve(self.residual).clone()
            self.energy = self._energy(self.residual, self.direction)
            if not self._keep(self._above_energy_target(self.rows, self.energy)):
                return
        elif not self._advanced and not self._advance():
            return
        for _ in range(self.left):
            self._ready = True
            image = self._apply(self.direction)
            curvature = dots(self.direction, image)
            self._ready = False
            sound = curvature > 0
            if not sound.all():
                self._negative_curvature(self.rows[~sound], curvature / dots(self.direction, self.direction))
                image, curvature = image[sound], curvature[sound]
                if not self._keep(sound):
                    return
            step = (self.energy / curvature).to(image.dtype)[:, None]
            if len(self.rows) == len(self.solution):
                self.solution.addcmul_(step, self.direction)
            else:
                self.solution.index_add_(0, self.rows, step * self.direction)
            self.residual.addcmul_(step, image, value=-1)
            self.norms[self.rows] = norms(self.residual)
            self.iterations[self.rows] += 1
            self._advanced = False
            yield
            self._ready = False
            if not self._advance():
                return

    def _advance(self) -> bool:
        """The next direction, for the right-hand sides that are not done; whether there are any."""
        target = self.target
        if self.energy_target is None:
            # A recursive residual below eps |b| says nothing any more (and its square would underflow in float32).
            target = torch.maximum(target, torch.finfo(self.residual.dtype).eps * self.scale)
        if self.halted or not self._keep(self.norms[self.rows] > target[self.rows]):
            return False
        conditioned = self.preconditioner.solve(self.residual)
        previous, self.energy = self.energy, self._energy(self.residual, conditioned)
        self.direction.mul_((self.energy / previous).to(self.direction.dtype)[:, None]).add_(conditioned)
        self._advanced = True
        return self._keep(self._above_energy_target(self.rows, self.energy))

    def _keep(self, active: Tensor) -> bool:
        """Go on with these of the rows only; False if there are none."""
        if not active.any():
            return False
        if not active.all():
            self.rows, self.energy = self.rows[active], self.energy[active]
            self.residual, self.direction = self.residual[active], self.direction[active]
        return True

    def _apply(self, vectors: Tensor) -> Tensor:
        image = self.operator(vectors)
        self.products += len(vectors)
        return image

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
