"""64-bit hashes of numbers that read every one of them, at about half the speed of memory.

Rows of numbers are read as 64-bit words. Those of long rows are summed first, word j into sum j modulo GROUPS, by one
pass of vectorised additions; the sums are then mixed, each with a key of its own. A row that differs in one number
always has another hash. Rows that differ anyhow have one, by all but certainty, unless the differences cancel in every
sum: two words of one group exchanged, or two signs changed in one (1 pair of numbers in 125 for rows of more than 62).
These are fingerprints against mistakes, not against attackers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Hashes: TypeAlias = "NDArray[np.uint64]"

GROUPS = 31
"""A prime number, so that no usual row length of an image is a multiple of it."""

LONG = 16 * GROUPS
"""Words in each row of a vector that is hashed in two stages."""

ODD = np.uint64(0x9E3779B97F4A7C15)
"""Multiplication with it exchanges 64-bit numbers one for one (it is 2^64 over the golden ratio)."""

SMALL = 2**14
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
    scrambled = words.cpu().numpy().view(np.uint64) + _keys(words.shape[1])
    scrambled *= ODD
    scrambled ^= scrambled >> np.uint64(32)
    found: Hashes = scrambled.sum(1, dtype=np.uint64)
    return found


def hash_tensors(tensors: Sequence[Tensor]) -> int:
    """One hash of the bytes of all tensors, in order."""
    joined: list[Tensor] = []
    small: list[Tensor] = []
    for tensor in tensors:
        part = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        if len(part) <= SMALL:
            small.append(part)
        else:
            joined += [torch.cat(small)] if small else []
            joined.append(part)
            small = []
    joined += [torch.cat(small)] if small else []
    return int(mix(_joint([_hash_vector(part) for part in joined]))[0])


def _hash_vector(vector: Tensor) -> Hashes:
    """The hash (1,) of bytes (n,): rows of LONG words first, then their hashes, in order."""
    stop = len(vector) // (8 * LONG) * 8 * LONG
    parts = [hash_rows(vector[:stop].view(-1, 8 * LONG))] if stop else []
    rest = vector[stop:]
    if len(rest):
        padded = torch.nn.functional.pad(rest, (0, -len(rest) % 8))
        parts += [hash_rows(padded[None]), np.array([len(rest)], np.uint64)]
    return _joint(parts)


def _joint(parts: Sequence[Hashes]) -> Hashes:
    """One hash (1,) of several, in order."""
    whole = mix(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)
    return hash_rows(torch.from_numpy(whole.view(np.int64))[None])


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
