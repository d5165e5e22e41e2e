"""Lanczos: a symmetric A seen through its Krylov space, A Q^T = Q^T T + b_m q_(m+1) e_m^T with T tridiagonal.

Every new vector is orthogonalised against all earlier ones, twice ("twice is enough"), which costs memory (m, P) and
prevents spurious copies of eigenvalues. T is kept and diagonalised in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.options import check_arguments, check_count
from lapis.progress import track
from lapis.solvers.operator import Operator, checked_block, dots, normal_block, norms, require

Enough = Callable[[Tensor, Tensor], bool]

BREAKDOWN = 10
"""A remainder below this many eps of |A| is rounding noise: the Krylov space is invariant."""


@dataclass(frozen=True)
class LanczosResult:
    """basis Q (m, P), orthonormal rows; diagonal (m,) and off_diagonal (m,) of T in float64, the last off-diagonal
    being b_m, the coupling to the rest of the space; stopped: "enough" (by the rule of that name), "steps", "complete"
    (m = P).
    """

    basis: Tensor
    diagonal: Tensor
    off_diagonal: Tensor
    stopped: Literal["enough", "steps", "complete"]

    @property
    def products(self) -> int:
        return len(self.diagonal)

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values (m,), by falling absolute value; rotation (m, m) whose columns are T's eigenvectors; bounds (m,).

        Each value has an eigenvalue of A within its bound: |A u - t u| = b_m |s_m| without any further product, plus
        eps |A| for the rounding of the products.
        """
        values, rotation = torch.linalg.eigh(tridiagonal(self.diagonal, self.off_diagonal[:-1]))
        order = values.abs().argsort(descending=True)
        rotation = rotation[:, order]
        rounding = torch.finfo(self.basis.dtype).eps * values.abs().max()
        return values[order], rotation, self.off_diagonal[-1] * rotation[-1].abs() + rounding

    def vectors(self, rotation: Tensor) -> Tensor:
        """Ritz vectors (r, P), one per row, for columns (m, r) of T's eigenvectors."""
        return rotation.mT.to(self.basis.dtype) @ self.basis


