"""Predictions of counts: mean, variances by source, intervals, densities."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapis.errors import LapisWarning, users_level
from lapis.predictions.integrals import counts
from lapis.predictions.integrals.mixtures import normal_quantile
from lapis.predictions.integrals.quadrature import in_chunks
from lapis.predictions.latent import LatentSamples
from lapis.predictions.numeric import NumericPrediction


@dataclass(frozen=True, eq=False, repr=False)
class CountPrediction(NumericPrediction):
    """p(y | x) of counts y ~ Poisson(e^f), laid out as the network's outputs.

    Linearised: f ~ N(m, v), so the rate e^f is log-normal, with mean e^(m + v/2) and variance (e^v - 1) e^(2m + v), the
    epistemic one; the outputs of a position are treated as independent. Sampled: the equal mixture of the S networks'
    Poisson distributions. The aleatoric variance is that of Poisson noise, E[e^f].
    """

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """E[e^f], Var[e^f] and again E[e^f], each (B, T, C), float64."""
        if isinstance(self.latent, LatentSamples):
            values = self.latent.values.double()
            top = values.amax(0)
            rates = (values - top).exp()  # relative to the largest: moments overflow to infinity, not to NaN
            mean = (top + rates.mean(0).log()).exp()
            return _told(mean, (2 * top + rates.var(0, unbiased=False).log()).exp())
        log_mean, variance = self._gaussian
        # log(e^v - 1) = v + log(1 - e^-v): -inf for v = 0, and overflows only if the result does
        log_excess = variance + (-torch.expm1(-variance)).log()
        mean = (log_mean + 0.5 * variance).exp()
        return _told(mean, (2 * log_mean + variance + log_excess).exp())

    @cached_property
    def _gaussian(self) -> tuple[Tensor, Tensor]:
        return self.latent.mean.double(), self.latent.variance.double().clamp_min(0)

    def _cumulative(self, k: Tensor) -> Tensor:
        if isinstance(self.latent, LatentSamples):
            rates = self.latent.values.double().exp()
            below: Tensor = torch.special.gammaincc((k + 1).expand_as(rates), rates)
            return below.mean(0)
        return in_chunks(counts.cumulative, k, *self._gaussian)

    def _quantile(self, level: float) -> Tensor:
        if isinstance(self.latent, LatentSamples):
            rates = self.latent.values.double().exp()
            rate = rates.sort(0).values[int(level * len(rates))]
        else:
            mean, variance = self._gaussian
            rate = (mean + normal_quantile(level) * variance.sqrt()).exp()
        return counts.quantile(level, self._cumulative, rate)

    def _position_log_prob(self, target: Tensor) -> Tensor:
        if isinstance(self.latent, LatentSamples):
            return self._monte_carlo_log_prob(target)
        densities = in_chunks(counts.log_prob, target.double(), *self._gaussian)
        return densities.sum(-1).to(target.dtype)


def _told(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The moments, with a warning where they are infinite."""
    infinite = int((~(mean + variance).isfinite()).sum())
    if infinite:
        warnings.warn(
            f"The rates of {infinite} of {mean.numel()} counts are so uncertain that their mean or variance exceeds "
            "all numbers, and is infinite. Look at quantiles (.interval), or doubt the weights less: a larger "
            "prior precision, or inputs nearer to the data.",
            LapisWarning,
            stacklevel=users_level(),
        )
    return mean, variance, mean
