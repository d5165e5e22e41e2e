"""The Jacobian J of a network's outputs in its weights over a data set, known by its products.

    forward:  J_n v          backward:  sum_n J_n^T u_n          ggn:  sum_n J_n^T S_n S_n^T J_n v

Vectors are rows of a block (k, P), as in `lapis.solvers`; outputs of a batch are (k, B, T, C).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lapis.batches import Batch, take
from lapis.errors import DataError
from lapis.network import Network, flat_gradient


class Jacobian:
    """J at the network's weights, for every batch. Products run in the network's dtype; sums over batches and results
    have the dtype of the vectors that went in.

    Args:
        network: the network and its chosen weights, P of them.
        canonical: brings raw outputs to (B, T, C), as `likelihood.canonical` does.
        batches: the data, in the order that all sums follow.
        memory_budget: bytes that one product may work in, beside its vectors and results.
    """

    def __init__(
        self,
        network: Network,
        canonical: Callable[[Tensor], Tensor],
        batches: Sequence[Batch],
        *,
        memory_budget: int = 4 * 2**30,
    ) -> None:
        self.network, self.canonical, self.batches, self.memory_budget = network, canonical, batches, memory_budget
        self.size = network.size
        self.outputs: list[Tensor] = []
        """f of each batch, (B, T, C) float64."""
        self.shapes: list[torch.Size] = []
        """Shapes of the raw outputs."""
        with network.prepared(), torch.no_grad():
            for batch in batches:
                raw = network.call(batch.inputs)
                self.outputs.append(canonical(raw).double())
                self.shapes.append(raw.shape)

    @property
    def n_outputs(self) -> int:
        """The number of rows of J: outputs over all examples and positions."""
        return sum(f.numel() for f in self.outputs)

    def at(self, chosen: int | Sequence[int]) -> Jacobian:
        """The same products over some of the batches, by their places in `batches`."""
        places = [chosen] if isinstance(chosen, int) else list(chosen)
        part = object.__new__(Jacobian)
        part.__dict__.update(self.__dict__)
        part.batches = [self.batches[place] for place in places]
        part.outputs = [self.outputs[place] for place in places]
        part.shapes = [self.shapes[place] for place in places]
        return part

    def forward(self, vectors: Tensor) -> list[Tensor]:
        """J v of each vector: for every batch (k, B, T, C)."""
        found = []
        with self.network.prepared():
            for pull in self._pulls(vectors):
                found.append(torch.stack([pull.push(v) for v in vectors.to(self.network.dtype)]).to(vectors.dtype))
        return found

    def backward(self, seeds: Sequence[Tensor]) -> Tensor:
        """J^T u, (k, P), for u given as (k, B, T, C) batch by batch."""
        total = torch.zeros(len(seeds[0]), self.size, dtype=seeds[0].dtype, device=self.network.device)
        with self.network.prepared():
            for batch, seed in zip(self.batches, seeds, strict=True):
                pull = _Pull(self, batch)
                for row, u in zip(total, seed.to(self.network.dtype), strict=True):
                    row += pull.pull(u)
        return total

    def ggn(self, vectors: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """sum_n J_n^T S_n S_n^T J_n v, (k, P), in one pass over the data. `factors`: S (B, T, C, R) of each batch."""
        total = torch.zeros_like(self._checked(vectors))
        with self.network.prepared():
            for pull, factor in zip(self._pulls(vectors), factors, strict=True):
                s = factor.to(self.network.dtype)
                for row, v in zip(total, vectors.to(self.network.dtype), strict=True):
                    row += pull.pull((s @ (s.mT @ pull.push(v)[..., None]))[..., 0])
        return total

    def _pulls(self, vectors: Tensor) -> list[_Pull]:
        self._checked(vectors)
        return [_Pull(self, batch) for batch in self.batches]

    def _checked(self, vectors: Tensor) -> Tensor:
        if vectors.dim() != 2 or vectors.shape[1] != self.size:
            raise DataError(
                "The vectors do not fit the weights",
                expected=f"a block (k, {self.size}), one vector a row",
                got=str(tuple(vectors.shape)),
                do="pass v[None] for a single one",
            )
        return vectors


class _Pull:
    """One batch's graph: f, and J^T u as a function of u, whose derivative in u is J."""

    def __init__(self, jacobian: Jacobian, batch: Batch) -> None:
        self.network, self.batch, self.canonical = jacobian.network, batch, jacobian.canonical
        self.f: Tensor | None = None

    def _output(self) -> Tensor:
        if self.f is None:
            self.f = self.canonical(self.network.call(self.batch.inputs))
        return self.f

    def push(self, vector: Tensor) -> Tensor:
        """J v."""
        for way in (self._push_by_double_backward, self._push_forward):
            try:
                return way(vector)
            except (RuntimeError, NotImplementedError, DataError):  # an operator without the derivative needed
                continue
        return self._push_by_rows(vector)

    def _push_by_double_backward(self, vector: Tensor) -> Tensor:
        f = self._output()
        seed = torch.zeros_like(f, requires_grad=True)
        parameters = self.network.parameters
        back = torch.autograd.grad(f, list(parameters.values()), seed, create_graph=True, allow_unused=True)
        tangents = self.network.unflatten(vector)
        used = [(g, tangents[name]) for g, name in zip(back, parameters, strict=True) if g is not None]
        used = [(g, v) for g, v in used if g.requires_grad]
        return torch.autograd.grad([g for g, _ in used], seed, [v for _, v in used])[0]

    def _push_forward(self, vector: Tensor) -> Tensor:
        parameters = {name: p.detach() for name, p in self.network.parameters.items()}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.jit.script.*")  # torch's own, on first use
            found: Tensor = torch.func.jvp(
                lambda p: self.canonical(self.network.call(self.batch.inputs, p)),
                (parameters,),
                (self.network.unflatten(vector),),
            )[1]
        return found

    def _push_by_rows(self, vector: Tensor) -> Tensor:
        f = self._output().detach()
        found = torch.zeros_like(f)
        for example in range(len(f)):
            one = self.canonical(self.network.call(take(self.batch.inputs, example, example + 1)))
            parameters = list(self.network.parameters.values())
            for place in range(f[0].numel()):
                row = torch.autograd.grad(one.reshape(-1)[place], parameters, retain_graph=True, allow_unused=True)
                found[example].view(-1)[place] = flat_gradient(row, parameters) @ vector
        return found

    def pull(self, seed: Tensor) -> Tensor:
        """J^T u."""
        parameters = list(self.network.parameters.values())
        found = torch.autograd.grad(self._output(), parameters, seed, retain_graph=True, allow_unused=True)
        return flat_gradient(found, parameters)
