"""Outputs of drawn networks: run one by one, or many small ones together.

Shortcuts: small networks run together under vmap; large ones run only the part that differs between draws (`head`),
without forming drawn matrices (`drawn_network`), and with max pooling by shifted views. The results of shortcuts are
compared with a network drawn without them before they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from lapis.batches import Inputs, all_finite, batch_length, describe, map_tensors
from lapis.curvature.outputs import check_outputs
from lapis.curvature.products.differentiation import DERIVATIVE_ERRORS, differentiable
from lapis.curvature.recording.pooling import QuickPooling
from lapis.network import Network
from lapis.posteriors.predicting.head import find_head
from lapis.predictions import LatentSamples
from lapis.proofs import close

if TYPE_CHECKING:
    from lapis.posteriors.over_weights import WeightPosterior

Canonical = Callable[[Tensor], Tensor]

SHORTCUTS = "networks drawn by shortcuts"
"""Name in `Network.proofs`."""

COMPARED_EXAMPLES = 4
"""First examples, and last ones, on which networks drawn by shortcuts are compared with the same drawn plainly."""

SMALL_NETWORK, SMALL_DRAWS, SMALL_RUN = 2**16, 16 * 2**20, 4 * 2**20
"""Limits for running networks together: weights, bytes of all draws, and bytes of one layer's outputs in a run."""


def drawn_outputs(
    posterior: WeightPosterior, inputs: Inputs, samples: int, generator: torch.Generator
) -> LatentSamples:
    """Outputs of `samples` networks drawn from the posterior; the draws are those of `posterior.sample`."""
    network, canonical, width = posterior.network, posterior.likelihood.canonical, posterior.n_outputs
    if are_small(network, samples):
        values, shape = together(network, canonical, width, posterior.sample(samples, generator=generator), inputs)
        return LatentSamples(values, raw_shape=tuple(shape))
    state = generator.get_state()

    def plain(source: torch.Generator) -> Iterable[Mapping[str, Tensor]]:
        return (network.unflatten(weights) for weights in posterior.draws(samples, source))

    def agrees() -> bool:
        """Compare the first two networks, on the first and last examples, with the same draws made plainly."""
        source = torch.Generator(generator.device)
        source.set_state(state)
        length = batch_length(inputs)
        every = torch.arange(length)
        ends = torch.cat([every[:COMPARED_EXAMPLES], every[COMPARED_EXAMPLES:][-COMPARED_EXAMPLES:]])
        few = map_tensors(lambda tensor: tensor[ends.to(tensor.device)], inputs)
        with network.prepared(), torch.no_grad():
            expected = [canonical(network.call(few, each)) for each in islice(plain(source), 2)]
        return close(torch.stack(expected), values[: len(expected), ends])

    if SHORTCUTS not in network.proofs.refused:
        values, shape = _by_shortcuts(posterior, inputs, samples, generator)
        if network.proofs.holds(SHORTCUTS, describe(inputs), agrees):
            return LatentSamples(values, raw_shape=tuple(shape))
        generator.set_state(state)
    values, shape = one_by_one(network, canonical, width, plain(generator), inputs, samples)
    return LatentSamples(values, raw_shape=tuple(shape))


def one_by_one(
    network: Network,
    canonical: Canonical,
    width: int,
    draws: Iterable[Mapping[str, Tensor]],
    inputs: Inputs,
    samples: int,
) -> tuple[Tensor, torch.Size]:
    """Outputs (S, B, T, C) of `samples` networks with the given parameters, and the raw output's shape."""
    outputs = Outputs(canonical, width, samples)
    with network.prepared(), torch.no_grad():
        for parameters in draws:
            with network.replaced(parameters):
                raw = network.call(inputs)
            outputs.add(raw)
    return outputs.values, raw.shape


class Outputs:
    """Checked outputs of `samples` networks on the same inputs, (S, B, T, C), in one tensor made for the first."""

    def __init__(self, canonical: Canonical, width: int, samples: int) -> None:
        self.canonical, self.width, self.samples = canonical, width, samples
        self.values = torch.empty(0)
        self.count = 0

    def add(self, raw: Tensor) -> None:
        """Take over the next network's raw output."""
        f = self.canonical(raw)
        check_outputs(f, self.width)
        if not self.count:
            self.values = f.new_empty(self.samples, *f.shape)
        self.values[self.count] = f
        self.count += 1


def _by_shortcuts(
    posterior: WeightPosterior, inputs: Inputs, samples: int, generator: torch.Generator
) -> tuple[Tensor, torch.Size]:
    """As `one_by_one`, but layers before the head run once, and wide drawn matrices are not formed."""
    network = posterior.network
    outputs = Outputs(posterior.likelihood.canonical, posterior.n_outputs, samples)
    pooling = QuickPooling(network.proofs)
    with network.prepared():
        with pooling:
            head = find_head(network, inputs)
        with torch.no_grad():
            draws = posterior.quick_draws(samples, generator, inputs if head is None else head.inputs)
            if draws is None:
                draws = (network.unflatten(weights) for weights in posterior.draws(samples, generator))
            for parameters in draws:
                listening = pooling if pooling.used or not outputs.count else nullcontext()
                with network.replaced(parameters), listening:
                    raw = network.call(inputs) if head is None else head.call()
                outputs.add(raw)
    return outputs.values, raw.shape


def are_small(network: Network, samples: int) -> bool:
    """Whether to try `together`.

    Not with convolutions, which are slower under vmap, nor with hooks on layers, which expect ordinary tensors.
    """
    entries = sum(p.numel() for p in network.parameters.values())  # draws of single weights fill whole parameters
    if samples == 1 or entries > SMALL_NETWORK or samples * entries * network.dtype.itemsize > SMALL_DRAWS:
        return False
    modules = list(network.module.modules())
    return not any(isinstance(m, _ConvNd) or m._forward_hooks or m._forward_pre_hooks for m in modules)


def together(
    network: Network, canonical: Canonical, width: int, weights: Tensor, inputs: Inputs
) -> tuple[Tensor, torch.Size]:
    """As `one_by_one`, for weights (S, P), with as many networks in one run as SMALL_RUN allows.

    The last network also runs alone. If its outputs differ, or torch cannot vmap the network, all run one by one.
    """
    result = _together(network, canonical, weights, inputs)
    if result is not None and result[0].shape[-1] == (width or result[0].shape[-1]) and all_finite(result[0]):
        return result
    return one_by_one(network, canonical, width, map(network.unflatten, weights), inputs, len(weights))


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
                values = torch.cat([torch.func.vmap(outputs)(group) for group in weights.tensor_split(runs)])
                same = close(canonical(alone), values[-1])
        except DERIVATIVE_ERRORS:
            return None
    return (values, alone.shape) if same else None
