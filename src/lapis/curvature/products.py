"""Matrix products that know their result is symmetric: half the work of general ones."""

from __future__ import annotations

import torch
from scipy.linalg import blas
from torch import Tensor

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
