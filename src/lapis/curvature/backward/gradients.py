"""Backpropagation of seeds to the outputs of recorded calls: all in one pass where that is faster, else one by one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lapis.curvature.recording.layers import Call
from lapis.proofs import Proofs, close

BATCHED = "backward passes of several seeds at once"


class Gradients:
    """The graph from the outputs f (B, T, C) of one batch back to the calls that took chosen weights."""

    def __init__(self, f: Tensor, calls: Sequence[Call], proofs: Proofs) -> None:
        self.f, self.calls, self.proofs = f, calls, proofs
        self._edges = [call.edge for call in calls]
        self._convolves = any("conv" in getattr(call.function, "__name__", "") for call in calls)

    @property
    def batched(self) -> bool:
        """Whether several seeds are backpropagated together: faster for matrix products, slower for convolutions."""
        return not self._convolves and BATCHED not in self.proofs.refused

    def at_calls(self, seeds: Tensor) -> dict[int, Tensor]:
        """Gradients of sum(seed * f) at each call's output, (M, *output), by the call's id. `seeds`: (M, B, T, C)."""
        if not self.calls:
            return {}
        found = None
        if len(seeds) > 1 and self.batched:
            found = self._batched(seeds)
        if found is None:
            found = self._looped(seeds)
        shapes = [(len(seeds), *call.output_shape) for call in self.calls]
        return {
            id(call): self.f.new_zeros(shape) if gradient is None else gradient.reshape(shape)
            for call, gradient, shape in zip(self.calls, found, shapes, strict=True)
        }

    def _grad(self, seeds: Tensor, **options: Any) -> Sequence[Tensor | None]:
        """Autograd's gradients at the calls' outputs; the graph is kept for more seeds.

        Seeds that require gradients get them: the result is a linear function of these.
        """
        found: Sequence[Tensor | None] = torch.autograd.grad(
            self.f,
            self._edges,
            seeds,
            retain_graph=True,
            create_graph=seeds.requires_grad,
            allow_unused=True,
            **options,
        )
        return found

    def _looped(self, seeds: Tensor) -> Sequence[Tensor | None]:
        """One backward pass for each seed. Results lie in memory as (B, M, ...), the order that later products want."""
        collected: list[Tensor | None] = []
        for i, seed in enumerate(seeds):
            found = self._grad(seed)
            if len(seeds) == 1:
                return [None if g is None else g[None] for g in found]
            if i == 0:
                collected = [None if g is None else g.new_empty(g.shape[0], len(seeds), *g.shape[1:]) for g in found]
            for whole, g in zip(collected, found, strict=True):
                if whole is not None and g is not None:
                    whole[:, i] = g
            del found, g  # before the next seed's gradients are made
        return [None if whole is None else whole.transpose(0, 1) for whole in collected]

    def _batched(self, seeds: Tensor) -> Sequence[Tensor | None] | None:
        """All seeds in one backward pass under vmap; None where an operator has no batching rule, or a wrong one."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*batching rule.*")
                found = self._grad(seeds, is_grads_batched=True)
        except RuntimeError:
            self.proofs.refused.add(BATCHED)
            return None
        key = (tuple(seeds.shape), *(call.output_shape for call in self.calls))

        def agrees() -> bool:
            """A mixture of the seeds' gradients is the gradient of the mixed seed."""
            mix = torch.linspace(1, 2, len(seeds), dtype=seeds.dtype, device=seeds.device)
            truth = self._grad(torch.einsum("m,mbtc->btc", mix, seeds))
            return all(
                one is None or (many is not None and close(one, torch.einsum("m,m...->...", mix, many)))
                for one, many in zip(truth, found, strict=True)
            )

        return found if self.proofs.holds(BATCHED, key, agrees) else None


class Given(Gradients):
    """Gradients that somebody else's backward pass has left at the calls' outputs, instead of those of seeds."""

    def __init__(self, f: Tensor, calls: Sequence[Call], proofs: Proofs, found: Mapping[int, Tensor]) -> None:
        super().__init__(f, calls, proofs)
        self._given = dict(found)

    def at_calls(self, seeds: Tensor) -> dict[int, Tensor]:
        return self._given
