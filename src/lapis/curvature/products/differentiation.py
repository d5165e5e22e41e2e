"""Ways to multiply with the Jacobian of a few examples: each is fastest, or the only one, for some networks.

All of them run the network once with a graph, and read J^T u off it.

    one_pass        J v by dual numbers, in the run that makes the graph; holds the tangents' graph beside it
    forward         J v by dual numbers, vector after vector
    double          J v as the derivative in u of J^T u, vector after vector on one graph
    batched         J v of all vectors in one pass of dual numbers, J^T u vector after vector
    batched_both    the same, and J^T u of all at once
    batched_double  both at once on one graph
    rows            J itself, example after example: slow, and works where a network has only first derivatives
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack

from lapis.batches import Inputs
from lapis.curvature.backward.per_example import PerExample
from lapis.curvature.backward.seeds import position_seeds, unit_factor
from lapis.errors import DataError
from lapis.network import Network

make_dual: Any = forward_ad.make_dual
unpack_dual: Any = forward_ad.unpack_dual

Canonical = Callable[[Tensor], Tensor]

BATCHED = frozenset({"batched", "batched_both", "batched_double"})
BATCHED_BACKWARD = frozenset({"batched_both", "batched_double"})
FOR_ONE = ("one_pass", "forward", "double", "rows")
FOR_SEVERAL = ("batched", "batched_both", "batched_double", "double", "forward", "rows")
LEANEST = ("forward", "one_pass", "double", "batched", "batched_double", "batched_both", "rows")
"""The ways by the memory that they take, least first."""

UNABLE = (RuntimeError, DataError)
"""What is raised where an operator lacks the derivative that a way needs: by torch, or by `Network.call` in its words.
The next way is tried then; "rows" needs first derivatives only, and what it raises is raised.
"""


@contextmanager
def differentiable() -> Iterator[None]:
    """Attention in plain operators: the fused ones have first derivatives only."""
    fast: bool = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.jit.script.*")  # torch's own, on first use
            warnings.filterwarnings("ignore", message=".*batching rule.*")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class LeanDuals(TorchFunctionMode):
    """Linear layers and convolutions of dual numbers in little memory.

    Torch itself would make a graph of the tangents, keep those of inputs with the outputs' graph, and write out zeros,
    to multiply with them, for inputs that have none.
    """

    BILINEAR = frozenset({F.linear, F.conv1d, F.conv2d, F.conv3d})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(self._bilinear, func) if func in self.BILINEAR else func
        return call(*args, **(kwargs or {}))

    def _bilinear(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any, **options: Any
    ) -> Tensor:
        x, dx = unpack_dual(input)
        w, dw = unpack_dual(weight)
        b, db = (None, None) if bias is None else unpack_dual(bias)
        if dw is None:
            plain: Tensor = func(input, weight, bias, *more, **options)
            return plain
        output = func(x, w, b, *more, **options)
        with torch.no_grad():
            tangent = func(x, dw, db, *more, **options)
            if dx is not None:
                tangent += func(dx, w, None, *more, **options)
        dual: Tensor = make_dual(output, tangent)
        return dual


class Pass:
    """Some examples: J v and J^T u for them, sharing one run of the network with a graph."""

    def __init__(self, network: Network, canonical: Canonical, inputs: Inputs) -> None:
        self.network, self.canonical, self.inputs = network, canonical, inputs
        self._f: Tensor | None = None

    @property
    def f(self) -> Tensor:
        """The outputs (B, T, C), with their graph."""
        if self._f is None:
            self._f = self.canonical(self.network.call(self.inputs))
        return self._f

    def push(self, vectors: Tensor, way: str, *, tracked: bool = False) -> Tensor:
        """J v for `vectors` (k, P) in the network's dtype: (k, B, T, C). `tracked`: J^T u will be asked for, too."""
        if way in ("forward", "one_pass"):
            leaves = tracked and way == "one_pass"
            return torch.stack([self._dual(v, tracked=leaves and i == 0) for i, v in enumerate(vectors)])
        if way in ("double", "batched_double"):
            return self._double(vectors, batched=way == "batched_double")
        if way == "rows":
            return torch.einsum("btcp,kp->kbtc", rows(self.network, self.canonical, self.inputs), vectors)
        return self._batched(vectors)

    def pull(self, seeds: Tensor, way: str) -> Tensor:
        """J^T u for `seeds` (k, B, T, C) in the network's dtype: (k, P)."""
        return self.pull_into(seeds.new_zeros(len(seeds), self.network.size), seeds, way, keep=True)

    def pull_into(self, total: Tensor, seeds: Tensor, way: str, *, keep: bool = False) -> Tensor:
        """`total` (k, P) plus J^T u, in place and parameter by parameter: no flat copy is made. The graph goes with its
        last use, unless it is to be kept.
        """
        parameters = list(self.network.parameters.values())
        if way in BATCHED_BACKWARD:
            found = torch.autograd.grad(self.f, parameters, seeds, keep, allow_unused=True, is_grads_batched=True)
            self._add(total, found)
            return total
        for i, (row, seed) in enumerate(zip(total, seeds, strict=True), 1):
            self._add(row, torch.autograd.grad(self.f, parameters, seed, keep or i < len(seeds), allow_unused=True))
        return total

    def _add(self, total: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients (..., *shape) of the parameters to `total` (..., P); sparse ones are filled."""
        for gradient, (name, start) in zip(gradients, self.network.offsets.items(), strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.layout == torch.sparse_coo else gradient
                stop = start + torch.Size(self.network.shapes[name]).numel()
                total[..., start:stop] += dense.reshape(*total.shape[:-1], -1)

    def _dual(self, vector: Tensor, tracked: bool) -> Tensor:
        """J v in one forward pass; a tracked one leaves f's graph behind."""
        with forward_ad.dual_level(), torch.set_grad_enabled(tracked), LeanDuals():
            # a storage for each tangent, in the same memory: of slices torch makes copies
            tangents = {name: from_dlpack(part.detach()) for name, part in self.network.unflatten(vector).items()}
            duals = {
                name: make_dual(p if tracked else p.detach(), tangents[name])
                for name, p in self.network.parameters.items()
            }
            f, tangent = unpack_dual(self.canonical(self.network.call(self.inputs, duals)))
        # the level is closed: a backward pass inside it would differentiate itself forward, at twice the cost
        if tracked:
            self._f = f
        return torch.zeros_like(f) if tangent is None else tangent.detach()

    def _double(self, vectors: Tensor, batched: bool) -> Tensor:
        parameters = self.network.parameters
        seed = torch.zeros_like(self.f, requires_grad=True)
        back = torch.autograd.grad(self.f, list(parameters.values()), seed, create_graph=True, allow_unused=True)
        used = [
            (gradient, name)
            for gradient, name in zip(back, parameters, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        gradients = [gradient for gradient, _ in used]
        if batched:
            block = [self._columns(vectors, name) for _, name in used]
            found: Tensor = torch.autograd.grad(gradients, seed, block, True, is_grads_batched=True)[0]
            return found
        each: list[Tensor] = []
        for vector in vectors:
            tangents = self.network.unflatten(vector)
            each += torch.autograd.grad(gradients, seed, [tangents[name] for _, name in used], retain_graph=True)
        return torch.stack(each)

    def _batched(self, vectors: Tensor) -> Tensor:
        parameters = {name: p.detach() for name, p in self.network.parameters.items()}
        block = {name: self._columns(vectors, name) for name in parameters}

        def outputs(values: dict[str, Tensor]) -> Tensor:
            return self.canonical(self.network.call(self.inputs, values))

        with torch.no_grad():
            found: Tensor = torch.func.vmap(lambda v: torch.func.jvp(outputs, (parameters,), (v,))[1])(block)
        return found

    def _columns(self, vectors: Tensor, name: str) -> Tensor:
        shape, start = self.network.shapes[name], self.network.offsets[name]
        return vectors[:, start : start + torch.Size(shape).numel()].reshape(len(vectors), *shape)


def rows(network: Network, canonical: Canonical, inputs: Inputs) -> Tensor:
    """J of each example, (B, T, C, P)."""
    with torch.no_grad():
        f = canonical(network.call(inputs))
    found = f.new_empty(*f.shape, network.size)
    per_example = PerExample(network, canonical)
    for position, seeds in enumerate(position_seeds(unit_factor(f), f.shape[-1])):
        each = per_example.rows(inputs, network.names, seeds)
        found[:, position] = torch.cat([each[name] for name in network.names], -1).transpose(0, 1)
    return found


def proven(examples: Pass, way: str, vectors: Tensor) -> bool:
    """Whether the way agrees with plain backward passes, whatever torch's rules for its operators are worth.

    For random u: u . (J v) = v . (J^T u) for every v, and a mixture of J^T u_i is J^T of the mixture.
    """
    generator = torch.Generator(device=vectors.device).manual_seed(0)
    pushed = examples.push(vectors, way, tracked=True)
    seeds = torch.empty_like(pushed).normal_(generator=generator)
    tolerance = 1e-8 if vectors.dtype == torch.float64 else 1e-3
    pulled = examples.pull(seeds[:1], "double")[0]
    ahead, back = pushed * seeds[0], vectors * pulled
    scale = torch.maximum(ahead.abs().flatten(1).sum(1), back.abs().sum(1)) + torch.finfo(pushed.dtype).tiny
    good = bool(((ahead.flatten(1).sum(1) - back.sum(1)).abs() <= tolerance * scale).all())
    if not good or way not in BATCHED_BACKWARD:
        return good
    mix = torch.empty_like(vectors[:, 0]).normal_(generator=generator)
    many = examples.pull(seeds, way)
    one = examples.pull(torch.einsum("k,k...->...", mix, seeds)[None], "double")[0]
    limit = tolerance * ((mix.abs() @ many.abs()).max() + torch.finfo(one.dtype).tiny)
    return bool(((mix @ many - one).abs() <= limit).all())
