"""Checks that metrics share: tensors of fitting shapes with values that can be scored, in float64 on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.options import checked_numbers, checked_tensor


def checked_classes(probs: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Checked probabilities (N, C) in float64 and classes (N,) in int64, without the ignored positions."""
    p, y = checked_numbers("probs", probs), checked_tensor("targets", targets).to("cpu")
    if p.dim() == y.dim() == 1:
        p = torch.stack([1 - p, p], -1)
    require(
        p.dim() >= 2 and p.shape[:-1] == y.shape and p.shape[-1] >= 2,
        "Probabilities and targets do not fit",
        "probs (B, ..., C) with targets (B, ...), or both (B,) when binary",
        f"probs {tuple(probs.shape)}, targets {tuple(targets.shape)}",
        "pass class indices (one_hot.argmax(-1)), classes last; flatten multi-label predictions to (B,)",
    )
    p, y = p.reshape(-1, p.shape[-1]), y.reshape(-1)
    index, last = y.long(), p.shape[-1] - 1
    require(bool((index == y).all()), "Targets are not classes", "whole numbers", extent(y), "pass indices")
    p, index = p[index != ignore_index], index[index != ignore_index]
    require(len(index) > 0, "Nothing to score", "a target that counts", "none", "check ignore_index")
    inside = bool((index >= 0).all() and (index <= last).all())
    require(inside, "A target is out of range", f"classes 0 to {last}", extent(index), "recode the classes")
    # A softmax is rounded to its dtype: in half precision, valid rows miss a sum of 1 by more than 1e-4.
    tolerance = max(1e-4, torch.finfo(probs.dtype).eps ** 0.5 if probs.is_floating_point() else 0.0)
    total = p.sum(-1)
    require(
        bool((p >= -tolerance).all() and (p <= 1 + tolerance).all() and ((total - 1).abs() <= tolerance).all()),
        "These are not probabilities",
        "values in [0, 1] that sum to 1 over the classes",
        f"{extent(p)}, sums {extent(total)}",
        "apply softmax (or sigmoid) to logits first",
    )
    return p, index


def checked_scores(name: str, value: Tensor) -> Tensor:
    """Flat float64 scores; infinite ones still rank, NaN does not."""
    numbers = checked_tensor(name, value).to("cpu", torch.float64).flatten()
    require(not numbers.isnan().any(), f"{name} has NaN", "numbers", "NaN", "see where the score becomes NaN")
    return numbers


def check_same_shape(name: str, value: Tensor, other: str, reference: Tensor) -> None:
    """Raise DataError unless the shapes are equal."""
    one, two = tuple(checked_tensor(name, value).shape), tuple(checked_tensor(other, reference).shape)
    do = "reshape one; broadcasting would compare every pair"
    require(one == two, f"{name} and {other} differ in shape", "equal shapes", f"{one} and {two}", do)


def checked_gaussian(mean: Tensor, std: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means, positive standard deviations and targets, float64.

    Means have the targets' shape, or (S, *shape) for a mixture of S Gaussians; the result has that axis in any case.
    """
    mixture = checked_tensor("mean", mean).dim() == checked_tensor("targets", targets).dim() + 1
    check_same_shape("mean", mean[0] if mixture else mean, "targets", targets)
    check_same_shape("std", std, "mean", mean)
    scale = checked_numbers("std", std)
    require(bool((scale > 0).all()), "std is not positive", "std > 0", extent(scale), "pass sqrt(variance)")
    centre, y = checked_numbers("mean", mean), checked_numbers("targets", targets)
    return (centre, scale, y) if mixture else (centre[None], scale[None], y)


def checked_weights(weights: Tensor | None, components: int) -> Tensor:
    """Weights (S,) of a mixture, equal by default."""
    if weights is None:
        return torch.full((components,), 1 / components, dtype=torch.float64)
    found = checked_numbers("weights", weights)
    fits = tuple(found.shape) == (components,) and bool((found >= 0).all()) and abs(float(found.sum()) - 1) < 1e-6
    require(
        fits,
        "These are no weights of the mixture",
        f"{components} numbers >= 0 that sum to 1",
        f"shape {tuple(found.shape)}, sum {float(found.sum()):g}",
        "normalise them",
    )
    return found


def require(ok: bool, what: str, expected: str, got: str, do: str) -> None:
    """Raise DataError unless `ok`."""
    if not ok:
        raise DataError(what, expected=expected, got=got, do=do)


def extent(value: Tensor) -> str:
    """Smallest and largest value, for messages."""
    return f"values from {value.min().item():g} to {value.max().item():g}"
