"""Metrics of accuracy and calibration: small functions of tensors, averaged over examples.

Classification metrics take probabilities (B, C) and classes (B,), both with any further positions: (B, ..., C) and
(B, ...). Binary predictions are one-dimensional, the probability of class 1: (B,) and (B,). Targets equal to
`ignore_index` are left out. Sums are in float64 on the CPU; the result is a 0-d float64 tensor unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.errors import DataError, OptionError

__all__ = [
    "Reliability",
    "accuracy",
    "auroc",
    "brier",
    "coverage",
    "ece",
    "nll",
    "ood_auroc",
    "regression_calibration",
    "reliability",
    "rmse",
]


def accuracy(probs: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Share of examples whose most probable class is the target.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0])).item()
    0.5
    """
    p, y = _classes(probs, targets, ignore_index)
    return (p.argmax(-1) == y).double().mean()


def nll(probs: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Mean negative log-likelihood -log p[y], in nats; infinite when a target had probability zero."""
    p, y = _classes(probs, targets, ignore_index)
    return -_at(p, y).log().mean()


def brier(probs: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Mean of sum_c (p_c - [y = c])^2, between 0 and 2.

    The sum runs over both classes in the binary case, which is twice the score that counts class 1 alone.
    """
    p, y = _classes(probs, targets, ignore_index)
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
    if bins < 1:
        raise OptionError("There must be bins", expected="bins >= 1", got=f"bins={bins}", do="use 15, say")
    p, y = _classes(probs, targets, ignore_index)
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


def auroc(scores: Tensor, labels: Tensor) -> Tensor:
    """Area under the ROC curve: P(score of a positive > score of a negative) + 1/2 P(equal), by midranks.

    >>> auroc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])).item()
    0.875
    """
    _same_shape("scores", scores, "labels", labels)
    values, truth = _scores("scores", scores), labels.to("cpu").flatten()
    binary = bool(((truth == 0) | (truth == 1)).all())
    _require(binary, "Labels are not binary", "0 and 1, or bools", _range(truth), "recode them")
    positive = truth == 1
    n1 = int(positive.sum())
    n0 = len(truth) - n1
    two = "at least one positive and one negative label"
    _require(n0 > 0 < n1, "One group is missing", two, f"{n1} positive, {n0} negative", "pass both groups")
    ordered = values.sort().values
    below, upto = torch.searchsorted(ordered, values), torch.searchsorted(ordered, values, right=True)
    midrank = (below + upto + 1).double() / 2
    return (midrank[positive].sum() - n1 * (n1 + 1) / 2) / (n1 * n0)


def ood_auroc(score_in: Tensor, score_out: Tensor) -> Tensor:
    """AUROC of a score for detecting out-of-distribution examples, for which it should be larger."""
    inside, outside = _scores("score_in", score_in), _scores("score_out", score_out)
    labels = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
    return auroc(torch.cat([inside, outside]), labels)


def rmse(mean: Tensor, targets: Tensor) -> Tensor:
    """Root of the mean squared error over examples and outputs."""
    _same_shape("mean", mean, "targets", targets)
    return (_numbers("mean", mean) - _numbers("targets", targets)).square().mean().sqrt()


def coverage(lower: Tensor, upper: Tensor, targets: Tensor) -> Tensor:
    """Share of targets inside [lower, upper]; a calibrated 95 % interval covers about 0.95 of them."""
    _same_shape("lower", lower, "targets", targets)
    _same_shape("upper", upper, "targets", targets)
    low, high, y = _numbers("lower", lower), _numbers("upper", upper), _numbers("targets", targets)
    _require(bool((low <= high).all()), "Empty interval", "lower <= upper", "lower > upper", "swap the two")
    return ((low <= y) & (y <= high)).double().mean()


def regression_calibration(
    mean: Tensor, std: Tensor, targets: Tensor, levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95, 0.99)
) -> Tensor:
    """Observed coverage of the central Gaussian interval of each level, (len(levels),); calibrated: equal to levels.

    |y - mean| <= std * z with z = sqrt(2) erfinv(level).
    """
    _same_shape("mean", mean, "targets", targets)
    _same_shape("std", std, "targets", targets)
    if not levels or not all(0 < level < 1 for level in levels):
        raise OptionError("Bad levels", expected="numbers in (0, 1)", got=f"{levels}", do="use (0.9,), say")
    scale = _numbers("std", std)
    _require(bool((scale > 0).all()), "std is not positive", "std > 0", _range(scale), "pass sqrt(variance)")
    z = ((_numbers("targets", targets) - _numbers("mean", mean)) / scale).abs().flatten()
    widths = 2**0.5 * torch.erfinv(torch.tensor(list(levels), dtype=torch.float64))
    return (z <= widths.unsqueeze(-1)).double().mean(-1)


