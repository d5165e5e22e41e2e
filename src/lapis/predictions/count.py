"""Predictions of counts: mean, variances by source, intervals, densities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapis.predictions import _counts
from lapis.predictions._mixtures import normal_quantile
from lapis.predictions._quadrature import in_chunks
from lapis.predictions.base import Prediction, tails
from lapis.predictions.latent import LatentSamples


@dataclass(frozen=True, eq=False, repr=False)
class CountPrediction(Prediction):
    """p(y | x) of counts y ~ Poisson(e^f), laid out as the network's outputs.

    Linearised: f ~ N(m, v), so the rate e^f is log-normal; the outputs of a position are treated as independent.
    Sampled: the equal mixture of the S networks' Poisson distributions.
    """

    @property
    def mean(self) -> Tensor:
        """E[y] = E[e^f]; linearised, e^(m + v/2)."""
        return self._lay(self._moments[0])

    @property
    def epistemic_variance(self) -> Tensor:
        """Var[e^f]; linearised, (e^v - 1) e^(2m + v): what more data would reduce."""
        return self._lay(self._moments[1])

    @property
    def aleatoric_variance(self) -> Tensor:
        """E[Var[y | f]] = E[e^f]: Poisson noise, which more data would not reduce."""
        return self.mean

    @property
    def variance(self) -> Tensor:
        """Epistemic plus aleatoric variance."""
        return self._lay(self._moments[0] + self._moments[1])

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Smallest counts at which the distribution reaches (1 - level)/2 and (1 + level)/2.

        Both ends belong to the interval, which holds at least `level` of the probability.
        """
        lower, upper = (self._quantile(tail) for tail in tails(level))
        return self._lay(lower), self._lay(upper)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """E[e^f] and Var[e^f], each (B, T, C), float64."""
        if isinstance(self.latent, LatentSamples):
            values = self.latent.values.double()
            top = values.amax(0)
            rates = (values - top).exp()  # relative to the largest: moments overflow to infinity, not to NaN
            return (top + rates.mean(0).log()).exp(), (2 * top + rates.var(0, unbiased=False).log()).exp()
        mean, variance = self._gaussian
        # log(e^v - 1) = v + log(1 - e^-v): -inf for v = 0, and overflows only if the result does
        log_excess = variance + (-torch.expm1(-variance)).log()
        return (mean + 0.5 * variance).exp(), (2 * mean + variance + log_excess).exp()

    @cached_property
    def _gaussian(self) -> tuple[Tensor, Tensor]:
        return self.latent.mean.double(), self.latent.variance.double().clamp_min(0)

    def _cumulative(self, k: Tensor) -> Tensor:
        """P(y <= k) of counts k (B, T, C), float64."""
        if isinstance(self.latent, LatentSamples):
            rates = self.latent.values.double().exp()
            below: Tensor = torch.special.gammaincc((k + 1).expand_as(rates), rates)
            return below.mean(0)
        return in_chunks(_counts.cumulative, k, *self._gaussian)

    def _quantile(self, level: float) -> Tensor:
        """The smallest counts k with P(y <= k) >= level, (B, T, C), float64."""
        if isinstance(self.latent, LatentSamples):
            rates = self.latent.values.double().exp()
            rate = rates.sort(0).values[int(level * len(rates))]
        else:
            mean, variance = self._gaussian
            rate = (mean + normal_quantile(level) * variance.sqrt()).exp()
        return _counts.quantile(level, self._cumulative, rate)

    def _position_log_prob(self, target: Tensor) -> Tensor:
        if isinstance(self.latent, LatentSamples):
            return self._monte_carlo_log_prob(target)
        densities = in_chunks(_counts.log_prob, target.double(), *self._gaussian)
        return densities.sum(-1).to(target.dtype)

    def _lay(self, canonical: Tensor) -> Tensor:
        return self.likelihood.layout(canonical.to(self.latent.mean.dtype), self.raw_shape)
