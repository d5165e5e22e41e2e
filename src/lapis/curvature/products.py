"""Symmetric products at little more than half the work of general ones."""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 128
"""Widest block that is multiplied in one go; narrower ones save more work and lose more speed."""


def half_gram(x: Tensor) -> Tensor:
    """x^T x for x (n, k), right in its lower triangle only: little more than half the work of a general product.

    BLAS has such a product, but torch does not expose it, and another library's threads would fight with torch's.
    """
    total = x.new_zeros(x.shape[1], x.shape[1])
    _fill(total, x.detach())
    return total


def _fill(total: Tensor, x: Tensor) -> None:
    width = x.shape[1]
    if width <= PANEL:
        torch.mm(x.mT, x, out=total)
        return
    half = width // 2
    left, right = x[:, :half], x[:, half:]
    _fill(total[:half, :half], left)
    torch.mm(right.mT, left, out=total[half:, :half])
    _fill(total[half:, half:], right)


def symmetric(lower: Tensor) -> Tensor:
    """The symmetric matrix with this lower triangle; what stands above it does not count."""
    return lower.tril() + lower.tril(-1).mT
