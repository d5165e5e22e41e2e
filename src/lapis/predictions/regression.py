"""Predictions of real targets: mean, variances by source, intervals, densities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapis.errors import LikelihoodError
from lapis.likelihoods import Gaussian, HeteroscedasticGaussian
from lapis.likelihoods.heteroscedastic import split
from lapis.predictions._mixtures import mixture_quantile, multivariate_log_prob, normal_log_prob
from lapis.predictions._quadrature import nodes_like
from lapis.predictions.base import Prediction, tails
from lapis.predictions.latent import LatentGaussian, LatentSamples

# exp() of a larger number overflows in float64.
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPrediction(Prediction):
    """p(y | x) of real targets, D per position, laid out as the network's outputs.

    Gaussian noise, linearised: exactly N(f, V + sigma^2 I). Noise predicted by the network, linearised: the
    mean is integrated exactly and the log variance s ~ N(s, V_ss) by quadrature, with the outputs' marginal
    variances. Sampled: the equal mixture of the S networks' Gaussians.
    """

    @property
    def mean(self) -> Tensor:
        """E[y]."""
        return self._lay(self._moments[0])

    @property
    def epistemic_variance(self) -> Tensor:
        """Variance of E[y | weights]: what more data would reduce."""
        return self._lay(self._moments[1])

    @property
    def aleatoric_variance(self) -> Tensor:
        """Expected variance of y given the weights: the noise, which more data would not reduce."""
        return self._lay(self._moments[2])

    @property
    def variance(self) -> Tensor:
        """Epistemic plus aleatoric variance (the law of total variance)."""
        return self._lay(self._moments[1] + self._moments[2])

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval that holds each target with probability `level`."""
        means, variances, log_weights = self._components
        lower, upper = (mixture_quantile(tail, means, variances.sqrt(), log_weights) for tail in tails(level))
        return self._lay(lower), self._lay(upper)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, epistemic and aleatoric variance, each (B, T, D)."""
        mean, variance = self.latent.mean, self.latent.variance
        if not self._heteroscedastic:
            return mean, variance, self._noise_variance.to(mean).expand_as(mean)
        if isinstance(self.latent, LatentSamples):
            return split(mean)[0], split(variance)[0], split(self.latent.values)[1].exp().mean(0)
        aleatoric = (split(mean)[1] + 0.5 * split(variance)[1]).exp()  # mean of a log-normal variable
        return split(mean)[0], split(variance)[0], aleatoric

    @cached_property
    def _components(self) -> tuple[Tensor, Tensor, Tensor]:
        """p(y | x) as a mixture of Gaussians: means, variances (K, B, T, D) and log weights, in float64."""
        if isinstance(self.latent, LatentSamples):
            values = self.latent.values.double()
            weights = values.new_full((len(values), 1, 1, 1), 1 / len(values)).log()
            if not self._heteroscedastic:
                return values, self._noise_variance.expand_as(values), weights
            means, log_variances = split(values)
            return means, log_variances.clamp_max(LARGEST_EXPONENT).exp(), weights
        mean, variance = self.latent.mean.double(), self.latent.variance.double().clamp_min(0)
        if not self._heteroscedastic:
            total = variance + self._noise_variance
            return mean.unsqueeze(0), total.unsqueeze(0), mean.new_zeros(1, 1, 1, 1)
        (m, s), (variance_m, variance_s) = split(mean), split(variance)
        z, log_weights = nodes_like(m)
        noise = (s + variance_s.sqrt() * z).clamp_max(LARGEST_EXPONENT).exp()
        return m.expand_as(noise), variance_m + noise, log_weights

    def _position_log_prob(self, target: Tensor) -> Tensor:
        if isinstance(self.latent, LatentSamples):
            return self._monte_carlo_log_prob(target)
        blocks = self.latent.blocks
        if blocks is not None and not self._heteroscedastic:
            covariance = blocks.double() + torch.diag_embed(self._noise_variance.expand(self.latent.mean.shape))
            return multivariate_log_prob(target - self.latent.mean, covariance).to(target.dtype)
        means, variances, log_weights = self._components
        densities = log_weights + normal_log_prob(target.double(), means, variances)
        return densities.logsumexp(0).sum(-1).to(target.dtype)

    def _joint_log_prob(self, target: Tensor) -> Tensor:
        if self._heteroscedastic or not isinstance(self.latent, LatentGaussian) or self.latent.joint is None:
            return super()._joint_log_prob(target)
        noise = self._noise_variance.expand(self.latent.mean.shape).flatten()
        covariance = self.latent.joint.double() + torch.diag(noise)
        return multivariate_log_prob((target - self.latent.mean).flatten(), covariance).to(target.dtype)

    @property
    def _heteroscedastic(self) -> bool:
        return isinstance(self.likelihood, HeteroscedasticGaussian)

    @property
    def _noise_variance(self) -> Tensor:
        """sigma^2 in float64, 0-d or (D,)."""
        if not isinstance(self.likelihood, Gaussian):
            raise LikelihoodError("No regression likelihood", expected="gaussian", got=self.likelihood.name)
        return self.likelihood.noise.detach().to(self.latent.mean.device).double() ** 2

    def _lay(self, canonical: Tensor) -> Tensor:
        return self.likelihood.layout(canonical.to(self.latent.mean.dtype), self.raw_shape)
