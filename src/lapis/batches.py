"""Data in any of the usual forms as a stream of checked (inputs, targets) batches.

Inputs are a tensor, a tuple (passed as positional arguments) or a mapping (passed as keywords); the first axis of every
tensor counts examples. Targets may also lie among the entries of a mapping, under "labels" (Hugging Face), and what
follows them in a triple, the examples' indices or names, is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lapis.errors import DataError, LikelihoodError, ModelError
from lapis.hashing import Hashes, hash_rows, mix
from lapis.options import UNREADABLE, check_count

Inputs: TypeAlias = Any
"""A tensor, a tuple of inputs, or a mapping from names to inputs."""

DEFAULT_BATCH_SIZE = 512

EXACT = (torch.int32, torch.int64)
"""Types of whole numbers that enter fingerprints exactly."""

AT_ONCE = 2**18
"""Numbers whose fingerprints are computed together: what that takes remains in a processor's cache."""

LABELS = ("labels", "label")
"""Names of the targets in a batch that is a dictionary."""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Prefix errors about data or outputs with the batch they concern."""
    try:
        yield
    except (DataError, LikelihoodError, ModelError) as error:
        raise type(error)(f"In {where}: {error}") from error


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of batch number `index` of a stream, or of a part of it that begins at example `start`."""

    inputs: Inputs
    targets: Tensor
    index: int
    start: int = 0
    position: int | None = None
    """Index of its first example among those of all ranks; None where all data are in this process's stream."""

    @property
    def where(self) -> str:
        """Which batch this is, for error messages."""
        part = f"examples {self.start} to {self.start + len(self) - 1} of " if self.start else ""
        return f"{part}batch {self.index}"

    def __len__(self) -> int:
        return batch_length(self.inputs)

    def split(self, size: int) -> Iterator[Batch]:
        """Parts of at most `size` examples, in order and of nearly equal length."""
        length = len(self)
        if length <= size:
            yield self
            return
        size = math.ceil(length / math.ceil(length / size))
        for start in range(0, length, size):
            stop = min(start + size, length)
            yield Batch(take(self.inputs, start, stop), self.targets[start:stop], self.index, self.start + start)

    def chosen(self, indices: Tensor) -> Batch:
        """The examples with these indices, in that order."""
        chosen = map_tensors(lambda tensor: tensor[indices], self.inputs)
        return Batch(chosen, self.targets[indices], self.index, position=self.position)


def joined(parts: Sequence[Batch]) -> Batch | None:
    """All examples as one batch; None when their shapes differ from batch to batch (padded sequences)."""
    tensors = [[*tensors_in(part.inputs), part.targets] for part in parts]
    if len({tuple((tensor.shape[1:], tensor.dtype) for tensor in group) for group in tensors}) > 1:
        return None
    *inputs, targets = (torch.cat(group) for group in zip(*tensors, strict=True))
    remaining = iter(inputs)
    return Batch(map_tensors(lambda _: next(remaining), parts[0].inputs), targets, 0)


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
    """The examples from `start` up to, not including, `stop`."""
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
    """Shapes and dtypes of `inputs`, for error messages."""
    if isinstance(inputs, Tensor):
        return f"{tuple(inputs.shape)} {str(inputs.dtype).removeprefix('torch.')}"
    if isinstance(inputs, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in inputs.items()) + "}"
    if isinstance(inputs, (tuple, list)):
        runs = [(part, len(list(run))) for part, run in groupby(describe(value) for value in inputs)]
        return "(" + ", ".join(f"{n} x {part}" if n > 3 else ", ".join([part] * n) for part, n in runs) + ")"
    return type(inputs).__name__


