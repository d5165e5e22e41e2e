"""One recorded batch: its outputs, its uses of the chosen weights, and the Jacobian of seeds for each site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapis.batches import Inputs
from lapis.curvature.backward.contributions import CHUNK_BYTES, Contribution, Lookup, Outer, Rows
from lapis.curvature.backward.entries import Entries
from lapis.curvature.backward.gradients import Gradients
from lapis.curvature.backward.per_example import PerExample
from lapis.curvature.recording.layers import Call, LookupUse, OuterUse, RowsUse, Use
from lapis.curvature.recording.patches import GROUPED_GRADIENTS, PATCH_MOMENTS
from lapis.curvature.recording.sites import Plan, Site, Slot
from lapis.proofs import Proofs

KERNEL_BYTES = 2**21
"""Gradients of a kernel that torch's convolution makes at once: they are summed from a core's own cache."""


class Record:
    """A batch that the network was run on: its outputs `f` (B, T, C), and the graph back to each use of a weight.

    Args:
        inputs: of the batch, for weights that need the network to be run again for each example.
        raw_shape: of the network's own output.
        uses: the calls that took chosen weights, each with the use that a rule made of it.
        lost: parameters with a use in this batch that no rule could interpret.
        trace: identifies the calls that a proof on this batch is valid for; None where it holds for this batch only.
    """

    def __init__(
        self,
        inputs: Inputs,
        raw_shape: torch.Size,
        f: Tensor,
        uses: list[tuple[Call, Use]],
        lost: set[str],
        trace: Any,
        plan: Plan,
        per_example: PerExample,
        entries: Entries,
        proofs: Proofs,
    ) -> None:
        self.inputs, self.raw_shape, self.f, self.uses = inputs, raw_shape, f, uses
        self.lost, self.trace, self.plan, self.proofs = lost, trace, plan, proofs
        self.per_example, self.entries = per_example, entries
        self.calls = list({id(call): call for call, _ in uses}.values())
        self.gradients = Gradients(f, self.calls, proofs)
        self.keep_inputs = False
        """Whether layer inputs, such as patches of images, are kept for more seeds of the same batch."""
        self._rows_of = [[slot.rows for slot in (use.weight, use.bias) if slot is not None] for _, use in uses]
        self._found: dict[int, list[tuple[Call, Use]]] = {}
        self._inputs: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.f.shape[0]

    def contributions(self, seeds: Tensor, sites: Sequence[Site] | None = None) -> list[Contribution]:
        """Each site's Jacobian of sum(seed * f), in factored form, for `seeds` (M, B, T, C)."""
        sites = self.plan.sites if sites is None else sites
        gradients = self.gradients.at_calls(seeds)
        uses = [self.uses_of(site) for site in sites]
        # these take per-example gradients: always, or in this batch (a layer that sees only some examples, or none)
        loose = [not self.explains(site) for site in sites]
        names = {slot.name for site, is_loose in zip(sites, loose, strict=True) if is_loose for slot in site.slots}
        rows = self.per_example.rows(self.inputs, sorted(names), seeds) if names else {}
        return [
            self._general(site, rows) if is_loose else self._contribution(site, found, gradients)
            for site, found, is_loose in zip(sites, uses, loose, strict=True)
        ]

    def head_inputs(self) -> Tensor | None:
        """Layer inputs a (B, T, I), with a one for the bias, if f = V a + constants for the chosen weights V (C, I).

        None if these are not such a layer. The proof is in every batch: a random vector at the network's outputs comes
        back unchanged as the gradient at the layer's.
        """
        sites = self.plan.sites
        if len(sites) != 1 or sites[0].kind != "outer" or not self.explains(sites[0]):
            return None
        generator = torch.Generator(self.f.device).manual_seed(0)
        seed = torch.empty_like(self.f).normal_(generator=generator)[None]
        (found,) = self.contributions(seed)
        if not isinstance(found, Outer) or found.g.shape[:2] != (1, 1) or not torch.equal(found.g[0], seed):
            return None
        a = found.inputs()[0]
        return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1) if found.bias else a

    def explains(self, site: Site) -> bool:
        """Whether the site's weights were used, and every use was interpreted by a rule of the site's kind."""
        found = self.uses_of(site)
        kind = {"outer": OuterUse, "lookup": LookupUse}.get(site.kind, object)
        lost = any(slot.name in self.lost or slot.name in self.plan.general for slot in site.slots)
        return bool(found) and not lost and all(isinstance(use, kind) for _, use in found)

    def uses_of(self, site: Site) -> list[tuple[Call, Use]]:
        """The uses of a site's weights; looked up once, since every seed asks for them."""
        if id(site) not in self._found:
            wanted = {slot.rows for slot in site.slots}
            name = site.slots[0].name
            if self.is_partial(site):  # the site is all of its chosen entries, whichever rows a use takes
                wanted = {rows for found in self._rows_of for rows in found if rows[0] == name}
            self._found[id(site)] = [
                pair for pair, rows in zip(self.uses, self._rows_of, strict=True) if not wanted.isdisjoint(rows)
            ]
        return self._found[id(site)]

    def is_partial(self, site: Site) -> bool:
        """Whether its weights are single entries of one parameter."""
        return site.slots[0].name in self.entries.network.indices

    def _general(self, site: Site, rows: dict[str, Tensor]) -> Rows:
        """Rows of the general rule in the site's order."""
        parts = []
        for slot in site.slots:
            shape = self.per_example.network.shapes[slot.name]
            row = int(torch.Size(shape[1:]).numel())
            parts.append(slot.arrange(rows[slot.name][..., slot.start * row : slot.start * row + slot.size]))
        return Rows((parts[0] if len(parts) == 1 else torch.cat(parts, -1)).flatten(2))

    def _contribution(self, site: Site, chosen: list[tuple[Call, Use]], gradients: dict[int, Tensor]) -> Contribution:
        if self.is_partial(site):
            return Rows(self.entries.rows(site.slots[0].name, [(use, gradients[id(call)]) for call, use in chosen]))
        wanted = {slot.rows for slot in site.slots}
        if site.kind == "outer":
            return self._outer(site, [(use, gradients[id(call)]) for call, use in chosen if isinstance(use, OuterUse)])
        if site.kind == "lookup":
            return self._lookup([(use, gradients[id(call)]) for call, use in chosen if isinstance(use, LookupUse)])
        return Rows(torch.stack([self._rows(use, gradients[id(call)], wanted) for call, use in chosen]).sum(0))

    def _outer(self, site: Site, uses: list[tuple[OuterUse, Tensor]]) -> Outer:
        g = _joined([use.gradient(raw) for use, raw in uses], 3)

        def inputs() -> Tensor:
            if site.weight is None:
                return g.new_empty(g.shape[0], *g.shape[2:4], 0)
            if id(site) in self._inputs:
                return self._inputs[id(site)]
            made = _joined([use.inputs() for use, _ in uses], 2)
            if self.keep_inputs:
                self._inputs[id(site)] = made
            return made

        direct = self._direct(site, uses)
        moments = [use.moment for use, _ in uses if use.moment is not None and site.weight is not None]
        if len(moments) < len(uses):
            return Outer(inputs, g, site.bias is not None, direct=direct)

        def add_moment(total: Tensor) -> bool:
            if not all(self.proofs.holds(PATCH_MOMENTS, moment.key, moment.agrees) for moment in moments):
                return False
            for moment in moments:
                moment.add(total)
            return True

        saving = min(moment.saving for moment in moments)
        return Outer(inputs, g, site.bias is not None, add_moment, saving, direct)

    def _direct(self, site: Site, uses: list[tuple[OuterUse, Tensor]]) -> tuple[Callable[[slice], Tensor], int] | None:
        """Gradients of a kernel for each example, without patches; None if there are several uses, or J is large."""
        (use, raw), *others = uses
        kernels = use.kernels
        if kernels is None or others or site.weight is None:
            return None
        size = len(raw) * kernels.weight.numel() * raw.element_size()
        if size > CHUNK_BYTES or not self.proofs.holds(GROUPED_GRADIENTS, kernels.key, lambda: kernels.agrees(raw)):
            return None
        return partial(kernels.of, raw), max(1, KERNEL_BYTES // size)

    @staticmethod
    def _lookup(uses: list[tuple[LookupUse, Tensor]]) -> Lookup:
        parts = []
        for use, raw in uses:
            g = use.gradient(raw)
            parts.append(g if use.padding is None else g * (use.index != use.padding)[:, None].to(g.dtype))
        first = uses[0][0]
        index = _joined([use.index for use, _ in uses], 1)
        return Lookup(index, _joined(parts, -1), first.entries, first.padding)

    def _rows(self, use: Use, raw: Tensor, wanted: set[tuple[str, int, int]]) -> Tensor:
        """Rows of one use in the parameter's own order."""
        if isinstance(use, RowsUse):
            return use.rows(raw)
        if isinstance(use, LookupUse):
            return use.weight.restore(_shaped(self._lookup([(use, raw)]).rows(), use.weight))
        g = use.gradient(raw)
        if use.weight is not None and use.weight.rows in wanted:
            return use.weight.restore(_shaped(Outer(use.inputs, g).rows(), use.weight))
        assert use.bias is not None
        return g.sum(3).permute(1, 2, 0, 3).flatten(2)


def _shaped(rows: Tensor, slot: Slot) -> Tensor:
    return rows.reshape(*rows.shape[:-1], *slot.shape)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
