"""Checking and reshaping of a user's targets into the canonical layout (see `likelihoods.base`), with precise errors.

Arguments shared by these functions: f is the canonical output (B, T, C) that the targets belong to; `positions` are the
sizes of the position axes in the network's own output, or None when only their product T is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.options import UNREADABLE


def as_tensor(y: Any, f: Tensor) -> Tensor:
    """Targets as a tensor on the outputs' device with the outputs' batch size; the dtype stays."""
    try:
        tensor = torch.as_tensor(y, device=f.device)
    except UNREADABLE as error:
        raise DataError(
            "The targets are not numbers",
            expected="a tensor, an array or nested lists of numbers",
            got=f"{type(y).__name__} ({error})",
            do="convert the targets to a tensor",
        ) from error
    if tensor.is_complex():
        raise DataError(
            "The targets are complex",
            expected="real numbers",
            got=str(tensor.dtype),
            do="split them into real and imaginary outputs",
        )
    if tensor.dim() == 0 or tensor.shape[0] != f.shape[0]:
        raise DataError(
            "Targets and outputs differ in batch size",
            expected=f"{f.shape[0]} examples",
            got=f"targets of shape {tuple(tensor.shape)}",
            do="pass one target per example",
        )
    return tensor.detach()


def check_finite(y: Tensor) -> None:
    """Every target a finite number, or DataError naming the first that is not."""
    if math.isfinite(y.sum()):  # one pass; a sum can also overflow, so the entries are examined only when it is not
        return
    bad = ~torch.isfinite(y)
    if bad.any():
        raise_at(y, bad, "not finite", expected="finite numbers", do="remove or impute these examples")


def raise_at(y: Tensor, bad: Tensor, what: str, *, expected: str, do: str) -> None:
    """Raise DataError for the targets marked `bad`: how many there are, and the first one's value and index."""
    where = [int(i) for i in bad.nonzero()[0]]
    value = y[tuple(where)]
    # the index omits the axis of a single position
    first = where[:1] + (where[1:] if bad.dim() > 1 and bad.shape[1] > 1 else where[2:])
    shown = str(value.item()) if value.dim() == 0 else str(value.tolist())
    count = int(bad.sum())
    raise DataError(
        f"{count} target{'s are' if count > 1 else ' is'} {what}",
        expected=expected,
        got=f"{shown} at index {first[0] if len(first) == 1 else tuple(first)} of the batch's targets",
        do=do,
    )


def flatten_positions(y: Tensor, f: Tensor, positions: Sequence[int] | None) -> Tensor | None:
    """Targets with one value per position, (B, *positions), as (B, T); None when the shape does not fit.

    Without positions, (B, 1) counts as (B,).
    """
    count = f.shape[1]
    fits = y.numel() == f.shape[0] * count
    if positions is not None:
        fits = tuple(y.shape[1:]) == tuple(positions) or (not positions and tuple(y.shape[1:]) == (1,))
    return y.reshape(f.shape[0], count) if fits else None


def flatten_channels(y: Tensor, f: Tensor, width: int, channels: str, positions: Sequence[int] | None) -> Tensor | None:
    """Targets (B, *positions, width), or (B, width, *positions) if channels come first, as (B, T, width).

    None when the shape does not fit.
    """
    if y.dim() < 2:
        return None
    last = y.movedim(1, -1) if channels == "first" else y
    inner = tuple(last.shape[1:-1])
    fits = torch.Size(inner).numel() == f.shape[1] if positions is None else inner == tuple(positions)
    return last.reshape(f.shape[0], f.shape[1], width) if fits and last.shape[-1] == width else None


def per_output(y: Any, f: Tensor, *, width: int, channels: str, positions: Sequence[int] | None, what: str) -> Tensor:
    """Real targets, one for each of `width` outputs, as finite numbers (B, T, width) in f's dtype.

    A width of 1 may be left out of the shape: (B,) or (B, *positions).
    """
    tensor = as_tensor(y, f)
    result = flatten_channels(tensor, f, width, channels, positions)
    if result is None and width == 1:
        flat = flatten_positions(tensor, f, positions)
        result = None if flat is None else flat.unsqueeze(-1)
    if result is None:
        shape = describe(f, width, channels, positions)
        raise DataError(
            f"{what} have the wrong shape",
            expected=shape + (" (the last 1 may be left out)" if width == 1 and channels == "last" else ""),
            got=str(tuple(tensor.shape)),
            do=other_channels(tensor, f, channels, positions)
            or "reshape the targets, or check the network's number of outputs",
        )
    check_finite(tensor)
    return result.to(f.dtype)


def describe(f: Tensor, width: int | None, channels: str, positions: Sequence[int] | None) -> str:
    """The shape that fits the network's outputs, in words; without a channel dimension when width is None."""
    if positions is None:
        inner = [] if f.shape[1] == 1 else [f"positions ({f.shape[1]} in all)"]
    else:
        inner = [str(size) for size in positions]
    channel = [] if width is None else [str(width)]
    parts = [str(f.shape[0]), *(channel + inner if channels == "first" else inner + channel)]
    return "shape (" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def other_channels(y: Tensor, f: Tensor, channels: str, positions: Sequence[int] | None) -> str | None:
    """What to do if the targets would fit outputs whose channels lie at the other end; None if they would not either.

    f was taken for (B, *positions, C), or for (B, C, *positions) with channels first; each is the other with its axes
    shifted.
    """
    if not positions:
        return None
    if channels == "last":
        other, count, inner = "first", positions[0], (*positions[1:], f.shape[-1])
    else:
        other, count, inner = "last", positions[-1], (f.shape[-1], *positions[:-1])
    whole = (count, *inner) if other == "first" else (*inner, count)
    if tuple(y.shape[1:]) not in (inner, whole):
        return None
    name = "Gaussian" if y.is_floating_point() else "Categorical"
    return f'use channels="{other}", as in lapis.{name}(channels="{other}"): outputs are {(f.shape[0], *whole)}'
