"""Outputs and per-example Jacobians of a network by plain tensor operations, which exporters can trace.

For a linear layer z = W a + b the Jacobian of an output f_c in (W, b) is g a^T and g, with g = d f_c / d z: one
backward pass for each output serves all examples and layers, as examples do not see each other.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lapis.errors import ModelError
from lapis.network.calling import output_tensor
from lapis.posteriors.laplace.stored import LaplacePosterior


class Tangent(nn.Module):
    """x -> outputs (B, C) and their Jacobian (B, C, P) in the chosen weights, which linear layers must hold."""

    def __init__(self, posterior: LaplacePosterior) -> None:
        super().__init__()
        network = posterior.network
        self.outputs = posterior.n_outputs
        self.model = copy.deepcopy(network.module).eval()
        self.layers = {name.rpartition(".")[0]: self._layer(name) for name in network.names}
        """Linear layers that hold chosen weights, by their names."""
        self.model.requires_grad_(False)
        for layer in self.layers.values():
            layer.requires_grad_(True)  # so that what follows them can be differentiated
        self.names = network.names
        self.indices = {name: index.clone() for name, index in network.indices.items()}

    def _layer(self, name: str) -> nn.Linear:
        path = name.rpartition(".")[0]
        layer = self.model.get_submodule(path)
        if type(layer) is not nn.Linear or torch.nn.utils.parametrize.is_parametrized(layer):
            raise ModelError(
                f"The weights {name!r} cannot be exported",
                expected="chosen weights in torch.nn.Linear layers",
                got=type(layer).__name__,
                do='fit with weights="last_layer", or with the names of linear layers',
            )
        return layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def hook(path: str) -> Any:
            def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                if path in seen or inputs[0].dim() != 2:
                    raise _not_once(path, "twice" if path in seen else f"for inputs {tuple(inputs[0].shape)}")
                seen[path] = (inputs[0], output)

            return note

        handles = [layer.register_forward_hook(hook(path)) for path, layer in self.layers.items()]
        try:
            with torch.enable_grad():
                f = output_tensor(self.model(x))
                f = f.reshape(f.shape[0], self.outputs)
                for path in self.layers:
                    if path not in seen:
                        raise _not_once(path, "without the call of its module")
                ends = [seen[path][1] for path in self.layers]
                slopes = [torch.autograd.grad(f[:, c].sum(), ends, retain_graph=True) for c in range(self.outputs)]
        finally:
            for handle in handles:
                handle.remove()
        found = {}
        for number, path in enumerate(self.layers):
            g = torch.stack([slope[number] for slope in slopes], 1).detach()
            found[path] = (g, seen[path][0].detach())
        return f.detach(), torch.cat([self._rows(name, *found[name.rpartition(".")[0]]) for name in self.names], -1)

    def _rows(self, name: str, g: Tensor, a: Tensor) -> Tensor:
        """The Jacobian (B, C, n) in the chosen entries of a weight or bias, from g (B, C, O) and a (B, I)."""
        rows = g if name.rpartition(".")[2] == "bias" else (g.unsqueeze(-1) * a[:, None, None, :]).flatten(2)
        return rows[..., self.indices[name]] if name in self.indices else rows


def _not_once(path: str, got: str) -> ModelError:
    return ModelError(
        f"The layer {path!r} cannot be exported",
        expected="one use for every example, of inputs (B, I)",
        got=f"a use {got}",
        do='fit with weights="last_layer", or predict in Python',
    )
