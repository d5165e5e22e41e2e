"""Prediction on data of any size: split into parts that fit the memory budget, and join the outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from lapis.batches import (
    DEFAULT_BATCH_SIZE,
    LABELS,
    Inputs,
    batch_length,
    describe,
    inputs_and_targets,
    naming,
    stream_length,
    take,
    tensors_in,
)
from lapis.errors import DataError, LapisError, ModelError
from lapis.network.inputs import check_inputs, nothing
from lapis.posteriors.predicting.linearised import check_covariances
from lapis.predictions import GatheredLatent, Latent, LatentGaussian, LatentMixture, LatentSamples
from lapis.progress import track

if TYPE_CHECKING:
    from lapis.posteriors.posterior import LatentKind, Posterior

COPIES = 8
"""Peak memory of a part, in multiples of its graph: outputs, tangents, gradients, and results computed from them."""

RESULT_COPIES = 4
"""Copies of a part's (co)variances, or of the outputs of its drawn networks, while they are computed."""

DRAWN_NETWORKS = 20
"""Default number of networks drawn for a sampled prediction."""


def latent_of_parts(
    posterior: Posterior,
    x: Any,
    kind: LatentKind,
    samples: int | None,
    generator: torch.Generator | None,
    progress: bool | None,
) -> Latent:
    """The outputs' distribution at `x`, computed part by part, with the same drawn networks for every part."""
    gathered, begun = GatheredLatent(_expected(x)), False
    state = None if generator is None else generator.get_state()
    for where, part in _parts(posterior, x, kind, samples, progress):
        if begun and generator is not None and state is not None and kind == "sampled":
            generator.set_state(state)
        with naming(where) if where else nullcontext():
            latent = _checked(posterior.latent(part, kind, samples, generator), part, kind)
            if not posterior.n_outputs:  # made without data: no outputs were checked before
                posterior.likelihood.check_outputs(latent.mean)
            gathered.add(latent)
            del latent  # before the next one is made
        begun = True
    if not begun:
        raise nothing(posterior.facts.signature, "no batches")
    return gathered.result()


def _expected(x: Any) -> int:
    """How many examples there are at most, as far as that is known beforehand; else 0."""
    if isinstance(x, DataLoader):
        return (stream_length(x) or 0) * (x.batch_size or 0)
    tensors = tensors_in(x)
    if tensors and tensors[0].dim():
        return len(tensors[0])
    return len(x) if isinstance(x, Dataset) and isinstance(x, Sized) else 0


def _checked(latent: Latent, inputs: Inputs, kind: LatentKind) -> Latent:
    """A latent distribution of these inputs, as was asked for: classes from outside may give anything."""
    length = batch_length(inputs)
    known = isinstance(latent, (LatentGaussian, LatentSamples, LatentMixture))
    if not known or latent.shape[0] != length or (kind == "joint") != latent.is_joint:
        raise ModelError(
            "The posterior's `latent` does not give what it was asked for",
            expected=f"a latent distribution of the outputs of {length} examples, of kind {kind!r}",
            got=type(latent).__name__ + (f" of shape {tuple(latent.shape)}" if known else ""),
            do="return a LatentGaussian, LatentSamples or LatentMixture; joint ones for kind 'joint' only",
        )
    return latent


def _parts(
    posterior: Posterior, x: Any, kind: LatentKind, samples: int | None, progress: bool | None
) -> Iterator[tuple[str, Inputs]]:
    """Checked inputs in parts that fit the memory budget, each with the batch that it is of, if there are several."""
    network, signature, expected = posterior.network, posterior.facts.signature, _expected(x)
    if isinstance(x, Dataset):
        x = DataLoader(x, batch_size=DEFAULT_BATCH_SIZE, generator=torch.Generator())
    if not isinstance(x, (DataLoader, Iterator)):
        inputs = check_inputs(_without_labels(x, signature), network, signature)
        length = batch_length(inputs)
        step = length if kind == "joint" else _part_length(posterior, inputs, kind, samples, expected)
        if step >= length:
            yield "", inputs
            return
        starts = range(0, length, step)
        for start in track(starts, "prediction", len(starts), progress):
            stop = min(start + step, length)
            yield f"examples {start} to {stop - 1}", take(inputs, start, stop)
        return
    if kind == "joint":
        raise DataError(
            "The covariance between all examples takes them at once",
            expected="inputs in one piece for joint=True",
            got=type(x).__name__,
            do="pass one batch of inputs, or leave joint out",
        )
    for index, item in enumerate(track(x, "prediction", stream_length(x), progress)):
        with naming(f"batch {index}"):
            inputs = check_inputs(_inputs_of(item, signature), network, signature)
            step = _part_length(posterior, inputs, kind, samples, expected)
        for start in range(0, batch_length(inputs), step):
            yield f"batch {index}", take(inputs, start, start + step)


def _inputs_of(item: Any, signature: str) -> Any:
    """The inputs of a batch, which may also hold targets, or be (inputs,)."""
    if isinstance(item, Mapping):
        return _without_labels(item, signature)
    if isinstance(item, (tuple, list)) and len(item) == 1:
        return item[0]
    pair = inputs_and_targets(item)
    return item if pair is None else pair[0]


def _without_labels(x: Any, signature: str) -> Any:
    """A dictionary of inputs without targets, unless the fit saw inputs of that name."""
    pair = inputs_and_targets(x) if isinstance(x, Mapping) else None
    return x if pair is None or any(f"{name}: " in signature for name in LABELS) else pair[0]


def _part_length(posterior: Posterior, inputs: Inputs, kind: LatentKind, samples: int | None, expected: int) -> int:
    """How many examples fit the memory budget, in half of it, by the graph of one example and its results.

    MemoryBudgetError if the covariances of all examples, of which some `expected` number will come, do not.
    """
    network = posterior.network
    example = take(inputs, 0, 1)
    key = describe(example)
    if key not in network.example_bytes:
        try:
            with network.prepared():
                output, held = network.traced(example)
        except LapisError:
            return batch_length(inputs)  # the prediction itself says what is wrong with the inputs
        network.example_bytes[key] = sum(held), output.nbytes
    graph, output_bytes = network.example_bytes[key]
    if kind == "full" and posterior.n_outputs:
        itemsize, outputs = network.dtype.itemsize, posterior.n_outputs
        positions = max(expected, batch_length(inputs)) * (output_bytes // (itemsize * outputs))
        check_covariances(positions, outputs, itemsize, posterior.facts.memory_budget)
    results = {"sampled": samples or DRAWN_NETWORKS, "full": posterior.n_outputs}.get(kind, 1) * output_bytes
    each = max(1, COPIES * (graph + output_bytes) + RESULT_COPIES * results)
    return max(1, min(batch_length(inputs), posterior.facts.memory_budget // (2 * each)))
