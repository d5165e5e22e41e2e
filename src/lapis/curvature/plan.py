"""The plan: a partition of the chosen weights into sites, found on a few examples and proven against autograd.

A site is a set of weights whose gradients one rule computes (see `recording.sites`). Weights whose recorded uses do not
add up to autograd's gradient, example by example, fall back to the general rule; so no architecture is silently wrong.
The proof is cached with the module, and holds while the same functions use the same weights in the same order, with the
examples along the same axes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lapis.batches import Inputs, batch_length, take
from lapis.curvature.backward.contributions import Outer, Rows
from lapis.curvature.backward.proof import unexplained
from lapis.curvature.backward.record import Record
from lapis.curvature.recording.layers import LookupUse, OuterUse, Use
from lapis.curvature.recording.sites import Plan, Site, Slot, whole
from lapis.curvature.tape import ExampleBytes, Tape
from lapis.network import Network

Key = tuple[tuple[str, int, int] | None, tuple[str, int, int] | None]


PLANNING_EXAMPLES = 8
"""Examples on which a network's layers are identified and the tape is proven against autograd."""


@dataclass(frozen=True)
class _Proven:
    """A plan proven on a few examples, and the trace of their forward pass that it is valid for; it holds no tensor."""

    trace: Any
    plan: Plan
    example_bytes: ExampleBytes


Choice = tuple[tuple[str, int], ...]

_PROVEN: WeakKeyDictionary[nn.Module, dict[Choice, _Proven]] = WeakKeyDictionary()
"""For each module, the last plan by names and chosen entries of its parameters."""


def planned_tape(network: Network, outputs: Callable[[Tensor], Tensor], inputs: Inputs) -> tuple[Tape, Tensor]:
    """A tape with a proven plan, and the outputs of a few examples. Must run inside `network.prepared()`."""
    cached = _PROVEN.setdefault(network.module, {})
    choice = tuple(network.sizes.items())
    known = cached.get(choice)
    tape = Tape(network, outputs)
    record = tape.record(take(inputs, 0, min(batch_length(inputs), PLANNING_EXAMPLES)))
    if known is None or record.trace is None or known.trace != record.trace:
        known = cached[choice] = _prove(network, record)
    tape.plan, tape.example_bytes = known.plan, known.example_bytes
    return tape, record.f.detach()


def _prove(network: Network, record: Record) -> _Proven:
    """Find sites for the recorded uses; parameters left `loose` are covered by the general rule."""
    sites, loose = _sites(network, [use for _, use in record.uses])
    loose |= record.lost | unexplained(record, network, sites)
    kept = [site for site in sites if not any(slot.name in loose for slot in site.slots)]
    # a bias that shared a site with a loose weight is loose too, and the reverse: the site was dropped
    loose |= set(network.names) - {slot.name for site in kept for slot in site.slots}
    kept = [site for site in kept if not any(slot.name in loose for slot in site.slots)]
    general = [Site("rows", whole(network, name)) for name in network.names if name in loose]
    ordered = sorted(kept + general, key=lambda site: site.spans(network)[0])
    record.plan = Plan(tuple(ordered), frozenset(loose))
    return _Proven(record.trace, record.plan, _example_bytes(record))


def _example_bytes(record: Record) -> ExampleBytes:
    inputs, moments, gradients = [0], [0], 0
    sites = record.plan.sites
    for site, contribution in zip(sites, record.contributions(torch.ones_like(record.f)[None], sites), strict=True):
        if isinstance(contribution, Outer):
            inputs.append(contribution.inputs().numel())
            moments.append(inputs[-1] // contribution.saving)
        elif record.is_partial(site) and record.explains(site):
            for call, use in record.uses_of(site):
                gradients += call.output_shape.numel()
                if isinstance(use, OuterUse) and use.weight is not None and use.weight.name == site.slots[0].name:
                    inputs.append(use.inputs().numel())
                    moments.append(inputs[-1])
        gradients += contribution.values.numel() if isinstance(contribution, Rows) else contribution.g.numel()
    counts = (sum(inputs), max(inputs), max(moments), gradients)
    return ExampleBytes(*(count * record.f.element_size() // len(record) for count in counts))


def _key(use: Use) -> Key:
    return (use.weight.rows if use.weight else None, use.bias.rows if use.bias else None)


def _sites(network: Network, uses: list[Use]) -> tuple[list[Site], set[str]]:
    """Sites from recorded uses, and the names of parameters that the uses do not cover exactly once."""
    keys = {_key(use) for use in uses}
    occurrences = Counter(rows for key in keys for rows in key if rows is not None)
    by_slot: dict[tuple[str, int, int], list[tuple[Use, Slot]]] = defaultdict(list)
    joint: dict[Key, Site] = {}
    partial: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for use in uses:
        for slot in (use.weight, use.bias):
            if slot is not None and slot.name in network.indices:
                partial[slot.name].add((slot.start, slot.stop))
        shared = any(rows is not None and occurrences[rows] > 1 for rows in _key(use))
        split = any(slot is not None and slot.name in network.indices for slot in (use.weight, use.bias))
        if isinstance(use, OuterUse) and use.weight and use.bias and not shared and not split:
            joint[_key(use)] = Site("outer", use.weight, use.bias)
        else:
            for slot in (use.weight, use.bias):
                if slot is not None and slot.name not in network.indices:
                    by_slot[slot.rows].append((use, slot))
    sites = list(joint.values())
    for members in by_slot.values():
        sites.append(_single(members))
    covered: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for site in sites:
        for slot in site.slots:
            covered[slot.name].append((slot.start, slot.stop))
    for name, rows in partial.items():
        sites.append(Site("rows", whole(network, name)))
        covered[name] = list(rows)
    loose = {name for name in network.names if not _tiles(covered[name], network.shapes[name])}
    return sites, loose


def _single(members: list[tuple[Use, Slot]]) -> Site:
    """A site for one slot: of the kind on which all uses agree, else plain rows."""
    kinds = {(type(use), slot.view, slot.axes, slot.shape, use.weight is slot) for use, slot in members}
    use, slot = members[0]
    if len(kinds) == 1 and isinstance(use, OuterUse):
        return Site("outer", slot, None) if use.weight is slot else Site("outer", None, slot)
    if len(kinds) == 1 and isinstance(use, LookupUse):
        return Site("lookup", slot)
    entries = slot.size
    return Site("rows", Slot(slot.name, slot.start, slot.stop, (entries,), (0,), (entries,)))


def _tiles(parts: list[tuple[int, int]], shape: tuple[int, ...]) -> bool:
    """Whether the row ranges cover a parameter exactly once."""
    end = 0
    for start, stop in sorted(parts):
        if start != end:
            return False
        end = stop
    return end == (shape[0] if shape else 1)
