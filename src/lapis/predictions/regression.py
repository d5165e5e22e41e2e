"""Predictions of real targets: mean, variances by source, intervals, densities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from lapis.errors import LikelihoodError
from lapis.likelihoods import Gaussian, HeteroscedasticGaussian
from lapis.likelihoods.heteroscedastic import split
from lapis.predictions.integrals.mixtures import (
    LARGEST_EXPONENT,
    multivariate_log_prob,
    noisy_cumulative,
    noisy_log_prob,
    noisy_quantile,
    normal_cumulative,
    normal_log_prob,
    normal_quantile,
    quantile_between,
)
from lapis.predictions.integrals.quadrature import in_chunks
from lapis.predictions.integrals.students import student_cumulative, student_log_prob, student_quantile
from lapis.predictions.latent import LatentGaussian, LatentSamples
from lapis.predictions.numeric import NumericPrediction


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPrediction(NumericPrediction):
    """p(y | x) of real targets, D per position, laid out as the network's outputs.

    Linearised, with one noise sigma for all inputs: exactly N(f, V + sigma^2 I). Linearised, with noise predicted by
    the network: the integral over the mean is exact, the integral over the log variance s ~ N(m_s, V_ss) is by
    quadrature; covariances between outputs are not used. Sampled: the equal mixture of the S networks' Gaussians.
    Variances that are estimates from K draws (`latent.degrees`): Student's t with K degrees of freedom, plus the noise,
    in `interval` and `log_prob`; `variance` is the estimate itself.
    """

    def _cumulative(self, y: Tensor) -> Tensor:
        if isinstance(self.latent, LatentSamples):
            return normal_cumulative(y, *self._networks(self.latent)).mean(0)
        if self._heteroscedastic:
            return in_chunks(noisy_cumulative, y, *self._mean_and_noise)
        if self._degrees is not None:
            return in_chunks(partial(student_cumulative, degrees=self._degrees), y, *self._estimated)
        return normal_cumulative(y, self.latent.mean.double(), self._total_variance.sqrt())

    def _quantile(self, level: float) -> Tensor:
        z = normal_quantile(level)
        if isinstance(self.latent, LatentSamples):
            means, deviations = self._networks(self.latent)
            return quantile_between(level, self._cumulative, means + z * deviations)
        if self._heteroscedastic:
            return in_chunks(partial(noisy_quantile, level), *self._mean_and_noise)
        if self._degrees is not None:
            return in_chunks(partial(student_quantile, level, degrees=self._degrees), *self._estimated)
        return self.latent.mean.double() + z * self._total_variance.sqrt()

    def _networks(self, latent: LatentSamples) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the targets under each of S networks, (S, B, T, D), float64."""
        values = latent.values.double()
        if not self._heteroscedastic:
            return values, self._noise_variance.sqrt().expand_as(values)
        means, log_variances = split(values)
        return means, (0.5 * log_variances.clamp_max(LARGEST_EXPONENT)).exp()

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = self.latent.mean, self.latent.variance
        if not self._heteroscedastic:
            return mean, variance, self._noise_variance.to(mean).expand_as(mean)
        if isinstance(self.latent, LatentSamples):
            return split(mean)[0], split(variance)[0], split(self.latent.values)[1].exp().mean(0)
        aleatoric = (split(mean)[1] + 0.5 * split(variance)[1]).exp()  # mean of a log-normal variable
        return split(mean)[0], split(variance)[0], aleatoric

    @property
    def _total_variance(self) -> Tensor:
        """V + sigma^2, (B, T, C), float64."""
        return self.latent.variance.double().clamp_min(0) + self._noise_variance

    @property
    def _degrees(self) -> int | None:
        """How many draws the variances are from; None where they are known."""
        return self.latent.degrees if isinstance(self.latent, LatentGaussian) else None

    @property
    def _estimated(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means, their estimated variances, and the noise variances: each (B, T, D), float64."""
        mean = self.latent.mean.double()
        return mean, self.latent.variance.double().clamp_min(0), self._noise_variance.expand(mean.shape)

    @property
    def _mean_and_noise(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Means and their variances, log noise variances and their variances: each (B, T, D), float64."""
        mean, log_variance = split(self.latent.mean.double())
        variance, uncertainty = split(self.latent.variance.double().clamp_min(0))
        return mean, variance, log_variance, uncertainty

    def _position_log_prob(self, target: Tensor) -> Tensor:
        if isinstance(self.latent, LatentSamples):
            return self._monte_carlo_log_prob(target)
        if self._heteroscedastic:
            densities = in_chunks(noisy_log_prob, target.double(), *self._mean_and_noise)
            return densities.sum(-1).to(target.dtype)
        blocks = self.latent.blocks
        if blocks is None:
            if self._degrees is None:
                densities = normal_log_prob(target.double(), self.latent.mean.double(), self._total_variance)
            else:
                density = partial(student_log_prob, degrees=self._degrees)
                densities = in_chunks(density, target.double(), *self._estimated)
            return densities.sum(-1).to(target.dtype)
        covariance = blocks.double() + torch.diag_embed(self._noise_variance.expand(self.latent.mean.shape))
        return multivariate_log_prob(target - self.latent.mean, covariance).to(target.dtype)

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
            raise LikelihoodError(
                "This regression has no noise of its own",
                expected="gaussian",
                got=self.likelihood.name,
                do="use lapis.Gaussian",
            )
        return self.likelihood.noise.detach().to(self.latent.mean.device).double() ** 2
