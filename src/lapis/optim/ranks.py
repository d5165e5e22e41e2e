"""Averages over the ranks of torch.distributed, of gradients and of curvature together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as distributed
from torch import Tensor

from lapis.errors import OptionError


@dataclass(frozen=True)
class Ranks:
    """The processes of the default group."""

    rank: int
    size: int

    @staticmethod
    def joined() -> Ranks:
        """This process's place; OptionError outside of torch.distributed."""
        if not (distributed.is_available() and distributed.is_initialized()):
            raise OptionError(
                "There are no ranks to synchronise",
                expected="torch.distributed.init_process_group(...) before the optimiser is made",
                got="synchronise=True in a process of its own",
                do="initialise torch.distributed, or leave synchronise out",
            )
        return Ranks(distributed.get_rank(), distributed.get_world_size())

    def averaged(
        self, own: Sequence[Tensor | None], like: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[Tensor | None]:
        """The mean of each tensor over the ranks, in the shape and on the device of `like`.

        A rank without one counts as zero; None stays where no rank has any.
        """
        present = torch.tensor([float(each is not None) for each in own], device=like[0].device)
        distributed.all_reduce(present)
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
            distributed.all_reduce(flat)
            flat /= self.size
        return found

    def mean(self, number: float, device: torch.device) -> float:
        """The mean of a number over the ranks."""
        total = torch.tensor(number, dtype=torch.float64, device=device)
        distributed.all_reduce(total)
        return float(total) / self.size

    def agree(self, number: float, device: torch.device) -> bool:
        """Whether all ranks have the same number, bit for bit."""
        ends = torch.tensor([number, -number], dtype=torch.float64, device=device)
        distributed.all_reduce(ends, distributed.ReduceOp.MAX)
        return float(ends[0]) == -float(ends[1])
