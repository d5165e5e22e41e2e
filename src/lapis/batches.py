"""Data of any usual form as a stream of (inputs, targets) batches, checked on the way in.

Inputs are a tensor, a tuple (passed as positional arguments) or a mapping (passed as keywords); the first axis of every
tensor counts examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lapis.errors import DataError

Inputs: TypeAlias = Any
"""A tensor, a tuple of inputs, or a mapping from names to inputs."""

DEFAULT_BATCH_SIZE = 256


@dataclass(frozen=True)
class Batch:
    """One batch: its inputs, its targets, and its place in the stream (for messages)."""

    inputs: Inputs
    targets: Tensor
    index: int

    def __len__(self) -> int:
        return batch_length(self.inputs)

    def split(self, size: int) -> Iterator[Batch]:
        """Parts of at most `size` examples, in order."""
        length = len(self)
        if length <= size:
            yield self
            return
        for start in range(0, length, size):
            stop = min(start + size, length)
            yield Batch(take(self.inputs, start, stop), self.targets[start:stop], self.index)


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """`inputs` with `function` applied to every tensor in it; everything else is kept."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {key: map_tensors(function, value) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(map_tensors(function, value) for value in inputs)
    return inputs


def tensors_in(inputs: Inputs) -> list[Tensor]:
    """Every tensor in `inputs`, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, inputs)
    return found


def take(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Examples start..stop of `inputs`."""
    return map_tensors(lambda tensor: tensor[start:stop], inputs)


def batch_length(inputs: Inputs) -> int:
    """The number of examples; every tensor must agree on it."""
    lengths = {tensor.shape[0] if tensor.dim() else -1 for tensor in tensors_in(inputs)}
    if len(lengths) != 1 or -1 in lengths:
        raise DataError(
            "The inputs do not share a batch axis",
            expected="tensors whose first axis counts the examples",
            got=describe(inputs),
            do="put the examples first in every input tensor",
        )
    return lengths.pop()


def describe(inputs: Inputs) -> str:
    """Shapes and dtypes, for messages."""
    if isinstance(inputs, Tensor):
        return f"{tuple(inputs.shape)} {str(inputs.dtype).removeprefix('torch.')}"
    if isinstance(inputs, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in inputs.items()) + "}"
    if isinstance(inputs, (tuple, list)):
        return "(" + ", ".join(describe(value) for value in inputs) + ")"
    return type(inputs).__name__


def as_inputs(inputs: Any, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Arrays become tensors (floating ones in the network's dtype), tensors move to its device."""
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    if isinstance(inputs, np.ndarray):
        tensor = torch.as_tensor(inputs)
        return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
    if isinstance(inputs, Mapping):
        return {key: as_inputs(value, dtype, device) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(as_inputs(value, dtype, device) for value in inputs)
    return inputs


def check_finite(inputs: Inputs, where: str) -> None:
    """Refuse NaN and infinity, naming the place."""
    for tensor in tensors_in(inputs):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).flatten(1).any(1).nonzero()[0]) if tensor.dim() > 1 else 0
            raise DataError(
                f"The inputs of {where} are not finite",
                expected="finite numbers",
                got=f"NaN or infinity, first in example {bad}",
                do="clean or drop such examples",
            )


def _is_pair(data: Any) -> bool:
    """(inputs, targets) as against a sequence of batches: in a pair the second member is itself an array."""
    return isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], (Tensor, np.ndarray))


def _stream(data: Any, batch_size: int, dtype: torch.dtype, device: torch.device) -> Iterable[Any]:
    if _is_pair(data):
        inputs, targets = as_inputs(data[0], dtype, device), torch.as_tensor(data[1])
        length = batch_length(inputs)
        if targets.dim() == 0 or targets.shape[0] != length:
            raise DataError(
                "Inputs and targets differ in length",
                expected=f"{length} targets",
                got=f"targets of shape {tuple(targets.shape)}",
                do="pass one target for each example",
            )
        return [
            (take(inputs, start, start + batch_size), targets[start : start + batch_size])
            for start in range(0, length, batch_size)
        ]
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=batch_size)
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping, Tensor, np.ndarray)):
        return data
    raise DataError(
        "This is no data set",
        expected="a DataLoader, a Dataset, a pair (inputs, targets), or an iterable of (inputs, targets) batches",
        got=type(data).__name__,
        do="wrap the data in one of these",
    )


def batches(
    data: Any, *, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> tuple[Iterator[Batch], int | None]:
    """The batches of `data` in order, and how many there are when that is known beforehand."""
    stream = _stream(data, batch_size or DEFAULT_BATCH_SIZE, dtype, device)
    total = len(stream) if isinstance(stream, (Sequence, DataLoader)) and hasattr(stream, "__len__") else None

    def walk() -> Iterator[Batch]:
        index = -1
        for index, item in enumerate(stream):
            if not (isinstance(item, (tuple, list)) and len(item) == 2):
                raise DataError(
                    f"Batch {index} is not a pair",
                    expected="(inputs, targets); several inputs as a tuple or a dictionary in the first place",
                    got=f"{type(item).__name__} of length {len(item)}"
                    if isinstance(item, (tuple, list))
                    else type(item).__name__,
                    do="yield pairs",
                )
            inputs = as_inputs(item[0], dtype, device)
            targets = torch.as_tensor(item[1]).to(device)
            length = batch_length(inputs)
            if targets.dim() == 0 or targets.shape[0] != length:
                raise DataError(
                    f"Inputs and targets of batch {index} differ in length",
                    expected=f"{length} targets",
                    got=f"targets of shape {tuple(targets.shape)}",
                    do="pass one target for each example",
                )
            check_finite(inputs, f"batch {index}")
            if length:
                yield Batch(inputs, targets, index)
        if index < 0:
            raise DataError(
                "There is no data",
                expected="at least one example",
                got="none",
                do="check the loader (a used-up iterator?)",
            )

    return walk(), total
