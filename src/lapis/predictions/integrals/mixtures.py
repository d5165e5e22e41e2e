"""Moments, densities and quantiles of mixtures, of Gaussians and in general, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lapis.errors import NotPositiveDefiniteError
from lapis.predictions.integrals.quadrature import grid_like

LOG_TWO_PI = math.log(2 * math.pi)

HALVINGS = 80
"""Enough bisections to reduce any float64 bracket to neighbouring numbers."""

LARGEST_EXPONENT = 700.0
"""exp() of a larger number overflows in float64."""


def normal_log_prob(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(y; mean, variance), elementwise."""
    return -0.5 * ((y - mean) ** 2 / variance + variance.log() + LOG_TWO_PI)


def multivariate_log_prob(error: Tensor, covariance: Tensor) -> Tensor:
    """log N(error; 0, covariance) for error (..., K) and covariance (..., K, K)."""
    lower, info = torch.linalg.cholesky_ex(covariance.double())
    if bool((info != 0).any()):
        raise NotPositiveDefiniteError(
            "The predictive covariance is not positive definite",
            expected="a covariance of the outputs plus positive noise",
            got="a negative eigenvalue",
            do="refit in float64, or predict with the diagonal covariance",
        )
    white: Tensor = torch.linalg.solve_triangular(lower, error.double().unsqueeze(-1), upper=False).squeeze(-1)
    log_volume: Tensor = lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * (white**2).sum(-1) - log_volume - 0.5 * error.shape[-1] * LOG_TWO_PI


def weighted_sum(weights: Iterable[float], values: Iterable[Tensor]) -> Tensor:
    """sum_k w_k v_k of K tensors of one shape, in float64, with one of them in memory at a time."""
    terms = (weight * value.double() for weight, value in zip(weights, values, strict=True))
    return sum(terms, torch.zeros((), dtype=torch.float64))


def total_variance(
    weights: Sequence[float], means: Sequence[Tensor], variances: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of a mixture of K distributions, elementwise, in float64.

    m = sum_k w_k m_k, and by the law of total variance v = sum_k w_k (v_k + (m_k - m)^2): the variances within
    the parts, plus the variance between them.
    """
    mean = weighted_sum(weights, means)
    # equal means differ by zero, even where both have overflowed to infinity
    gaps = (torch.where(part == mean, 0.0, part.double() - mean) for part in means)
    return mean, weighted_sum(weights, (v.double() + gap**2 for v, gap in zip(variances, gaps, strict=True)))


def log_weighted_sum(weights: Iterable[float], log_values: Iterable[Tensor]) -> Tensor:
    """log sum_k w_k e^(l_k) of K tensors l_k of one shape, for weights above zero, in float64."""
    terms = [math.log(weight) + value.double() for weight, value in zip(weights, log_values, strict=True)]
    return torch.stack(terms).logsumexp(0)


def normal_cumulative(y: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """P(Y <= y), Y ~ N(mean, deviation^2), elementwise."""
    below: Tensor = torch.special.ndtr((y - mean) / deviation)
    return below


def normal_quantile(level: float) -> float:
    """z with P(Z <= z) = level, Z ~ N(0, 1)."""
    return float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))


def quantile_between(level: float, distribution: Callable[[Tensor], Tensor], own: Tensor) -> Tensor:
    """Quantile of a mixture of continuous distributions, elementwise, by bisection.

    Args:
        level: a probability.
        distribution: P(Y <= y) of the mixture.
        own: the same quantile of each component, (K, ...): that of the mixture lies between the smallest and the
            largest of them.
    """
    low, high = own.amin(0), own.amax(0)
    for _ in range(HALVINGS if len(own) > 1 else 0):
        middle = low + 0.5 * (high - low)
        below = distribution(middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low + 0.5 * (high - low)


def noisy_log_prob(y: Tensor, mean: Tensor, variance: Tensor, s: Tensor, s_variance: Tensor) -> Tensor:
    """log E[N(y; mean, variance + e^t)], t ~ N(s, s_variance), elementwise."""
    log_weights, variances = _noisy(variance, s, s_variance)
    return (log_weights + normal_log_prob(y, mean, variances)).logsumexp(0)


def noisy_quantile(level: float, mean: Tensor, variance: Tensor, s: Tensor, s_variance: Tensor) -> Tensor:
    """Quantile of E[N(mean, variance + e^t)], t ~ N(s, s_variance), elementwise."""
    log_weights, variances = _noisy(variance, s, s_variance)
    weights, deviations = log_weights.exp(), variances.sqrt()

    def distribution(y: Tensor) -> Tensor:
        return (weights * normal_cumulative(y, mean, deviations)).sum(0)

    return quantile_between(level, distribution, mean + normal_quantile(level) * deviations)


def noisy_cumulative(y: Tensor, mean: Tensor, variance: Tensor, s: Tensor, s_variance: Tensor) -> Tensor:
    """P(Y <= y) under E[N(mean, variance + e^t)], t ~ N(s, s_variance), elementwise."""
    log_weights, variances = _noisy(variance, s, s_variance)
    return (log_weights.exp() * normal_cumulative(y, mean, variances.sqrt())).sum(0)


def _noisy(variance: Tensor, s: Tensor, s_variance: Tensor) -> tuple[Tensor, Tensor]:
    z, log_weights = grid_like(s)
    return log_weights, variance + (s + s_variance.sqrt() * z).clamp_max(LARGEST_EXPONENT).exp()
