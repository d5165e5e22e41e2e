"""The dense structure: all second derivatives between the block's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lapis.batches import all_finite
from lapis.curvature.backward.contributions import Contribution
from lapis.curvature.blocks.abilities import Traces
from lapis.curvature.blocks.block import Block, BlockGaussian, common_group, site_precision
from lapis.curvature.blocks.dense.gram import STRIP, Gram
from lapis.curvature.blocks.dense.triangle import inverse_diagonal
from lapis.curvature.blocks.spectrum import Spectrum, spectrum
from lapis.curvature.recording.sites import Site
from lapis.errors import NotPositiveDefiniteError
from lapis.priors import WeightPrior

SMALL_EIGENPROBLEM = 512
"""Up to this many weights eigenvalues, which serve every prior and noise, are computed without `prepare_spectra`."""


class DenseBlock(Block):
    """sum_n J_n^T S_n S_n^T J_n, as a matrix (size, size)."""

    kind = "dense"
    summed = "curvature"
    takes_rows = True

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites)
        self._gram = Gram([site.size for site in sites])
        self._eigenvalues: Tensor | None = None
        self.is_hessian = False
        """Whether second derivatives were added, which need not be positive."""

    def accumulate(self, contributions: Sequence[Contribution], first: bool) -> None:
        self._gram.add(contributions)

    def add_row(self, row: int, values: Tensor) -> None:
        self.curvature[row] += values
        self.is_hessian = True

    def flush(self) -> None:
        self._gram.flush()

    def combine(self, parts: Sequence[Block], weights: Sequence[float]) -> None:
        rows = [part.few_rows for part in parts if isinstance(part, DenseBlock)]
        if any(found is None for found in rows):
            super().combine(parts, weights)
            return
        pairs = zip(rows, weights, strict=True)
        self._gram.load_rows(torch.cat([weight**0.5 * found for found, weight in pairs if found is not None]))
        self._eigenvalues = None

    @property
    def few_rows(self) -> Tensor | None:
        """All rows R with curvature R^T R, float64, where they are few beside the weights; else None."""
        return self._gram.rows

    @property
    def lower(self) -> Tensor:
        """The curvature matrix, valid in its lower triangle only."""
        return self._gram.lower

    @property
    def curvature(self) -> Tensor:
        """The whole curvature matrix."""
        return self._gram.matrix

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the curvature (size,), ascending; computed once."""
        if self._eigenvalues is None:
            rows = self.few_rows
            if rows is None:
                self._eigenvalues = torch.linalg.eigvalsh(self.curvature)
            else:
                found = torch.linalg.eigvalsh(rows @ rows.mT).clamp(min=0)
                self._eigenvalues = torch.cat([found.new_zeros(self.size - len(rows)), found])
        return self._eigenvalues

    def gaussian(self, prior: WeightPrior, scale: Tensor) -> DenseGaussian:
        if common_group(prior, self.sites) is not None:
            precision = site_precision(prior, self.sites[0])
        else:
            parts = [site_precision(prior, site).expand(site.shape).reshape(-1) for site in self.sites]
            precision = torch.cat(parts)
        return DenseGaussian(self, precision, scale)

    def spectra(self, prior: WeightPrior) -> list[tuple[int | Tensor, Spectrum]] | None:
        group = common_group(prior, self.sites)
        if group is None or (self._eigenvalues is None and self.size > SMALL_EIGENPROBLEM and self.few_rows is None):
            return None
        return [(group, spectrum(self.eigenvalues()))]

    def prepare_spectra(self, prior: WeightPrior) -> None:
        if common_group(prior, self.sites) is not None:
            self.eigenvalues()

    @property
    def nbytes(self) -> int:
        return 8 * self.size**2

    def is_finite(self) -> bool:
        rows = self.few_rows  # else the diagonal, which bounds every entry of a positive semi-definite matrix
        return all_finite(self.lower.diagonal() if rows is None else rows)

    def eps(self) -> dict[str, float]:
        return {"curvature": self._gram.eps}

    def take_eps(self, eps: Mapping[str, float]) -> None:
        self._gram.eps = eps["curvature"]

    def inherit(self, others: Sequence[Block]) -> None:
        super().inherit(others)
        self.is_hessian = any(other.is_hessian for other in others if isinstance(other, DenseBlock))

    def rounding(self) -> float:
        return self._gram.rounding

    def state(self) -> dict[str, Tensor]:
        return {"curvature": self.curvature}

    def layout(self) -> dict[str, tuple[int, ...]]:
        return {"curvature": (self.size, self.size)}

    def load(self, state: dict[str, Tensor]) -> None:
        self._gram.load(state["curvature"])
        self._eigenvalues = None


