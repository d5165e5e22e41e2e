"""Outputs of drawn networks: of one after another, or of many small ones in one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from lapis.batches import Inputs, all_finite
from lapis.curvature.outputs import check_outputs
from lapis.curvature.products.differentiation import DERIVATIVE_ERRORS, differentiable
from lapis.curvature.recording.pooling import QuickPooling
from lapis.network import Network
from lapis.posteriors.predicting.head import find_ending
from lapis.proofs import close

Canonical = Callable[[Tensor], Tensor]

SMALL_NETWORK, SMALL_DRAWS, SMALL_RUN = 2**16, 16 * 2**20, 4 * 2**20
"""Weights of a network that is called small, bytes of all its draws, and of what a layer puts out in one run."""


def one_by_one(
    network: Network,
    canonical: Canonical,
    width: int,
    draws: Callable[[Inputs], Iterable[Mapping[str, Tensor]]],
    inputs: Inputs,
) -> tuple[Tensor, torch.Size]:
    """Outputs (S, B, T, C) of networks with the given parameters, one by one, and the raw output's shape.

    `draws` is told what all of them will be given: the inputs, or what reaches the layers that differ.
    """
    outputs: list[Tensor] = []
    pooling = QuickPooling(network.proofs)
    with network.prepared():
        with pooling:
            ending = find_ending(network, inputs)
        with torch.no_grad():
            for parameters in draws(inputs if ending is None else ending.inputs):
                listening = pooling if pooling.used or not outputs else nullcontext()
                with network.replaced(parameters), listening:
                    raw = network.call(inputs) if ending is None else ending.call()
                outputs.append(canonical(raw))
                check_outputs(outputs[-1], width)
    return torch.stack(outputs), raw.shape


def are_small(network: Network, count: int) -> bool:
    """Whether `together` is worth a try. Convolutions take longer with many weights in one run, and hooks on layers are
    to see tensors as they know them.
    """
    if count == 1 or network.size > SMALL_NETWORK or count * network.size * network.dtype.itemsize > SMALL_DRAWS:
        return False
    modules = list(network.module.modules())
    return not any(isinstance(m, _ConvNd) or m._forward_hooks or m._forward_pre_hooks for m in modules)


def together(
    network: Network, canonical: Canonical, width: int, weights: Tensor, inputs: Inputs
) -> tuple[Tensor, torch.Size]:
    """The same for networks with weights (S, P), as many of them in one run as are small together.

    The last one is run alone, too. Where the two differ, or torch cannot, all are run one by one.
    """
    found = _together(network, canonical, weights, inputs)
    if found is not None and found[0].shape[-1] == width and all_finite(found[0]):
        return found
    return one_by_one(network, canonical, width, lambda _: map(network.unflatten, weights), inputs)


def _together(
    network: Network, canonical: Canonical, weights: Tensor, inputs: Inputs
) -> tuple[Tensor, torch.Size] | None:
    def outputs(vector: Tensor) -> Tensor:
        return canonical(network.call(inputs, network.unflatten(vector)))

    with network.prepared(), differentiable():
        try:
            alone, held = network.traced(inputs, network.unflatten(weights[-1].clone().requires_grad_()))
            runs = math.ceil(len(weights) * max(held, default=alone.nbytes) / SMALL_RUN)
            with torch.no_grad():
                values = torch.cat([torch.func.vmap(outputs)(some) for some in weights.tensor_split(runs)])
                same = close(canonical(alone), values[-1])
        except DERIVATIVE_ERRORS:
            return None
    return (values, alone.shape) if same else None
