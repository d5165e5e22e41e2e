"""Prediction on data of any size: split into parts that fit the memory budget, and join the outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from lapis.batches import (
    DEFAULT_BATCH_SIZE,
    Inputs,
    as_inputs,
    batch_length,
    check_finite,
    describe,
    naming,
    take,
    tensors_in,
)
from lapis.errors import DataError
from lapis.network import Network
from lapis.predictions import Latent, join_latents
from lapis.progress import track

if TYPE_CHECKING:
    from lapis.posteriors.posterior import LatentKind, Posterior

SMALL = 256
"""Up to this many examples are predicted together, without measuring their memory."""

COPIES = 8
"""Peak memory of a part, in multiples of its graph: outputs, tangents, gradients, and results computed from them."""


def latent_of_parts(
    posterior: Posterior,
    x: Any,
    kind: LatentKind,
    samples: int | None,
    generator: torch.Generator | None,
    progress: bool | None,
) -> Latent:
    """The outputs' distribution at `x`, computed part by part, with the same drawn networks for every part."""
    latents: list[Latent] = []
    state = None if generator is None else generator.get_state()
    for where, part in _parts(posterior, x, kind, progress):
        if latents and generator is not None and state is not None and kind == "sampled":
            generator.set_state(state)
        with naming(where) if where else nullcontext():
            latents.append(posterior.latent(part, kind, samples, generator))
    if not latents:
        raise _nothing(posterior.facts.signature, "no batches")
    return latents[0] if len(latents) == 1 else join_latents(latents)


def _parts(posterior: Posterior, x: Any, kind: LatentKind, progress: bool | None) -> Iterator[tuple[str, Inputs]]:
    """Checked inputs in parts that fit the memory budget, each with the batch that it is of, if there are several."""
    network, signature, memory_budget = posterior.network, posterior.facts.signature, posterior.facts.memory_budget
    if isinstance(x, Dataset):
        x = DataLoader(x, batch_size=DEFAULT_BATCH_SIZE, generator=torch.Generator())
    if not isinstance(x, (DataLoader, Iterator)):
        inputs = check_inputs(x, network, signature)
        length = batch_length(inputs)
        step = length if kind == "joint" else _part_length(network, inputs, memory_budget)
        total = -(-length // step)
        for part in _split(inputs, step) if total == 1 else track(_split(inputs, step), "prediction", total, progress):
            yield "", part
        return
    if kind == "joint":
        raise DataError(
            "The covariance between all examples takes them at once",
            expected="inputs in one piece for joint=True",
            got=type(x).__name__,
            do="pass one batch of inputs, or leave joint out",
        )
    batches = len(x) if isinstance(x, DataLoader) and hasattr(x.dataset, "__len__") else None
    for index, item in enumerate(track(x, "prediction", batches, progress)):
        with naming(f"batch {index}"):
            inputs = check_inputs(_inputs_of(item), network, signature)
            step = _part_length(network, inputs, memory_budget)
        for part in _split(inputs, step):
            yield f"batch {index}", part


def _inputs_of(item: Any) -> Any:
    """The inputs of a loader's batch, which may be (inputs, targets), (inputs,) or inputs."""
    return item[0] if isinstance(item, (tuple, list)) and len(item) in (1, 2) else item


def _split(inputs: Inputs, step: int) -> Iterator[Inputs]:
    length = batch_length(inputs)
    if length <= step:
        yield inputs
        return
    for start in range(0, length, step):
        yield take(inputs, start, min(start + step, length))


def _part_length(network: Network, inputs: Inputs, memory_budget: int) -> int:
    """How many examples fit the memory budget, estimated from the graph of one example."""
    length = batch_length(inputs)
    if length <= SMALL:
        return length
    with network.prepared():
        output, held = network.traced(take(inputs, 0, 1))
    return max(1, min(length, memory_budget // (COPIES * max(1, sum(held) + output.nbytes))))


def check_inputs(inputs: Any, network: Network, signature: str) -> Inputs:
    """Inputs on the network's device; DataError if they are empty, not finite, or of another floating dtype."""
    ready = as_inputs(inputs, network.dtype, network.device)
    if not tensors_in(ready) or batch_length(ready) == 0:
        raise _nothing(signature, describe(ready))
    for tensor in tensors_in(ready):
        if tensor.is_floating_point() and tensor.dtype != network.dtype:
            raise DataError(
                "The inputs have another dtype than the network",
                expected=f"{network.dtype} (the fit saw {signature})",
                got=describe(ready),
                do=f"convert the inputs with .to({network.dtype})",
            )
    check_finite(ready, "this batch")
    return ready


def _nothing(signature: str, got: str) -> DataError:
    return DataError(
        "There is nothing to predict", expected=f"inputs like {signature}", got=got, do="pass some examples"
    )
