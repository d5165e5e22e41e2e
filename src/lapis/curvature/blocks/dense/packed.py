"""The dense structure for many weights: one triangle of the curvature, one of its factor, both in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapis.batches import all_finite
from lapis.curvature.backward.contributions import Contribution
from lapis.curvature.blocks.block import Block, BlockGaussian, site_precision
from lapis.curvature.blocks.dense.matrix import inner_products, stacked_rows
from lapis.curvature.blocks.dense.triangle import Triangle, spans, triangle_bytes
from lapis.curvature.blocks.spectrum import Spectrum
from lapis.curvature.moments import sum_rounding
from lapis.curvature.recording.sites import Site
from lapis.errors import NotPositiveDefiniteError
from lapis.priors import WeightPrior

BUFFER_BYTES = 2**29
"""Rows of the Jacobian that are multiplied together: each product reads and writes the whole triangle."""


def packed_bytes(size: int) -> int:
    """Memory at the peak of a fit over so many weights, its factorisation, and predictions."""
    return 2 * triangle_bytes(size) + 2 * BUFFER_BYTES


class PackedBlock(Block):
    """sum_n J_n^T S_n S_n^T J_n, of which only the lower triangle is stored."""

    kind = "dense"
    takes_rows = True

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites)
        self._triangle: Triangle | None = None
        """None before the first batch: it takes no memory then."""
        self._buffer: list[Tensor] = []
        self._eps = 0.0

    @property
    def triangle(self) -> Triangle:
        """The curvature."""
        self.flush()
        if self._triangle is None:
            self._triangle = Triangle.zeros(self.size, torch.device("cpu"))
        return self._triangle

    def accumulate(self, contributions: Sequence[Contribution], first: bool) -> None:
        rows = stacked_rows(contributions).detach().flatten(0, 1)
        if self._buffer and sum(part.nbytes for part in self._buffer) + rows.nbytes > BUFFER_BYTES:
            self.flush()
        self._buffer.append(rows)

    def add_row(self, row: int, values: Tensor) -> None:
        for (start, stop), strip in zip(self.triangle.spans, self.triangle.rows, strict=True):
            if start <= row < stop:
                strip[row - start] += values[:stop]

    def flush(self) -> None:
        if self._buffer:
            rows, self._buffer = torch.cat(self._buffer), []
            if self._triangle is None:
                self._triangle = Triangle.zeros(self.size, rows.device)
            self._triangle.add_products(rows)
            self._eps = max(self._eps, 0.0 if rows.dtype == torch.float64 else torch.finfo(rows.dtype).eps)

    def gaussian(self, prior: WeightPrior, scale: Tensor) -> PackedGaussian:
        parts = [site_precision(prior, site).expand(site.shape).reshape(-1) for site in self.sites]
        return PackedGaussian(self, torch.cat(parts), scale)

    def spectra(self, prior: WeightPrior) -> list[tuple[int | Tensor, Spectrum]] | None:
        return None  # eigenvalues of so many weights take several times the memory and the time of a factorisation

    @property
    def nbytes(self) -> int:
        return triangle_bytes(self.size)

    def is_finite(self) -> bool:
        return all_finite(self.triangle.diagonal())  # which bounds every entry of a positive semi-definite matrix

    def eps(self) -> dict[str, float]:
        self.flush()
        return {"rows": self._eps}

    def take_eps(self, eps: Mapping[str, float]) -> None:
        self._eps = eps["rows"]

    def rounding(self) -> float:
        return sum_rounding(self.eps()["rows"], self.triangle.diagonal())

    def state(self) -> dict[str, Tensor]:
        self.flush()
        return {} if self._triangle is None else {f"rows.{k}": rows for k, rows in enumerate(self._triangle.rows)}

    def layout(self) -> dict[str, tuple[int, ...]]:
        return {f"rows.{k}": (stop - start, stop) for k, (start, stop) in enumerate(spans(self.size))}

    def load(self, state: dict[str, Tensor]) -> None:
        rows = [state[name] for name in self.layout() if name in state]
        self._triangle, self._buffer = Triangle(self.size, rows) if rows else None, []


class PackedGaussian(BlockGaussian):
    """Precision scale * curvature + diag(prior), through a triangle that holds its Cholesky factor."""

    def __init__(self, block: PackedBlock, prior: Tensor, scale: Tensor) -> None:
        self.block, self.prior, self.scale = block, prior, scale
        self._factor: Triangle | None = None

    def factor(self) -> Triangle:
        """L with L L^T = precision; without gradients."""
        if self._factor is None:
            self._factor = self.block.triangle.cholesky(self.scale.detach(), self.prior.detach())
        if self._factor is None:
            raise NotPositiveDefiniteError(
                "The posterior precision is not positive definite",
                expected="curvature + prior with positive eigenvalues",
                got=f"none for a smallest prior precision of {float(self.prior.detach().min()):.3g}",
                do='use curvature="ggn", train to a minimum, or a larger prior precision',
            )
        return self._factor

    def check(self) -> None:
        self.factor()

    def logdet(self) -> Tensor:
        value: Tensor = _LogDeterminant.apply(self.prior, self.scale, self)  # type: ignore[no-untyped-call]
        return value

    def color(self, noise: Tensor) -> Tensor:
        return self.factor().solve_transposed(noise.double().T).T

    def multiply(self, vectors: Tensor) -> Tensor:
        return self.scale.detach() * self.block.triangle.times(vectors.T).T + vectors * self.prior.detach()

    def solve(self, vectors: Tensor) -> Tensor:
        factor = self.factor()
        return factor.solve_transposed(factor.solve(vectors.T)).T

    def variance(self) -> Tensor:
        return self.factor().inverse_diagonal()

    def covariance(self, contributions: Sequence[Contribution], diagonal: bool) -> Tensor:
        white = self.features(contributions)
        return white.square().sum(0) if diagonal else torch.einsum("pbm,pbn->bmn", white, white)

    def features(self, contributions: Sequence[Contribution]) -> Tensor:
        """L^-1 J^T as (size, B, M)."""
        rows = stacked_rows(contributions).transpose(0, 1)
        return self.factor().solve(rows.flatten(0, 1).double().T).reshape(-1, *rows.shape[:2])

    def kernel(self, left: Tensor, right: Tensor) -> Tensor:
        return inner_products(left, right)

    def matrix(self) -> Tensor:
        matrix = self.scale.detach() * self.block.triangle.whole()
        matrix.diagonal().add_(self.prior.detach())
        return matrix


class _LogDeterminant(torch.autograd.Function):
    """log |s C + Lambda|. Its gradient in diag(Lambda) are the marginal variances v; its derivative in s is
    (P - sum(Lambda v)) / s. It can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, prior: Tensor, scale: Tensor, gaussian: PackedGaussian) -> Tensor:
        ctx.save_for_backward(prior, scale)
        ctx.gaussian = gaussian
        return 2 * gaussian.factor().diagonal().log().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        prior, scale = ctx.saved_tensors
        variance = ctx.gaussian.variance()
        by_scale = (len(variance) - (prior * variance).sum()) / scale
        return slope * variance, slope * by_scale, None
