"""Products and log-determinants written for speed: symmetric products, sums of many logarithms."""

from __future__ import annotations

from typing import Any

import torch
from scipy.linalg import blas
from torch import Tensor
from torch.autograd.function import once_differentiable

_SYRK = {torch.float32: blas.ssyrk, torch.float64: blas.dsyrk}

NARROWEST = 32
"""Below this width a plain product is as fast."""


def half_gram(x: Tensor) -> Tensor:
    """The lower triangle of x^T x for x (n, k), with zeros above. BLAS has it, torch does not expose it."""
    if x.device.type != "cpu" or x.dtype not in _SYRK or x.shape[1] < NARROWEST or x.shape[0] == 0:
        return (x.mT @ x).tril()
    x = x.detach()
    if x.stride(1) != 1 and x.stride(0) != 1:
        x = x.contiguous()
    if x.stride(1) == 1:  # rows in memory: x^T is in the column order that BLAS wants
        return torch.from_numpy(_SYRK[x.dtype](1.0, x.numpy().T, trans=0, lower=0).T)
    return torch.from_numpy(_SYRK[x.dtype](1.0, x.numpy(), trans=1, lower=0).T)


def symmetric(lower: Tensor) -> Tensor:
    """The symmetric matrix with this lower triangle (zeros above)."""
    return lower + lower.mT.triu(1)


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