def as_inputs(inputs: Any, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Inputs on the network's device: arrays become tensors (floating ones in its dtype), tensors keep their dtype."""
    if isinstance(inputs, Tensor):
        return _dense(inputs, "inputs").to(device)
    if isinstance(inputs, np.ndarray):
        tensor = as_tensor(inputs, "inputs")
        return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
    if isinstance(inputs, Mapping):
        return {key: as_inputs(value, dtype, device) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(as_inputs(value, dtype, device) for value in inputs)
    return inputs


def as_tensor(values: Any, what: str) -> Tensor:
    """Numbers in any form as a tensor; DataError calls them `what`."""
    try:
        # lists through numpy: torch would convert their numbers to single precision
        tensor = torch.as_tensor(np.asarray(values) if isinstance(values, (list, tuple)) else values)
    except UNREADABLE as error:
        raise DataError(
            f"The {what} are not numbers",
            expected="a tensor, an array or a list of numbers",
            got=f"{type(values).__name__} ({error})",
            do=f"convert the {what} to a tensor",
        ) from error
    return _dense(tensor, what)


def _dense(tensor: Tensor, what: str) -> Tensor:
    """The tensor itself; DataError for one without values, and for a sparse or nested one, which cannot be cut."""
    if tensor.device.type == "meta":
        raise DataError(
            f"The {what} have no values", expected="a tensor with values", got="one on the device meta", do="make them"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        raise DataError(
            f"The {what} are not dense",
            expected="a tensor with the examples along its first axis",
            got="a nested tensor" if tensor.is_nested else str(tensor.layout),
            do="pad it" if tensor.is_nested else "use .to_dense(), batch by batch if it is large",
        )
    # made in inference mode, where autograd does not see tensors: a copy made outside is like any other
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN or infinity.

    A finite sum proves it in one pass; the entries are examined only when the sum is not finite, as it may overflow.
    """
    if not tensor.is_floating_point() or math.isfinite(tensor.detach().sum()):
        return True
    return bool(torch.isfinite(tensor).all())


def check_finite(inputs: Inputs, where: str) -> None:
    """Raise DataError on NaN or infinity, naming the batch (`where`) and the first such example."""
    for tensor in tensors_in(inputs):
        if not all_finite(tensor):
            bad = int((~torch.isfinite(tensor)).reshape(tensor.shape[0], -1).any(1).nonzero()[0])
            raise DataError(
                f"The inputs of {where} are not finite",
                expected="finite numbers",
                got=f"NaN or infinity, first in example {bad}",
                do="clean or drop such examples",
            )


def inputs_and_targets(item: Any) -> tuple[Any, Any] | None:
    """Inputs and targets of a batch in one of the usual forms; None if it is of no such form.

    These are (inputs, targets), a dictionary with the targets under "labels", and (inputs, targets, index), where the
    index is a whole number of its own, or a name, for each example. Other triples may have two inputs.
    """
    if isinstance(item, Mapping):
        name = next((name for name in LABELS if name in item), None)
        return None if name is None else ({key: item[key] for key in item if key != name}, item[name])
    if not isinstance(item, (tuple, list)):
        return None
    if len(item) == 2 or (len(item) == 3 and _identifies(item[2])):
        return item[0], item[1]
    return None


def _identifies(values: Any) -> bool:
    """Whether the values are different whole numbers, or strings."""
    if isinstance(values, (tuple, list)) and values and all(isinstance(value, str) for value in values):
        return True
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        values = torch.as_tensor(values)
    whole = isinstance(values, Tensor) and not values.is_floating_point() and values.dtype != torch.bool
    return whole and values.dim() == 1 and len(values.unique()) == len(values)


def whole_pair(data: Any) -> tuple[Any, Any] | None:
    """Inputs and targets of all data in one piece: a pair or triple whose second entry is an array, or a dictionary."""
    if isinstance(data, (Mapping, tuple, list)):
        pair = inputs_and_targets(data)
        if pair is not None and isinstance(pair[1], (Tensor, np.ndarray)):
            return pair
    return None


def _stream(data: Any, batch_size: int, dtype: torch.dtype, device: torch.device) -> Iterable[Any]:
    """The data as an iterable of batches, which `batches` then checks one by one."""
    pair = whole_pair(data)
    if pair is not None:
        inputs, targets = as_inputs(pair[0], dtype, device), as_tensor(pair[1], "targets")
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
        # its own generator: a loader draws a seed even without workers, which would advance torch's global generator
        return DataLoader(data, batch_size=batch_size, generator=torch.Generator())
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping, Tensor, np.ndarray)):
        return data
    raise DataError(
        "This is no data set",
        expected="a DataLoader, a Dataset, a pair (inputs, targets), or an iterable of (inputs, targets) batches",
        got=type(data).__name__,
        do="wrap the data in one of these",
    )


def batches(
    data: Any, *, dtype: torch.dtype, device: torch.device, batch_size: int | None = None, may_be_empty: bool = False
) -> tuple[Iterator[Batch], int | None]:
    """The batches of `data` in order, and their number, or None when it is not known beforehand."""
    if batch_size is not None:
        check_count("batch_size", batch_size)
    stream = _stream(data, batch_size or DEFAULT_BATCH_SIZE, dtype, device)

    def walk() -> Iterator[Batch]:
        index, examples = -1, 0
        for index, item in enumerate(stream):
            pair = inputs_and_targets(item)
            if pair is None:
                raise DataError(
                    f"Batch {index} is not a pair",
                    expected='(inputs, targets), (inputs, targets, index), or a dictionary with "labels"; several '
                    "inputs as a tuple or a dictionary in the first place",
                    got=f"{type(item).__name__} of length {len(item)}"
                    if isinstance(item, (tuple, list))
                    else describe(item),
                    do="yield pairs, as in ((ids, mask), labels), or pass one pair of tensors (or arrays)",
                )
            with naming(f"batch {index}"):
                inputs = as_inputs(pair[0], dtype, device)
                targets = as_tensor(pair[1], "targets").to(device)
                length = batch_length(inputs)
            if targets.dim() == 0 or targets.shape[0] != length:
                raise DataError(
                    f"Inputs and targets of batch {index} differ in length",
                    expected=f"{length} targets",
                    got=f"targets of shape {tuple(targets.shape)}",
                    do="pass one target for each example"
                    if targets.dim()
                    else "batch single examples first: torch.utils.data.DataLoader(data, batch_size=64)",
                )
            check_finite(inputs, f"batch {index}")
            examples += length
            if length:
                yield Batch(inputs, targets, index)
        if not examples and not may_be_empty:
            raise DataError(
                "There is no data",
                expected="at least one example",
                got="no batches" if index < 0 else f"only empty batches ({index + 1})",
                do="check the loader (a used-up iterator?)",
            )

    return walk(), stream_length(stream)


def check_repeatable(data: Any) -> None:
    """Raise DataError for an iterator, which gives its batches only once."""
    if isinstance(data, Iterator):
        raise DataError(
            "The data can be read only once",
            expected="data for two passes: a DataLoader, a Dataset, a pair (inputs, targets), or a list of batches",
            got=f"an iterator ({type(data).__name__})",
            do="pass the loader itself, or list(iterator) if its batches fit in memory",
        )


def stream_length(stream: Iterable[Any]) -> int | None:
    """The number of batches; None when it is not known beforehand."""
    if not isinstance(stream, (Sequence, DataLoader)):
        return None
    try:
        return len(stream)
    except TypeError:  # a loader over a data set without a length
        return None


def digest(inputs: Inputs, targets: Tensor) -> int:
    """A 64-bit fingerprint of examples, additive over examples: neither their order nor batching matters.

    Every number of an example, flattened and rounded to float32, enters the hash of the example; whole numbers that
    float32 cannot hold enter exactly. The hashes are summed modulo 2^64. Images and the same pixels as vectors, in
    single or double precision, therefore have the same fingerprint.
    """
    return int(example_digests(inputs, targets).sum(dtype=np.uint64))


def example_digests(inputs: Inputs, targets: Tensor) -> Hashes:
    """The fingerprint of each example alone, (B,)."""
    count = len(targets)
    tensors = [inputs, targets] if isinstance(inputs, Tensor) else [*tensors_in(inputs), targets]
    at_once = max(1, count * AT_ONCE // max(1, sum(tensor.numel() for tensor in tensors)))
    if count > at_once:
        starts = range(0, count, at_once)
        parts = [example_digests(take(inputs, i, i + at_once), targets[i : i + at_once]) for i in starts]
        return np.concatenate(parts)
    if not count:
        return np.zeros(0, np.uint64)
    rows = [_rows(tensor.detach(), count) for tensor in tensors]
    rounded = [part.float() for part in rows]
    # zero for whole numbers that float32 can hold, and zeros add nothing to a hash
    rest = [whole.long() - part.long() for whole, part in zip(rows, rounded, strict=True) if whole.dtype in EXACT]
    return mix(hash_rows(rounded, rest))


def _rows(tensor: Tensor, count: int) -> Tensor:
    """The numbers of each example (count, d)."""
    rows = tensor if tensor.dim() == 2 else tensor.reshape(count, -1)
    return torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
