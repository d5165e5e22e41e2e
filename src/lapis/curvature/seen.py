"""Which examples are in a sum: their smallest fingerprints, by which examples that two sums share are noticed.

Fingerprints are random numbers of 64 bits. Of n examples those up to a limit are kept, KEPT at most, so that two sums
can be compared below the smaller of their limits: exactly up to KEPT examples, and by a random sample of about
KEPT m / n of m shared ones beyond.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lapis.hashing import Hashes
from lapis.ranks import Ranks

KEPT = 1024
"""Fingerprints kept."""

LIMIT = 2**64 - 1


@dataclass(frozen=True, eq=False)
class Seen:
    """The fingerprints up to `limit` of all examples seen, sorted, as often as they were; immutable.

    Args:
        hashes: (k,) uint64.
        limit: no example with a fingerprint up to this one is missing.
    """

    hashes: Hashes
    limit: int = LIMIT

    @staticmethod
    def none() -> Seen:
        """Of no examples."""
        return Seen(np.zeros(0, np.uint64))

    @staticmethod
    def unknown() -> Seen:
        """Of examples whose fingerprints were not kept."""
        return Seen(np.zeros(0, np.uint64), 0)

    def plus(self, other: Seen) -> Seen:
        """Of both."""
        limit = min(self.limit, other.limit)
        found = np.sort(np.concatenate([self.upto(limit), other.upto(limit)]))
        if len(found) > KEPT:
            limit = int(found[KEPT - 1])
            found = found[:KEPT]
            if len(found) and found[0] == found[-1]:  # one example, more often than can be kept
                return Seen.unknown()
            found, limit = found[found < found[-1]], limit - 1
        return Seen(found, limit)

    def add(self, hashes: Hashes) -> Seen:
        """With more examples."""
        return self.plus(Seen(np.sort(hashes)))

    def minus(self, other: Seen) -> Seen:
        """Without the other's examples, each of which is among these."""
        limit = min(self.limit, other.limit)
        values, counts = np.unique(self.upto(limit), return_counts=True)
        gone, times = np.unique(other.upto(limit), return_counts=True)
        left = counts.copy()
        left[np.isin(values, gone)] -= times[np.isin(gone, values)]
        return Seen(np.repeat(values, np.maximum(left, 0)), limit)

    def upto(self, limit: int) -> Hashes:
        """The fingerprints up to a limit."""
        found: Hashes = self.hashes[self.hashes <= np.uint64(limit)]
        return found

    def shared(self, other: Seen) -> tuple[int, int, int]:
        """How many of the fingerprints that can be compared are in both, and how many there are in each."""
        limit = min(self.limit, other.limit)
        mine, theirs = self.upto(limit), other.upto(limit)
        return len(np.intersect1d(mine, theirs)), len(mine), len(theirs)

    def missing(self, other: Seen) -> int:
        """How many of the other's fingerprints, as far as can be compared, are not among these, each as often."""
        limit = min(self.limit, other.limit)
        mine = dict(zip(*np.unique(self.upto(limit), return_counts=True), strict=True))
        theirs = zip(*np.unique(other.upto(limit), return_counts=True), strict=True)
        return int(sum(max(0, times - mine.get(each, 0)) for each, times in theirs))

    def over_ranks(self, ranks: Ranks) -> Seen:
        """Of the examples of all ranks."""
        found = Seen.none()
        limits = ranks.numbers(self.limit)
        lengths = ranks.numbers(len(self.hashes))
        whole = ranks.gathered(self.tensor()).numpy().view(np.uint64)
        for part, limit in zip(np.split(whole, np.cumsum(lengths)[:-1]), limits, strict=True):
            found = found.plus(Seen(part, limit))
        return found

    def tensor(self) -> Tensor:
        """The fingerprints as int64 numbers of the same bits, for files and other processes."""
        return torch.from_numpy(self.hashes.view(np.int64).copy())
