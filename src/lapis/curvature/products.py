"""Matrix products that know their result is symmetric."""

from __future__ import annotations

import torch
from scipy.linalg import blas
from torch import Tensor

_SYRK = {torch.float32: blas.ssyrk, torch.float64: blas.dsyrk}

NARROWEST = 32
"""Below this width a plain product is as fast."""


def gram(x: Tensor) -> Tensor:
    """x^T x for x (n, k). BLAS's symmetric product does half the work of a general one; torch does not expose it."""
    if x.device.type != "cpu" or x.dtype not in _SYRK or x.shape[1] < NARROWEST or x.shape[0] == 0:
        return x.mT @ x
    x = x.detach()
    if x.stride(1) != 1 and x.stride(0) != 1:
        x = x.contiguous()
    if x.stride(1) == 1:  # rows in memory: x^T is in the column order that BLAS wants
        lower = torch.from_numpy(_SYRK[x.dtype](1.0, x.numpy().T, trans=0, lower=0).T)
    else:
        lower = torch.from_numpy(_SYRK[x.dtype](1.0, x.numpy(), trans=1, lower=0).T)
    return lower + lower.mT.triu(1)
