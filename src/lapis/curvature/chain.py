"""Chains: networks in which one function follows the other, such as multilayer perceptrons and plain convolution nets.

Many seeds go back along a chain together, by one operation a function: a product for a matrix, one convolution for all
seeds of all examples, one multiplication in place for elementwise functions, and through max pooling straight to the
places of the maxima, which are the same for every seed. That takes half the memory of sending them through autograd
together, and less time than sending them one by one. Whether a network is a chain is read off the graph of each batch.

Gradients are (M, B, ...), or example after example in memory: what holds them keeps the order in which they came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapis.curvature.layers import Call

ELEMENTWISE = frozenset(
    f"{name}Backward{in_place}"
    for name in (
        "Celu", "Elu", "Gelu", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu", "LogSigmoid", "Mish", "Relu",
        "Sigmoid", "Silu", "Sin", "Softplus", "Tanh",
    )
    for in_place in (0, 1)
)  # fmt: skip
"""Autograd's names for functions of one tensor, entry by entry; some have another name when they work in place."""

RESHAPES = frozenset(
    (
        "CloneBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2",
        "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
    )
)  # fmt: skip
"""For those that keep all entries in their order."""

LINEAR = frozenset(
    (
        "AdaptiveAvgPool2DBackward0", "AdaptiveAvgPool3DBackward0", "AvgPool2DBackward0", "AvgPool3DBackward0",
        "ConstantPadNdBackward0", "MeanBackward1",
    )
)  # fmt: skip
"""For cheap linear functions of one tensor, through which seeds go one by one."""

PRODUCTS = {"AddmmBackward0": 1, "MmBackward0": 0}
"""For matrix products, with the place of their left factor among what they took."""

POOLING = frozenset(("MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0"))
CONVOLUTION, BATCH_NORM = "ConvolutionBackward0", "NativeBatchNormBackward0"

Back = Callable[[Tensor], Tensor]
"""From the gradients at a function's output, (M, ...), to those at its input."""


@dataclass
class Chain:
    """From the outputs back to the first of the calls."""

    steps: list[int | Back]
    """Functions, and where a call's output is reached, its number."""
    by_example: bool
    """Whether the seeds of an example lie side by side: convolutions' products are made for each example."""

    @torch.no_grad()
    def send_back(self, seeds: Tensor) -> list[Tensor]:
        """Gradients of sum(seed * f) at the calls' outputs, in the calls' order. `seeds`: (M, B, ...)."""
        found: dict[int, Tensor] = {}
        g = seeds.transpose(0, 1).contiguous().transpose(0, 1) if self.by_example else seeds
        for step in self.steps:
            if isinstance(step, int):
                found[step] = g
            else:
                g = step(g)
        return [found[call] for call in sorted(found)]


@torch.no_grad()
def find_chain(f: Tensor, calls: Sequence[Call]) -> Chain | None:
    """The chain that ends in f (B, ...); None where the graph from the calls to f is none."""
    places = {call.edge.node: place for place, call in enumerate(calls)}
    if len(places) < len(calls):
        return None
    node: Any = f.grad_fn
    chain = Chain([], False)
    steps = chain.steps
    while node is not None and node.next_functions:
        name = node.name()
        chain.by_example |= name == CONVOLUTION
        if node in places:
            steps.append(places.pop(node))
            if not places:
                return chain
        others = list(node.next_functions)
        before, _ = others.pop(PRODUCTS.get(name, 0))
        if before is None or not all(_is_leaf(other) for other, _ in others):
            return None
        if name in ELEMENTWISE or (name == BATCH_NORM and not node._saved_training):
            _add_slope(steps, node)
        elif name in PRODUCTS and getattr(node, "_saved_alpha", 1) == 1:
            steps.append(partial(_product, node._saved_mat2.mT))
        elif name == CONVOLUTION:
            steps.append(Convolution(node))
        elif name in POOLING:
            steps.append(MaxPooling(node))
        elif name in LINEAR:
            steps.append(partial(_one_by_one, node))
        elif name not in RESHAPES:
            return None
        node = before
    return None


def _together(g: Tensor, function: Back) -> Tensor:
    """A function of all seeds and examples along one axis, in the order in which they lie in memory."""
    turned = g.stride(0) < g.stride(1)
    if turned:
        g = g.transpose(0, 1)
    found = function(g.flatten(0, 1))
    found = found.reshape(*g.shape[:2], *found.shape[1:])
    return found.transpose(0, 1) if turned else found


