"""Scores of predictions, summed over parts of the data: log density, calibration and accuracy."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lapis import metrics
from lapis.likelihoods import Bernoulli, Categorical, Likelihood
from lapis.predictions import ClassificationPrediction, LatentSamples, NumericPrediction, Prediction
from lapis.predictions import predict as predict_outputs

LEVEL = 0.95
"""Probability of the intervals whose coverage is counted."""

LABELS = {
    "nll": "NLL, nats an example",
    "accuracy": "accuracy",
    "ece": "ECE",
    "brier": "Brier score",
    "confidence": "mean confidence",
    "rmse": "RMSE",
    "coverage": "coverage of 95 % intervals",
}
"""Scores by name, in the order of the table, with their names there."""


def plain_prediction(likelihood: Likelihood, f: Tensor, raw_shape: tuple[int, ...]) -> Prediction:
    """The prediction of one network without doubt about its weights, from canonical outputs f (B, T, C)."""
    return predict_outputs(likelihood, LatentSamples(f[None], raw_shape=raw_shape))


class Scores:
    """Sums behind the scores of one kind of predictions; each likelihood has those that have a meaning for it."""

    def __init__(self) -> None:
        self.log_probs: list[Tensor] = []
        self.bins: list[metrics.Reliability] = []
        self.brier = 0.0
        self.squared = self.covered = 0.0
        self.targets = 0

    def add(self, prediction: Prediction, y: Any) -> None:
        """Add predictions of some examples, with targets as users pass them."""
        self.log_probs.append(prediction.log_prob(y).detach().double().cpu())
        likelihood = prediction.likelihood
        target = likelihood.targets(y, prediction.latent.mean, prediction.raw_shape)
        if isinstance(prediction, ClassificationPrediction):
            self._add_classes(likelihood, likelihood.canonical(prediction.probs), target)
        elif isinstance(prediction, NumericPrediction):
            lower, upper = map(likelihood.canonical, prediction.interval(LEVEL))
            self.squared += float((likelihood.canonical(prediction.mean) - target).double().square().sum())
            self.covered += float(((lower <= target) & (target <= upper)).sum())
            self.targets += target.numel()

    def _add_classes(self, likelihood: Likelihood, probs: Tensor, target: Tensor) -> None:
        """Of hard labels only: soft ones have no accuracy."""
        ignored = -100
        if target.is_floating_point():
            if not isinstance(likelihood, Bernoulli) or not bool(((target == 0) | (target == 1)).all()):
                return
            probs, target = probs.flatten(), target.flatten().long()
        else:
            assert isinstance(likelihood, Categorical)
            ignored = -1 if likelihood.ignore_index is None else likelihood.ignore_index
        count = int((target != ignored).sum())
        if count:
            self.bins.append(metrics.reliability(probs, target, ignore_index=ignored))
            self.brier += count * float(metrics.brier(probs, target, ignore_index=ignored))

    @property
    def count(self) -> int:
        """Labels, or targets, that were scored one by one."""
        return sum(int(each.count.sum()) for each in self.bins) or self.targets

    def reliability(self) -> metrics.Reliability:
        """All parts together."""
        count = torch.stack([each.count for each in self.bins])
        total = count.sum(0)

        def mean(values: list[Tensor]) -> Tensor:
            return (count * torch.stack(values).nan_to_num()).sum(0) / total

        confidences, accuracies = [each.confidence for each in self.bins], [each.accuracy for each in self.bins]
        return metrics.Reliability(self.bins[0].edges, total, mean(confidences), mean(accuracies))

    def values(self) -> dict[str, float]:
        """The scores by name, see `LABELS`."""
        found = {"nll": -float(torch.cat(self.log_probs).mean())}
        if self.bins:
            bins = self.reliability()
            share = bins.count / bins.count.sum()
            found |= {
                "accuracy": float((share * bins.accuracy.nan_to_num()).sum()),
                "ece": float(bins.ece),
                "brier": self.brier / self.count,
                "confidence": float((share * bins.confidence.nan_to_num()).sum()),
            }
        if self.targets:
            found |= {"rmse": (self.squared / self.targets) ** 0.5, "coverage": self.covered / self.targets}
        return found


def tolerable(likelihood: Likelihood, outputs: int) -> float:
    """Nats an example by which an honest posterior may fall short of the network on the network's own training data.

    Where S^T V S < 1 the doubt at most doubles the variance of a real target: 1/2 log 2 for each of an example's
    outputs. Classes that a network has learned leave far less room.
    """
    return 0.1 if likelihood.kind == "classification" else 0.5 * math.log(2) * outputs


def excess(plain: list[Tensor], posterior: list[Tensor]) -> tuple[float, float]:
    """By how many nats an example the posterior's log densities (n,) fall short of the network's, with standard error.

    The differences of single examples are far less spread than the densities themselves.
    """
    gap = torch.cat(plain).double() - torch.cat(posterior).double()
    if not bool(torch.isfinite(gap).all()):
        return float(gap.mean()), 0.0
    error = float(gap.std()) / len(gap) ** 0.5 if len(gap) > 1 else float("inf")
    return float(gap.mean()), error
