"""One batch on the tape: gradients at every use of the chosen weights, for any seeds, as contributions to sites."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lapis.batches import Inputs
from lapis.curvature.axes import close
from lapis.curvature.chain import Chain, find_chain
from lapis.curvature.contributions import Contribution, Lookup, Outer, Rows
from lapis.curvature.layers import Call, LookupUse, OuterUse, RowsUse, Use
from lapis.curvature.sites import Site, Slot
from lapis.network import flat_gradient

if TYPE_CHECKING:
    from lapis.curvature.tape import Tape

Way = Literal["together", "along the chain", "one by one"]


class Record:
    """One batch on the tape: outputs `f` (B, T, C) and the uses of the chosen weights."""

    def __init__(
        self,
        tape: Tape,
        inputs: Inputs,
        raw_shape: torch.Size,
        f: Tensor,
        uses: list[tuple[Call, Use]],
        lost: set[str],
        trace: Any = None,
    ) -> None:
        self.tape, self.inputs, self.raw_shape, self.f, self.uses = tape, inputs, raw_shape, f, uses
        self.lost = lost
        """Parameters with a use in this batch that no rule could read."""
        self.trace = trace
        """What a proof on this batch rests on; None where one batch does not speak for others."""
        self.calls = list({id(call): call for call, _ in uses}.values())
        self.keep_inputs = False
        """Whether what layers take in, such as patches of images, is kept for more seeds of the same batch."""
        self._rows_of = [[slot.rows for slot in (use.weight, use.bias) if slot is not None] for _, use in uses]
        self._found: dict[int, list[tuple[Call, Use]]] = {}
        self._inputs: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.f.shape[0]

    @cached_property
    def chain(self) -> Chain | None:
        """The way back for many seeds at once, where the network is a chain."""
        return find_chain(self.f, self.calls)

    @property
    def way(self) -> Way:
        """How seeds go back: many at once wins where layers are matrix products, and loses on convolutions but for
        chains.
        """
        if any("conv" in getattr(call.function, "__name__", "") for call in self.calls):
            return "one by one" if self.chain is None else "along the chain"
        return "together" if self.tape.batchable else "one by one"

    def gradients(self, seeds: Tensor) -> dict[int, Tensor]:
        """Gradients of sum(seed * f) at each call's output, (M, *output), by id of the call. `seeds`: (M, B, T, C)."""
        if not self.calls:
            return {}
        edges = [call.edge for call in self.calls]
        if len(seeds) > 1 and self.way != "one by one":
            if self.chain is not None:
                return self._by_call(self.chain.send_back(seeds), len(seeds))
            batched = self._batched_gradients(edges, seeds)
            if batched is not None:
                return self._by_call(batched, len(seeds))
            self.tape.batchable = False
        return self._by_call(self._looped_gradients(edges, seeds), len(seeds))

    def _looped_gradients(self, edges: list[Any], seeds: Tensor) -> Sequence[Tensor | None]:
        """One seed after another, collected with the seeds of an example side by side, as products want them."""
        collected: list[Tensor | None] = []
        for i, seed in enumerate(seeds):
            found = torch.autograd.grad(self.f, edges, seed, retain_graph=True, allow_unused=True)
            if len(seeds) == 1:
                return [None if g is None else g[None] for g in found]
            if i == 0:
                collected = [None if g is None else g.new_empty(g.shape[0], len(seeds), *g.shape[1:]) for g in found]
            for whole, g in zip(collected, found, strict=True):
                if whole is not None:
                    whole[:, i] = g
            del found, g  # before the next seed's
        return [None if whole is None else whole.transpose(0, 1) for whole in collected]

    def _batched_gradients(self, edges: list[Any], seeds: Tensor) -> Sequence[Tensor | None] | None:
        """All seeds at once; None if an operator cannot, or (as some do, silently) gives wrong results."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*batching rule.*")
                found: Sequence[Tensor | None] = torch.autograd.grad(
                    self.f, edges, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
        except RuntimeError:
            return None
        if seeds.shape[:2] not in self.tape.proven:
            mix = torch.linspace(-1, 1, len(seeds) + 1, dtype=seeds.dtype, device=seeds.device)[1:]
            mixed = torch.einsum("m,mbtc->btc", mix, seeds)
            truth = torch.autograd.grad(self.f, edges, mixed, retain_graph=True, allow_unused=True)
            for one, many in zip(truth, found, strict=True):
                if one is not None and many is not None and not close(one, torch.einsum("m,m...->...", mix, many)):
                    return None
            self.tape.proven.add(seeds.shape[:2])
        return found

    def _by_call(self, found: Sequence[Tensor | None], seeds: int) -> dict[int, Tensor]:
        shapes = [(seeds, *call.output_shape) for call in self.calls]
        return {
            id(call): self.f.new_zeros(shape) if gradient is None else gradient.reshape(shape)
            for call, gradient, shape in zip(self.calls, found, shapes, strict=True)
        }

    def contributions(self, seeds: Tensor, sites: Sequence[Site] | None = None) -> list[Contribution]:
        """What the batch says about each site's weights, for `seeds` (M, B, T, C)."""
        sites = self.tape.sites if sites is None else sites
        gradients = self.gradients(seeds)
        uses = [self._uses(site) for site in sites]
        # what only the general rule can do: always, or in this batch (a layer that sees some of the examples, or none)
        loose = [not self._clear(site, found) for site, found in zip(sites, uses, strict=True)]
        names = {slot.name for site, is_loose in zip(sites, loose, strict=True) if is_loose for slot in site.slots}
        rows = self.tape.per_example.rows(self.inputs, sorted(names), seeds) if names else {}
        return [
            self._general(site, rows) if is_loose else self._contribution(site, found, gradients)
            for site, found, is_loose in zip(sites, uses, loose, strict=True)
        ]

    def unexplained(self, sites: Sequence[Site]) -> set[str]:
        """Parameters whose uses do not reproduce autograd's gradient.

        For a random seed v and random coefficients c, sum_b c_b J_b^T v_b from the recorded uses must be the gradient
        of sum_b c_b v_b . f_b: it does only if every use is known and credited to the right example.
        """
        network = self.tape.network
        known = [site for site in sites if self._clear(site, self._uses(site))]
        generator = torch.Generator(device=self.f.device).manual_seed(0)
        seed = torch.empty_like(self.f).normal_(generator=generator)
        coefficients = self.f.new_empty(len(self)).normal_(generator=generator)
        parameters = list(network.parameters.values())
        mixed = seed * coefficients[:, None, None]
        rest = flat_gradient(
            torch.autograd.grad(self.f, parameters, mixed, retain_graph=True, allow_unused=True), parameters
        )
        parts = network.unflatten(rest)
        relative, floor = (1e-8, 1e-12) if rest.dtype == torch.float64 else (1e-3, 1e-6)
        whole = floor * rest.norm()
        allowed = {name: relative * part.norm() + whole for name, part in parts.items()}
        claimed: Counter[str] = Counter()
        for site, contribution in zip(known, self.contributions(seed[None], known), strict=True):
            claims = site.parts(contribution.gradient(coefficients).reshape(site.shape))
            for slot, claim, (start, stop) in zip(site.slots, claims, site.spans(network), strict=True):
                rest[start:stop] -= slot.restore(claim)
                claimed[slot.name] += slot.size
        return {
            name
            for name, entries in claimed.items()
            if entries != parts[name].numel() or not bool(parts[name].norm() <= allowed[name])
        }

    def _clear(self, site: Site, found: list[tuple[Call, Use]]) -> bool:
        """Whether there are uses, all known, and of the site's kind."""
        kind = {"outer": OuterUse, "lookup": LookupUse}.get(site.kind, object)
        lost = any(slot.name in self.lost or slot.name in self.tape.general for slot in site.slots)
        return bool(found) and not lost and all(isinstance(use, kind) for _, use in found)

    def _uses(self, site: Site) -> list[tuple[Call, Use]]:
        """The uses of a site's weights; looked up once, since every seed asks for them."""
        if id(site) not in self._found:
            wanted = {slot.rows for slot in site.slots}
            self._found[id(site)] = [
                pair for pair, rows in zip(self.uses, self._rows_of, strict=True) if not wanted.isdisjoint(rows)
            ]
        return self._found[id(site)]

    def _general(self, site: Site, rows: dict[str, Tensor]) -> Rows:
        """Rows of the general rule in the site's order."""
        parts = []
        for slot in site.slots:
            shape = self.tape.network.shapes[slot.name]
            row = int(torch.Size(shape[1:]).numel())
            parts.append(slot.arrange(rows[slot.name][..., slot.start * row : slot.start * row + slot.size]))
        return Rows((parts[0] if len(parts) == 1 else torch.cat(parts, -1)).flatten(2))

    def _contribution(self, site: Site, chosen: list[tuple[Call, Use]], gradients: dict[int, Tensor]) -> Contribution:
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

        moments = [use.add_moment for use, _ in uses if use.add_moment is not None and site.weight is not None]

        def add_moment(total: Tensor) -> None:
            for add in moments:
                add(total)

        if len(moments) < len(uses):
            return Outer(inputs, g, site.bias is not None)
        return Outer(inputs, g, site.bias is not None, add_moment, min(use.spared for use, _ in uses))

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