def lanczos(
    operator: Operator,
    steps: int,
    *,
    generator: torch.Generator,
    start: Tensor | None = None,
    enough: Enough | None = None,
    progress: bool | None = False,
) -> LanczosResult:
    """Up to `steps` Lanczos steps from `start` (P,), a random vector when None.

    When the Krylov space becomes invariant before that, the run continues from a random direction orthogonal to it
    (T is then block diagonal), so that enough steps find eigenvalues of any multiplicity.

    Args:
        operator: A, declared symmetric.
        steps: at most P; memory (steps, P).
        generator: draws the starting vector, and the directions to continue from.
        start: (P,).
        enough: rule(Ritz values, bounds), both by falling |value|, that ends the run; asked at growing intervals.
        progress: show a bar (None: on a terminal only).
    """
    check_arguments(lanczos, locals())
    require(operator, "symmetric", "Lanczos")
    check_count("steps", steps, most=operator.size)
    first = normal_block(operator, 1, generator) if start is None else start.reshape(1, -1)
    run = _Run(operator, steps, _checked_starts(operator, first), generator)
    asked = 0
    for m in track(run.iterate(), "Lanczos", steps, progress):
        # A dense eigenproblem of size m each time: asking every m/8 steps keeps their sum a small multiple of the last.
        if enough is not None and m >= asked + max(1, asked // 8):
            asked = m
            values, _, bounds = run.result("enough").ritz()
            if enough(values, bounds):
                return run.result("enough")
    return run.result("complete" if run.m == operator.size else "steps")


class _Run:
    def __init__(self, operator: Operator, steps: int, start: Tensor, generator: torch.Generator) -> None:
        self.operator, self.steps, self.generator = operator, steps, generator
        self.basis = torch.empty(1, steps, operator.size, dtype=operator.dtype, device=operator.device)
        self.diagonal, self.off_diagonal = [0.0] * steps, [0.0] * steps
        self.m, self.next = 0, start

    def iterate(self) -> Iterator[int]:
        eps, scale = torch.finfo(self.operator.dtype).eps, 0.0
        for m in range(self.steps):
            self.basis[:, m] = unit(self.next)
            rest = self.operator(self.basis[:, m])
            self.diagonal[m] = float(dots(rest, self.basis[:, m]))
            rest = orthogonalised(rest, self.basis[:, : m + 1])
            self.off_diagonal[m] = float(norms(rest))
            scale = max(scale, abs(self.diagonal[m]), self.off_diagonal[m])
            self.m, self.next = m + 1, rest
            if self.m == self.operator.size or self.off_diagonal[m] <= BREAKDOWN * eps * scale:
                self.off_diagonal[m] = 0.0
                if self.m < self.steps:
                    fresh = normal_block(self.operator, 1, self.generator)
                    self.next = orthogonalised(fresh, self.basis[:, : m + 1])
            yield self.m

    def result(self, stopped: Literal["enough", "steps", "complete"]) -> LanczosResult:
        entries = torch.tensor([self.diagonal, self.off_diagonal], dtype=torch.float64, device=self.basis.device)
        diagonal, off_diagonal = entries[:, : self.m]
        return LanczosResult(self.basis[0, : self.m], diagonal, off_diagonal, stopped)


def lanczos_coefficients(
    operator: Operator, starts: Tensor, steps: int, *, reorthogonalise: bool = True
) -> tuple[Tensor, Tensor]:
    """T of each row of `starts` (k, P), run side by side: diagonal (k, m) and off-diagonal (k, m - 1), float64.

    Memory (k, m, P) with reorthogonalisation, (k, P) without; quadrature stays accurate without it, eigenvalues do not.
    A row whose Krylov space is exhausted gets zero couplings from there on, and a repeated first diagonal entry, which
    lies in A's spectrum and leaves e_1^T f(T) e_1 unchanged.
    """
    require(operator, "symmetric", "Lanczos")
    check_count("steps", steps, most=operator.size)
    starts = _checked_starts(operator, starts)
    kept = steps if reorthogonalise else 0
    basis = torch.empty(len(starts), kept, operator.size, dtype=operator.dtype, device=operator.device)
    diagonal = torch.zeros(len(starts), steps, dtype=torch.float64, device=operator.device)
    off_diagonal = torch.zeros_like(diagonal)
    threshold = BREAKDOWN * torch.finfo(operator.dtype).eps
    current = unit(starts)
    previous, coupling = torch.zeros_like(current), torch.zeros_like(diagonal[:, 0])
    alive = torch.ones(len(starts), dtype=torch.bool, device=operator.device)
    scale = torch.zeros_like(coupling)
    for m in range(steps):
        rest = operator(current)
        diagonal[:, m] = torch.where(alive, dots(rest, current), diagonal[:, 0])
        if reorthogonalise:
            basis[:, m] = current
            rest = orthogonalised(rest, basis[:, : m + 1])
        else:
            rest = rest - dots(rest, current).to(rest.dtype)[:, None] * current
            rest = rest - coupling.to(rest.dtype)[:, None] * previous
        coupling = norms(rest)
        scale = torch.maximum(scale, torch.maximum(diagonal[:, m].abs(), coupling))
        alive = alive & (coupling > threshold * scale)
        coupling = torch.where(alive, coupling, torch.zeros_like(coupling))
        off_diagonal[:, m] = coupling
        inverse = torch.where(alive, 1 / coupling, torch.zeros_like(coupling))
        previous, current = current, rest * inverse.to(rest.dtype)[:, None]
    return diagonal, off_diagonal[:, :-1]


def tridiagonal(diagonal: Tensor, off_diagonal: Tensor) -> Tensor:
    """The symmetric tridiagonal matrices (..., m, m) of diagonals (..., m) and off-diagonals (..., m - 1)."""
    above = torch.diag_embed(off_diagonal, offset=1)
    return torch.diag_embed(diagonal) + above + above.mT


def orthogonalised(vectors: Tensor, basis: Tensor) -> Tensor:
    """Row i of `vectors` (k, P) minus its part in the orthonormal rows of basis[i], basis (k, m, P)."""
    rest = vectors[:, None]
    for _ in range(2):
        rest = rest - (rest @ basis.mT) @ basis
    return rest[:, 0]


def unit(vectors: Tensor) -> Tensor:
    """Each row divided by its norm."""
    return vectors / norms(vectors).to(vectors.dtype)[:, None]


def _checked_starts(operator: Operator, starts: Tensor) -> Tensor:
    starts = checked_block(operator, starts, "The starting vector")
    if not bool((norms(starts) > 0).all()):
        raise DataError(
            "A Krylov space needs a direction",
            expected="starting vectors other than 0",
            got="a zero vector",
            do="draw them at random, or drop the zero ones",
        )
    return starts
