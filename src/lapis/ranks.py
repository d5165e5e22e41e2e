"""The processes of torch.distributed: sums and averages over them, and one end for all when one of them fails."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as distributed
from torch import Tensor

from lapis.errors import LapisError, OptionError, RankError

T = TypeVar("T")

MESSAGE_BYTES = 512
"""Room for what a rank that failed has to say to the others."""

PACKED_BYTES = 2**28
"""Tensors are packed into one buffer of up to this size, and reduced together; larger ones are reduced in place."""


@dataclass(frozen=True)
class Ranks:
    """The processes of the default group."""

    rank: int
    size: int

    @staticmethod
    def joined(asked: str = "synchronise=True") -> Ranks:
        """This process's place; OptionError outside of torch.distributed."""
        if not (distributed.is_available() and distributed.is_initialized()):
            raise OptionError(
                "There are no ranks to work with",
                expected="torch.distributed.init_process_group(...) before (torchrun sets what it needs)",
                got=f"{asked} in a process of its own",
                do="initialise torch.distributed, or leave the option out",
            )
        return Ranks(distributed.get_rank(), distributed.get_world_size())

    # averages, for optimisers ----------------------------------------------------------------------

    def averaged(
        self, own: Sequence[Tensor | None], like: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[Tensor | None]:
        """The mean of each tensor over the ranks, in the shape and on the device of `like`.

        A rank without one counts as zero; None stays where no rank has any.
        """
        present = torch.tensor([float(each is not None) for each in own], device=like[0].device)
        self._reduce(present)
        found: list[Tensor | None] = [None] * len(own)
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for index, some in enumerate(present.tolist()):
            if some:
                kinds[like[index].device, dtypes[index]].append(index)
        for (device, dtype), members in kinds.items():
            flat = torch.zeros(sum(like[i].numel() for i in members), dtype=dtype, device=device)
            parts = torch.split(flat, [like[i].numel() for i in members])
            for i, part in zip(members, parts, strict=True):
                value = own[i]
                if value is not None:
                    part.copy_(value.reshape(-1))
                found[i] = part.view(like[i].shape)
            self._reduce(flat)
            flat /= self.size
        return found

    def mean(self, number: float, device: torch.device) -> float:
        """The mean of a number over the ranks."""
        total = torch.tensor(number, dtype=torch.float64, device=device)
        self._reduce(total)
        return float(total) / self.size

    def agree(self, number: float, device: torch.device) -> bool:
        """Whether all ranks have the same number, bit for bit."""
        ends = torch.tensor([number, -number], dtype=torch.float64, device=device)
        self._reduce(ends, distributed.ReduceOp.MAX)
        return float(ends[0]) == -float(ends[1])

    # sums ------------------------------------------------------------------------------------------

    def add_up(self, tensors: Sequence[Tensor]) -> int:
        """Replace tensors of one dtype by their sums over the ranks, in place; returns the bytes that were reduced.

        They travel in one packed all-reduce; those that do not fit in its buffer are reduced one by one, uncopied.
        """
        packed: list[Tensor] = []
        room = PACKED_BYTES
        for tensor in sorted(tensors, key=lambda each: each.nbytes):
            if tensor.nbytes <= room or not tensor.is_contiguous():
                packed.append(tensor)
                room -= tensor.nbytes
            else:
                self._reduce(tensor)
        if packed:
            flat = torch.cat([tensor.reshape(-1) for tensor in packed])
            self._reduce(flat)
            for tensor, part in zip(packed, torch.split(flat, [each.numel() for each in packed]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        return sum(tensor.nbytes for tensor in tensors)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the ranks; the tensor itself is overwritten where it can be."""
        found = tensor.contiguous()
        self._reduce(found)
        return found

    def share(self, tensor: Tensor, source: int) -> None:
        """Overwrite a contiguous tensor with that of rank `source`."""
        with talking():
            distributed.broadcast(tensor, source)

    def _reduce(self, tensor: Tensor, operation: Any = distributed.ReduceOp.SUM) -> None:
        with talking():
            distributed.all_reduce(tensor, operation)

    # collections -----------------------------------------------------------------------------------

    def gathered(self, tensor: Tensor, axis: int = 0) -> Tensor:
        """The ranks' tensors one after the other along an axis, in which they may differ in length."""
        lengths = self.numbers(tensor.shape[axis])
        moved = tensor.movedim(axis, 0)
        padded = moved.new_zeros(max(lengths), *moved.shape[1:])
        padded[: len(moved)] = moved
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with talking():
            distributed.all_gather(parts, padded)
        whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        return whole.movedim(0, axis).contiguous()

    def numbers(self, number: int) -> list[int]:
        """The whole number, below 2^64, that each rank has."""
        own = torch.tensor([number % 2**32, number // 2**32])
        parts = [torch.empty_like(own) for _ in range(self.size)]
        with talking():
            distributed.all_gather(parts, own)
        return [int(low) + (int(high) << 32) for low, high in parts]

    def first_of(self, own: T | None) -> T | None:
        """What the first rank that has one has; it is sent only if some rank has none."""
        having = self.numbers(int(own is not None))
        if all(having) or not any(having):
            return own
        source = having.index(1)
        sent = [own if self.rank == source else None]
        with talking():
            distributed.broadcast_object_list(sent, source)
        return own if own is not None else sent[0]

    def messages(self, own: bytes) -> list[bytes]:
        """The bytes that each rank has, of any length."""
        lengths = self.numbers(len(own))
        whole = self.gathered(torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else torch.zeros(0).byte())
        return [bytes(part.numpy()) for part in torch.split(whole, lengths)]

    # agreement -------------------------------------------------------------------------------------

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """OptionError, on every rank, unless all of them have the same facts, which JSON can hold."""
        digests = {name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16] for name, value in facts.items()}
        all_digests = [json.loads(message) for message in self.messages(json.dumps(digests).encode())]
        for name in digests:
            differing = [rank for rank, theirs in enumerate(all_digests) if theirs[name] != all_digests[0][name]]
            if differing:
                raise OptionError(
                    f"The processes do not agree on the {name}",
                    expected="the same call with the same network on every rank",
                    got=f"another {name} on rank {differing[0]} than on rank 0; here {str(facts[name])[:80]}",
                    do="load the same weights and pass the same options everywhere",
                )

    @contextmanager
    def together(self, work: str) -> Iterator[None]:
        """Work of each rank on its own: when it fails on one of them, all end with an error that says why.

        The others wait for the slowest at the end. A rank that was killed cannot say anything: the next exchange with
        it fails, by a lost connection at once or else after the group's timeout (see `talking`).
        """
        try:
            yield
        except RankError:
            raise  # all know already
        except Exception as error:  # whatever ends this rank's work: the others must hear of it, and it goes on here
            self._status(f"{type(error).__name__}: {error}")
            raise
        for rank, message in enumerate(self._status("")):
            if message:
                raise RankError(
                    f"Rank {rank} failed in its part of the {work}",
                    expected=f"all {self.size} ranks to finish",
                    got=message,
                    do="mend the cause and start all of them again",
                )

    def _status(self, message: str) -> list[str]:
        own = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        text = message.encode()[:MESSAGE_BYTES]
        own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        with talking():
            distributed.all_gather(parts, own)
        return [bytes(part.tolist()).rstrip(b"\0").decode(errors="replace") for part in parts]


@contextmanager
def talking() -> Iterator[None]:
    """An exchange between ranks: RankError when another process has gone, or does not answer within the timeout."""
    try:
        yield
    except LapisError:
        raise
    except RuntimeError as error:
        raise RankError(
            "Another process of the group died, or did not answer in time",
            expected="all ranks alive until the end; the timeout is that of init_process_group(timeout=...)",
            got=str(error).strip().splitlines()[0][:200],
            do="look for its message, then start all of them again: checkpoints of the others are kept",
        ) from error