def _classes(probs: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Checked probabilities (N, C) in float64 and classes (N,) in int64, without the ignored positions."""
    p, y = _numbers("probs", probs), _tensor("targets", targets).to("cpu")
    if p.dim() == y.dim() == 1:
        p = torch.stack([1 - p, p], -1)
    _require(
        p.dim() >= 2 and p.shape[:-1] == y.shape and p.shape[-1] >= 2,
        "Probabilities and targets do not fit",
        "probs (B, ..., C) with targets (B, ...), or both (B,) when binary",
        f"probs {tuple(probs.shape)}, targets {tuple(targets.shape)}",
        "pass class indices (one_hot.argmax(-1)), classes last; flatten multi-label predictions to (B,)",
    )
    p, y = p.reshape(-1, p.shape[-1]), y.reshape(-1)
    index, last = y.long(), p.shape[-1] - 1
    _require(bool((index == y).all()), "Targets are not classes", "whole numbers", _range(y), "pass indices")
    p, index = p[index != ignore_index], index[index != ignore_index]
    _require(len(index) > 0, "Nothing to score", "a target that counts", "none", "check ignore_index")
    inside = bool((index >= 0).all() and (index <= last).all())
    _require(inside, "A target is out of range", f"classes 0 to {last}", _range(index), "recode the classes")
    # A softmax is rounded to its dtype: in half precision, valid rows miss a sum of 1 by more than 1e-4.
    tolerance = max(1e-4, torch.finfo(probs.dtype).eps ** 0.5 if probs.is_floating_point() else 0.0)
    total = p.sum(-1)
    _require(
        bool((p >= -tolerance).all() and (p <= 1 + tolerance).all() and ((total - 1).abs() <= tolerance).all()),
        "These are not probabilities",
        "values in [0, 1] that sum to 1 over the classes",
        f"{_range(p)}, sums {_range(total)}",
        "apply softmax (or sigmoid) to logits first",
    )
    return p, index


def _at(probs: Tensor, targets: Tensor) -> Tensor:
    """The probability of each target."""
    return probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _tensor(name: str, value: Tensor) -> Tensor:
    is_tensor, do = isinstance(value, Tensor), f"use torch.as_tensor({name})"
    _require(is_tensor, f"{name} is no tensor", "a torch.Tensor", type(value).__name__, do)
    _require(value.numel() > 0, f"{name} is empty", "at least one value", "none", "check the data")
    return value


def _scores(name: str, value: Tensor) -> Tensor:
    """Flat float64 scores; infinite ones still rank, NaN does not."""
    numbers = _tensor(name, value).to("cpu", torch.float64).flatten()
    _require(not numbers.isnan().any(), f"{name} has NaN", "numbers", "NaN", "see where the score becomes NaN")
    return numbers


def _numbers(name: str, value: Tensor) -> Tensor:
    numbers = _tensor(name, value).to("cpu", torch.float64)
    bad = int((~numbers.isfinite()).sum())
    got = f"{bad} NaN or infinite of {numbers.numel()}"
    _require(not bad, f"{name} is not finite", "finite numbers", got, "check the prediction")
    return numbers


def _same_shape(name: str, value: Tensor, other: str, reference: Tensor) -> None:
    one, two = tuple(_tensor(name, value).shape), tuple(_tensor(other, reference).shape)
    do = "reshape one; broadcasting would compare every pair"
    _require(one == two, f"{name} and {other} differ in shape", "equal shapes", f"{one} and {two}", do)


def _require(ok: bool, what: str, expected: str, got: str, do: str) -> None:
    if not ok:
        raise DataError(what, expected=expected, got=got, do=do)


def _range(value: Tensor) -> str:
    return f"values from {value.min().item():g} to {value.max().item():g}"
