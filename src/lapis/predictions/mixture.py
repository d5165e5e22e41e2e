"""Predictions of mixtures: weighted combinations of the predictions of the parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lapis.likelihoods.base import Kind
from lapis.predictions.base import Prediction
from lapis.predictions.classification import ClassificationPrediction
from lapis.predictions.count import CountPrediction
from lapis.predictions.function import FunctionPrediction
from lapis.predictions.integrals import counts
from lapis.predictions.integrals.mixtures import log_weighted_sum, quantile_between, total_variance, weighted_sum
from lapis.predictions.latent import LatentMixture
from lapis.predictions.numeric import NumericPrediction
from lapis.predictions.regression import RegressionPrediction


@dataclass(frozen=True, eq=False, repr=False)
class MixturePrediction(Prediction):
    """p(y | x) = sum_k w_k p_k(y | x), where p_k is the prediction of part k of a `LatentMixture`.

    Densities are mixed position by position, or, if the parts are joint, as those of the whole batch.
    """

    parts: tuple[Prediction, ...]
    weights: tuple[float, ...]

    @property
    def method(self) -> Literal["mixture"]:
        return "mixture"

    def _position_log_prob(self, target: Tensor) -> Tensor:
        each = [part._position_log_prob(target) for part in self.parts]
        return log_weighted_sum(self.weights, each).to(each[0].dtype)

    def _joint_log_prob(self, target: Tensor) -> Tensor:
        each = [part._joint_log_prob(target) for part in self.parts]
        return log_weighted_sum(self.weights, each).to(each[0].dtype)


# The order of the bases matters: densities of classes come from ClassificationPrediction, at the mixed probabilities.
@dataclass(frozen=True, eq=False, repr=False)
class ClassificationMixture(ClassificationPrediction, MixturePrediction):
    """Classes: the weighted mean of the parts' probabilities, and of their expected entropies."""

    parts: tuple[ClassificationPrediction, ...]

    @cached_property
    def _log_probs(self) -> Tensor:
        mixed = log_weighted_sum(self.weights, (part._log_probs for part in self.parts))
        return mixed.log_softmax(-1).to(self.latent.mean.dtype)

    @cached_property
    def _expected_entropy(self) -> Tensor:
        mixed = weighted_sum(self.weights, (part._expected_entropy for part in self.parts))
        return mixed.to(self.latent.mean.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class NumericMixture(MixturePrediction, NumericPrediction):
    """Numbers: the epistemic variance includes that between the parts' means."""

    parts: tuple[NumericPrediction, ...]

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        means, epistemic, aleatoric = zip(*(part._moments for part in self.parts), strict=True)
        return *total_variance(self.weights, means, epistemic), weighted_sum(self.weights, aleatoric)

    def _cumulative(self, y: Tensor) -> Tensor:
        return weighted_sum(self.weights, (part._cumulative(y) for part in self.parts))


@dataclass(frozen=True, eq=False, repr=False)
class RegressionMixture(NumericMixture, RegressionPrediction):
    """Real targets."""

    def _quantile(self, level: float) -> Tensor:
        own = torch.stack([part._quantile(level) for part in self.parts])
        return quantile_between(level, self._cumulative, own)


@dataclass(frozen=True, eq=False, repr=False)
class CountMixture(NumericMixture, CountPrediction):
    """Counts."""

    def _quantile(self, level: float) -> Tensor:
        own = torch.stack([part._quantile(level) for part in self.parts])
        return counts.quantile_between(level, self._cumulative, own.amin(0) - 1, own.amax(0))


@dataclass(frozen=True, eq=False, repr=False)
class FunctionMixture(MixturePrediction, FunctionPrediction):
    """Likelihoods known by their density only: the densities are mixed."""


_MIXTURES: dict[Kind, Callable[..., MixturePrediction]] = {
    "classification": ClassificationMixture,
    "regression": RegressionMixture,
    "count": CountMixture,
    "function": FunctionMixture,
}


def mix(latent: LatentMixture, parts: Sequence[Prediction], weights: Sequence[float]) -> MixturePrediction:
    """The prediction of `latent` from the predictions of its parts, under one likelihood, with positive weights."""
    first = parts[0]
    samples = sum(part.samples for part in parts)
    common = (first.likelihood, latent, samples, first.seed, tuple(parts), tuple(weights))
    links = [part.link for part in parts if isinstance(part, ClassificationPrediction)]
    of_classes = [next(filter(None, links), None)] if links else []
    return _MIXTURES[first.likelihood.kind](*common, *of_classes)
