"""Gaussians whose variance was estimated from K draws, with Gaussian noise added: densities and quantiles, in float64.

An estimate v of a variance from K draws of N(0, V) is V chi^2_K / K. So f - mean is sqrt(v) times Student's t with K
degrees of freedom, and y = f + noise is N(mean, s^2 + v K / r^2) with r^2 ~ chi^2_K: an integral over r, whose
integrand is smooth, by Gauss-Legendre nodes. Intervals then hold as much as they say, for any K.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lapis.predictions.integrals.mixtures import normal_cumulative, normal_log_prob, normal_quantile

NODES, REACH = 80, 9.0
"""Nodes, within so many standard deviations of r."""

TABLE = 257
"""Quantiles of so many shares of estimated variance, from which those of many elements begin."""

NEWTON_STEPS = 60
"""At most: they converge quadratically, and before that at least double in heavy tails."""


@lru_cache(maxsize=32)
def _chi(degrees: int) -> tuple[Tensor, Tensor]:
    """K / r^2 and log weights (nodes,) for r ~ chi with K degrees of freedom."""
    middle = degrees**0.5
    low, high = max(0.0, middle - REACH), middle + REACH
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    with torch.inference_mode(False):  # the result is cached, and must be usable outside inference mode
        t = torch.from_numpy((nodes + 1) / 2)
        r = low + (high - low) * t.square()  # closer near zero, where the tails of few draws come from
        log_weights = torch.from_numpy(weights).log() + t.log() + (degrees - 1) * r.log() - 0.5 * r.square()
        return degrees / r.square(), log_weights.log_softmax(0)


def _parts(variance: Tensor, noise: Tensor, degrees: int) -> tuple[Tensor, Tensor]:
    """Log weights and variances of the Gaussians that are mixed, nodes in front."""
    scales, log_weights = (each.to(variance.device).reshape(-1, *([1] * variance.dim())) for each in _chi(degrees))
    return log_weights, noise + scales * variance


def student_log_prob(y: Tensor, mean: Tensor, variance: Tensor, noise: Tensor, degrees: int) -> Tensor:
    """log p(y), elementwise; `noise` is a variance."""
    log_weights, variances = _parts(variance, noise, degrees)
    return (log_weights + normal_log_prob(y, mean, variances)).logsumexp(0)


def student_cumulative(y: Tensor, mean: Tensor, variance: Tensor, noise: Tensor, degrees: int) -> Tensor:
    """P(Y <= y), elementwise."""
    log_weights, variances = _parts(variance, noise, degrees)
    return (log_weights.exp() * normal_cumulative(y, mean, variances.sqrt())).sum(0)


def student_quantile(level: float, mean: Tensor, variance: Tensor, noise: Tensor, degrees: int) -> Tensor:
    """y with P(Y <= y) = level, elementwise: the mean where there is no variance at all."""
    total = variance + noise
    unit = total.sqrt()
    share = torch.where(total > 0, variance / total, 0.0)
    upper = max(level, 1 - level)
    start = torch.full_like(share, normal_quantile(upper))
    if share.numel() > 2 * TABLE:
        grid = torch.linspace(0, 1, TABLE, dtype=torch.float64, device=share.device)
        known = _unit_quantile(upper, torch.full_like(grid, normal_quantile(upper)), grid, degrees)
        left = (share * (TABLE - 1)).long().clamp(max=TABLE - 2)
        start = torch.lerp(known[left], known[left + 1], share * (TABLE - 1) - left)
    x = unit * _unit_quantile(upper, start, share, degrees)
    return mean + x if level > 0.5 else mean - x


def _unit_quantile(upper: float, x: Tensor, share: Tensor, degrees: int) -> Tensor:
    """The same for level >= 1/2, mean 0, and a variance of 1 in all, of which `share` was estimated.

    By Newton's method: above the mean the distribution is concave, so that no step from the left of the solution
    passes it, and one from its right leads to the left.
    """
    log_weights, variances = _parts(share, 1 - share, degrees)
    weights, deviations = log_weights.exp(), variances.sqrt()
    for _ in range(NEWTON_STEPS):
        z = x / deviations
        missing = upper - (weights * torch.special.ndtr(z)).sum(0)
        density = (weights * (-0.5 * z.square()).exp() / deviations).sum(0) / (2 * torch.pi) ** 0.5
        step = missing / density
        x = (x + step).clamp(min=0)
        if bool((step.abs() <= 1e-12 * (1 + x)).all()):
            break
    return x
