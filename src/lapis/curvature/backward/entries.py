"""Columns of the Jacobian for single entries of a parameter, without the parameter's other columns.

Of a layer with inputs a and gradients g at its outputs, the entry (k, o, i) of the weight has the column

    J[m, b, (k, o, i)] = sum_t g[k, m, b, t, o] a[k, b, t, i].

Entries are sorted by their output (k, o); each output takes one product with the inputs that it has chosen. Time and
memory grow with the number of chosen entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.curvature.recording.layers import LookupUse, RowsUse, Use
from lapis.curvature.recording.sites import Slot
from lapis.network import Network


@dataclass(frozen=True)
class _Placed:
    """Chosen entries of a slot."""

    span: slice
    """Among all chosen entries of the parameter: those in the slot's rows."""
    flat: Tensor
    """Flat indices in the slot, in the parameter's order, (n,)."""
    group: Tensor
    output: Tensor
    input: Tensor
    """Their indices in the slot's (groups, outputs, inputs) array, (n,) each."""
    runs: tuple[tuple[int, int, Tensor, Tensor], ...]
    """For every output with chosen entries: its group, the output, indices among the n, and their inputs. Empty where
    the slot is a plain list, whose columns `RowsUse` gives by `flat` alone."""


class Entries:
    """The chosen entries of parameters that are chosen in part, placed in the arrays of the layers that use them."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._found: dict[Slot, _Placed] = {}

    def rows(self, name: str, uses: Sequence[tuple[Use, Tensor]]) -> Tensor:
        """J of the chosen entries of a parameter, (M, B, n), summed over its uses, each with raw gradients (M, ...)."""
        total: Tensor | None = None
        for use, raw in uses:
            for slot in (use.weight, use.bias):
                if slot is None or slot.name != name:
                    continue
                placed = self._placed(slot)
                part = _columns(use, raw, placed, is_weight=slot is use.weight)
                if total is None:
                    total = part.new_zeros(*part.shape[:2], self.network.sizes[name])
                total[..., placed.span] += part
        assert total is not None
        return total

    def _placed(self, slot: Slot) -> _Placed:
        if slot not in self._found:
            index, shape = self.network.indices[slot.name], self.network.shapes[slot.name]
            row = int(torch.Size(shape[1:]).numel())
            first, last = (int(torch.searchsorted(index, limit * row)) for limit in (slot.start, slot.stop))
            self._found[slot] = _place(slot, index[first:last] - slot.start * row, slice(first, last))
        return self._found[slot]


def _place(slot: Slot, flat: Tensor, span: slice) -> _Placed:
    """Where entries lie in the slot's array: along the axes of its view, reordered, and cut as its shape says."""
    along = torch.unravel_index(flat, slot.view)
    place = torch.zeros_like(flat)
    for axis in slot.axes:
        place = place * slot.view[axis] + along[axis]
    group, output, column = (*torch.unravel_index(place, slot.shape), *(torch.zeros_like(flat),) * 2)[:3]
    runs: list[tuple[int, int, Tensor, Tensor]] = []
    if len(slot.shape) == 3 and len(flat):
        key = group * slot.shape[1] + output
        order = torch.argsort(key, stable=True)
        outputs, counts = torch.unique_consecutive(key[order], return_counts=True)
        for which, chosen in zip(outputs.tolist(), torch.split(order, counts.tolist()), strict=True):
            runs.append((*divmod(which, slot.shape[1]), chosen, column[chosen]))
    return _Placed(span, flat, group, output, column, tuple(runs))


def _columns(use: Use, raw: Tensor, placed: _Placed, is_weight: bool) -> Tensor:
    """J (M, B, n) of the entries placed in one use."""
    if isinstance(use, RowsUse):
        return use.rows(raw)[..., placed.flat]
    if isinstance(use, LookupUse):
        return _looked_up(use, use.gradient(raw), placed)
    g = use.gradient(raw)
    if not is_weight:
        return g.sum(3)[placed.group, :, :, placed.output].permute(1, 2, 0)
    return _outer(g, use.inputs(), placed)


def _outer(g: Tensor, a: Tensor, placed: _Placed) -> Tensor:
    """Columns of a linear map, for gradients g (K, M, B, T, O) and inputs a (K, B, T, I)."""
    _, seeds, batch, positions, _ = g.shape
    if positions == 1 and len(g) == 1:
        return g[0, :, :, 0].index_select(-1, placed.output) * a[0, :, 0].index_select(-1, placed.input)
    found = g.new_empty(batch, seeds, len(placed.flat))
    for group, output, chosen, inputs in placed.runs:
        left = g[group, :, :, :, output].transpose(0, 1)
        found[..., chosen] = torch.bmm(left, a[group].index_select(-1, inputs))
    return found.transpose(0, 1)


def _looked_up(use: LookupUse, g: Tensor, placed: _Placed) -> Tensor:
    """Columns of an embedding, for gradients g (M, B, O, T): only entries of rows that are looked up are not zero."""
    seeds, batch, _, positions = g.shape
    row, order = torch.sort(placed.input)
    looked = use.index.reshape(-1)
    first, last = torch.searchsorted(row, looked), torch.searchsorted(row, looked, right=True)
    counts = last - first
    if use.padding is not None:
        counts = counts * (looked != use.padding)
    # every pair of a look-up and a chosen entry of its row
    which = torch.repeat_interleave(counts)
    offset = torch.arange(len(which), device=g.device) - (counts.cumsum(0) - counts)[which]
    entry = order[first[which] + offset]
    example, position = which // positions, which % positions
    values = g[:, example, placed.output[entry], position]
    found = g.new_zeros(seeds, batch * len(order))
    return found.index_add_(1, example * len(order) + entry, values).reshape(seeds, batch, -1)
