"""Products with the Jacobian of a few examples in each of the modes, and the proof that a mode is right.

The modes themselves, and which one is preferred, are described in `lapis.curvature.products.modes`.
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
from lapis.curvature.products.modes import BATCHED_BACKWARD_MODES
from lapis.errors import DataError
from lapis.network import Network

make_dual: Any = forward_ad.make_dual
unpack_dual: Any = forward_ad.unpack_dual

Canonical = Callable[[Tensor], Tensor]

DERIVATIVE_ERRORS = (RuntimeError, DataError)
"""Errors that mean that an operator lacks the derivative or batching rule that a mode needs: torch's own, or what
`Network.call` makes of it.
"""


@contextmanager
def differentiable() -> Iterator[None]:
    """Run attention in plain operators, because the fused kernels have first derivatives only."""
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
    """Forward-mode derivatives of linear layers and convolutions in little memory.

    Torch's own rules would build an autograd graph of the tangents, keep the tangents of layer inputs alive in the
    graph of the outputs, and multiply by explicit zeros where an input has no tangent.
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
    """J v and J^T u for some examples, sharing one run of the network with its autograd graph."""

    def __init__(self, network: Network, canonical: Canonical, inputs: Inputs) -> None:
        self.network, self.canonical, self.inputs = network, canonical, inputs
        self._f: Tensor | None = None

    @property
    def f(self) -> Tensor:
        """The outputs (B, T, C) with their graph; the network runs on first use."""
        if self._f is None:
            self._f = self.canonical(self.network.call(self.inputs))
        return self._f

    def push(self, vectors: Tensor, mode: str, *, tracked: bool = False) -> Tensor:
        """J v, (k, B, T, C), for `vectors` (k, P) in the network's dtype.

        `tracked` says that J^T u will be asked for, too: "one_pass" then builds the graph for it in the same run.
        """
        if mode in ("forward", "one_pass"):
            builds_graph = tracked and mode == "one_pass"
            return torch.stack([self._dual(v, tracked=builds_graph and i == 0) for i, v in enumerate(vectors)])
        if mode in ("double", "batched_double"):
            return self._double(vectors, batched=mode == "batched_double")
        if mode == "rows":
            return torch.einsum("btcp,kp->kbtc", rows(self.network, self.canonical, self.inputs), vectors)
        return self._batched(vectors)

    def pull(self, seeds: Tensor, mode: str) -> Tensor:
        """J^T u, (k, P), for `seeds` u (k, B, T, C) in the network's dtype; the graph is kept."""
        return self.pull_into(seeds.new_zeros(len(seeds), self.network.size), seeds, mode, keep_graph=True)

    def pull_into(self, total: Tensor, seeds: Tensor, mode: str, *, keep_graph: bool = False) -> Tensor:
        """Add J^T u to `total` (k, P) in place, parameter by parameter, so that no flat copy is made.

        The last backward pass frees the graph, unless it is to be kept.
        """
        if mode in BATCHED_BACKWARD_MODES:
            self._add(total, self._gradients(seeds, keep_graph, batched=True))
            return total
        for i, (row, seed) in enumerate(zip(total, seeds, strict=True), 1):
            self._add(row, self._gradients(seed, keep_graph or i < len(seeds)))
        return total

    def _gradients(self, seeds: Tensor, keep_graph: bool, batched: bool = False) -> Sequence[Tensor | None]:
        """Gradients of sum(u * f) in every parameter for one seed u (B, T, C), or for a batch of seeds (k, B, T, C)."""
        found: Sequence[Tensor | None] = torch.autograd.grad(
            self.f,
            list(self.network.parameters.values()),
            seeds,
            retain_graph=keep_graph,
            allow_unused=True,
            is_grads_batched=batched,
        )
        return found

    def _add(self, total: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Add the parameters' gradients, (..., *shape) each, to `total` (..., P)."""
        for gradient, name in zip(gradients, self.network.names, strict=True):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.layout == torch.sparse_coo else gradient
                total[..., self.network.span(name)] += self.network.pick(name, dense.reshape(*total.shape[:-1], -1))

    def _dual(self, vector: Tensor, tracked: bool) -> Tensor:
        """J v, (B, T, C), of one vector in one forward-mode run; a tracked run also builds the graph of f."""
        with forward_ad.dual_level(), torch.set_grad_enabled(tracked), LeanDuals():
            # torch copies a tangent that is a slice of a storage, so each one gets a storage over the same memory
            tangents = {name: from_dlpack(part.detach()) for name, part in self.network.tangents(vector).items()}
            duals = {
                name: make_dual(p if tracked else p.detach(), tangents[name])
                for name, p in self.network.parameters.items()
            }
            f, tangent = unpack_dual(self.canonical(self.network.call(self.inputs, duals)))
        # backward passes come after the level is closed: inside, torch would differentiate them forward, too
        if tracked:
            self._f = f
        return torch.zeros_like(f) if tangent is None else tangent.detach()

    def _double(self, vectors: Tensor, batched: bool) -> Tensor:
        """J v, (k, B, T, C), by double backward: J^T u is linear in u, and its derivative along v is J v."""
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
            tangents = self.network.tangents(vectors)
            block = [tangents[name] for _, name in used]
            found: Tensor = torch.autograd.grad(gradients, seed, block, True, is_grads_batched=True)[0]
            return found
        each: list[Tensor] = []
        for vector in vectors:
            tangents = self.network.tangents(vector)
            each += torch.autograd.grad(gradients, seed, [tangents[name] for _, name in used], retain_graph=True)
        return torch.stack(each)

    def _batched(self, vectors: Tensor) -> Tensor:
        """J v, (k, B, T, C), of all vectors in one vmapped forward-mode run."""
        parameters = {name: p.detach() for name, p in self.network.parameters.items()}
        block = self.network.tangents(vectors)

        def outputs(values: dict[str, Tensor]) -> Tensor:
            return self.canonical(self.network.call(self.inputs, values))

        with torch.no_grad():
            found: Tensor = torch.func.vmap(lambda v: torch.func.jvp(outputs, (parameters,), (v,))[1])(block)
        return found


def rows(network: Network, canonical: Canonical, inputs: Inputs) -> Tensor:
    """J of each example, (B, T, C, P), by per-example gradients, which carry their own proof."""
    with torch.no_grad():
        f = canonical(network.call(inputs))
    found = f.new_empty(*f.shape, network.size)
    per_example = PerExample(network, canonical)
    for position, seeds in enumerate(position_seeds(unit_factor(f), f.shape[-1])):
        each = per_example.rows(inputs, network.names, seeds)
        found[:, position] = torch.cat([each[name] for name in network.names], -1).transpose(0, 1)
    return found


def agrees_with_backward(examples: Pass, mode: str, vectors: Tensor) -> bool:
    """Whether a mode's products agree with plain backward passes through a graph of their own.

    J v is right if u . (J v) = (J^T u) . v for each vector and a random u. A part of this u is a random combination of
    the products themselves, so that the sums do not cancel and an error of a percent shows in float32, too. J^T u of
    several seeds, or through the graph of a forward-mode run, is right if a random combination of the results is the
    gradient for the combined seeds.
    """
    generator = torch.Generator(device=vectors.device).manual_seed(0)
    tolerance = 1e-8 if vectors.dtype == torch.float64 else 1e-3
    pushed = examples.push(vectors, mode, tracked=True)
    coefficients = torch.empty_like(vectors[:, 0]).normal_(generator=generator)
    seeds = torch.empty_like(pushed).normal_(generator=generator)
    lengths = pushed.flatten(1).norm(dim=1)
    u = torch.einsum("k,k...->...", coefficients / lengths.clamp_min(1e-30), pushed) + seeds[0] / seeds[0].norm()
    plain = Pass(examples.network, examples.canonical, examples.inputs)
    pulled = plain.pull(u[None], "double")[0]
    for v, product, length in zip(vectors, pushed, lengths, strict=True):
        left, right = (product.double() * u).sum(), v.double() @ pulled.double()
        scale = torch.maximum(length.double() * u.norm(), right.abs())
        if not bool((left - right).abs() <= tolerance * scale):
            return False
    if mode not in BATCHED_BACKWARD_MODES and mode != "one_pass":
        return True
    each = examples.pull(seeds, mode)
    combined = plain.pull(torch.einsum("k,k...->...", coefficients, seeds)[None], "double")[0]
    limit = tolerance * ((coefficients.abs() @ each.abs()).max() + torch.finfo(each.dtype).tiny)
    return bool(((coefficients @ each - combined).abs() <= limit).all())
