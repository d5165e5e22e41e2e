"""Dropout masks as weights: zeroing an input of a linear layer or convolution is zeroing its column of the weight.

A network drawn by dropout is then a network with other weights, W diag(mask) / (1 - p). Which weight takes a mask is
read off the operators of a forward pass, and the result is compared with the masked network before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapis.batches import Inputs, batch_length
from lapis.errors import LapisError, ModelError
from lapis.network import Network
from lapis.posteriors.predicting.masks import MakeMask, MaskPlan, Masks, aten, bernoulli, masked, of_one_example
from lapis.proofs import close
from lapis.schema import wrong

CHECKED = (1, 2)
"""Seeds of the draws whose outputs are compared."""

EXAMPLES, SIDE = 3, 32
"""Of plausible inputs: their number, and the length of an image's sides."""


@dataclass(frozen=True)
class MaskedWeight:
    """A parameter whose inputs are masked."""

    parameter: str
    number: int
    """Of the mask in the forward pass."""
    shape: tuple[int, ...]
    """Of the mask, for one example."""
    keep: float
    """Probability of a one."""
    groups: int = 1
    """Of a convolution."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # JSON turns tuples into lists

    def check(self, network: Network) -> None:
        """FileError unless the mask fits a weight of the network."""
        inputs = network.shapes.get(self.parameter, ())[1:2]
        if self.number < 0 or not 0 < self.keep <= 1 or [n * self.groups for n in inputs] != [math.prod(self.shape)]:
            raise wrong("mask", f"one for the inputs of a weight, {self.parameter!r}", str(self))

    def factor(self, seed: int, weight: Tensor) -> Tensor:
        """mask / keep, in a shape that multiplies the weight (outputs, inputs / groups, ...)."""
        rows = bernoulli(seed, self.number, self.shape, self.keep).reshape(self.groups, 1, -1) / self.keep
        columns = rows.expand(-1, len(weight) // self.groups, -1).reshape(len(weight), -1)
        return columns.to(weight).reshape(*columns.shape, *[1] * (weight.dim() - 2))


class Tracing(Masks):  # type: ignore[no-untyped-call]
    """Notes which products with which weights take a masked tensor."""

    def __init__(self, make: MakeMask, network: Network) -> None:
        super().__init__(make)
        self.products: list[tuple[int, str, int]] = []
        """The number of a mask, the parameter that multiplies what it masks, and the groups of a convolution."""
        self._names = {_address(parameter): name for name, parameter in network.parameters.items()}
        self._masked: dict[int, int] = {}
        """By address, of masks and of tensors multiplied by them: the number of the mask."""
        self._kept: list[Tensor] = []
        """All tensors of the pass, so that no address is used twice."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = len(self.drawn)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        output = result[0] if isinstance(result, tuple) else result
        if not isinstance(output, Tensor):
            return result
        self._kept.append(output)
        if len(self.drawn) > before:
            self._masked[_address(output)] = before
        elif func in (aten.mul.Tensor, aten.mul_.Tensor) and isinstance(args[1], Tensor):
            if _address(args[1]) in self._masked:
                self._masked[_address(output)] = self._masked[_address(args[1])]
        elif func in (aten.addmm.default, aten.mm.default):
            self._note(args[-2], args[-1], 1)
        elif func is aten.convolution.default and not args[6]:
            self._note(args[0], args[1], args[8])
        return result

    def _note(self, taken: Tensor, weight: Tensor, groups: int) -> None:
        number, name = self._masked.get(_address(taken)), self._names.get(_address(weight))
        if number is not None and name is not None:
            self.products.append((number, name, groups))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def masked_weights(network: Network, plan: MaskPlan, inputs: Inputs) -> tuple[MaskedWeight, ...]:
    """The weights that the masks multiply; ModelError if a mask is not one of weights."""
    traces: list[Tracing] = []

    def trace(make: MakeMask) -> Masks:
        traces.append(Tracing(make, network))
        return traces[-1]

    masked(network, inputs, plan, CHECKED[:1], mode=trace)
    (traced,) = traces
    found = []
    for number, name, groups in traced.products:
        (whole, keep), layout, weight = traced.drawn[number], plan.layouts[number], network.parameters[name]
        if layout is not None:
            shape = of_one_example(whole, layout[0], batch_length(inputs))
            if math.prod(shape) == weight.shape[1] * groups:
                found.append(MaskedWeight(name, number, shape, keep, groups))
    numbers, names = {each.number for each in found}, {each.parameter for each in found}
    missing = [number for number in range(len(plan.layouts)) if number not in numbers]
    if missing:
        raise _no_weights(f"mask {missing[0]} of shape {tuple(traced.drawn[missing[0]][0])}, which does not")
    if len(names) < len(found) or not all(_agrees(network, plan, inputs, found, seed) for seed in CHECKED):
        raise _no_weights("masks or weights that are also used otherwise")
    return tuple(found)


def draw_weights(network: Network, found: Sequence[MaskedWeight], seed: int) -> Tensor:
    """The weights (P,) of the network drawn by `seed`."""
    vector = network.flat()
    parameters = network.unflatten(vector)  # views
    for each in found:
        weight = parameters[each.parameter]
        weight.mul_(each.factor(seed, weight))
    return vector


def _agrees(network: Network, plan: MaskPlan, inputs: Inputs, found: Sequence[MaskedWeight], seed: int) -> bool:
    weights = network.unflatten(draw_weights(network, found, seed))
    with network.prepared(), torch.no_grad():
        expected = network.call(inputs, weights)
    return close(expected, masked(network, inputs, plan, [seed]))


def plausible_inputs(network: Network) -> Inputs | None:
    """A few inputs of the shape that the network's first layer takes, if it is linear or a convolution; else None."""
    first = next(layer for layer in network.module.modules() if next(layer.parameters(recurse=False), None) is not None)
    if isinstance(first, nn.Linear):
        shape: tuple[int, ...] = (first.in_features,)
    elif isinstance(first, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        shape = (first.in_channels, *[SIDE] * len(first.kernel_size))
    else:
        return None
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, *shape, generator=source).to(network.device, network.dtype)
    try:
        with network.prepared(), torch.no_grad():
            network.call(inputs)
    except LapisError:
        return None
    return inputs


def _no_weights(got: str) -> ModelError:
    return ModelError(
        "The networks drawn by dropout are not networks with other weights",
        expected="dropout straight before linear layers or convolutions, with one bit an input feature or channel",
        got=got,
        do="use predict, which needs no weights, or dropout layers in such places (nn.Dropout2d before nn.Conv2d)",
    )
