"""Training data: how many there are, how far the targets spread, and a pass over them in random order."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lapis.batches import Batch, as_inputs, as_tensor, batch_length, batches, digest, map_tensors, take, whole_pair
from lapis.errors import DataError, ModelError
from lapis.network import Network


@dataclass(frozen=True)
class Survey:
    """Facts of the data that the defaults of training follow from."""

    n_data: int
    n_batches: int
    """Optimiser steps in an epoch."""
    example: Any
    """A few inputs."""
    spread: float
    """Standard deviation of the targets, each output about its own mean; 1 where there is none."""
    digest: str = ""
    """Fingerprint of the data, if it was asked for."""


_global_generator = threading.RLock()


@contextmanager
def own_randomness(network: Network, seed: int) -> Iterator[None]:
    """Random numbers that depend on the seed only; the global generators are left as they were.

    Threads take turns, since there is one global generator for all of them.
    """
    with _global_generator, torch.random.fork_rng(devices=[network.device] if network.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def shuffled(data: Any, network: Network, batch_size: int) -> Iterator[Batch]:
    """One pass. Pairs and Datasets in an order drawn from torch's global generator, other forms in their own order."""
    pair = whole_pair(data)
    if pair is not None:
        inputs, targets = as_inputs(pair[0], network.dtype, network.device), as_tensor(pair[1], "targets")
        order = torch.randperm(batch_length(inputs))
        parts = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        data = ((map_tensors(lambda tensor, part=part: tensor[part], inputs), targets[part]) for part in parts)  # type: ignore[misc]
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=batch_size, shuffle=True)
    return batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)[0]


def survey(data: Any, network: Network, batch_size: int, *, fingerprint: bool = False) -> Survey:
    """One pass over the data; those that can be read once only are refused."""
    if isinstance(data, Iterator):
        raise DataError(
            "Training reads the data many times",
            expected="a pair, a Dataset, a DataLoader or a list of batches",
            got=f"{type(data).__name__}, which is used up after one pass",
            do="wrap it in a list or a Dataset",
        )
    for name, parameter in network.module.named_parameters():
        if parameter.is_inference():
            raise ModelError(
                f"The network's {name!r} cannot be trained",
                expected="weights made outside torch.inference_mode()",
                got="some made inside",
                do="train copy.deepcopy(model), made outside",
            )
    count, steps, measured, total, example = 0, 0, 0, 0, None
    centre, sums = torch.zeros(()), torch.zeros(2, 0)
    for batch in batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)[0]:
        columns = batch.targets.detach().reshape(len(batch), -1).double()
        if example is None:
            example = take(batch.inputs, 0, 8)
            centre, sums = columns.mean(0), columns.new_zeros(2, columns.shape[1])
        if columns.shape[1] == sums.shape[1]:  # sequences may have other lengths in other batches
            deviation = columns - centre
            sums += torch.stack([deviation.sum(0), deviation.square().sum(0)])
            measured += len(batch)
        count, steps = count + len(batch), steps + 1
        if fingerprint:
            total = (total + digest(batch.inputs, batch.targets)) % 2**64
    return Survey(count, steps, example, _spread(sums / measured, centre), f"{total:016x}" if fingerprint else "")


def _spread(moments: Tensor, centre: Tensor) -> float:
    """Root of the columns' mean variance, from their first two moments (2, K) about `centre` (K,)."""
    spread = float((moments[1] - moments[0].square()).mean().clamp(min=0).sqrt())
    rounding = 1e-9 * float(centre.abs().mean())
    return spread if math.isfinite(spread) and spread > rounding else 1.0
