"""Scores of one column on one network: a row of docs/results/trust.json."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapis import metrics
from trust.settings import Loaded

CLASSIFICATION = ("nll", "ece", "brier", "accuracy", "ood_auroc", "shifted_nll", "shifted_ece")
REGRESSION = ("nll", "rmse", "coverage", "shifted_nll", "shifted_coverage")


@dataclass(frozen=True)
class Density:
    """A predictive distribution of real targets or counts, at the targets of one part."""

    log_prob: Tensor
    mean: Tensor
    lower: Tensor
    upper: Tensor


Answers = dict[str, Tensor] | dict[str, Density]
"""By part ("test", "shifted", and "ood" of classifications): probabilities (B, C), or densities."""


def entropy(probs: Tensor) -> Tensor:
    each: Tensor = torch.special.entr(probs.double())
    return each.sum(-1)


def score(loaded: Loaded, answers: Answers) -> dict[str, float]:
    """Every score by its name; ECE with 15 bins, intervals of 95 %."""
    parts = {"": ("test", loaded.test[1]), "shifted_": ("shifted", loaded.shifted[1])}
    found: dict[str, float] = {}
    for prefix, (part, targets) in parts.items():
        answer = answers[part]
        if isinstance(answer, Density):
            values = {
                "nll": -answer.log_prob.mean(),
                "rmse": metrics.rmse(answer.mean, targets),
                "coverage": metrics.coverage(answer.lower, answer.upper, targets),
            }
        else:
            values = {
                "nll": metrics.nll(answer, targets),
                "ece": metrics.ece(answer, targets),
                "brier": metrics.brier(answer, targets),
                "accuracy": metrics.accuracy(answer, targets),
            }
        found |= {prefix + name: float(value) for name, value in values.items()}
    if "ood" in answers:
        inside, outside = answers["test"], answers["ood"]
        assert isinstance(inside, Tensor) and isinstance(outside, Tensor)  # noqa: PT018 - one fact, for the types
        found["ood_auroc"] = float(metrics.ood_auroc(entropy(inside), entropy(outside)))
    return found