class DenseGaussian(BlockGaussian, Traces):
    """Precision scale * curvature + diag(prior), through its Cholesky factor."""

    def __init__(self, block: DenseBlock, prior: Tensor, scale: Tensor) -> None:
        self.block, self.prior, self.scale = block, prior, scale
        self.differentiable = prior.requires_grad or scale.requires_grad
        self.fixed = DenseGaussian(block, prior.detach(), scale.detach()) if self.differentiable else self
        """The same Gaussian without gradients, for autograd functions that have their own backward pass."""
        self._factor: Tensor | None = None

    def matrix(self) -> Tensor:
        matrix = self.scale * self.block.curvature
        matrix.diagonal().add_(self.prior)
        return matrix

    def factor(self) -> Tensor:
        """L with L L^T = precision."""
        if self._factor is None:
            upper, info = self._upper()
            if int(info):
                with torch.no_grad():
                    values = self.scale * self.block.eigenvalues()
                    lowest, rounding = float(values[0]), len(values) * torch.finfo(values.dtype).eps * float(values[-1])
                    least = max(-lowest, rounding)
                remedy = 'use curvature="ggn", train to a minimum, or'
                if not self.block.is_hessian:
                    narrow = self.block.rounding() > 0
                    remedy = "sum in float64: model.double(), or use" if narrow else "rescale the inputs, or use"
                raise NotPositiveDefiniteError(
                    "The posterior precision is not positive definite"
                    + ("" if self.block.is_hessian else " after rounding"),
                    expected="curvature + prior with positive eigenvalues",
                    got=f"curvature with eigenvalues from {lowest:.3g} to {float(values[-1]):.3g}",
                    do=f"{remedy} a prior precision above {least:.3g}",
                )
            self._factor = upper.mT
        return self._factor

    def check(self) -> None:
        self.factor()

    def _upper(self) -> tuple[Tensor, Tensor]:
        """The transpose U = L^T of the Cholesky factor, and LAPACK's status: 0 if the factorisation succeeded.

        Where no gradient is needed the factor is written over a single copy of the matrix. Its lower triangle, row by
        row in memory, is the upper triangle of the column-major matrix that LAPACK sees.
        """
        if self.differentiable:
            upper, info = torch.linalg.cholesky_ex(self.matrix().mT, upper=True)
            return upper, info
        matrix = (self.scale * self.block.lower).mT
        matrix.diagonal().add_(self.prior)
        info = torch.empty((), dtype=torch.int32, device=matrix.device)
        torch.linalg.cholesky_ex(matrix, upper=True, out=(matrix, info))
        return matrix, info

    def logdet(self) -> Tensor:
        rows = self.block.few_rows
        if rows is None:
            value: Tensor = _LogDeterminant.apply(self.prior, self.scale, self.fixed)  # type: ignore[no-untyped-call]
            return value
        # |Lambda + s R^T R| = |Lambda| |I + s R Lambda^-1 R^T|
        inner = self.scale * (rows / self.prior) @ rows.mT + torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
        rest: Tensor = torch.linalg.slogdet(inner).logabsdet
        return self.prior.expand(self.block.size).log().sum() + rest

    def color(self, noise: Tensor) -> Tensor:
        draws: Tensor = torch.linalg.solve_triangular(self.factor().mT, noise.double().T, upper=True)
        return draws.T

    def multiply(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix()

    def solve(self, vectors: Tensor) -> Tensor:
        return torch.cholesky_solve(vectors.T, self.factor()).T

    def variance(self) -> Tensor:
        value: Tensor = _Variance.apply(self.prior, self.scale, self.fixed)  # type: ignore[no-untyped-call]
        return value

    def trace(self, block: Block) -> Tensor:
        assert isinstance(block, DenseBlock)
        rows = block.few_rows
        if rows is None:
            return (torch.cholesky_inverse(self.factor()) * block.curvature).sum()
        white: Tensor = torch.linalg.solve_triangular(self.factor(), rows.mT, upper=False)
        return white.square().sum()

    def _whitened(self, contributions: Sequence[Contribution]) -> Tensor:
        """L^-1 J^T as (size, B, M)."""
        rows = stacked_rows(contributions)
        seeds, batch, _ = rows.shape
        flat = rows.transpose(0, 1).reshape(batch * seeds, -1).double()
        white: Tensor = torch.linalg.solve_triangular(self.factor(), flat.T, upper=False)
        return white.reshape(-1, batch, seeds)

    def covariance(self, contributions: Sequence[Contribution], diagonal: bool) -> Tensor:
        white = self._whitened(contributions)
        return white.square().sum(0) if diagonal else torch.einsum("pbm,pbn->bmn", white, white)

    def features(self, contributions: Sequence[Contribution]) -> Tensor:
        return self._whitened(contributions)

    def kernel(self, left: Tensor, right: Tensor) -> Tensor:
        return inner_products(left, right)


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """(B, M, B', M') from vectors (size, B, M) and (size, B', M')."""
    return (left.flatten(1).mT @ right.flatten(1)).reshape(*left.shape[1:], *right.shape[1:])


def stacked_rows(contributions: Sequence[Contribution]) -> Tensor:
    """The sites' Jacobians side by side, (M, B, size)."""
    parts = [contribution.rows() for contribution in contributions]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class _LogDeterminant(torch.autograd.Function):
    """log |s C + Lambda|. Its gradient in diag(Lambda) are the marginal variances v; its derivative in s is
    trace((s C + Lambda)^-1 C) = (P - sum(Lambda v)) / s."""

    @staticmethod
    def forward(ctx: Any, prior: Tensor, scale: Tensor, gaussian: DenseGaussian) -> Tensor:
        ctx.save_for_backward(prior, scale)
        ctx.gaussian = gaussian
        return 2 * gaussian.factor().diagonal().log().sum()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        prior, scale = ctx.saved_tensors
        variance: Tensor = _Variance.apply(prior, scale, ctx.gaussian)  # type: ignore[no-untyped-call]
        by_scale = (len(variance) - (prior * variance).sum()) / scale
        return (slope * variance).sum_to_size(prior.shape), slope * by_scale, None


class _Variance(torch.autograd.Function):
    """The diagonal v of W = (s C + Lambda)^-1. For an incoming gradient u, the gradient in diag(Lambda) is -(W * W) u,
    and the one in s is -u . diag(W C W) = -u . (v - (W * W) Lambda) / s."""

    @staticmethod
    def forward(ctx: Any, prior: Tensor, scale: Tensor, gaussian: DenseGaussian) -> Tensor:
        ctx.save_for_backward(prior, scale)
        ctx.block = gaussian.block
        factor = gaussian.factor()
        return inverse_diagonal(len(factor), STRIP, lambda top, bottom, start, stop: factor[top:bottom, start:stop])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        prior, scale = ctx.saved_tensors
        inverse = torch.linalg.inv(DenseGaussian(ctx.block, prior, scale).matrix())
        by_prior = -(inverse.square() @ slope)
        by_scale = -(slope @ inverse.diagonal() + by_prior @ prior.expand(len(slope))) / scale
        return by_prior.sum_to_size(prior.shape), by_scale, None
