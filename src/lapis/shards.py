"""This process's part of a data set: the ranks' parts are all of the data, every example once.

`DistributedSampler` repeats examples until all parts have one length. Curvature is a sum over examples: parts may
differ in length, and must not repeat any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from lapis.batches import Batch, Inputs, as_inputs, batch_length, batches, digest, take, whole_pair
from lapis.errors import DataError
from lapis.ranks import Ranks

Distributed: TypeAlias = bool | Literal["shards"]
"""True: every rank passes the same data, which are divided (tensors that differ are each rank's own). "shards": every
rank passes examples of its own."""


@dataclass(frozen=True)
class Shard:
    """What this rank works on.

    Args:
        ranks: the processes.
        data: of this rank, in any form that `batches` takes, without any examples too; with `interleaved`, those of
            all ranks.
        whole: the data whose first examples the ranks look at to lay out their work: all data, or its own.
        start: index of its first example in all data.
        interleaved: whether the rank takes every size-th batch of a stream.
    """

    ranks: Ranks
    data: Any
    whole: Any
    start: int
    interleaved: bool = False

    def batches(
        self, *, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
    ) -> tuple[Iterator[Batch], int | None]:
        """As `lapis.batches.batches`, for this rank's examples; every batch knows its position in all data."""
        stream, total = batches(self.data, dtype=dtype, device=device, batch_size=batch_size, may_be_empty=True)

        def walk() -> Iterator[Batch]:
            position = self.start
            for number, batch in enumerate(stream):
                if not self.interleaved or number % self.ranks.size == self.ranks.rank:
                    yield replace(batch, position=position)
                position += len(batch)

        if self.interleaved and total is not None:
            total = len(range(self.ranks.rank, total, self.ranks.size))
        return walk(), total

    def check_repeats(self, fingerprint: int, n_data: int) -> None:
        """DataError unless the ranks' examples, with these fingerprints and numbers, are different ones."""
        if self.data is not self.whole:
            return  # divided by their indices
        found = list(zip(self.ranks.numbers(fingerprint), self.ranks.numbers(n_data), strict=True))
        twice = next((rank for rank, each in enumerate(found) if each[1] and each in found[:rank]), None)
        if twice is not None:
            raise DataError(
                f"Ranks {found.index(found[twice])} and {twice} worked on the same examples",
                expected="every example on one rank only",
                got=f"{found[twice][1]:,} examples with fingerprint {found[twice][0]:016x} on both",
                do="pass the same data in the same order on every rank with distributed=True, or different examples",
            )


def shard(data: Any, ranks: Ranks, how: Distributed) -> Shard:
    """This rank's part of the data."""
    if how == "shards":
        return Shard(ranks, data, data, ranks.rank << 40)
    pair = whole_pair(data)
    if pair is not None:
        return _of_pair(pair, ranks)
    inner = _indexed(data)
    if inner is None:
        return Shard(ranks, data, data, 0, interleaved=True)
    start, stop = span(_agreed_length(len(inner), ranks), ranks)
    return Shard(ranks, _subset(data, inner, start, stop), _subset(data, inner, 0, len(inner)), start)


def divided(data: Any, ranks: Ranks) -> Any:
    """This rank's part of a loader or data set, the same on every rank; None where they have no indices, or too few."""
    inner = _indexed(data)
    if inner is None or _agreed_length(len(inner), ranks) < ranks.size:
        return None
    return _subset(data, inner, *span(len(inner), ranks))


def span(length: int, ranks: Ranks) -> tuple[int, int]:
    """This rank's examples of so many: from the first number up to, not including, the second; none if too few."""
    return ranks.rank * length // ranks.size, (ranks.rank + 1) * length // ranks.size


def _of_pair(data: Any, ranks: Ranks) -> Shard:
    """Tensors that are the same on every rank are divided; others are each rank's own."""
    with ranks.together("reading of the data"):
        inputs: Inputs = as_inputs(data[0], torch.float64, torch.device("cpu"))
        targets = torch.as_tensor(data[1])
        length = batch_length(inputs)
        fits = targets.dim() > 0 and len(targets) == length  # else `batches` says what is wrong
        known = digest(inputs, targets) if fits else 0
    if len(set(ranks.numbers(known))) == 1 and len(set(ranks.numbers(length))) == 1:
        start, stop = span(length, ranks)
        half = digest(take(inputs, 0, length // 2), targets[: length // 2]) if fits else 0
        if len(set(ranks.numbers(half))) > 1:
            raise DataError(
                "The ranks hold the same examples in different orders",
                expected="the same tensors on every rank, or different examples",
                got=f"{length:,} examples with fingerprint {known:016x} on each, in another order",
                do="shuffle with the same seed everywhere, or not at all",
            )
        return Shard(ranks, (_cut(data[0], start, stop), data[1][start:stop]), data, start)
    return Shard(ranks, data, data, sum(ranks.numbers(length)[: ranks.rank]))


def _cut(inputs: Any, start: int, stop: int) -> Any:
    """Some of the examples of tensors or arrays in any usual form."""
    if isinstance(inputs, (tuple, list)):
        return tuple(_cut(each, start, stop) for each in inputs)
    if isinstance(inputs, dict):
        return {name: _cut(each, start, stop) for name, each in inputs.items()}
    return take(inputs, start, stop) if isinstance(inputs, Tensor) else inputs[start:stop]


def _agreed_length(length: int, ranks: Ranks) -> int:
    lengths = ranks.numbers(length)
    if len(set(lengths)) > 1:
        raise DataError(
            "The ranks hold different data",
            expected="the same data set on every rank, which Lapis divides",
            got=f"lengths {lengths}",
            do='pass the same everywhere, or distributed="shards" if each rank has examples of its own',
        )
    return length


def _indexed(data: Any) -> Any:
    """A data set with indices, or that of a loader that shows each of its examples once; None for others."""
    if not isinstance(data, DataLoader):
        return data if isinstance(data, Dataset) and isinstance(data, Sized) else None
    loader: DataLoader[Any] = data
    sampler: Any = loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise DataError(
            "A DistributedSampler repeats examples, which would count twice",
            expected="a loader over all data, which Lapis divides without repeats",
            got="a DataLoader with a DistributedSampler",
            do="leave the sampler out, or pass the data set itself",
        )
    plain = type(loader.batch_sampler) is BatchSampler and not loader.drop_last
    once = isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement)
    inner: Any = loader.dataset
    return inner if plain and once and isinstance(inner, Sized) and len(sampler) == len(inner) else None


def _subset(data: Any, inner: Any, start: int, stop: int) -> Any:
    """Some examples of a data set, in the batches of its loader if there is one."""
    some = Subset(inner, range(start, stop))
    if not isinstance(data, DataLoader):
        return some
    return DataLoader(
        some, batch_size=data.batch_size, collate_fn=data.collate_fn, num_workers=data.num_workers,
        generator=torch.Generator(),
    )  # fmt: skip
