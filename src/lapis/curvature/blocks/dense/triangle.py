"""The lower triangle of a large symmetric matrix, in strips of rows: half the memory of the matrix, without copies.

A strip of rows a..b has columns 0..b; entries above the diagonal inside of it have no meaning. All work is done strip
by strip in float64, by products of matrices: the Cholesky factor takes one more triangle and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lapis.curvature.blocks.dense.gram import Span, strips
from lapis.curvature.moments import symmetric

WIDTH = 512
"""Rows of a strip."""


def spans(size: int) -> list[Span]:
    """The strips of a triangle: their rows from, and up to. The latter is also their number of columns."""
    return list(strips(0, size, WIDTH))


def triangle_bytes(size: int) -> int:
    """Memory of a triangle of this size."""
    return sum(8 * (stop - start) * stop for start, stop in spans(size))


class Triangle:
    """The lower triangle of a matrix (size, size); `rows[k]` holds the rows of span k, up to its last column."""

    def __init__(self, size: int, rows: list[Tensor]) -> None:
        self.size, self.rows = size, rows
        self.spans = spans(size)

    @staticmethod
    def zeros(size: int, device: torch.device) -> Triangle:
        """The triangle of an empty sum."""
        shapes = ((stop - start, stop) for start, stop in spans(size))
        return Triangle(size, [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes])

    def add_products(self, rows: Tensor) -> None:
        """Add R^T R for rows R (n, size)."""
        for (start, stop), total in zip(self.spans, self.rows, strict=True):
            left, right = rows[:, start:stop].mT, rows[:, :stop]
            if rows.dtype == total.dtype:
                torch.addmm(total, left, right, out=total)
            else:
                total += left @ right

    def diagonal(self) -> Tensor:
        """The matrix's diagonal, (size,)."""
        return torch.cat([self._corner(k).diagonal() for k in range(len(self.spans))])

    def _corner(self, k: int) -> Tensor:
        """The square of strip k at the diagonal, valid in its lower triangle."""
        return self.rows[k][:, self.spans[k][0] :]

    def whole(self) -> Tensor:
        """The symmetric matrix."""
        matrix = self.rows[0].new_empty(self.size, self.size)
        for k, (start, stop) in enumerate(self.spans):
            matrix[start:stop, :start] = self.rows[k][:, :start]
            matrix[:start, start:stop] = self.rows[k][:, :start].mT
            matrix[start:stop, start:stop] = symmetric(self._corner(k))
        return matrix

    def times(self, vectors: Tensor) -> Tensor:
        """The symmetric matrix times columns (size, n)."""
        found = torch.zeros_like(vectors)
        for k, (start, stop) in enumerate(self.spans):
            before = self.rows[k][:, :start]
            found[start:stop] += before @ vectors[:start] + symmetric(self._corner(k)) @ vectors[start:stop]
            found[:start] += before.mT @ vectors[start:stop]
        return found

    def cholesky(self, scale: Tensor, diagonal: Tensor) -> Triangle | None:
        """L with L L^T = scale * matrix + diag(diagonal), as a triangle; None if that is not positive definite.

        Row strip by row strip, L[k, j] = (A[k, j] - L[k, :j] L[j, :j]^T) L[j, j]^-T.
        """
        factor = Triangle(self.size, [])
        for k, (start, stop) in enumerate(self.spans):
            row = scale * self.rows[k]
            row[:, start:].diagonal().add_(diagonal[start:stop])
            factor.rows.append(row)
            for j, (first, last) in enumerate(self.spans[:k]):
                block = row[:, first:last]
                torch.addmm(block, row[:, :first], factor.rows[j][:, :first].mT, alpha=-1, out=block)
                corner = factor._corner(j).mT
                block.copy_(torch.linalg.solve_triangular(corner, block, upper=True, left=False))
            corner = row[:, start:]
            torch.addmm(corner, row[:, :start], row[:, :start].mT, alpha=-1, out=corner)
            lower, info = torch.linalg.cholesky_ex(corner)
            if int(info):
                return None
            corner.copy_(lower)
        return factor

    # of a triangular matrix L ----------------------------------------------------------------------

    def solve(self, columns: Tensor) -> Tensor:
        """L^-1 times columns (size, n)."""
        found = columns.clone()
        for k, (start, stop) in enumerate(self.spans):
            part = found[start:stop]
            part.addmm_(self.rows[k][:, :start], found[:start], alpha=-1)
            part.copy_(torch.linalg.solve_triangular(self._corner(k), part, upper=False))
        return found

    def solve_transposed(self, columns: Tensor) -> Tensor:
        """L^-T times columns (size, n)."""
        found = columns.clone()
        for k, (start, stop) in reversed(list(enumerate(self.spans))):
            part = found[start:stop]
            part.copy_(torch.linalg.solve_triangular(self._corner(k).mT, part, upper=True))
            found[:start].addmm_(self.rows[k][:, :start].mT, part, alpha=-1)
        return found

    def inverse_diagonal(self) -> Tensor:
        """The diagonal of (L L^T)^-1: columns of L^-1, squared and summed, a strip of them at a time."""
        return inverse_diagonal(self.size, WIDTH, lambda top, bottom, start, stop: self._block(top, start, stop))

    def _block(self, top: int, start: int, stop: int) -> Tensor:
        """Columns start..stop of the strip that begins at row `top`."""
        return self.rows[top // WIDTH][:, start:stop]


def inverse_diagonal(size: int, width: int, block: Callable[[int, int, int, int], Tensor]) -> Tensor:
    """The diagonal of (L L^T)^-1 for L given by `block(top, bottom, start, stop)`, its rows and columns."""
    spans = list(strips(0, size, width))
    found = []
    for i, (start, stop) in enumerate(spans):
        columns = block(start, stop, start, stop).new_zeros(size - start, stop - start)
        columns[: stop - start].fill_diagonal_(1)
        for top, bottom in spans[i:]:
            strip = columns[top - start : bottom - start]
            strip.addmm_(block(top, bottom, start, top), columns[: top - start], alpha=-1)
            strip.copy_(torch.linalg.solve_triangular(block(top, bottom, top, bottom), strip, upper=False))
        found.append(columns.square_().sum(0))
    return torch.cat(found)
