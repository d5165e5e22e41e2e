"""64-bit hashes of numbers that read every one of them, at about the speed of memory.

Rows of numbers are read as 64-bit words. Those of long rows are summed first, word j into sum j modulo GROUPS, by one
pass of vectorised additions; the sums are then mixed, each with a key of its own. A row that differs in one number
always has another hash. Rows that differ anyhow have one, by all but certainty, unless the differences cancel in every
sum: two words of one group exchanged, or two signs changed in one (1 pair of numbers in 125 for rows of more than 62).
These are fingerprints against mistakes, not against attackers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Hashes: TypeAlias = "NDArray[np.uint64]"

GROUPS = 31
"""A prime number, so that no usual row length of an image is a multiple of it."""

WIDTHS = (1021, 1009)
"""Of rows that a vector is cut into and summed over: primes, so that what cancels in one sum does not in the other."""

ODD = np.uint64(0x9E3779B97F4A7C15)
"""Multiplication with it exchanges 64-bit numbers one for one (it is 2^64 over the golden ratio)."""

SMALL = 2**16
"""Tensors of up to so many bytes are joined and hashed together: for these, calls cost more than reading."""


def hash_rows(rows: Tensor) -> Hashes:
    """One hash (n,) uint64 for each row of numbers (n, d) of 32 or 64 bits, or of 8 bits if d is divisible by 8.

    Its bits are not all alike random: `mix` it before adding it to others.
    """
    if rows.element_size() == 4 and rows.shape[1] % 2:
        rows = torch.nn.functional.pad(rows, (0, 1))
    words = rows.contiguous().view(torch.int64)
    count = words.shape[1]
    if count > GROUPS:
        times = count // GROUPS
        shape, stride = (len(words), times, GROUPS), (count, GROUPS, 1)
        sums = torch.as_strided(words, shape, stride, words.storage_offset()).sum(1)
        sums[:, : count - times * GROUPS] += words[:, times * GROUPS :]
        words = sums
    # numpy has less overhead than torch on small arrays, and unsigned numbers
    return _scrambled(words.cpu().numpy().view(np.uint64))


def hash_tensors(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Hashes of the bytes of all tensors, to be compared within this process with those of as many of the same shapes.

    A change of one number always changes them. Others do, unless they cancel in the sums over both WIDTHS: two words
    that change places, for example, unless they lie a multiple of 8 MB apart.
    """
    found: list[int] = []
    small: list[Tensor] = []
    for tensor in tensors:
        part = tensor.detach().reshape(-1).view(torch.uint8)
        part = part if part.device.type == "cpu" else part.cpu()
        if len(part) <= SMALL or len(part) % 8:
            small.append(part)
        else:
            found += _hash_words(part)
    if small:
        size = sum(map(len, small))
        found += _hash_words(torch.cat([*small, torch.zeros(-size % 8, dtype=torch.uint8)]))
    return tuple(found)


def _hash_words(part: Tensor) -> Iterator[int]:
    """Hashes of sums over the rows of both widths, of bytes (n,)."""
    words = part.numpy().view(np.uint64)
    for width in WIDTHS if len(words) >= 2 * max(WIDTHS) else (max(1, len(words)),):
        stop = len(words) // width * width
        sums = words[:stop].reshape(-1, width).sum(0, dtype=np.uint64)
        sums[: len(words) - stop] += words[stop:]
        yield hash(sums.tobytes())


def _scrambled(words: Hashes) -> Hashes:
    """The sum (n,) of each row of words (n, d), each scrambled with a key of its own."""
    found = words + _keys(words.shape[1])
    found *= ODD
    found ^= found >> np.uint64(32)
    whole: Hashes = found.sum(1, dtype=np.uint64)
    return whole


@cache
def _keys(count: int) -> Hashes:
    """A pseudorandom number for each word, so that the order of words matters."""
    return mix(np.arange(1, count + 1, dtype=np.uint64))


def mix(numbers: Hashes) -> Hashes:
    """A hash of each 64-bit number, no two of which are alike: splitmix64."""
    numbers = numbers * ODD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers ^= numbers >> np.uint64(31)
    return numbers
