"""The matrix normal: a Gaussian over a layer's weight matrix whose precision is a Kronecker product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.learning_rule.expectations import Expectation
from lapis.learning_rule.family import Parameters, positive_definite, vector_of
from lapis.learning_rule.gaussian import Gaussian
from lapis.learning_rule.losses import Loss
from lapis.options import check_arguments


@dataclass(frozen=True, eq=False, repr=False)
class KroneckerGaussian(Gaussian):
    """N(m, (U x V)^-1) over theta = the rows of a matrix Theta (r, c), one after another.

    lambda = (S m, -U/2, -V/2) with S = U x V, mu = (E[Theta], E[Theta Theta^T], E[Theta^T Theta]). The precisions are
    no linear space, so the family is curved: the rule takes the natural gradient, which is the projection of the full
    Gaussian's step G = E[H] - S on the tangents A x V + U x B in the Fisher metric,

        A = tr_c((I x V^-1) G) / c - (t/2) U,    B = tr_r((U^-1 x I) G) / r - (t/2) V,    t = tr(S^-1 G) / (r c),

    and the mean moves by -rate S^-1 E[g] with the new S. U and V are determined up to a factor (U a, V / a).

    Args:
        mean: m, (r c,).
        rows: U, (r, r).
        columns: V, (c, c).
    """

    improvable: ClassVar[bool] = True

    rows: Tensor
    columns: Tensor

    def __post_init__(self) -> None:
        check_arguments(KroneckerGaussian, vars(self))
        mean = vector_of("mean", self.mean)
        rows, columns = positive_definite("rows", self.rows), positive_definite("columns", self.columns)
        if len(mean) != len(rows) * len(columns):
            raise DataError(
                "The mean does not fit the factors",
                expected=f"{len(rows)} x {len(columns)} numbers",
                got=f"{len(mean)}",
                do="pass a factor for the rows and one for the columns of the weight matrix",
            )
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "columns", columns)

    @property
    def matrix(self) -> Tensor:
        """S = U x V, (P, P)."""
        return torch.kron(self.rows, self.columns)

    @property
    def _factors(self) -> tuple[Tensor, Tensor]:
        return torch.linalg.cholesky(self.rows), torch.linalg.cholesky(self.columns)

    def _matrices(self, vectors: Tensor) -> Tensor:
        return vectors.reshape(*vectors.shape[:-1], len(self.rows), len(self.columns))

    def deviations(self, noise: Tensor) -> Tensor:
        """C_U^-T Z C_V^-1, for U = C_U C_U^T and V alike."""
        left, right = self._factors
        found: Tensor = torch.linalg.solve_triangular(left.mT, self._matrices(noise), upper=True)
        found = torch.linalg.solve_triangular(right, found, upper=False, left=False)
        return found.flatten(-2)

    def scores(self, noise: Tensor) -> Tensor:
        """C_U Z C_V^T."""
        left, right = self._factors
        return (left @ self._matrices(noise) @ right.mT).flatten(-2)

    def _whitened(self, deviations: Tensor) -> Tensor:
        left, right = self._factors
        return (left.mT @ self._matrices(deviations) @ right).flatten(-2)

    def log_determinant(self) -> Tensor:
        """log det S = c log det U + r log det V, 0-d."""
        left, right = (2 * factor.diagonal().log().sum() for factor in self._factors)
        return len(self.columns) * left + len(self.rows) * right

    def natural(self) -> Parameters:
        """(S m, -U/2, -V/2)."""
        return (self.rows @ self._matrices(self.mean) @ self.columns).flatten(), -self.rows / 2, -self.columns / 2

    def expectation(self) -> Parameters:
        """(m, M M^T + U^-1 tr V^-1, M^T M + V^-1 tr U^-1)."""
        matrix = self._matrices(self.mean)
        left, right = (torch.cholesky_inverse(factor) for factor in self._factors)
        return self.mean, matrix @ matrix.mT + left * right.trace(), matrix.mT @ matrix + right * left.trace()

    def with_natural(self, natural: Sequence[Tensor]) -> KroneckerGaussian:
        """U = -2 lambda_2, V = -2 lambda_3, m = S^-1 lambda_1."""
        first, second, third = self._parts("natural", natural)
        rows, columns = positive_definite("rows", -2 * second), positive_definite("columns", -2 * third)
        return KroneckerGaussian(_solve(rows, self._matrices(first), columns), rows, columns)

    def with_expectation(self, expectation: Sequence[Tensor]) -> KroneckerGaussian:
        """U^-1 and V^-1 are proportional to mu_2 - M M^T and mu_3 - M^T M, whose traces are both tr S^-1."""
        mean, second, third = self._parts("expectation", expectation)
        matrix = self._matrices(mean)
        left = positive_definite("covariance of rows", second - matrix @ matrix.mT)
        right = positive_definite("covariance of columns", third - matrix.mT @ matrix)
        traces = left.detach().trace(), right.detach().trace()
        if abs(traces[0] - traces[1]) > 1e-6 * traces[0]:
            raise DataError(
                "The expectation parameters contradict each other",
                expected="two second moments with the same trace, E[|theta|^2]",
                got=f"traces that differ by {float(abs(traces[0] - traces[1])):.3g}",
                do="start from q.expectation()",
            )
        rows, columns = (part.trace().sqrt() * torch.linalg.inv(part) for part in (left, right))
        return KroneckerGaussian(mean, (rows + rows.mT) / 2, (columns + columns.mT) / 2)

    def loss_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """(E[g] - (A x V + U x B) m, A/2, B/2) for G = E[H]."""
        gradient, curvature = self.expected_derivatives(loss, how)
        return self._projected(gradient, curvature)

    def objective_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """The same for G = E[H] - S."""
        gradient, curvature = self.expected_derivatives(loss, how)
        return self._projected(gradient, curvature - self.matrix)

    def _projected(self, gradient: Tensor, change: Tensor) -> Parameters:
        r, c = len(self.rows), len(self.columns)
        blocks = change.reshape(r, c, r, c)
        left, right = (torch.cholesky_inverse(factor) for factor in self._factors)
        rows = torch.einsum("ijkl,jl->ik", blocks, right) / c
        columns = torch.einsum("ijkl,ik->jl", blocks, left) / r
        share = (left * rows).sum() / r / 2
        rows, columns = rows - share * self.rows, columns - share * self.columns
        return gradient - self._changed(rows, columns), rows / 2, columns / 2

    def _changed(self, rows: Tensor, columns: Tensor) -> Tensor:
        """(A x V + U x B) m."""
        matrix = self._matrices(self.mean)
        return (rows @ matrix @ self.columns + self.rows @ matrix @ columns).flatten()

    def moved(self, gradient: Parameters, rate: float, improved: bool) -> KroneckerGaussian:
        """U + rate A and V + rate B; improved: U + rate A + rate^2/2 A U^-1 A, V alike, are positive definite.

        Only U x V matters, so the scale that they can exchange is shared out: it would drift to infinity over a run.
        """
        changes = 2 * gradient[1], 2 * gradient[2]
        factors = []
        for name, factor, change in zip(("rows", "columns"), (self.rows, self.columns), changes, strict=True):
            new = factor + rate * change
            if improved:
                new = new + rate**2 / 2 * change @ torch.linalg.solve(factor, change)
            factors.append(positive_definite(name, (new + new.T) / 2))
        step = self._matrices(gradient[0] + self._changed(*changes))
        mean = self.mean - rate * _solve(factors[0], step, factors[1])
        rows, columns = factors
        share = (columns.diagonal().mean() / rows.diagonal().mean()).sqrt()
        return KroneckerGaussian(mean, rows * share, columns / share)


def _solve(rows: Tensor, matrix: Tensor, columns: Tensor) -> Tensor:
    """U^-1 X V^-1 as a vector."""
    found: Tensor = torch.linalg.solve(columns, torch.linalg.solve(rows, matrix).mT).mT
    return found.flatten()
