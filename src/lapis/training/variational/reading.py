"""The data of a variational fit, read round after round, so that a fit that goes on ends as it would have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from lapis.batches import Batch, batches, digest
from lapis.network import Network
from lapis.training.data import own_randomness, shuffled


@dataclass(frozen=True)
class Reading:
    """Data of any usual form; the randomness of every round follows from the seed and the round's number."""

    data: Any
    network: Network
    batch_size: int
    seed: int

    def source(self, number: int) -> torch.Generator:
        """The generator of one round."""
        return torch.Generator(self.network.device).manual_seed((self.seed + number) % 2**63)

    def randomness(self, number: int = 0) -> AbstractContextManager[None]:
        """A context in which torch's global randomness, which data sets draw from, is that of one round."""
        return own_randomness(self.network, self.seed + number)

    def epochs(self, count: int) -> Iterator[Batch]:
        """So many passes, each shuffled anew."""
        return chain.from_iterable(shuffled(self.data, self.network, self.batch_size) for _ in range(count))

    def whole(self) -> Digested:
        """One pass over the data in their own order."""
        network = self.network
        return Digested(batches(self.data, dtype=network.dtype, device=network.device, batch_size=self.batch_size)[0])

    def digest(self) -> int:
        """The fingerprint of all data."""
        with self.randomness():
            whole = self.whole()
            for _ in whole:
                pass
        return whole.digest


class Digested:
    """Batches, with the fingerprint of all that were read."""

    def __init__(self, stream: Iterator[Batch]) -> None:
        self._stream = stream
        self.digest = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._stream:
            self.digest = (self.digest + digest(batch.inputs, batch.targets)) % 2**64
            yield batch
