"""The Gaussian over the weights while it is fitted: its parameters, its divergence from the prior, the best prior."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.priors import WeightPrior


@dataclass(frozen=True)
class Approximation:
    """q(theta) = N(mean, D (I + V^T V) D), D = diag(exp(log_deviation)); its tensors are leaves of an optimiser.

    Standard deviations are fitted by their logarithms, and the low-rank part in units of them: they differ by orders of
    magnitude between weights, and a step that suits the means would drown them in noise of the factors.
    """

    mean: Tensor
    """(P,)"""
    log_deviation: Tensor
    """(P,)"""
    loadings: Tensor | None = None
    """V, (K, P)."""

    def parameters(self) -> list[Tensor]:
        found = [self.mean, self.log_deviation]
        return found if self.loadings is None else [*found, self.loadings]

    def factors(self) -> Tensor | None:
        """V D, (K, P)."""
        return None if self.loadings is None else self.loadings * self.log_deviation.exp()

    def variance(self) -> Tensor:
        """Of each weight, (P,) float64."""
        diagonal = (2 * self.log_deviation.double()).exp()
        return diagonal if self.loadings is None else diagonal * (1 + self.loadings.double().square().sum(0))

    def logdet(self) -> Tensor:
        """log |covariance|, 0-d float64, by the matrix determinant lemma."""
        total = 2 * self.log_deviation.double().sum()
        if self.loadings is None:
            return total
        inner = self.loadings.double() @ self.loadings.double().mT
        return total + torch.logdet(inner + torch.eye(len(inner), dtype=inner.dtype, device=inner.device))

    def divergence(self, prior: WeightPrior) -> Tensor:
        """KL(q | prior), nats, 0-d float64:

        1/2 [tr(Lambda Sigma) + |mean - m|^2_Lambda - P - log |Lambda| - log |Sigma|].
        """
        moments = self.variance() + (self.mean.double() - prior.mean).square()
        known = (prior.vector() * moments).sum() - len(self.mean) - prior.logdet() - self.logdet()
        return 0.5 * known

    def pull(self, prior: WeightPrior, precision: Tensor) -> tuple[float, list[Tensor]]:
        """KL(q | prior) and its gradients in `parameters()`, for a step.

        Mean-field in closed form and in the weights' dtype: Lambda (mean - m), and Lambda deviation^2 - 1.

        Args:
            precision: `prior.vector()` in that dtype, (P,).
        """
        if self.loadings is not None:
            divergence = self.divergence(prior)
            return float(divergence.detach()), list(torch.autograd.grad(divergence, self.parameters()))
        with torch.no_grad():
            away = self.mean - prior.mean.to(self.mean)
            pull, squeeze = precision * away, (2 * self.log_deviation).exp_().mul_(precision)
            squares = float(torch.dot(pull, away)) + float(squeeze.sum()) - len(away) - float(prior.logdet())
            return 0.5 * squares - float(self.log_deviation.sum()), [pull, squeeze.sub_(1)]

    def best_prior(self, prior: WeightPrior) -> WeightPrior:
        """The precisions with the highest ELBO, P_g / E_q|theta_g - m_g|^2: that of each group in closed form."""
        with torch.no_grad():
            moments = self.variance() + (self.mean.double() - prior.mean).square()
            if prior.scales is not None:
                moments = moments * prior.scales
            total = torch.zeros_like(prior.precision).index_add(0, prior.group_index(), moments)
            return prior.with_precision(prior.sizes() / total)


def small_deviations(mean: Tensor, prior: WeightPrior, share: float = 0.1) -> Tensor:
    """Deviations (P,) to start from: a share of the prior's, or of the typical distance of the mean from it."""
    wide = prior.vector().detach().rsqrt()
    typical = float((mean.double() - prior.mean).square().mean().sqrt())
    return share * (wide.clamp(max=typical) if math.isfinite(typical) and typical > 0 else wide)