def _product(matrix: Tensor, g: Tensor) -> Tensor:
    """Back through x @ matrix^T."""
    return _together(g.reshape(len(g), -1, matrix.shape[0]), lambda rows: rows @ matrix)


def _one_by_one(node: Any, g: Tensor) -> Tensor:
    """Back through any function of one tensor, seed by seed."""
    shape = _shape(node)
    return torch.stack([node(one.reshape(shape)) for one in g], 1).transpose(0, 1)


@dataclass
class Slope:
    """Back through elementwise functions, by their derivative (B, ...)."""

    derivative: Tensor
    in_place: bool
    """Whether the gradients that come in are nobody else's."""

    def __call__(self, g: Tensor) -> Tensor:
        g = g.reshape(len(g), *self.derivative.shape)
        return g.mul_(self.derivative) if self.in_place else g * self.derivative


class MaxPooling:
    """Back through max pooling: each gradient goes to where its window's maximum was.

    An elementwise function before it needs to be asked about there only.
    """

    def __init__(self, node: Any) -> None:
        size, stride = node._saved_kernel_size, node._saved_stride or node._saved_kernel_size
        reach = [dilation * (length - 1) + 1 for length, dilation in zip(size, node._saved_dilation, strict=True)]
        self.axes = len(size)
        self.shape = node._saved_self.shape
        self.winners = node._saved_result1.flatten(-self.axes)
        self.overlapping = any(length > step for length, step in zip(reach, stride, strict=True))
        self.slope: Tensor | None = None

    def multiply(self, derivative: Tensor) -> None:
        """Go back through an elementwise function as well."""
        self.slope = derivative.reshape(self.shape).flatten(-self.axes).gather(-1, self.winners)

    def __call__(self, g: Tensor) -> Tensor:
        g = g.reshape(len(g), *self.winners.shape)
        if self.slope is not None:
            g = g * self.slope
        shape = (*self.shape[: -self.axes], self.shape[-self.axes :].numel())
        turned = g.stride(0) < g.stride(1)
        spread = g.new_zeros(shape[0], len(g), *shape[1:]).transpose(0, 1) if turned else g.new_zeros(len(g), *shape)
        index = self.winners.expand(g.shape)
        spread = spread.scatter_add_(-1, index, g) if self.overlapping else spread.scatter_(-1, index, g)
        return spread.reshape(len(g), *self.shape)


class Convolution:
    """Back through a convolution, or a transposed one."""

    def __init__(self, node: Any) -> None:
        self.node, self.shape = node, _shape(node)

    def __call__(self, g: Tensor) -> Tensor:
        return _together(g.reshape(len(g), *self.shape), self._images)

    def _images(self, g: Tensor) -> Tensor:
        node = self.node
        # its inputs count for gradients of weights only
        like = g.new_empty(()).expand(len(g), *node._saved_input.shape[1:])
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            g, like, node._saved_weight, None, node._saved_stride, node._saved_padding, node._saved_dilation,
            node._saved_transposed, node._saved_output_padding, node._saved_groups, (True, False, False),
        )  # fmt: skip
        return found[0]


def _add_slope(steps: list[int | Back], node: Any) -> None:
    """One more elementwise function; next to another, or to max pooling, it becomes part of that."""
    last = steps[-1] if steps else None
    if isinstance(last, Slope):
        last.derivative = _derivative(node, last.derivative)
    elif isinstance(last, MaxPooling) and last.slope is None:
        last.multiply(_derivative(node))
    else:
        steps.append(Slope(_derivative(node), in_place=last is not None and not isinstance(last, int)))


def _derivative(node: Any, outer: Tensor | None = None) -> Tensor:
    """Of an elementwise function, times that of what follows it."""
    if outer is None:
        like = node._input_metadata[0]
        outer = torch.ones((), dtype=like.dtype, device=like.device).expand(_shape(node))
    found = node(outer.reshape(_shape(node)))
    first: Tensor = found if isinstance(found, Tensor) else found[0]
    return first


def _shape(node: Any) -> torch.Size:
    """Of the output."""
    return torch.Size(node._input_metadata[0].shape)


def _is_leaf(node: Any) -> bool:
    """Whether no more than a transposition lies between a weight, or a constant, and its use."""
    if node is not None and node.name() == "TBackward0":
        ((node, _),) = node.next_functions
    return node is None or node.name() == "torch::autograd::AccumulateGrad"
