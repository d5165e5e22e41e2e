"""Many sequences of different lengths: read from what users pass, and laid out in time for a scan over all at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.options import UNREADABLE, shown


def as_sequences(value: Any, width: int = 1) -> tuple[list[Tensor], bool]:
    """Sequences as tensors (T,) or (T, D), and whether one came alone.

    One alone is an array of one or two axes, or a list of numbers. Many are a list of such, or an array (B, T, D). A
    list of lists of numbers is many sequences (T,), but where rows are known to have a `width` above 1: there it is one
    sequence (T, D).
    """
    if isinstance(value, (Tensor, np.ndarray)):
        array = as_real(value)
        if array.dim() == 3:
            return [_one(each) for each in array], False
        return [_one(array)], True
    if isinstance(value, (list, tuple)) and value:
        try:
            alone = np.ndim(value[0]) == 0 and not isinstance(value[0], str)
        except UNREADABLE as error:  # rows of different lengths
            raise _refusal(value) from error
        if alone:
            return [_one(as_real(value))], True
        parts = [_one(as_real(each)) for each in value]
        if width > 1 and all(part.shape == (width,) for part in parts):
            return [torch.stack(parts)], True
        return parts, False
    raise _refusal(value)


def as_real(value: Any) -> Tensor:
    """A tensor of real numbers."""
    try:
        array = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except UNREADABLE as error:
        raise _refusal(value) from error
    if array.is_complex() or array.layout != torch.strided or array.device.type == "meta":
        raise _refusal(value)
    return array


def of_moderate_size(x: Tensor) -> Tensor:
    """x, or an error if sums of its squares overflow; NaN is missing."""
    limit, numbers = (torch.finfo(x.dtype).max / (16 * x.numel())) ** 0.5, x.detach()
    low, high = numbers.aminmax()
    if bool(low.isnan()):
        low, high = numbers.nan_to_num().aminmax()
    largest = max(-float(low), float(high))
    if largest > limit:
        raise DataError(
            "Numbers are so large that their squares overflow", expected=f"at most {limit:.2g}", got=f"{largest:.2g}",
            do="rescale the data",
        )  # fmt: skip
    return x


def _one(array: Tensor) -> Tensor:
    if array.dim() not in (1, 2) or not array.numel():
        raise _refusal(array)
    return array


def _refusal(value: Any) -> DataError:
    return DataError(
        "This is no sequence",
        expected="an array (T,) or (T, D) with T and D at least 1, or a list of such",
        got=shown(value),
        do="pass a list of sequences, or one",
    )


@dataclass(frozen=True)
class Layout:
    """Where the rows of sequences, one after the other, lie in arrays (T, B, ...) with the longest sequence first.

    So a scan over time has its running sequences in front: step t is about the first `running[t]` of them.
    """

    lengths: tuple[int, ...]

    @cached_property
    def equal(self) -> bool:
        """Whether all are of one length: they stay in their order, and no step has gaps."""
        return len(set(self.lengths)) == 1

    @cached_property
    def order(self) -> list[int]:
        """Sequences, longest first."""
        return sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])

    @cached_property
    def running(self) -> list[int]:
        """Sequences longer than t, for each t."""
        longest = max(self.lengths)
        ended = np.bincount(self.lengths, minlength=longest + 1)
        return [int(n) for n in len(self.lengths) - ended.cumsum()[:longest]]

    @cached_property
    def time(self) -> Tensor:
        """t of each row, (N,)."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @cached_property
    def places(self) -> Tensor:
        """Place of each sequence among those sorted by length, (B,)."""
        places = torch.empty(len(self.lengths), dtype=torch.long)
        places[torch.tensor(self.order)] = torch.arange(len(self.lengths))
        return places

    @cached_property
    def slot(self) -> Tensor:
        """Place of each row's sequence, (N,)."""
        return self.places[self.sequence]

    @cached_property
    def sequence(self) -> Tensor:
        """Index of each row's sequence, (N,)."""
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))

    @cached_property
    def later(self) -> Tensor:
        """Rows that are not the first of their sequence."""
        return (self.time > 0).nonzero()[:, 0]

    def in_time(self, rows: Tensor) -> Tensor:
        """Rows (N, ...) in an array (T, B, ...), with zeros after the ends."""
        if self.equal:
            return rows.reshape(len(self.lengths), -1, *rows.shape[1:]).transpose(0, 1).contiguous()
        padded = rows.new_zeros(max(self.lengths), len(self.lengths), *rows.shape[1:])
        return padded.index_put((self.time.to(rows.device), self.slot.to(rows.device)), rows)

    def rows(self, array: Tensor) -> Tensor:
        """Back from (T, B, ...) to rows (N, ...)."""
        if self.equal:
            return array.transpose(0, 1).flatten(0, 1)
        return array[self.time.to(array.device), self.slot.to(array.device)]

    def last(self, array: Tensor) -> Tensor:
        """The last step of each sequence, (B, ...), in the order of the sequences."""
        return array[torch.tensor(self.lengths) - 1, self.places]

    def some(self, slots: Tensor) -> Some:
        """The sequences in some of the slots, a mask (B,) in the order of the layout."""
        sequences = slots[self.places].nonzero()[:, 0]
        layout = Layout(tuple(self.lengths[int(i)] for i in sequences))
        return Some(layout, sequences, slots[self.slot].nonzero()[:, 0])

    def split(self, rows: Tensor) -> list[Tensor]:
        """Rows (N, ...) as one tensor a sequence."""
        return list(torch.split(rows, list(self.lengths)))


@dataclass(frozen=True)
class Some:
    """Some of the sequences of a layout; in time they keep their order, as both are sorted alike."""

    layout: Layout
    sequences: Tensor
    """Their indices."""
    rows: Tensor
    """Indices of their rows."""

    @property
    def longest(self) -> int:
        """T."""
        return max(self.layout.lengths)
