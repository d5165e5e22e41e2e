"""The kernel K = J Lambda^-1 J^T between all outputs of a data set: a linear model seen from its outputs.

Where outputs are fewer than weights, everything about the tangent model can be worked out on K, (M, M) with M examples
x positions x outputs, and on vectors (M,): weights Lambda^-1 J^T a have outputs K a and prior penalty 1/2 a^T K a.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lapis.curvature.products.jacobian import Jacobian
from lapis.priors import WeightPrior
from lapis.progress import track

WORKING = 4
"""Matrices of the kernel's size that a solve works in beside those kept: K, S^T K S on the way, and its factor."""

COLUMNS_BYTES = 2**26
"""Columns of J that are multiplied at once, in float64."""

ROW_BLOCKS = 8
"""Strips that the lower triangle is computed in: 9/16 of the products that the full matrix takes."""


class OutputKernel:
    """K for any prior of one grouping: the parts K_g = J_g J_g^T are kept, so that other precisions are a weighted sum.

    Where the parts do not fit in `jacobian.memory_budget` (or every weight is a group) only K itself is kept, and
    computed anew from the rows of J for each prior.
    """

    def __init__(self, jacobian: Jacobian) -> None:
        self.jacobian = jacobian.keeping()
        self.size = jacobian.n_outputs
        self._parts: tuple[object, list[Tensor]] | None = None
        self._latest: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def bytes_needed(jacobian: Jacobian, parts: int = 0) -> int:
        """Memory that rows of J, `parts` kept parts of K, and a solve take."""
        rows = jacobian.n_outputs * jacobian.size * jacobian.network.dtype.itemsize
        return rows + (parts + WORKING) * 8 * jacobian.n_outputs**2

    @classmethod
    def suits(cls, jacobian: Jacobian) -> bool:
        """Whether outputs are at most half as many as weights, and rows and kernel fit in the memory budget."""
        few = 2 * jacobian.n_outputs <= jacobian.size
        return few and cls.bytes_needed(jacobian) <= jacobian.memory_budget

    # the matrix ------------------------------------------------------------------------------------

    def parts(self, prior: WeightPrior) -> list[Tensor] | None:
        """K_g, (M, M) float64, of each prior group at precision one; None where they do not fit."""
        if prior.group_of is None:
            return None
        key = (tuple(prior.group_of.items()), prior.scales)
        if self._parts is not None and self._parts[0][0] == key[0] and self._parts[0][1] is key[1]:  # type: ignore[index]
            return self._parts[1]
        if self.bytes_needed(self.jacobian, len(prior.precision)) > self.jacobian.memory_budget:
            return None
        self._parts = None
        spans: list[list[slice]] = [[] for _ in prior.labels]
        for name, group in prior.group_of.items():
            spans[group].append(prior.span(name))
        self._parts = (key, [self._gram(some, prior.scales) for some in spans])
        return self._parts[1]

    def under(self, prior: WeightPrior) -> Tensor:
        """K = J Lambda^-1 J^T, (M, M) float64."""
        vector = prior.vector().detach()
        if self._latest is not None and torch.equal(self._latest[0], vector):
            return self._latest[1]
        self._latest = None
        parts = self.parts(prior)
        if parts is None:
            kernel = self._gram([slice(0, self.jacobian.size)], vector)
        else:
            kernel = torch.zeros_like(parts[0])
            for part, precision in zip(parts, prior.precision.detach().tolist(), strict=True):
                kernel.add_(part, alpha=1 / precision)
        self._latest = (vector, kernel)
        return kernel

    def _gram(self, spans: Sequence[slice], precision: Tensor | None) -> Tensor:
        """sum_p J_p J_p^T / precision_p over the columns in `spans`."""
        size = self.size
        total = torch.zeros(size, size, dtype=torch.float64, device=self.jacobian.network.device)
        step = max(1, COLUMNS_BYTES // (8 * size))
        chunks = [slice(i, min(i + step, span.stop)) for span in spans for i in range(span.start, span.stop, step)]
        height = -(-size // ROW_BLOCKS)
        for chunk in track(chunks, "kernel of the outputs", len(chunks)):
            columns = torch.cat([rows[:, chunk].double() for rows in self._flat_rows()])
            if precision is not None:
                columns *= precision[chunk].rsqrt()
            for start in range(0, size, height):
                strip = slice(start, min(start + height, size))
                total[start:, strip].addmm_(columns[start:], columns[strip].mT)
        return total.tril_().add_(total.tril(-1).mT)

    # products --------------------------------------------------------------------------------------

    def _flat_rows(self) -> Iterator[Tensor]:
        return (rows.flatten(0, 2) for rows in self.jacobian.rows())

    def forward(self, vector: Tensor) -> Tensor:
        """J v, (M,), summed in float64 whatever the network's dtype."""
        return torch.cat([some.double() @ vector for rows in self._flat_rows() for some in torch.split(rows, 256)])

    def backward(self, seed: Tensor) -> Tensor:
        """J^T u, (P,), summed in float64."""
        pieces = [some for rows in self._flat_rows() for some in torch.split(rows, 256)]
        total = torch.zeros(self.jacobian.size, dtype=torch.float64, device=seed.device)
        for rows, u in zip(pieces, torch.split(seed, [len(rows) for rows in pieces]), strict=True):
            total += u @ rows.double()
        return total


class Factored:
    """B = I + S^T K S = L L^T for factors S of the likelihood's curvature: I - S B^-1 S^T K is (I + S S^T K)^-1."""

    def __init__(self, kernel: Tensor, factors: Sequence[Tensor]) -> None:
        self.factors = factors
        inner = self.narrowed(self.narrowed(kernel).mT)
        inner.diagonal().add_(1)
        self.lower: Tensor = torch.linalg.cholesky(inner)

    def narrowed(self, rows: Tensor) -> Tensor:
        """S^T u for u (M, n): (R, n), R columns of S in all."""
        return self._apply(rows, [s.mT for s in self.factors])

    def widened(self, rows: Tensor) -> Tensor:
        """S u for u (R, n): (M, n)."""
        return self._apply(rows, self.factors)

    @staticmethod
    def _apply(rows: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        counts = [block.shape[:2].numel() * block.shape[-1] for block in blocks]
        pieces = zip(torch.split(rows, counts), blocks, strict=True)
        return torch.cat([(b.flatten(0, 1) @ u.reshape(-1, b.shape[-1], u.shape[-1])).flatten(0, 1) for u, b in pieces])

    def remove(self, rows: Tensor) -> Tensor:
        """S B^-1 S^T u for u (M, n): what turns prior covariances K of outputs into K - K (S B^-1 S^T) K."""
        return self.widened(torch.cholesky_solve(self.narrowed(rows), self.lower))
