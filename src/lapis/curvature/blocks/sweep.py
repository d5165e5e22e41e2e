"""Output covariances under many prior precisions at once: J (C + c Lambda)^-1 J^T for each of K factors c.

In a basis where both C and Lambda are diagonal a factor changes variances 1 / (C_i + c Lambda_i) only. So the Jacobian
is moved to that basis once, and each factor costs no more than a contraction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch

import torch
from torch import Tensor

from lapis.curvature.backward.contributions import Contribution, Outer
from lapis.curvature.blocks.block import Block, site_precision
from lapis.curvature.blocks.dense.matrix import DenseBlock, stacked_rows
from lapis.curvature.blocks.dense.packed import PackedBlock
from lapis.curvature.blocks.diagonal import DiagonalBlock
from lapis.curvature.blocks.kronecker.eigenbasis import EigenbasisGaussian, OwnBiasGaussian, rotate
from lapis.curvature.blocks.lowrank import LowRankBlock
from lapis.curvature.recording.sites import Site
from lapis.errors import StructureError
from lapis.priors import WeightPrior

Sweep = Callable[[Sequence[Contribution], bool], Tensor]
"""From contributions (one for each site of a block) to covariances (K, B, M, M), or if True to variances (K, B, M)."""

RANK = 1e-13
"""Eigenvalues of a curvature given by few rows count as zero below this fraction of the largest."""


WEAK = 2.0**-60
"""A prior so weak that adding and subtracting it leaves eigenvalues of the curvature as they are."""


@singledispatch
def sweep(block: Block, prior: WeightPrior, scale: Tensor, factors: Tensor) -> Sweep:
    """The block's covariances under `factors` (K,) times the prior precision; NaN where they do not exist."""
    weak = prior.with_precision(prior.precision * WEAK)
    gaussian = block.gaussian(weak, scale)
    if not isinstance(gaussian, EigenbasisGaussian) or isinstance(gaussian, OwnBiasGaussian):
        each = [block.gaussian(prior.with_precision(factor * prior.precision), scale) for factor in factors]
        return lambda contributions, diagonal: torch.stack([g.covariance(contributions, diagonal) for g in each])
    # the bases do not depend on the scale of the curvature: without it, the eigenvalues are those of the prior
    precision = block.gaussian(weak, torch.zeros_like(scale)).eigenvalues  # type: ignore[attr-defined]
    curvature = gaussian.eigenvalues - precision

    def covariances(contributions: Sequence[Contribution], diagonal: bool) -> Tensor:
        _, outputs, back = gaussian.factors(contributions[0].dtype)
        rotated = rotate(contributions[0], back, outputs, precision.shape)
        return _independent(rotated, curvature, precision, factors / WEAK, diagonal)

    return covariances


@sweep.register
def _diagonal(block: DiagonalBlock, prior: WeightPrior, scale: Tensor, factors: Tensor) -> Sweep:
    curvature, precision = scale * block.curvature, site_precision(prior, block.site).expand(block.site.shape)
    return lambda contributions, diagonal: _independent(contributions[0], curvature, precision, factors, diagonal)


@sweep.register
def _dense(block: DenseBlock, prior: WeightPrior, scale: Tensor, factors: Tensor) -> Sweep:
    precision = _precision(prior, block.sites)
    if block.few_rows is not None:
        return _few_rows(scale.sqrt() * block.few_rows, precision, factors)
    root = precision.rsqrt()
    values, vectors = torch.linalg.eigh(scale * block.curvature * root * root[:, None])
    basis, variances = root[:, None] * vectors, _reciprocal(values + factors[:, None])
    return lambda contributions, diagonal: _weighted(_rows(contributions) @ basis, variances, diagonal)


@sweep.register
def _packed(block: PackedBlock, prior: WeightPrior, scale: Tensor, factors: Tensor) -> Sweep:
    raise StructureError(
        "Calibrating takes eigenvectors of the curvature, and those of so many weights do not fit",
        expected="fewer weights, or another structure",
        got=f"a dense posterior over {block.size:,} weights",
        do="use tune(), or choose fewer weights",
    )


@sweep.register
def _low_rank(block: LowRankBlock, prior: WeightPrior, scale: Tensor, factors: Tensor) -> Sweep:
    rows = (scale * block.values).sqrt()[:, None] * block.vectors
    return _few_rows(rows, _precision(prior, block.sites), factors)


def _few_rows(rows: Tensor, precision: Tensor, factors: Tensor) -> Sweep:
    """For C = R^T R with rows R (r, size): orthogonal to them, in the prior's metric, the covariance is the prior's."""
    white = rows * precision.rsqrt()
    values, inner = torch.linalg.eigh(white @ white.mT)
    kept = values > RANK * values.max() if len(values) else values > 0
    values = values[kept]
    basis = (white.mT @ (inner[:, kept] * values.rsqrt())) * precision.rsqrt()[:, None]
    variances = _reciprocal(values + factors[:, None]) - _reciprocal(factors[:, None])

    def covariances(contributions: Sequence[Contribution], diagonal: bool) -> Tensor:
        jacobian = _rows(contributions)
        prior = _weighted(jacobian, precision.reciprocal()[None], diagonal)
        total = _weighted(jacobian @ basis, variances, diagonal)
        return total + prior / factors.reshape(-1, *[1] * (prior.dim() - 1))

    return covariances


def _precision(prior: WeightPrior, sites: Sequence[Site]) -> Tensor:
    """Prior precision of every weight of a block, (size,)."""
    return torch.cat([site_precision(prior, site).expand(site.shape).reshape(-1) for site in sites])


def _rows(contributions: Sequence[Contribution]) -> Tensor:
    """J, (B, M, size) in float64."""
    return stacked_rows(contributions).transpose(0, 1).double()


def _reciprocal(precisions: Tensor) -> Tensor:
    """1 / precisions; NaN where they are not positive (a Hessian away from a minimum)."""
    return torch.where(precisions > 0, precisions.reciprocal(), torch.nan)


def _weighted(jacobian: Tensor, variances: Tensor, diagonal: bool) -> Tensor:
    """J diag(v) J^T for J (B, M, n) and each of K variances v (K, n): (K, B, M, M), or its diagonal (K, B, M)."""
    if diagonal:
        return (jacobian.square() @ variances.mT).movedim(-1, 0)
    return torch.stack([(jacobian * v) @ jacobian.mT for v in variances])


def _independent(
    contribution: Contribution, curvature: Tensor, precision: Tensor, factors: Tensor, diagonal: bool
) -> Tensor:
    """`contribution.covariance` for variances 1 / (curvature + c precision), arrays over the site's weights.

    The Jacobian of weights shared by several positions is formed once for all factors, piece by piece.
    """
    dtype = contribution.dtype
    if not isinstance(contribution, Outer) or contribution.g.shape[3] == 1:
        variances = (_reciprocal(curvature + factor * precision).to(dtype) for factor in factors)
        return torch.stack([contribution.covariance(variance, diagonal) for variance in variances])
    _, seeds, batch, _, _ = contribution.g.shape
    total = contribution.g.new_zeros(len(factors), batch, *([seeds] if diagonal else [seeds, seeds]))
    for examples, outputs, jacobian, bias in contribution.pieces():
        whole = torch.cat([jacobian, bias[..., None]], -1) if contribution.bias else jacobian
        each = factors[:, None, None, None]
        variances_here = _reciprocal(curvature[:, outputs] + each * precision[:, outputs]).to(dtype)
        total[:, examples] += _weighted(whole.transpose(1, 2).flatten(2), variances_here.flatten(1), diagonal)
    return total
