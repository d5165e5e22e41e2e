"""Training data: how many there are, and a pass over them in random order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lapis.batches import Batch, as_inputs, batch_length, batches, is_pair, map_tensors, take
from lapis.errors import DataError
from lapis.network import Network


def shuffled(data: Any, network: Network, batch_size: int) -> Iterator[Batch]:
    """One pass. Pairs and Datasets in an order drawn from torch's global generator, other forms in their own order."""
    if is_pair(data):
        inputs, targets = as_inputs(data[0], network.dtype, network.device), torch.as_tensor(data[1])
        order = torch.randperm(batch_length(inputs))
        parts = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        data = ((map_tensors(lambda tensor, part=part: tensor[part], inputs), targets[part]) for part in parts)  # type: ignore[misc]
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=batch_size, shuffle=True)
    return batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)[0]


def survey(data: Any, network: Network, batch_size: int) -> tuple[int, Any]:
    """The number of examples, and a few of them; data that can be read once only are refused."""
    if isinstance(data, Iterator):
        raise DataError(
            "Training reads the data many times",
            expected="a pair, a Dataset, a DataLoader or a list of batches",
            got=f"{type(data).__name__}, which is used up after one pass",
            do="wrap it in a list or a Dataset",
        )
    count, example = 0, None
    for batch in batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)[0]:
        example = take(batch.inputs, 0, 8) if example is None else example
        count += len(batch)
    return count, example
