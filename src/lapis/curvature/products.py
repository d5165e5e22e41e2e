"""Products and log-determinants written for speed: symmetric products, sums of many logarithms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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


FACTORS = 16
"""Numbers multiplied before a logarithm is taken: products stay in float64's range for numbers from 1e-19 to 1e19."""


def sum_of_logs(values: Tensor) -> Tensor:
    """sum(log(values)) for positive values; few logarithms, for they cost ten times a product."""
    flat = values.reshape(-1)
    whole = flat.numel() // FACTORS * FACTORS
    products = flat[:whole].reshape(FACTORS, -1).prod(0)
    if bool(torch.isfinite(products).all()) and bool((products > torch.finfo(products.dtype).tiny).all()):
        return products.log().sum() + flat[whole:].log().sum()
    return flat.log().sum()


class _ShiftedLogDet(torch.autograd.Function):
    """sum(log(scale * values + shift)) with both derivatives from one sum of reciprocals."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        shifted = values * scale + shift
        ctx.save_for_backward(scale, shift)
        ctx.count = shifted.numel()
        ctx.shifted = shifted
        return sum_of_logs(shifted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        scale, shift = ctx.saved_tensors
        by_shift = ctx.shifted.reciprocal().sum()
        return None, gradient * (ctx.count - shift * by_shift) / scale, gradient * by_shift


def shifted_logdet(values: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """sum(log(scale * values + shift)), differentiable once in scale and shift (0-d); the values are constants."""
    result: Tensor = _ShiftedLogDet.apply(values, scale, shift)  # type: ignore[no-untyped-call]
    return result
