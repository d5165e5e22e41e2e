"""Densities and quantiles of Gaussians and of mixtures of Gaussians, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapis.errors import NotPositiveDefiniteError
from lapis.predictions._quadrature import grid_like

LOG_TWO_PI = math.log(2 * math.pi)
# Enough halvings to take any bracket in float64 to neighbouring numbers.
HALVINGS = 80
# exp() of a larger number overflows in float64.
LARGEST_EXPONENT = 700.0


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


def mixture_quantile(level: float, means: Tensor, deviations: Tensor, log_weights: Tensor) -> Tensor:
    """Quantile of a mixture of Gaussians with components along the first dimension, by bisection.

    It lies between the smallest and the largest of the components' own quantiles.
    """
    z = float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))
    own = means + z * deviations
    low, high = own.amin(0), own.amax(0)
    weights = log_weights.exp()
    for _ in range(HALVINGS if len(means) > 1 else 0):
        middle = low + 0.5 * (high - low)
        below = (weights * torch.special.ndtr((middle - means) / deviations)).sum(0) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low + 0.5 * (high - low)


def noisy_log_prob(y: Tensor, mean: Tensor, variance: Tensor, s: Tensor, s_variance: Tensor) -> Tensor:
    """log E[N(y; mean, variance + e^t)], t ~ N(s, s_variance), elementwise."""
    log_weights, variances = _noisy(variance, s, s_variance)
    return (log_weights + normal_log_prob(y, mean, variances)).logsumexp(0)


def noisy_quantile(level: float, mean: Tensor, variance: Tensor, s: Tensor, s_variance: Tensor) -> Tensor:
    """Quantile of E[N(mean, variance + e^t)], t ~ N(s, s_variance), elementwise."""
    log_weights, variances = _noisy(variance, s, s_variance)
    return mixture_quantile(level, mean.expand_as(variances), variances.sqrt(), log_weights)


def _noisy(variance: Tensor, s: Tensor, s_variance: Tensor) -> tuple[Tensor, Tensor]:
    z, log_weights = grid_like(s)
    return log_weights, variance + (s + s_variance.sqrt() * z).clamp_max(LARGEST_EXPONENT).exp()
