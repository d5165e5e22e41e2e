"""A pool of examples without labels, in any form that `predict` takes: read in parts, and examples picked by index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate

from lapis.batches import Inputs, as_inputs, batch_length, map_tensors, take, tensors_in
from lapis.errors import DataError
from lapis.network import Network

PART = 2_048
"""Examples that are predicted together, and of which only the scores are kept."""


def parts(pool: Any, network: Network) -> Iterator[Inputs]:
    """The pool's inputs in order, in parts, on the network's device."""
    if isinstance(pool, Dataset):
        pool = DataLoader(pool, batch_size=PART, generator=torch.Generator())
    if isinstance(pool, DataLoader):
        _check_order(pool)
        for item in pool:
            yield as_inputs(_inputs(item), network.dtype, network.device)
        return
    if isinstance(pool, Iterator):
        raise DataError(
            "The pool can be read only once",
            expected="inputs, a Dataset, or a DataLoader in a fixed order",
            got=f"an iterator ({type(pool).__name__})",
            do="pass what it was made from",
        )
    inputs = as_inputs(pool, network.dtype, network.device)
    for start in range(0, batch_length(inputs), PART):
        yield take(inputs, start, start + PART)


def pick(pool: Any, indices: Sequence[int], network: Network) -> Inputs:
    """The inputs with these indices, in this order, as one batch."""
    if isinstance(pool, DataLoader):
        _check_order(pool)
        wanted = {index: place for place, index in enumerate(indices)}
        found: list[tuple[int, Inputs]] = []
        start = 0
        for item in pool:
            inputs = as_inputs(_inputs(item), network.dtype, network.device)
            length = batch_length(inputs)
            found += [
                (wanted[i], take(inputs, i - start, i - start + 1)) for i in range(start, start + length) if i in wanted
            ]
            start += length
        ordered = [inputs for _, inputs in sorted(found, key=lambda pair: pair[0])]
        return _joined(ordered)
    if isinstance(pool, Dataset):
        return as_inputs(_inputs(default_collate([pool[i] for i in indices])), network.dtype, network.device)
    rows = torch.as_tensor(list(indices), device=network.device)
    return map_tensors(lambda tensor: tensor[rows], as_inputs(pool, network.dtype, network.device))


def _joined(pieces: Sequence[Inputs]) -> Inputs:
    """Inputs of some examples each, as one batch."""
    columns = zip(*(tensors_in(piece) for piece in pieces), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return map_tensors(lambda _: next(joined), pieces[0])


def _inputs(item: Any) -> Any:
    """The inputs of a batch, which may be (inputs, targets), (inputs,) or inputs."""
    return item[0] if isinstance(item, (tuple, list)) and len(item) in (1, 2) else item


def _check_order(loader: DataLoader[Any]) -> None:
    if isinstance(loader.sampler, RandomSampler):
        raise DataError(
            "The pool comes in another order each time, and indices into it mean nothing",
            expected="a loader with shuffle=False",
            got="a loader that shuffles",
            do="pass its data set, or a loader in a fixed order",
        )
