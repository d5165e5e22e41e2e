"""64-bit hashes of numbers that read every one of them, at about the speed of memory.

Numbers are read as 64-bit words. Those of long rows are summed first, word j into sum j modulo GROUPS, by one pass of
vectorised additions; the sums, mixed, are then multiplied by odd keys and added up. A row that differs in one number
always has another hash. Rows that differ anyhow have one, by all but certainty, unless the differences cancel in every
sum: two words of one group exchanged, or two signs changed in one (1 pair of numbers in 388 for rows of more than 194).
These are fingerprints against mistakes, not against attackers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Hashes: TypeAlias = "NDArray[np.uint64]"

GROUPS = 97
"""A prime number, so that no usual row length of an image is a multiple of it; 96 sums fill vector registers."""

FOLDS = (GROUPS, 65)
"""Two coprime numbers of groups: no two words of a part of 65 x 97 are in one group both times. The sums are of odd
numbers of words, so that all signs changed at once do not cancel."""

PART = FOLDS[0] * FOLDS[1]

ODD = np.uint64(0x9E3779B97F4A7C15)
"""Multiplication with it exchanges 64-bit numbers one for one (it is 2^64 over the golden ratio)."""

SMALL = 2**16
"""Bytes of tensors that a cryptographic hash reads directly: for these, calls cost more than reading."""

SHIFT = np.uint64(29)
"""Takes the signs of both float32 numbers in a word to bits where no other sign is."""


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, (n,) uint8; a view where its numbers lie side by side.

    Single numbers count as contiguous whatever their stride, and keep it: a view as bytes refuses them.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def hash_rows(parts: Sequence[Tensor], more: Sequence[Tensor] = ()) -> Hashes:
    """One hash (n,) uint64 for each row of float32 parts (n, d_1), (n, d_2) ... side by side, and of `more` in int64.

    Where `more` is zero, it makes no difference. `mix` a hash before adding it to others: its bits are not all alike.
    """
    pieces: list[Tensor] = []
    widths = 0
    for part in parts:
        pieces += _folded(part)
        widths = 31 * widths + part.shape[1]
    if sum(piece.shape[1] for piece in pieces) % 2:
        pieces.append(_zeros(len(pieces[0]), pieces[0].device))
    pieces += [part.view(torch.float32) for part in more]
    hashes = _hash_words(torch.cat(pieces, 1).view(torch.int64))
    hashes += np.uint64(widths % 2**64)
    return hashes


@lru_cache(8)
def _zeros(count: int, device: torch.device) -> Tensor:
    """A column that completes words."""
    return torch.zeros(count, 1, device=device)


def _folded(rows: Tensor) -> tuple[Tensor, ...]:
    """Rows (n, d) as sums of their words in groups, and the numbers after the last full group. Short rows stay."""
    if rows.shape[1] <= 2 * GROUPS:
        return (rows,)
    if rows.shape[1] % 2:
        rows = torch.nn.functional.pad(rows, (0, 1))
    words = _aligned(rows).view(torch.int64)
    n, count = words.shape
    times = count // GROUPS
    sums = torch.as_strided(words, (n, times, GROUPS), (count, GROUPS, 1), words.storage_offset()).sum(1)
    return sums.view(torch.float32), rows[:, 2 * times * GROUPS :]


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose numbers can be read as words of 64 bits."""
    if tensor.storage_offset() * tensor.element_size() % 8:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def hash_tensors(tensors: Sequence[Tensor]) -> bytes:
    """32 bytes from all bytes of all tensors, to be compared with those of as many of the same shapes.

    A change of one number always changes them, and so do two numbers that change places or signs. Changes of more
    numbers do unless they cancel, in tensors above SMALL; without the numbers nobody can foretell the bytes.
    """
    digest = hashlib.sha256()  # the fastest choice: processors have instructions for it
    for tensor in tensors:
        numbers = tensor.detach()
        if numbers.nbytes > SMALL:
            words = _words(numbers)
            count = len(words) // PART
            for groups in FOLDS:
                strides = PART, groups, 1
                sums = words.as_strided((count, PART // groups, groups), strides, words.storage_offset()).sum(1)
                digest.update(sums.cpu().numpy().data)
            numbers = words[count * PART :]
        elif numbers.dtype is not torch.float32:
            numbers = flat_bytes(numbers)
        digest.update(numbers.contiguous().reshape(-1).cpu().numpy().data)
    return digest.digest()


def _words(tensor: Tensor) -> Tensor:
    """All bytes as words of 64 bits (n,), the last of which may be incomplete."""
    if tensor.nbytes % 8:
        return torch.nn.functional.pad(flat_bytes(tensor), (0, -tensor.nbytes % 8)).view(torch.int64)
    return _aligned(tensor).view(-1).view(torch.int64)


def _hash_words(words: Tensor) -> Hashes:
    """The sum (n,) of the words (n, d) in each row, each mixed and multiplied by an odd key of its own."""
    # numpy has less overhead than torch on small arrays, and unsigned numbers
    numbers: Hashes = words.cpu().numpy().view(np.uint64)
    mixed = numbers >> SHIFT  # products would lose all but the parity of the highest bits, the signs
    mixed ^= numbers
    found: Hashes = mixed.dot(_keys(numbers.shape[1]))
    return found


@cache
def _keys(count: int) -> Hashes:
    """A pseudorandom odd number for each word, so that the order of words matters."""
    keys = mix(np.arange(1, count + 1, dtype=np.uint64))
    keys |= np.uint64(1)
    return keys


def mix(numbers: Hashes) -> Hashes:
    """A hash of each 64-bit number, no two of which are alike: splitmix64."""
    numbers = numbers * ODD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers ^= numbers >> np.uint64(31)
    return numbers
