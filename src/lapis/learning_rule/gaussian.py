"""Gaussians over weights: with a fixed covariance, full, and diagonal.

E_q[loss] enters through the expected gradient and curvature (Bonnet's and Price's theorems):

    grad_E[theta] E_q[loss] = E[g] - E[H] m,    grad_E[theta theta^T] E_q[loss] = E[H] / 2.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.learning_rule.expectations import Expectation, centred, normal_grid, refuse_curvature
from lapis.learning_rule.family import Family, Parameters, positive_definite, positive_vector, source_of, vector_of
from lapis.learning_rule.losses import Function, Loss
from lapis.options import check_arguments, checked_tensor, shown


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(Family):
    """N(m, S^-1), known to what follows by white noise z: theta = m + S^-1/2 z, with score S (theta - m) = S^1/2 z."""

    mean: Tensor

    @abstractmethod
    def deviations(self, noise: Tensor) -> Tensor:
        """S^-1/2 z of each row, (n, P)."""

    @abstractmethod
    def scores(self, noise: Tensor) -> Tensor:
        """S (theta - m) of the same rows, (n, P)."""

    @abstractmethod
    def _whitened(self, deviations: Tensor) -> Tensor:
        """z with S^-1/2 z = deviations, up to a rotation."""

    @abstractmethod
    def log_determinant(self) -> Tensor:
        """log det S, 0-d."""

    def entropy(self) -> Tensor:
        """(P log(2 pi e) - log det S) / 2, 0-d."""
        return (self.size * math.log(2 * math.pi * math.e) - self.log_determinant()) / 2

    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(theta) of (P,) or of each row of (n, P); differentiable in theta."""
        distances = self._whitened(self._rows(theta) - self.mean).square().sum(-1)
        return (self.log_determinant() - self.size * math.log(2 * math.pi) - distances) / 2

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws (samples, P); the generator is seeded with 0 when None."""
        check_arguments(Gaussian.sample, locals())
        return self.mean + self.deviations(self._noise(samples, source_of(generator)))

    def _noise(self, samples: int, generator: torch.Generator) -> Tensor:
        return torch.randn(samples, self.size, dtype=torch.float64, generator=generator)

    def nodes(self, how: Expectation) -> tuple[Tensor, Tensor]:
        """White noise (n, P) and weights (n,) whose weighted means stand for expectations."""
        if how.kind == "local":
            return torch.zeros(1, self.size, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        if how.kind == "quadrature":
            return normal_grid(how.points, self.size)
        return self._noise(how.samples, how.generator), torch.full((how.samples,), 1 / how.samples).double()

    def expected_value(self, loss: Loss, how: Expectation) -> Tensor:
        """E_q[loss], 0-d."""
        noise, weights = self.nodes(how)
        return weights @ loss.values(self.mean + self.deviations(noise)).detach()

    def expected_gradient(self, loss: Loss, how: Expectation) -> Tensor:
        """E[g], (P,)."""
        noise, weights = self.nodes(how)
        points = self.mean + self.deviations(noise)
        if how.kind == "function_values":
            return centred(loss.values(points).detach()) @ self.scores(noise)
        return weights @ loss.gradients(points)

    def expected_derivatives(self, loss: Loss, how: Expectation) -> tuple[Tensor, Tensor]:
        """E[g], (P,), and E[H], (P, P), or what `how.curvature` takes for it.

        "reparameterised": E[H] = E[S (theta - m) g^T], from gradients alone. "squared_gradients": g g^T. A function: of
        theta, to a matrix or its diagonal. From function values: E[H] = E[(s s^T - S) loss] with the score s, where the
        term in S drops out since the values are centred.
        """
        noise, weights = self.nodes(how)
        points = self.mean + self.deviations(noise)
        if how.kind == "function_values":
            values, scores = centred(loss.values(points).detach()), self.scores(noise)
            return values @ scores, torch.einsum("n,ni,nj->ij", values, scores, scores)
        if how.curvature in (None, "hessian"):
            gradients, hessians = loss.derivatives(points)
            return weights @ gradients, torch.einsum("n,nij->ij", weights, hessians)
        gradients = loss.gradients(points)
        if callable(how.curvature):
            found = [self._curvature(how.curvature, point) for point in points]
            return weights @ gradients, torch.einsum("n,nij->ij", weights, torch.stack(found))
        left = gradients if how.curvature == "squared_gradients" else self.scores(noise)
        product = torch.einsum("n,ni,nj->ij", weights, left, gradients)
        return weights @ gradients, (product + product.T) / 2

    def _curvature(self, function: Function, point: Tensor) -> Tensor:
        found = checked_tensor("curvature", function(point)).detach().double()
        if tuple(found.shape) not in ((self.size,), (self.size, self.size)) or not bool(found.isfinite().all()):
            raise DataError(
                "The curvature does not fit the weights",
                expected=f"finite numbers, ({self.size}, {self.size}) or a diagonal ({self.size},)",
                got=shown(found),
                do="check the function that was passed as curvature",
            )
        return found.diag() if found.dim() == 1 else found


class _FullSpread(Gaussian):
    """What follows from the Cholesky factor C of the precision, S = C C^T."""

    @property
    @abstractmethod
    def matrix(self) -> Tensor:
        """S, (P, P)."""

    @property
    def _factor(self) -> Tensor:
        factor: Tensor = torch.linalg.cholesky(self.matrix)
        return factor

    def deviations(self, noise: Tensor) -> Tensor:
        """C^-T z."""
        found: Tensor = torch.linalg.solve_triangular(self._factor, noise, upper=False, left=False)
        return found

    def scores(self, noise: Tensor) -> Tensor:
        """C z."""
        return noise @ self._factor.mT

    def _whitened(self, deviations: Tensor) -> Tensor:
        return deviations @ self._factor

    def log_determinant(self) -> Tensor:
        """log det S, 0-d."""
        return 2 * self._factor.diagonal().log().sum()


@dataclass(frozen=True, eq=False, repr=False)
class FixedGaussian(_FullSpread):
    """N(m, Sigma) with a fixed covariance: lambda = Sigma^-1 m, mu = m, and the entropy is constant.

    The rule is m <- m - rate Sigma E[g]: gradient descent, with the covariance as its preconditioner.

    Args:
        mean: m, (P,).
        covariance: Sigma, (P, P), or its diagonal (P,); the identity when None.

    >>> q = FixedGaussian(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.5]))
    >>> q.natural()
    (tensor([1., 4.], dtype=torch.float64),)
    """

    covariance: Tensor | None = None

    def __post_init__(self) -> None:
        check_arguments(FixedGaussian, vars(self))
        mean = vector_of("mean", self.mean)
        if self.covariance is None:
            covariance = torch.eye(len(mean), dtype=torch.float64)
        elif self.covariance.dim() == 1:
            covariance = positive_vector("covariance", self.covariance, len(mean)).diag()
        else:
            covariance = positive_definite("covariance", self.covariance, len(mean))
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "covariance", covariance)

    @property
    def _covariance(self) -> Tensor:
        assert self.covariance is not None  # set when made
        return self.covariance

    @property
    def matrix(self) -> Tensor:
        """S = Sigma^-1, (P, P)."""
        return torch.cholesky_inverse(torch.linalg.cholesky(self._covariance))

    def natural(self) -> Parameters:
        """(Sigma^-1 m,)."""
        return (torch.linalg.solve(self._covariance, self.mean),)

    def expectation(self) -> Parameters:
        """(m,)."""
        return (self.mean,)

    def with_natural(self, natural: Sequence[Tensor]) -> FixedGaussian:
        """m = Sigma lambda."""
        (natural_mean,) = self._parts("natural", natural)
        return FixedGaussian(self._covariance @ natural_mean, self._covariance)

    def with_expectation(self, expectation: Sequence[Tensor]) -> FixedGaussian:
        """m = mu."""
        (mean,) = self._parts("expectation", expectation)
        return FixedGaussian(mean, self._covariance)

    def loss_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """(E[g],)."""
        refuse_curvature(how, "A Gaussian with fixed covariance")
        return (self.expected_gradient(loss, how),)

    def objective_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """The same, as the entropy does not depend on m."""
        return self.loss_gradient(loss, how)


@dataclass(frozen=True, eq=False, repr=False)
class FullGaussian(_FullSpread):
    """N(m, S^-1): lambda = (S m, -S/2), mu = (E[theta], E[theta theta^T]).

    The rule is S <- (1 - rate) S + rate E[H], m <- m - rate S^-1 E[g] with the new S.

    Args:
        mean: m, (P,).
        precision: S, (P, P).
    """

    improvable: ClassVar[bool] = True

    precision: Tensor

    def __post_init__(self) -> None:
        check_arguments(FullGaussian, vars(self))
        mean = vector_of("mean", self.mean)
        precision = positive_definite("precision", self.precision, len(mean))
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "precision", precision)

    @property
    def matrix(self) -> Tensor:
        """S, (P, P)."""
        return self.precision

    @property
    def covariance(self) -> Tensor:
        """S^-1, (P, P)."""
        return torch.cholesky_inverse(self._factor)

    def natural(self) -> Parameters:
        """(S m, -S/2)."""
        return self.precision @ self.mean, -self.precision / 2

    def expectation(self) -> Parameters:
        """(m, m m^T + S^-1)."""
        return self.mean, torch.outer(self.mean, self.mean) + self.covariance

    def with_natural(self, natural: Sequence[Tensor]) -> FullGaussian:
        """S = -2 lambda_2, m = S^-1 lambda_1."""
        first, second = self._parts("natural", natural)
        precision = positive_definite("precision", -2 * second)
        return FullGaussian(torch.linalg.solve(precision, first), precision)

    def with_expectation(self, expectation: Sequence[Tensor]) -> FullGaussian:
        """m = mu_1, S^-1 = mu_2 - m m^T."""
        mean, second = self._parts("expectation", expectation)
        covariance = positive_definite("covariance", second - torch.outer(mean, mean))
        return FullGaussian(mean, torch.cholesky_inverse(torch.linalg.cholesky(covariance)))

    def loss_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """(E[g] - E[H] m, E[H] / 2)."""
        gradient, curvature = self.expected_derivatives(loss, how)
        return gradient - curvature @ self.mean, curvature / 2

    def moved(self, gradient: Parameters, rate: float, improved: bool) -> FullGaussian:
        """lambda - rate gradient; improved: S + rate G + rate^2/2 G S^-1 G, with G = E[H] - S, is positive definite."""
        if not improved:
            return super().moved(gradient, rate, improved)
        change = 2 * gradient[1]
        precision = self.precision + rate * change + rate**2 / 2 * change @ torch.linalg.solve(self.precision, change)
        precision = (precision + precision.T) / 2
        mean = self.mean - rate * torch.linalg.solve(precision, gradient[0] + change @ self.mean)
        return FullGaussian(mean, precision)


@dataclass(frozen=True, eq=False, repr=False)
class DiagonalGaussian(Gaussian):
    """N(m, diag(s)^-1): lambda = (s m, -s/2), mu = (E[theta], E[theta^2]), each weight by itself.

    Args:
        mean: m, (P,).
        precision: s, (P,).
    """

    improvable: ClassVar[bool] = True

    precision: Tensor

    def __post_init__(self) -> None:
        check_arguments(DiagonalGaussian, vars(self))
        mean = vector_of("mean", self.mean)
        precision = positive_vector("precision", self.precision, len(mean))
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "precision", precision)

    def deviations(self, noise: Tensor) -> Tensor:
        """z / sqrt(s)."""
        return noise / self.precision.sqrt()

    def scores(self, noise: Tensor) -> Tensor:
        """sqrt(s) z."""
        return noise * self.precision.sqrt()

    def _whitened(self, deviations: Tensor) -> Tensor:
        return deviations * self.precision.sqrt()

    def log_determinant(self) -> Tensor:
        """log det S, 0-d."""
        return self.precision.log().sum()

    def natural(self) -> Parameters:
        """(s m, -s/2)."""
        return self.precision * self.mean, -self.precision / 2

    def expectation(self) -> Parameters:
        """(m, m^2 + 1/s)."""
        return self.mean, self.mean.square() + 1 / self.precision

    def with_natural(self, natural: Sequence[Tensor]) -> DiagonalGaussian:
        """s = -2 lambda_2, m = lambda_1 / s."""
        first, second = self._parts("natural", natural)
        precision = positive_vector("precision", -2 * second)
        return DiagonalGaussian(first / precision, precision)

    def with_expectation(self, expectation: Sequence[Tensor]) -> DiagonalGaussian:
        """m = mu_1, 1/s = mu_2 - m^2."""
        mean, second = self._parts("expectation", expectation)
        return DiagonalGaussian(mean, 1 / positive_vector("variance", second - mean.square()))

    def loss_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """(E[g] - E[h] m, E[h] / 2), h the diagonal of the Hessian."""
        gradient, curvature = self.expected_derivatives(loss, how)
        diagonal = curvature.diagonal()
        return gradient - diagonal * self.mean, diagonal / 2

    def moved(self, gradient: Parameters, rate: float, improved: bool) -> DiagonalGaussian:
        """lambda - rate gradient; improved: s + rate g + rate^2/2 g^2 / s, with g = E[h] - s, is positive."""
        if not improved:
            return super().moved(gradient, rate, improved)
        change = 2 * gradient[1]
        precision = self.precision + rate * change + rate**2 / 2 * change.square() / self.precision
        mean = self.mean - rate * (gradient[0] + change * self.mean) / precision
        return DiagonalGaussian(mean, precision)
