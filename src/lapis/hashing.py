"""64-bit hashes of numbers that read every one of them, at about half the speed of memory.

Rows of numbers are read as 64-bit words. Those of long rows are summed first, word j into sum j modulo GROUPS, by one
pass of vectorised additions; the sums are then mixed, each with a key of its own. A row that differs in one number
always has another hash. Rows that differ anyhow have one, by all but certainty, unless the differences cancel in every
sum: two words of one group exchanged, or two signs changed in one (1 pair of numbers in 250 for rows of more than 122).
These are fingerprints against mistakes, not against attackers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

GROUPS = 61
"""A prime number, so that no usual row length of an image is a multiple of it."""

LONG = 16 * GROUPS
"""Words in each row of a vector that is hashed in two stages."""

SMALL = 2**14
"""Tensors of up to so many bytes are joined and hashed together: for these, calls cost more than reading."""


def hash_rows(rows: Tensor) -> Tensor:
    """One hash (n,) int64 for each row of numbers (n, d) of 32 or 64 bits, or of 8 bits if d is divisible by 8."""
    words = _words(rows)
    count = words.shape[1]
    if count > GROUPS:
        times = count // GROUPS
        shape, stride = (len(words), times, GROUPS), (count, GROUPS, 1)
        sums = torch.as_strided(words, shape, stride, words.storage_offset()).sum(1)
        sums[:, : count - times * GROUPS] += words[:, times * GROUPS :]
        words = sums
    mixed = mix(words + _keys(words.shape[1]).to(words.device))
    return mix(mixed.sum(1).add_(count))


def hash_tensors(tensors: Sequence[Tensor]) -> int:
    """One hash of the bytes of all tensors, in order."""
    parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for tensor in tensors]
    joined: list[Tensor] = []
    small: list[Tensor] = []
    for part in parts:
        if len(part) <= SMALL:
            small.append(part)
        else:
            joined += [torch.cat(small)] if small else []
            joined.append(part)
            small = []
    joined += [torch.cat(small)] if small else []
    found = torch.stack([_hash_vector(part) for part in joined]) if joined else torch.zeros(0, dtype=torch.int64)
    return int(hash_rows(found[None]))


def _hash_vector(vector: Tensor) -> Tensor:
    """The hash of bytes (n,): rows of LONG words first, then their hashes, in order."""
    stop = len(vector) // (8 * LONG) * 8 * LONG
    parts = [hash_rows(vector[:stop].view(-1, 8 * LONG))] if stop else []
    rest = vector[stop:]
    if len(rest):
        padded = torch.nn.functional.pad(rest, (0, -len(rest) % 8))
        parts += [hash_rows(padded[None]), torch.tensor([len(rest)])]
    return hash_rows(torch.cat(parts)[None])[0] if parts else torch.zeros((), dtype=torch.int64)


def _words(rows: Tensor) -> Tensor:
    """The rows as contiguous int64."""
    if rows.element_size() == 4 and rows.shape[1] % 2:
        rows = torch.nn.functional.pad(rows, (0, 1))
    return rows.contiguous().view(torch.int64)


@cache
def _keys(count: int) -> Tensor:
    """A pseudorandom number for each word, so that the order of words matters."""
    return mix(torch.arange(1, count + 1, dtype=torch.int64))


def mix(numbers: Tensor) -> Tensor:
    """A hash of each 64-bit integer, in place: splitmix64, no two of which are alike."""
    numbers.mul_(-7046029254386353131)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        numbers.bitwise_xor_((numbers >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return numbers.bitwise_xor_((numbers >> 31).bitwise_and_(2**33 - 1))
