"""Slots and sites: a slot is a part of one parameter; a site is the slots that one layer uses together.

A site's weights form an array `shape`: (groups, outputs, inputs) for matrices, where a bias is the last column of
inputs; (entries,) otherwise. `gather` and `scatter` translate between that order and the flat weight vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lapis.network import Network
from lapis.schema import entry, record, wrong

Kind = Literal["outer", "lookup", "rows"]


@dataclass(frozen=True)
class Slot:
    """Rows start..stop of a parameter (its first axis), and the view that makes them a (groups, outputs, inputs) array.

    The rows, reshaped to `view` and permuted by `axes`, reshape to `shape`.
    """

    name: str
    start: int
    stop: int
    view: tuple[int, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    @cached_property
    def rows(self) -> tuple[str, int, int]:
        """Parameter name, first row and the one after the last: equal for slots that are the same weights."""
        return (self.name, self.start, self.stop)

    @cached_property
    def size(self) -> int:
        return int(torch.Size(self.view).numel())

    def arrange(self, part: Tensor) -> Tensor:
        """(..., size) in the parameter's order -> (..., *shape)."""
        lead = part.shape[:-1]
        n = len(lead)
        view = part.reshape(*lead, *self.view)
        return view.permute(*range(n), *(n + axis for axis in self.axes)).reshape(*lead, *self.shape)

    def restore(self, array: Tensor) -> Tensor:
        """(..., *shape) -> (..., size) in the parameter's order."""
        lead = array.shape[: array.dim() - len(self.shape)]
        n = len(lead)
        inverse = [self.axes.index(axis) for axis in range(len(self.axes))]
        permuted = array.reshape(*lead, *(self.view[axis] for axis in self.axes))
        return permuted.permute(*range(n), *(n + axis for axis in inverse)).reshape(*lead, self.size)


def whole(network: Network, name: str) -> Slot:
    """All chosen entries of a parameter as a plain list."""
    return _listed(network, name, network.sizes[name])


def entire(network: Network, name: str) -> Slot:
    """All entries of a parameter, chosen or not, as a plain list."""
    return _listed(network, name, network.parameters[name].numel())


def _listed(network: Network, name: str, size: int) -> Slot:
    shape = network.shapes[name]
    return Slot(name, 0, shape[0] if shape else 1, (size,), (0,), (size,))


@dataclass(frozen=True)
class Site:
    """Weights that are explained together. `weight` may be None (a bias alone), so may `bias`."""

    kind: Kind
    weight: Slot | None
    bias: Slot | None = None

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in (self.weight, self.bias) if slot is not None)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        if self.weight is None:
            assert self.bias is not None
            return self.bias.shape
        if self.bias is None:
            return self.weight.shape
        groups, outputs, inputs = self.weight.shape
        return (groups, outputs, inputs + 1)

    @cached_property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def label(self) -> str:
        return " + ".join(slot.name for slot in self.slots)

    def spans(self, network: Network) -> list[tuple[int, int]]:
        """(start, stop) of each slot in the flat weight vector."""
        found = []
        for slot in self.slots:
            shape = network.shapes[slot.name]
            row = int(torch.Size(shape[1:]).numel())
            start = network.offsets[slot.name] + slot.start * row
            found.append((start, start + slot.size))
        return found

    def gather(self, vector: Tensor, network: Network) -> Tensor:
        """(..., P) -> (..., *shape)."""
        parts = [
            slot.arrange(vector[..., start:stop])
            for slot, (start, stop) in zip(self.slots, self.spans(network), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def parts(self, array: Tensor) -> list[Tensor]:
        """(..., *shape) -> (..., *slot.shape) for each slot."""
        return [array] if len(self.slots) == 1 else [array[..., :-1], array[..., -1:]]

    def scatter(self, array: Tensor, vector: Tensor, network: Network) -> None:
        """Write (..., *shape) into the site's entries of a flat vector (..., P)."""
        for slot, part, (start, stop) in zip(self.slots, self.parts(array), self.spans(network), strict=True):
            vector[..., start:stop] = slot.restore(part)

    def to_config(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_config(config: dict[str, Any], network: Network) -> Site:
        """The inverse of `to_config`; FileError unless the site is of weights of this network."""
        kind, weight, bias = (entry(config, name, hint) for name, hint in SITE.items())
        site = Site(kind, *(each and _slot(each, network) for each in (weight, bias)))
        shapes = [slot.shape for slot in site.slots]
        fits = bool(shapes) and all(len(shape) == (1 if kind == "rows" else 3) for shape in shapes)
        if len(shapes) == 2 and fits:
            fits = kind == "outer" and shapes[1] == (*shapes[0][:2], 1)
        if not fits:
            raise wrong("site", f"the weights of one layer ({kind})", f"arrays {shapes}")
        return site


SITE: dict[str, Any] = {"kind": Kind, "weight": dict | None, "bias": dict | None}
"""Entries of a site in a file."""


def _slot(config: dict[str, Any], network: Network) -> Slot:
    """The slot that a file describes; FileError unless it is rows of a chosen parameter."""
    lists = {key: tuple(config.get(key, ())) for key in ("view", "axes", "shape")}
    slot = record(Slot, config | lists)
    shape = network.shapes.get(slot.name)
    if shape is None:
        raise wrong("site", "names of chosen parameters", repr(slot.name))
    rows = shape[0] if shape else 1
    entries = math.prod(shape[1:]) * (slot.stop - slot.start)
    if slot.name in network.indices:
        entries = network.sizes[slot.name] if slot.stop - slot.start == rows else -1
    sizes = [math.prod(lengths) if min(lengths, default=0) > 0 else -1 for lengths in (slot.view, slot.shape)]
    if not (0 <= slot.start < slot.stop <= rows and sizes == [entries, entries]):
        raise wrong("site", f"rows of {slot.name!r}, of shape {shape}", str(config)[:120])
    if sorted(slot.axes) != list(range(len(slot.view))):
        raise wrong("site", f"the axes of {slot.view} in some order", str(slot.axes))
    return slot


@dataclass(frozen=True)
class Plan:
    """Which site explains which weights; the sites partition the chosen ones, in the order of the flat vector."""

    sites: tuple[Site, ...] = ()
    general: frozenset[str] = frozenset()
    """Parameters that no rule for layers explains: their sites take per-example gradients."""

    @staticmethod
    def from_config(sites: Sequence[Any], general: Sequence[str], network: Network) -> Plan:
        """The plan in a file; FileError unless its sites partition the weights of this network."""
        found = tuple(Site.from_config(site, network) for site in sites)
        spans = sorted(span for site in found for span in site.spans(network))
        stops = [0, *(stop for _, stop in spans)]
        if [start for start, _ in spans] != stops[:-1] or stops[-1] != network.size:
            raise wrong("sites", f"each of the {network.size} weights once", f"spans {spans}"[:120])
        if not set(general) <= set(network.names):
            raise wrong("general", "names of chosen parameters", str(general)[:80])
        return Plan(found, frozenset(general))
