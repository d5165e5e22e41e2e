"""The Dirichlet: a distribution over the proportions of experts, or of a mixture's components."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.learning_rule.expectations import Expectation, centred, check_nodes, product, refuse_curvature
from lapis.learning_rule.family import Family, Parameters, positive_vector, source_of
from lapis.learning_rule.losses import Loss
from lapis.options import check_arguments

TINY = 1e-300
"""The smallest gamma draw: one of zero has no logarithm."""


@dataclass(frozen=True, eq=False, repr=False)
class Dirichlet(Family):
    """q(theta) proportional to prod theta_k^(alpha_k - 1) over proportions theta (K,).

    lambda = alpha - 1, mu = E[log theta] = psi(alpha) - psi(sum alpha). "local" is loss(exp(mu)), the loss at the
    geometric mean, whose sum is below one: exact for losses that are linear in log theta, as those of conjugate models
    are. "monte_carlo" differentiates through draws, "function_values" does not. "quadrature" breaks a stick: theta_k is
    the share v_k of what is left, v_k ~ Beta(alpha_k, sum of those after it), each on a grid in its log odds.

    Args:
        concentration: alpha, (K,).
    """

    concentration: Tensor

    def __post_init__(self) -> None:
        check_arguments(Dirichlet, vars(self))
        object.__setattr__(self, "concentration", positive_vector("concentration", self.concentration))

    @property
    def mean(self) -> Tensor:
        """alpha / sum alpha, (K,)."""
        return self.concentration / self.concentration.sum()

    def natural(self) -> Parameters:
        """(alpha - 1,)."""
        return (self.concentration - 1,)

    def expectation(self) -> Parameters:
        """(E[log theta],)."""
        return (_mean_logs(self.concentration),)

    def with_natural(self, natural: Sequence[Tensor]) -> Dirichlet:
        """alpha = lambda + 1."""
        return Dirichlet(self._parts("natural", natural)[0] + 1)

    def with_expectation(self, expectation: Sequence[Tensor]) -> Dirichlet:
        """alpha by Newton's method on log alpha: there is no closed form, and no gradient."""
        mean_logs = self._parts("expectation", expectation)[0].detach()
        if float(mean_logs.exp().sum()) >= 1:
            raise DataError(
                "No Dirichlet has these expectations of log theta",
                expected="sum exp(mu) < 1",
                got=f"{float(mean_logs.exp().sum()):.6g}",
                do="start from q.expectation()",
            )
        logs = self.concentration.detach().log()
        for _ in range(200):
            alpha = logs.exp()
            residual = _mean_logs(alpha) - mean_logs
            if float(residual.abs().max()) < 1e-14 * (1 + float(mean_logs.abs().max())):
                break
            logs = logs - (torch.linalg.solve(_fisher(alpha), residual) / alpha).clamp(-1, 1)
        return Dirichlet(logs.exp())

    def entropy(self) -> Tensor:
        """log B(alpha) - (alpha - 1)^T mu, 0-d."""
        return -_log_constant(self.concentration) - (self.natural()[0] * self.expectation()[0]).sum()

    def log_prob(self, theta: Tensor) -> Tensor:
        """(alpha - 1)^T log theta - log B(alpha), the density in the first K - 1 proportions."""
        return self._rows(theta).log() @ self.natural()[0] + _log_constant(self.concentration)

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws (samples, K); the generator is seeded with 0 when None."""
        check_arguments(Dirichlet.sample, locals())
        return _drawn(self.concentration.detach(), samples, source_of(generator))

    def loss_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """(grad_mu E[loss],): the Fisher information's inverse times the gradient in alpha."""
        refuse_curvature(how, "A Dirichlet")
        alpha, mean_logs = self.concentration.detach(), self.expectation()[0].detach()
        if how.kind == "local":
            point = mean_logs.exp()
            return (loss.gradients(point[None])[0] * point,)
        if how.kind == "quadrature":
            logs, weights = _grid(alpha, how.points)
            values = loss.values(logs.exp()).detach()
            slope = (weights * (values - weights @ values)) @ logs
        elif how.kind == "function_values":
            drawn = _drawn(alpha, how.samples, how.generator)
            slope = centred(loss.values(drawn).detach()) @ (drawn.log() - mean_logs)
        else:
            with torch.enable_grad():
                leaf = alpha.clone().requires_grad_()
                total = loss.values(_drawn(leaf, how.samples, how.generator)).mean()
                (slope,) = torch.autograd.grad(total, leaf, allow_unused=True, materialize_grads=True)
        return (torch.linalg.solve(_fisher(alpha), slope),)


def _mean_logs(alpha: Tensor) -> Tensor:
    return torch.digamma(alpha) - torch.digamma(alpha.sum())


def _fisher(alpha: Tensor) -> Tensor:
    """d mu / d lambda = diag(psi'(alpha)) - psi'(sum alpha)."""
    return torch.polygamma(1, alpha).diag() - torch.polygamma(1, alpha.sum())


def _log_constant(alpha: Tensor) -> Tensor:
    """-log B(alpha)."""
    return torch.lgamma(alpha.sum()) - torch.lgamma(alpha).sum()


def _drawn(alpha: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Normalised gammas, differentiable in alpha by torch's implicit derivatives."""
    gammas = torch._standard_gamma(alpha.expand(samples, -1), generator=generator).clamp_min(TINY)
    return gammas / gammas.sum(1, keepdim=True)


def _grid(alpha: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """log theta (points^(K - 1), K) and weights whose weighted means stand for expectations."""
    check_nodes((points, len(alpha) - 1))
    after = alpha.sum() - alpha.cumsum(0)
    shares = [_log_odds(float(a), float(b), points) for a, b in zip(alpha[:-1], after[:-1], strict=True)]
    odds = product(torch.stack([nodes for nodes, _ in shares]))
    left = torch.nn.functional.logsigmoid(-odds).cumsum(1)
    logs = torch.nn.functional.logsigmoid(odds) + left - torch.nn.functional.logsigmoid(-odds)
    return torch.cat([logs, left[:, -1:]], 1), product(torch.stack([weights for _, weights in shares])).prod(1)


def _log_odds(a: float, b: float, points: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the log odds z of a Beta(a, b): the trapezium rule in t, z = mode + deviation sinh(t).

    The density exp(a z) / (1 + exp(z))^(a + b) then falls doubly exponentially at both ends, and the error about
    exponentially in the number of points: 1e-5 or less with 20, 1e-10 with 40, logarithms of proportions included.
    """
    mode, deviation = math.log(a / b), math.sqrt((a + b) / (a * b))

    def log_density(t: Tensor) -> Tensor:
        z = mode + deviation * t.sinh()
        return a * z - (a + b) * torch.nn.functional.softplus(z)

    t = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    inside = t[log_density(t) > log_density(t.new_zeros(())) - min(36.0, 2 + 0.7 * points)]
    t = torch.linspace(float(inside[0]), float(inside[-1]), points, dtype=torch.float64)
    heights = (log_density(t) - log_density(t).max()).exp() * t.cosh()
    return mode + deviation * t.sinh(), heights / heights.sum()
