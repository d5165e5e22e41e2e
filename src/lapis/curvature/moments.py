"""Symmetric products at little more than half the work of general ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

STRIP = 96
"""Columns multiplied in one go with all columns before them: narrower strips save more work, at a lower speed."""

TERMS_BEFORE_FLOAT64 = 16
"""Terms that are summed in the network's own precision before the sum is added to the one in float64."""


def add_half_gram(total: Tensor, x: Tensor) -> None:
    """Add the lower triangle of x^T x, x (n, k), to `total` (k, k): little more than half a general product's work.

    BLAS has such a product, but torch does not expose it, and another library's threads would fight with torch's.
    """
    x, width = x.detach().to(total.dtype), x.shape[1]
    for start in range(0, width, STRIP):
        stop = min(start + STRIP, width)
        strip = total[start:stop, :stop]
        torch.addmm(strip, x[:, start:stop].mT, x[:, :stop], out=strip)


class Moment:
    """A sum of many arrays in float64, except for the latest few terms, which are summed in their own precision.

    Adding to float64 costs as much as a narrow product, so it is done for several terms at once. No memory is allocated
    before the first term, and none in float64 before the first few terms are summed.

    `by_columns`: the latest terms are stored column-major, so that a matrix without its last column, the bias, is
    contiguous: products written there are a fifth faster.
    """

    def __init__(self, shape: Sequence[int], total: Tensor | None = None, *, by_columns: bool = False) -> None:
        self.shape = tuple(shape)
        self._total = total
        self._by_columns = by_columns
        self._recent: Tensor | None = None
        self._terms = 0
        self.eps = 0.0
        """Of the least precise dtype of a term, unless that was float64."""

    def rounding(self) -> float:
        """About the error in eigenvalues of a sum of outer products: see `sum_rounding`."""
        if not self.eps:
            return 0.0
        known = self._recent if self._total is None and self._recent is not None else self.total
        return sum_rounding(self.eps, known.diagonal(dim1=-2, dim2=-1))

    def recent(self, dtype: torch.dtype) -> Tensor:
        """The array that the caller adds the next term to, in place."""
        if dtype == torch.float64:
            return self.total
        if self._terms == TERMS_BEFORE_FLOAT64 or (self._recent is not None and self._recent.dtype != dtype):
            self._add_recent()
        self.eps = max(self.eps, torch.finfo(dtype).eps)
        if self._recent is None:
            device = None if self._total is None else self._total.device
            if self._by_columns:
                *others, rows, columns = self.shape
                self._recent = torch.zeros(*others, columns, rows, dtype=dtype, device=device).mT
            else:
                self._recent = torch.zeros(self.shape, dtype=dtype, device=device)
        self._terms += 1
        return self._recent

    def _add_recent(self) -> None:
        if self._recent is not None:
            # one dtype and order: additions run vectorised
            exact = self._recent.to(torch.float64, memory_format=torch.contiguous_format)
            self._total = exact if self._total is None else self._total.add_(exact)
        self._recent, self._terms = None, 0

    def copy(self) -> Tensor:
        """A float64 copy of the sum, without allocating memory for the sum itself if it has none in float64 yet."""
        if self._total is None and self._recent is not None:
            return self._recent.double()
        return self.total.clone()

    @property
    def total(self) -> Tensor:
        self._add_recent()
        if self._total is None:
            self._total = torch.zeros(self.shape, dtype=torch.float64)
        return self._total


def sum_rounding(eps: float, diagonal: Tensor) -> float:
    """About the error in eigenvalues of J^T J: eps * sqrt(size) * the largest entry of its diagonal (..., size).

    Rows that are exact to eps and multiplied in float64 give the Gram matrix of a matrix near J, whose eigenvalues are
    right down to eps^2 of the largest. Products in float32 lose all below eps of it.
    """
    return eps * math.sqrt(diagonal.shape[-1]) * float(diagonal.max())


def weighted(terms: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_k w_k x_k of tensors of one shape."""
    total = torch.zeros_like(terms[0])
    for term, weight in zip(terms, weights, strict=True):
        total.add_(term, alpha=weight)
    return total


def symmetric(lower: Tensor) -> Tensor:
    """The symmetric matrix with this lower triangle; what is above the diagonal is ignored."""
    return lower.tril() + lower.tril(-1).mT
