"""Jacobian products over a data set, J v and J^T u, at the linearisation point.

The Jacobian is kept as rows when it fits in the memory allowed; else each product is a forward-mode (or, where an
operator has none, double-backward) and a reverse pass over the data.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from lapis.batches import Batch, Inputs
from lapis.curvature.fit import position_seeds
from lapis.curvature.tape import Tape
from lapis.errors import DataError
from lapis.network import Network

KEPT_BYTES = 2**30
"""Most memory that rows of the Jacobian take, when the budget allows it."""


class Products:
    """J for every batch. Outputs are (B, T, C); weight vectors (P,) are float64 outside and cast inside."""

    def __init__(self, network: Network, tape: Tape, batches: Sequence[Batch], memory_budget: int) -> None:
        self.network, self.tape, self.batches = network, tape, batches
        self.outputs: list[Tensor] = []
        self.shapes: list[torch.Size] = []
        with network.prepared(), torch.no_grad():
            for batch in batches:
                raw = network.call(batch.inputs)
                self.outputs.append(tape.outputs(raw).double())
                self.shapes.append(raw.shape)
        rows = sum(f.numel() for f in self.outputs)
        needed = rows * network.size * network.dtype.itemsize
        self.rows = self._jacobians() if 2 * needed <= min(KEPT_BYTES, memory_budget) else None
        self.forward_mode = True

    def _jacobians(self) -> list[Tensor]:
        """Each batch's Jacobian, (B, T, C, P)."""
        found = []
        with self.network.prepared():
            for batch in self.batches:
                record = self.tape.record(batch.inputs)
                f = record.f.detach()
                jacobian = f.new_zeros(*f.shape, self.network.size)
                unit = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).expand(*f.shape, f.shape[-1])
                for position, seeds in enumerate(position_seeds(unit, f.shape[-1])):
                    flat = f.new_zeros(len(seeds), len(batch), self.network.size)
                    for site, contribution in zip(self.tape.sites, record.contributions(seeds), strict=True):
                        part = contribution.rows()
                        site.scatter(part.reshape(*part.shape[:2], *site.shape), flat, self.network)
                    jacobian[:, position] = flat.transpose(0, 1)
                found.append(jacobian)
        return found

    def forward(self, vector: Tensor) -> list[Tensor]:
        """J v for each batch, float64."""
        v = vector.to(self.network.dtype)
        if self.rows is not None:
            return [(jacobian @ v).double() for jacobian in self.rows]
        tangents = self.network.unflatten(v)
        with self.network.prepared():
            return [self._jvp(batch.inputs, tangents).double() for batch in self.batches]

    def _function(self, inputs: Inputs, parameters: dict[str, Tensor]) -> Tensor:
        return self.tape.outputs(self.network.call(inputs, parameters))

    def _jvp(self, inputs: Inputs, tangents: dict[str, Tensor]) -> Tensor:
        parameters = {name: p.detach() for name, p in self.network.parameters.items()}
        if self.forward_mode:
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*torch.jit.script.*")  # torch's own, on first use
                    found: Tensor = torch.func.jvp(lambda p: self._function(inputs, p), (parameters,), (tangents,))[1]
                return found
            except (RuntimeError, NotImplementedError, DataError):  # an operator without forward mode
                self.forward_mode = False
        leaves = {name: p.requires_grad_() for name, p in parameters.items()}
        f = self._function(inputs, leaves)
        seed = torch.zeros_like(f, requires_grad=True)
        back = torch.autograd.grad(f, list(leaves.values()), seed, create_graph=True, allow_unused=True)
        used = [(g, tangents[name]) for g, name in zip(back, leaves, strict=True) if g is not None and g.requires_grad]
        return torch.autograd.grad([g for g, _ in used], seed, [v for _, v in used])[0]

    def backward(self, seeds: Sequence[Tensor]) -> Tensor:
        """J^T u, float64 (P,), for u given batch by batch."""
        total = torch.zeros(self.network.size, dtype=torch.float64, device=self.network.device)
        if self.rows is not None:
            for jacobian, seed in zip(self.rows, seeds, strict=True):
                total += (seed.to(jacobian.dtype).reshape(-1) @ jacobian.reshape(-1, self.network.size)).double()
            return total
        with self.network.prepared():
            parameters = list(self.network.parameters.values())
            for batch, seed in zip(self.batches, seeds, strict=True):
                f = self.tape.outputs(self.network.call(batch.inputs))
                found = torch.autograd.grad(f, parameters, seed.to(f.dtype), allow_unused=True)
                parts = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
                total += torch.cat([part.reshape(-1) for part in parts]).double()
        return total
