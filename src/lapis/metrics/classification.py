"""Scores of predicted class probabilities: accuracy, likelihood, and calibration of the top label.

Probabilities are (B, C) and classes (B,), both with any further positions: (B, ..., C) and (B, ...). Binary predictions
are one-dimensional, the probability of class 1: (B,) and (B,). Targets equal to `ignore_index` are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.metrics._checks import checked_classes
from lapis.options import check_arguments


def accuracy(probs: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Share of examples whose most probable class is the target.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0])).item()
    0.5
    """
    check_arguments(accuracy, locals(), signed=("ignore_index",))
    p, y = checked_classes(probs, targets, ignore_index)
    return (p.argmax(-1) == y).double().mean()


def nll(probs: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Mean negative log-likelihood -log p[y], in nats; infinite when a target had probability zero.

    >>> nll(torch.tensor([[0.5, 0.5]]), torch.tensor([1])).item()
    0.693...
    """
    check_arguments(nll, locals(), signed=("ignore_index",))
    p, y = checked_classes(probs, targets, ignore_index)
    return -_at(p, y).log().mean()


def brier(probs: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Mean of sum_c (p_c - [y = c])^2, between 0 and 2.

    The sum runs over both classes in the binary case, which is twice the score that counts class 1 alone.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1])).item()
    0.5
    """
    check_arguments(brier, locals(), signed=("ignore_index",))
    p, y = checked_classes(probs, targets, ignore_index)
    return (p.square().sum(-1) - 2 * _at(p, y) + 1).mean()


@dataclass(frozen=True)
class Reliability:
    """Accuracy against confidence of the predicted class, in bins (edges[b], edges[b + 1]] of confidence.

    `count`, `confidence` and `accuracy` have one entry per bin; the two means are NaN in empty bins.
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def ece(self) -> Tensor:
        """sum_b count_b / N |accuracy_b - confidence_b|."""
        used = self.count > 0
        gap = (self.accuracy[used] - self.confidence[used]).abs()
        return (gap * self.count[used]).sum() / self.count.sum()


def reliability(
    probs: Tensor, targets: Tensor, *, bins: int = 15, adaptive: bool = False, ignore_index: int = -100
) -> Reliability:
    """Bin the examples by top-label confidence: equal widths, or (adaptive) about as many examples in each bin.

    Adaptive edges are order statistics, so equal confidences share a bin and the order of examples is irrelevant.
    """
    check_arguments(reliability, locals(), signed=("ignore_index",))
    p, y = checked_classes(probs, targets, ignore_index)
    top, label = p.max(-1)
    correct = (label == y).double()
    if adaptive:
        last = (torch.arange(1, bins) * len(top) + bins - 1) // bins - 1
        inner = top.sort().values[last]
    else:
        inner = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    index = torch.bucketize(top, inner)

    def total(values: Tensor) -> Tensor:
        return torch.zeros(bins, dtype=torch.float64).index_add(0, index, values)

    count = total(torch.ones_like(top))
    edges = torch.cat([torch.zeros(1, dtype=inner.dtype), inner, torch.ones(1, dtype=inner.dtype)])
    return Reliability(edges, count, total(top) / count, total(correct) / count)


def ece(probs: Tensor, targets: Tensor, *, bins: int = 15, adaptive: bool = False, ignore_index: int = -100) -> Tensor:
    """Expected calibration error of the top label: the mean gap between confidence and accuracy over bins."""
    return reliability(probs, targets, bins=bins, adaptive=adaptive, ignore_index=ignore_index).ece


def adaptive_ece(probs: Tensor, targets: Tensor, *, bins: int = 15, ignore_index: int = -100) -> Tensor:
    """Expected calibration error over bins with about as many examples in each: `ece` with adaptive=True.

    Bins of equal width leave most of a good classifier's examples in the last one.

    >>> adaptive_ece(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]), bins=2).item()
    0.35...
    """
    return ece(probs, targets, bins=bins, adaptive=True, ignore_index=ignore_index)


def _at(probs: Tensor, targets: Tensor) -> Tensor:
    """The probability of each target."""
    return probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
