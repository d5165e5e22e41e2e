"""The general rule: gradients of any weights, one example at a time. Slower, and exact for any network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lapis.batches import Inputs, batch_length, map_tensors, take
from lapis.curvature.backward.contributions import CHUNK_BYTES
from lapis.errors import DataError
from lapis.network import Network, flat_gradient


class PerExample:
    """Per-example, per-seed gradients: all examples at once with vmap where the network's operators allow it."""

    def __init__(self, network: Network, outputs: Callable[[Tensor], Tensor]) -> None:
        self.network, self.outputs = network, outputs
        self.vectorised = True

    def rows(self, inputs: Inputs, names: Sequence[str], seeds: Tensor) -> dict[str, Tensor]:
        """Gradients of sum(seed * f) for `seeds` (M, B, T, C): parameter name -> (M, B, chosen entries)."""
        if not any(name in self.network.indices for name in names):
            return self._whole_rows(inputs, names, seeds)
        # gradients come whole, so only those of a few examples are in memory before the chosen entries are picked
        size = sum(self.network.parameters[name].numel() for name in names)
        step = max(1, CHUNK_BYTES // (len(seeds) * size * seeds.element_size()))
        parts: list[dict[str, Tensor]] = []
        for start in range(0, seeds.shape[1], step):
            some = slice(start, min(start + step, seeds.shape[1]))
            found = self._whole_rows(take(inputs, some.start, some.stop), names, seeds[:, some])
            parts.append({name: self.network.pick(name, rows).clone() for name, rows in found.items()})
        return {name: torch.cat([part[name] for part in parts], 1) for name in names}

    def _whole_rows(self, inputs: Inputs, names: Sequence[str], seeds: Tensor) -> dict[str, Tensor]:
        """The same for all entries of the parameters."""
        if self.vectorised:
            try:
                with warnings.catch_warnings(), torch.no_grad():
                    warnings.filterwarnings("ignore", message=".*batching rule.*")
                    found = self._mapped(inputs, names, seeds)
            except (RuntimeError, ValueError, DataError):  # no batching rule, as for fused recurrent layers
                found = None
            if found is not None and self._holds(found, inputs, seeds):
                return found
            self.vectorised = False
        return self._looped(inputs, names, seeds)

    def _holds(self, found: dict[str, Tensor], inputs: Inputs, seeds: Tensor) -> bool:
        """Whether a random mixture of the rows is autograd's gradient; some operators' batching rules are wrong."""
        generator = torch.Generator(device=seeds.device).manual_seed(0)
        mix = torch.randn(seeds.shape[:2], generator=generator, dtype=seeds.dtype, device=seeds.device)
        f = self.outputs(self.network.call(inputs))
        mixed = torch.einsum("mb,mbtc->btc", mix, seeds)
        parameters = [self.network.parameters[name] for name in found]
        truth = flat_gradient(torch.autograd.grad(f, parameters, mixed, allow_unused=True), parameters)
        for rows, exact in zip(found.values(), torch.split(truth, [p.numel() for p in parameters]), strict=True):
            if rows.shape != (*seeds.shape[:2], len(exact)):  # zeros of a wrong shape would agree, as by PReLU's rule
                return False
            mean = torch.einsum("mb,mbp->p", mix, rows)
            scale = (mix.abs()[..., None] * rows.abs()).sum((0, 1)).max() + torch.finfo(rows.dtype).tiny
            if not bool((mean - exact).abs().max() <= min(1e3 * torch.finfo(rows.dtype).eps, 0.1) * scale):
                return False
        return True

    def _mapped(self, inputs: Inputs, names: Sequence[str], seeds: Tensor) -> dict[str, Tensor]:
        parameters = {name: self.network.parameters[name].detach() for name in names}

        def one(example: Inputs, seed: Tensor) -> dict[str, Tensor]:
            def output(values: dict[str, Tensor]) -> Tensor:
                raw = self.network.call(map_tensors(lambda x: x.unsqueeze(0), example), values)
                return self.outputs(raw)[0]

            pull = torch.func.vjp(output, parameters)[1]
            gradients: dict[str, Tensor] = torch.func.vmap(lambda s: pull(s)[0])(seed)
            return gradients

        axes = map_tensors(lambda _: 0, inputs)  # type: ignore[arg-type, return-value]
        found = torch.func.vmap(one, in_dims=(axes, 1), out_dims=1)(inputs, seeds)
        return {name: gradient.reshape(*gradient.shape[:2], -1) for name, gradient in found.items()}

    def _looped(self, inputs: Inputs, names: Sequence[str], seeds: Tensor) -> dict[str, Tensor]:
        parameters = [self.network.parameters[name] for name in names]
        count, length = len(seeds), batch_length(inputs)
        sizes = [parameter.numel() for parameter in parameters]
        found = seeds.new_zeros(count, length, sum(sizes))
        for b in range(length):
            f = self.outputs(self.network.call(take(inputs, b, b + 1)))
            for m in range(count):
                gradients = torch.autograd.grad(
                    f, parameters, seeds[m, b : b + 1], retain_graph=True, allow_unused=True
                )
                found[m, b] = flat_gradient(gradients, parameters)
        return dict(zip(names, torch.split(found, sizes, -1), strict=True))
