"""Expectations of the log likelihood and its derivatives in the outputs f, when f is Gaussian.

    E[log p(y | f)],    E[grad of -log p],    E[Hessian of -log p]

Where the likelihood treats each output alone, by Gauss-Hermite quadrature of every output's marginal; otherwise by
fixed, evenly spread points (quasi-Monte Carlo). Points come in pairs z and -z whose covariance is exactly the identity,
so that both rules are exact for quadratic functions, and with them for Gaussian likelihoods.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lapis.likelihoods import Likelihood
from lapis.predictions.integrals.quadrature import gauss_hermite
from lapis.predictions.integrals.quasi import normal_points
from lapis.predictions.latent import square_root

NODES = 32
"""Nodes of Gauss-Hermite quadrature: enough for variances of logits up to about 100."""

LEAST_POINTS = 256
"""Points of quasi-Monte Carlo; more where there are many outputs."""

CHUNK = 2**19
"""Numbers in a chunk of points, so that it stays in the processor's cache."""


@dataclass(frozen=True)
class Expectations:
    """Of examples with outputs (B, T, C)."""

    log_likelihood: Tensor
    """E[log p(y | f)] at each position, (B, T)."""
    gradient: Tensor
    """E[gradient of -log p(y | f)], (B, T, C)."""
    hessian: Tensor
    """E[S S^T], the Hessian (or Fisher information) of -log p(y | f) in f: (B, T, C, C)."""


def expectations(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, targets: Tensor, fitted: Likelihood | None = None
) -> Expectations:
    """Expectations under f ~ N(mean, covariance), float64.

    Args:
        likelihood: p(y | f).
        mean: (B, T, C).
        covariance: of each position's outputs, (B, T, C, C).
        targets: canonical ones.
        fitted: the likelihood whose Hessian is meant, if its noise is another one.
    """
    length, positions, outputs = mean.shape
    alone = likelihood.is_elementwise
    z, weights = _nodes(mean.device) if alone else _points(outputs, mean.device)
    step = max(1, CHUNK // (len(z) * positions * outputs))
    parts = []
    for start in range(0, length, step):
        some = slice(start, start + step)
        centre, spread = mean[some].double(), covariance[some].double()
        if alone:
            deviation = spread.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
            f = centre + z[:, None, None, None] * deviation
        else:
            f = centre + torch.einsum("btcd,sd->sbtc", square_root(spread), z)
        parts.append(_weighted(likelihood, fitted or likelihood, f, weights, targets[some]))
    return Expectations(*(torch.cat(same) for same in zip(*parts, strict=True)))


def _weighted(
    likelihood: Likelihood, fitted: Likelihood, f: Tensor, weights: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over points f (S, B, T, C) with their weights (S,)."""
    y = targets.double() if targets.is_floating_point() else targets
    flat, every = f.flatten(0, 1), y.expand(len(f), *y.shape).flatten(0, 1)
    losses = likelihood.position_nll(flat, every).reshape(f.shape[:3])
    gradients = likelihood.gradient(flat, every).reshape(f.shape)
    expected = fitted.expected_hessian(f, y, weights)
    return (
        -torch.einsum("s,sbt->bt", weights, losses),
        torch.einsum("s,sbtc->btc", weights, gradients),
        expected,
    )


def _nodes(device: torch.device) -> tuple[Tensor, Tensor]:
    z, log_weights = gauss_hermite(NODES)
    return z.to(device), log_weights.exp().to(device)


@lru_cache(maxsize=8)
def _points(outputs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points (S, C) with mean zero and covariance exactly I, and equal weights."""
    half = LEAST_POINTS // 2
    while half < 2 * outputs:
        half *= 2
    with torch.inference_mode(False):
        z = normal_points(half, outputs, 0).mT
        values, vectors = torch.linalg.eigh(z.mT @ z / half)
        z = z @ (vectors * values.rsqrt()) @ vectors.mT
        return torch.cat([z, -z]).to(device), torch.full((2 * half,), 0.5 / half, dtype=torch.float64, device=device)


def hessian_factor(hessian: Tensor) -> Tensor:
    """S (B, T, C, R) with S S^T = hessian (B, T, C, C), without columns that are zero for all examples."""
    values, vectors = torch.linalg.eigh(hessian)
    values = values.clamp_min(0)
    used = int((values.flatten(0, -2).amax(0) > 1e-13 * values.amax().clamp_min(1e-300)).sum())
    kept = slice(values.shape[-1] - max(1, used), None)
    factor: Tensor = vectors[..., kept] * values[..., None, kept].sqrt()
    return factor
