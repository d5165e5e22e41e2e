"""Block conjugate gradients for A x = b: right-hand sides share their Krylov space.

After i iterations each of k solutions is the best, in the norm of A, of all in a space of i k dimensions, not of i: k
solves together take fewer iterations than one alone wherever a few dozen large eigenvalues are what takes long.

With R = B - A X the residuals (rows; k x P), M the preconditioner and Q a basis of them, Q M^-1 Q^T = I, R = X Q:

    a = (S A S^T)^-1,   X <- X + (x^T a) S,   Q' r = Q - a S A,   S <- Q' M^-1 + r S,   x <- r^T x

in a form that needs no inverse of residuals that become small or dependent: directions in which the k residuals agree
to rounding are dropped from the basis (D. P. O'Leary 1980; A. A. Dubrulle 2001).
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
from lapis.schema import tensor, wrong
from lapis.solvers.operator import Operator, checked_block, norms, require
from lapis.solvers.preconditioners import Identity, Preconditioner

CHUNK = 2**16
"""Columns of a block whose inner products are taken in float64 at a time."""


@dataclass
class BlockState:
    """A solve in flight; each tensor by the name under which it is saved."""

    solution: Tensor
    """X, (k, P)."""
    basis: Tensor
    """Q, (r, P), r <= k."""
    direction: Tensor
    """S, (r, P)."""
    coordinates: Tensor
    """x of R = x^T Q, (r, k) float64."""
    decrements: Tensor
    """|X_i+1 - X_i|_A^2 of every iteration so far, (i, k) float64: by how much it reduced |X_i - X|_A^2."""

    def tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))

    @staticmethod
    def load(tensors: dict[str, Tensor], vectors: int, size: int, dtype: torch.dtype) -> BlockState:
        """The inverse of `tensors`; FileError unless they may be of a solve for so many vectors (k, size)."""
        basis = tensor(tensors, "basis", (-1, size), dtype)
        rank = len(basis)
        if not 1 <= rank <= vectors:
            raise wrong("basis", f"1 to {vectors} vectors", str(rank))
        return BlockState(
            tensor(tensors, "solution", (vectors, size), dtype).clone(),
            basis.clone(),
            tensor(tensors, "direction", (rank, size), dtype).clone(),
            tensor(tensors, "coordinates", (rank, vectors), torch.float64).clone(),
            tensor(tensors, "decrements", (-1, vectors), torch.float64, least=0).clone(),
        )

    @property
    def residual(self) -> Tensor:
        """R, (k, P), by the recursion."""
        return self.coordinates.mT.to(self.basis.dtype) @ self.basis


@dataclass(frozen=True)
class BlockResult:
    """solution (k, P); iterations; residual_norms and relative_residuals (k,) float64, by the recursion; stopped:
    "callback", "max_iterations", or "exhausted": no residual is left above rounding; products: vectors that A was
    applied to.
    """

    solution: Tensor
    iterations: int
    residual_norms: Tensor
    relative_residuals: Tensor
    stopped: Literal["callback", "max_iterations", "exhausted"]
    products: int


def block_conjugate_gradients(
    operator: Operator,
    rhs: Tensor,
    *,
    preconditioner: Preconditioner | None = None,
    start: Tensor | None = None,
    max_iterations: int = 1000,
    callback: Callable[[BlockState], bool | None] | None = None,
    resumed: BlockState | None = None,
    progress: bool | None = False,
) -> BlockResult:
    """Solve A x = b for all rows b of `rhs` together, until the callback has seen enough.

    Args:
        operator: A, declared positive definite.
        rhs: (k, P).
        preconditioner: M, close to A and cheap to invert.
        start: (k, P), where to start; zero by default.
        max_iterations: at most.
        callback: sees the state after each iteration; returning True stops. `decrements` estimates errors: the sum of
            those to come is |X_i - X|_A^2 exactly.
        resumed: the state that a callback saw of this very solve.
        progress: show a bar (None: on a terminal only).

    Memory: 8 blocks of (k, P) beyond what A takes.
    """
    check_arguments(block_conjugate_gradients, locals(), signed=("max_iterations",))
    require(operator, "positive_definite", "Block conjugate gradients")
    check_count("max_iterations", max_iterations, least=0)
    rhs = checked_block(operator, rhs, "The right-hand side")
    if start is not None:
        start = checked_block(operator, start, "The starting point", rows=len(rhs))
    inverse = preconditioner or Identity()
    inverse.check(operator)
    run = _Run(operator, inverse, rhs, start, resumed)
    left = max(0, max_iterations - len(run.state.decrements))
    for _ in track(run.iterate(left), "block conjugate gradients", left, progress):
        if callback is not None and callback(run.state):
            run.stopped = "callback"
            break
    scale, left_over = norms(rhs), norms(run.state.residual)
    relative = torch.where(scale > 0, left_over / scale, torch.zeros_like(scale))
    done = len(run.state.decrements)
    return BlockResult(run.state.solution, done, left_over, relative, run.stopped, run.products)


class _Run:
    def __init__(
        self, operator: Operator, inverse: Preconditioner, rhs: Tensor, start: Tensor | None, resumed: BlockState | None
    ) -> None:
        self.operator, self.inverse, self.products = operator, inverse, 0
        self.stopped: Literal["callback", "max_iterations", "exhausted"] = "max_iterations"
        if resumed is not None:
            self.state = resumed
            return
        solution = torch.zeros_like(rhs) if start is None else start.clone()
        residual = rhs.clone() if start is None else rhs - self._apply(solution)
        basis, direction, coordinates = self._orthonormal(residual)
        none = torch.zeros(0, len(rhs), dtype=torch.float64, device=rhs.device)
        self.state = BlockState(solution, basis, direction, coordinates, none)

    def _apply(self, vectors: Tensor) -> Tensor:
        self.products += len(vectors)
        return self.operator(vectors)

    def _orthonormal(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q (r, P) with Q M^-1 Q^T = I, Q M^-1, and c (r, k) with rows = c^T Q, without what is rounding."""
        conditioned = self.inverse.solve(rows)
        gram = inner(rows, conditioned)
        size = gram.diagonal().clamp(min=0).sqrt()
        scale = torch.where(size > 0, size, torch.ones_like(size))
        values, vectors = torch.linalg.eigh(gram / scale[:, None] / scale)
        kept = values > len(gram) * torch.finfo(rows.dtype).eps
        root = values[kept].sqrt()
        turn = (vectors[:, kept] / root).mT / scale
        coordinates = (vectors[:, kept] * root).mT * scale
        turn = turn.to(rows.dtype)
        return turn @ rows, turn @ conditioned, coordinates

    def iterate(self, most: int) -> Iterator[None]:
        for _ in range(most):
            state = self.state
            if not len(state.basis):
                self.stopped = "exhausted"
                return
            image = self._apply(state.direction)
            curvature = inner(state.direction, image)
            factor, failed = torch.linalg.cholesky_ex((curvature + curvature.mT) / 2)
            if int(failed):
                raise NotPositiveDefiniteError(
                    "Block conjugate gradients met a direction of negative or zero curvature",
                    expected="S A S^T positive definite",
                    got=f"smallest eigenvalue {float(torch.linalg.eigvalsh(curvature)[0]):.3g}",
                    do="add a larger prior precision, or use float64",
                )
            steps = torch.cholesky_solve(state.coordinates, factor)
            gained = (state.coordinates * steps).sum(0).clamp(min=0)
            # a new tensor: an interruption must leave the state whole
            solution = torch.addmm(state.solution, steps.mT.to(image.dtype), state.direction)
            change = torch.cholesky_inverse(factor).to(image.dtype)
            basis, conditioned, turn = self._orthonormal(torch.addmm(state.basis, change, image, alpha=-1))
            direction = conditioned.addmm_(turn.to(image.dtype), state.direction)
            coordinates = turn @ state.coordinates
            self.state = BlockState(
                solution, basis, direction, coordinates, torch.cat([state.decrements, gained[None]])
            )
            yield


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of the rows of two blocks, (j, k), in float64."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    for one, other in zip(torch.split(left, CHUNK, 1), torch.split(right, CHUNK, 1), strict=True):
        total += one.double() @ other.double().mT
    return total
