"""Random numbers of an optimiser: a seed and a count, so that a resumed run, or another rank, draws what it should."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_SEED = 2**63


@dataclass
class Draws:
    """The noise of draw n comes from a generator seeded with `seed` + n: nothing else needs to be remembered.

    With R ranks that draw on their own, draw n of rank r has number n R + r.
    """

    seed: int
    made: int = 0
    rank: int = 0
    ranks: int = 1

    @staticmethod
    def of(generator: torch.Generator | None) -> Draws:
        """A seed from the generator, or 0."""
        if generator is None:
            return Draws(0)
        return Draws(int(torch.randint(2**62, (), generator=generator, device=generator.device)))

    def count(self) -> None:
        """Go on to the next draw."""
        self.made += 1

    def normal(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Standard normal numbers in the form of each tensor."""
        return self._drawn(like, torch.randn)

    def uniform(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Numbers from [0, 1) in the form of each tensor."""
        return self._drawn(like, torch.rand)

    def _drawn(self, like: Sequence[Tensor], draw: Callable[..., Tensor]) -> list[Tensor]:
        generators: dict[torch.device, torch.Generator] = {}
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for index, tensor in enumerate(like):
            kinds[tensor.device, tensor.dtype].append(index)
        found = list(like)
        for (device, dtype), members in kinds.items():
            if device not in generators:
                number = self.seed + self.made * self.ranks + self.rank
                generators[device] = torch.Generator(device).manual_seed(number % LARGEST_SEED)
            sizes = [like[index].numel() for index in members]
            flat = draw(sum(sizes), generator=generators[device], dtype=dtype, device=device)
            for index, part in zip(members, torch.split(flat, sizes), strict=True):
                found[index] = part.view(like[index].shape)
        return found
