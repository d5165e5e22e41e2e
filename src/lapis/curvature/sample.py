"""A few examples of the data of a fit, kept in memory to look at later; they never go to files."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor

from lapis.batches import Batch, example_digests, joined, map_tensors, tensors_in
from lapis.ranks import Ranks

MOST_EXAMPLES, MOST_BYTES, MOST_OUTPUTS = 512, 8 * 2**20, 2**15
"""The size of a sample, in examples, in bytes, and in outputs: predictions may take a backward pass for each."""


class Sample:
    """A uniform random sample of the examples of all batches added, without replacement.

    Each example draws a number, and those with the smallest ones stay: the draws are made from seed 0.

    Args:
        outputs: of an example, positions included. Where they are very many the sample stays empty.
    """

    def __init__(self, outputs: int = 1) -> None:
        self._random = np.random.default_rng(0)
        self._room = min(MOST_EXAMPLES, MOST_OUTPUTS // outputs)
        self._limit = math.inf
        """The largest number that still belongs to the sample."""
        self._pieces: list[tuple[NDArray[np.float64], Batch]] = []

    def add(self, batch: Batch) -> None:
        """Let the examples of a batch take part in the draw."""
        if batch.position is not None:  # the numbers that these examples would draw in one process
            self._random = np.random.Generator(np.random.PCG64(0).advance(batch.position))
        drawn = self._random.random(len(batch))
        if not self._pieces:
            held = sum(tensor.nbytes for tensor in (*tensors_in(batch.inputs), batch.targets))
            self._room = min(self._room, MOST_BYTES * len(batch) // max(1, held))
        chosen = np.flatnonzero(drawn < self._limit)
        if len(chosen) > self._room:
            chosen = np.sort(chosen[np.argsort(drawn[chosen])[: self._room]])
        if not len(chosen):
            return
        self._pieces.append((drawn[chosen], batch.chosen(torch.from_numpy(chosen).to(batch.targets.device))))
        numbers = np.concatenate([piece for piece, _ in self._pieces])
        if len(numbers) > self._room:
            self._limit = float(np.partition(numbers, self._room - 1)[self._room - 1])
        if len(numbers) > 2 * self._room:
            self._drop()

    def _drop(self) -> None:
        """Forget examples that no longer belong to the sample."""
        kept = []
        for numbers, batch in self._pieces:
            stays = np.flatnonzero(numbers <= self._limit)
            if len(stays) == len(numbers):
                kept.append((numbers, batch))
            elif len(stays):
                kept.append((numbers[stays], batch.chosen(torch.from_numpy(stays).to(batch.targets.device))))
        self._pieces = kept

    def batches(self) -> list[Batch]:
        """The sample: in one batch if all examples have one shape, else in as many as there were."""
        self._drop()
        parts = [batch for _, batch in self._pieces]
        whole = joined(parts) if parts else None
        return parts if whole is None else [whole]

    def without(self, gone: Counter[int]) -> Sample:
        """A copy without the examples of these fingerprints, each as often as it is counted."""
        same, left = self.clone(), Counter(gone)
        same._pieces = []
        for numbers, batch in self._pieces:
            stays = []
            for index, each in enumerate(example_digests(batch.inputs, batch.targets).tolist()):
                if left[each]:
                    left[each] -= 1
                else:
                    stays.append(index)
            if stays:
                same._pieces.append((numbers[stays], batch.chosen(torch.tensor(stays, device=batch.targets.device))))
        return same

    def over_ranks(self, ranks: Ranks) -> None:
        """Make it a sample of the examples of all ranks: that of one process that saw them all."""
        self._drop()
        self._room = min(ranks.numbers(self._room))
        like = ranks.first_of(self._pieces[0][1].chosen(torch.tensor([0])) if self._pieces else None)
        if not self._room or like is None:
            self._pieces = []
            return
        drawn = np.concatenate([np.zeros(0), *(each for each, _ in self._pieces)])
        numbers = ranks.gathered(torch.from_numpy(drawn)).numpy()
        if len(numbers) > self._room:
            self._limit = float(np.partition(numbers, self._room - 1)[self._room - 1])
        self._drop()
        packed: dict[str, Tensor] = {}
        for i, (drawn, batch) in enumerate(self._pieces):
            packed |= {f"{i}.numbers": torch.from_numpy(drawn), f"{i}.position": torch.tensor(batch.position or 0)}
            tensors = (batch.targets, *tensors_in(batch.inputs))
            packed |= {f"{i}.{j}": tensor.cpu().contiguous() for j, tensor in enumerate(tensors)}
        found = []
        for message in ranks.messages(save(packed) if packed else b""):
            theirs = load(message) if message else {}
            for i in range(sum(name.endswith(".numbers") for name in theirs)):
                members = [theirs[f"{i}.{j}"].to(like.targets.device) for j in range(len(tensors_in(like.inputs)) + 1)]
                inputs = map_tensors(partial(_next, iter(members[1:])), like.inputs)
                batch = Batch(inputs, members[0], i, position=int(theirs[f"{i}.position"]))
                found.append((theirs[f"{i}.numbers"].numpy(), batch))
        self._pieces = sorted(found, key=lambda piece: piece[1].position or 0)

    def clone(self) -> Sample:
        """A copy that can be added to without changing this one."""
        same = copy.copy(self)
        same._random, same._pieces = copy.deepcopy(self._random), list(self._pieces)
        return same


def _next(remaining: Iterator[Tensor], _: Tensor) -> Tensor:
    return next(remaining)
