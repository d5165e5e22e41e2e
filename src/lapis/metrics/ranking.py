"""Scores of a ranking by doubt: does it find the outliers, and the mistakes?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.metrics._checks import (
    check_same_shape,
    checked_classes,
    checked_scores,
    extent,
    require,
)
from lapis.options import check_arguments, checked_numbers, checked_tensor


def auroc(scores: Tensor, labels: Tensor) -> Tensor:
    """Area under the ROC curve: P(score of a positive > score of a negative) + 1/2 P(equal), by midranks.

    >>> auroc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])).item()
    0.875
    """
    values, positive = _two_groups(scores, labels)
    n1 = int(positive.sum())
    n0 = len(positive) - n1
    ordered = values.sort().values
    below, upto = torch.searchsorted(ordered, values), torch.searchsorted(ordered, values, right=True)
    midrank = (below + upto + 1).double() / 2
    return (midrank[positive].sum() - n1 * (n1 + 1) / 2) / (n1 * n0)


def aupr(scores: Tensor, labels: Tensor) -> Tensor:
    """Area under the precision-recall curve of the positives: average precision, sum_k (R_k - R_(k-1)) P_k.

    P_k and R_k are precision and recall among the scores not below the k-th largest value, so that tied scores enter
    together. Unlike the AUROC it depends on how many positives there are: a random score has their share.

    >>> aupr(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])).item()
    0.833...
    """
    values, positive = _two_groups(scores, labels)
    distinct, group = torch.unique(values, return_inverse=True)
    group = len(distinct) - 1 - group  # the largest score first
    counts = torch.zeros(len(distinct), 2, dtype=torch.float64)
    counts.index_add_(0, group, torch.stack([positive.double(), torch.ones(len(positive), dtype=torch.float64)], 1))
    hits, taken = counts.cumsum(0).unbind(1)
    return (counts[:, 0] / hits[-1] * hits / taken).sum()


def _two_groups(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Flat scores, and which of them belong to positives; both groups must be there."""
    check_same_shape("scores", scores, "labels", labels)
    values, truth = checked_scores("scores", scores), labels.to("cpu").flatten()
    binary = bool(((truth == 0) | (truth == 1)).all())
    require(binary, "Labels are not binary", "0 and 1, or bools", extent(truth), "recode them")
    positive = truth == 1
    n1 = int(positive.sum())
    n0 = len(truth) - n1
    two = "at least one positive and one negative label"
    require(n0 > 0 < n1, "One group is missing", two, f"{n1} positive, {n0} negative", "pass both groups")
    return values, positive


def ood_auroc(score_in: Tensor, score_out: Tensor) -> Tensor:
    """AUROC of a score for detecting out-of-distribution examples, for which it should be larger.

    >>> ood_auroc(torch.tensor([0.1, 0.3]), torch.tensor([0.2, 0.9])).item()
    0.75
    """
    inside, outside = checked_scores("score_in", score_in), checked_scores("score_out", score_out)
    labels = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
    return auroc(torch.cat([inside, outside]), labels)


def misclassification_auroc(
    probs: Tensor, targets: Tensor, uncertainty: Tensor | None = None, *, ignore_index: int = -100
) -> Tensor:
    """AUROC of a doubt for detecting the examples that are classified wrongly.

    Args:
        probs: see `lapis.metrics.accuracy`; so are `targets` and `ignore_index`.
        uncertainty: in the targets' shape, larger for doubtful examples; by default one minus the top probability.

    >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
    >>> misclassification_auroc(probs, torch.tensor([0, 1, 1])).item()
    1.0
    """
    check_arguments(misclassification_auroc, locals(), signed=("ignore_index",))
    doubt, wrong = _doubts(probs, targets, uncertainty, ignore_index)
    return auroc(doubt, wrong)


@dataclass(frozen=True)
class RiskCoverage:
    """Mean loss of the examples that are kept when the most doubtful are handed over to somebody else."""

    coverage: Tensor
    """The share of examples kept, k / N for k = 1 .. N."""
    risk: Tensor
    """Mean loss of the k least doubtful examples, (N,)."""

    @property
    def area(self) -> Tensor:
        """Area under the curve: the mean of `risk` over k = 1 .. N."""
        return self.risk.mean()


def risk_coverage(uncertainty: Tensor, losses: Tensor) -> RiskCoverage:
    """The risk-coverage curve of a doubt: risk_k = 1/k sum of the losses of the k least doubtful examples.

    Among equally doubtful examples each loss counts as their mean, as in the expectation over random orders.

    Args:
        uncertainty: one number an example, any shape.
        losses: of the same shape: 0 and 1 for mistakes, squared errors, negative log densities.

    >>> risk_coverage(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0.0, 1.0, 1.0])).risk.tolist()
    [0.0, 0.5, 0.666...]
    """
    check_same_shape("uncertainty", uncertainty, "losses", losses)
    doubt, values = checked_scores("uncertainty", uncertainty), checked_numbers("losses", losses).flatten()
    _, group, count = torch.unique(doubt, return_inverse=True, return_counts=True)
    average = torch.zeros(len(count), dtype=torch.float64).index_add(0, group, values) / count
    kept = torch.arange(1, len(doubt) + 1, dtype=torch.float64)
    return RiskCoverage(kept / len(doubt), average[group.sort().values].cumsum(0) / kept)


def aurc(probs: Tensor, targets: Tensor, uncertainty: Tensor | None = None, *, ignore_index: int = -100) -> Tensor:
    """Area under the risk-coverage curve of a classifier's mistakes: the lower, the better mistakes are foreseen.

    Arguments as in `misclassification_auroc`.

    >>> aurc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1])).item()
    0.25
    """
    check_arguments(aurc, locals(), signed=("ignore_index",))
    doubt, wrong = _doubts(probs, targets, uncertainty, ignore_index)
    return risk_coverage(doubt, wrong.double()).area


def _doubts(probs: Tensor, targets: Tensor, uncertainty: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Doubt and mistake of each example that counts, flat."""
    p, y = checked_classes(probs, targets, ignore_index)
    top, label = p.max(-1)
    if uncertainty is None:
        return 1 - top, label != y
    check_same_shape("uncertainty", uncertainty, "targets", targets)
    counted = checked_tensor("targets", targets).to("cpu").flatten() != ignore_index
    return checked_scores("uncertainty", uncertainty)[counted], label != y
