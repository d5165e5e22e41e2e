"""The kernel K = J Lambda^-1 J^T: the prior covariance of all outputs of the tangent model over a data set.

K is (M, M), M = examples x positions x outputs. Where M is smaller than the number of weights, everything about the
tangent model can be worked out from K and vectors (M,), as in Gaussian process regression: weights Lambda^-1 J^T a have
outputs K a and the prior penalty 1/2 a^T K a.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lapis.batches import all_finite
from lapis.curvature.products.jacobian import Jacobian
from lapis.errors import NotPositiveDefiniteError
from lapis.priors import WeightPrior
from lapis.progress import track

SOLVE_MATRICES = 4
"""Matrices (M, M) that a solve works in beside the kept parts of K: K, S^T K, S^T K S and its factor."""

COLUMNS_BYTES = 2**26
"""The columns of J that are multiplied together take at most this many bytes in float64."""

TRIANGLE_STRIPS = 8
"""The lower triangle of K is computed in so many vertical strips: 9/16 of the work that the full matrix takes."""


class OutputKernel:
    """K under any prior. The parts K_g = J_g J_g^T of the prior's groups are kept, so that K for other precisions is a
    weighted sum of them.

    Where the parts do not fit in `jacobian.memory_budget`, or every weight is a group of its own, only the latest K is
    kept, and it is computed from the rows of J for each new prior.
    """

    def __init__(self, jacobian: Jacobian) -> None:
        self.jacobian = jacobian.with_kept_rows()
        self.size = jacobian.n_outputs
        self._parts: tuple[object, list[Tensor]] | None = None
        self._latest: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def bytes_needed(jacobian: Jacobian, parts: int = 0) -> int:
        """Bytes that the rows of J, so many kept parts of K, and a solve take together."""
        rows = jacobian.n_outputs * jacobian.size * jacobian.network.dtype.itemsize
        return rows + (parts + SOLVE_MATRICES) * 8 * jacobian.n_outputs**2

    @classmethod
    def suits(cls, jacobian: Jacobian) -> bool:
        """Whether outputs are at most half as many as weights, and rows and kernel fit in the memory budget."""
        few = 2 * jacobian.n_outputs <= jacobian.size
        return few and cls.bytes_needed(jacobian) <= jacobian.memory_budget

    # the matrix ------------------------------------------------------------------------------------

    def parts(self, prior: WeightPrior) -> list[Tensor] | None:
        """K_g, (M, M) float64, of each prior group at precision one; None where they do not fit in memory."""
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
        """sum_p J_p J_p^T / precision_p, (M, M) float64, over the columns p of J in `spans`."""
        size = self.size
        total = torch.zeros(size, size, dtype=torch.float64, device=self.jacobian.network.device)
        step = max(1, COLUMNS_BYTES // (8 * size))
        chunks = [slice(i, min(i + step, span.stop)) for span in spans for i in range(span.start, span.stop, step)]
        height = -(-size // TRIANGLE_STRIPS)
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
        """J of each batch, (B T C, P)."""
        return (rows.flatten(0, 2) for rows in self.jacobian.rows())

    def forward(self, vectors: Tensor) -> Tensor:
        """J v, (M,) or (k, M), for vectors (P,) or (k, P), summed in float64 whatever the network's dtype."""
        pieces = [some for rows in self._flat_rows() for some in torch.split(rows, 256)]
        return torch.cat([vectors @ some.double().mT for some in pieces], -1)

    def backward(self, seeds: Tensor) -> Tensor:
        """J^T u, (P,) or (k, P), for seeds (M,) or (k, M), summed in float64."""
        pieces = [some for rows in self._flat_rows() for some in torch.split(rows, 256)]
        total = torch.zeros(*seeds.shape[:-1], self.jacobian.size, dtype=torch.float64, device=seeds.device)
        for rows, u in zip(pieces, torch.split(seeds, [len(rows) for rows in pieces], -1), strict=True):
            total += u @ rows.double()
        return total


class KernelCholesky:
    """Solves with K + H^-1 for the likelihood's curvature H = S S^T, also where H is singular.

    By Woodbury's identity (K + H^-1)^-1 = S B^-1 S^T with B = I + S^T K S, whose Cholesky factor is computed once.
    B is (R, R), R being the number of columns of S over all examples and positions.
    """

    def __init__(self, kernel: Tensor, factors: Sequence[Tensor]) -> None:
        self.factors = factors
        inner = self._times_factors_transposed(self._times_factors_transposed(kernel).mT)
        inner.diagonal().add_(1)
        lower, info = torch.linalg.cholesky_ex(inner)
        if int(info) or not all_finite(lower):
            raise NotPositiveDefiniteError(
                "The outputs' prior covariance, in units of the noise, is too large for float64",
                expected="I + S^T K S with eigenvalues >= 1",
                got=f"a factorisation that failed, with {float(inner.diagonal().max()):.3g} on the diagonal",
                do="use a larger prior precision or noise, or rescale inputs and targets",
            )
        self.lower: Tensor = lower

    def solve(self, columns: Tensor) -> Tensor:
        """(K + H^-1)^-1 u, (M, n), for columns u (M, n). Posterior covariances of outputs are K - K (K + H^-1)^-1 K."""
        return self._times_factors(torch.cholesky_solve(self._times_factors_transposed(columns), self.lower))

    def half(self, columns: Tensor) -> Tensor:
        """L^-1 S^T u, (R, n), for columns u (M, n) and B = L L^T: inner products of these are u^T (K + H^-1)^-1 u."""
        half: Tensor = torch.linalg.solve_triangular(self.lower, self._times_factors_transposed(columns), upper=False)
        return half

    def logdet(self) -> Tensor:
        """log |B|, 0-d float64."""
        return 2 * self.lower.diagonal().log().sum()

    def _times_factors_transposed(self, columns: Tensor) -> Tensor:
        """S^T u, (R, n), for u (M, n)."""
        return self._blockwise([s.mT for s in self.factors], columns)

    def _times_factors(self, columns: Tensor) -> Tensor:
        """S u, (M, n), for u (R, n)."""
        return self._blockwise(self.factors, columns)

    @staticmethod
    def _blockwise(factors: Sequence[Tensor], columns: Tensor) -> Tensor:
        """The block-diagonal matrix with blocks (B, T, rows, columns) of each batch, times columns."""
        counts = [factor.shape[:2].numel() * factor.shape[-1] for factor in factors]
        return torch.cat(
            [
                (factor.flatten(0, 1) @ u.reshape(-1, factor.shape[-1], u.shape[-1])).flatten(0, 1)
                for u, factor in zip(torch.split(columns, counts), factors, strict=True)
            ]
        )
