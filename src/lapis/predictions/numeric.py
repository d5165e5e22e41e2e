"""Predictions of numbers, real or counts: what follows from their moments and quantiles."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lapis.predictions.base import Prediction, tails


@dataclass(frozen=True, eq=False, repr=False)
class NumericPrediction(Prediction):
    """p(y | x) of targets that are numbers, laid out as the network's outputs."""

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
        """Standard deviation, the square root of `variance`."""
        return self.variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval that holds each target with probability `level`.

        Of counts the smallest at which the distribution reaches (1 - level)/2 and (1 + level)/2: both ends belong to
        the interval, which holds at least `level` of the probability.
        """
        lower, upper = (self._lay(self._quantile(tail)) for tail in tails(level))
        return lower, upper

    @cached_property
    @abstractmethod
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, epistemic and aleatoric variance, each (B, T, D)."""

    @abstractmethod
    def _cumulative(self, y: Tensor) -> Tensor:
        """P(target <= y) for y (B, T, D), float64."""

    @abstractmethod
    def _quantile(self, level: float) -> Tensor:
        """The smallest y with P(target <= y) >= level, (B, T, D), float64."""

    def _lay(self, canonical: Tensor) -> Tensor:
        return self.likelihood.layout(canonical.to(self.latent.mean.dtype), self.raw_shape)
