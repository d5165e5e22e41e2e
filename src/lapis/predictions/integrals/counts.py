"""Poisson counts whose log rate is normal: densities, distribution function and quantiles, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lapis.predictions.integrals.quadrature import nodes_like

MANY = 2.0**50
"""Quantiles above this count are set to the rate's quantile: Poisson noise changes them by less than 1e-7."""

CERTAIN = 1e-20
"""Smallest variance of a log rate; smaller ones are raised to it."""


def log_prob(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log E[Poisson(y; e^f)], f ~ N(mean, variance), elementwise.

    Gauss-Hermite quadrature, with nodes placed around the mode of the integrand and scaled to its width: as a
    function of f the Poisson density of a large count is much narrower than N(mean, variance), and nodes placed by
    the mean and the variance would miss it. For a count of zero the density is a step in f, too sharp for the nodes
    when the variance is large; there P(Y = 0) = P(Y <= 0) is taken from `cumulative`, which is made for steps.
    """
    variance = variance.clamp_min(CERTAIN)
    shift = _mode_shift(y, mean, variance)
    width = (1 / variance + (mean + shift).exp()).rsqrt()
    z, log_weights = nodes_like(mean)
    offset = shift + width * z
    f = mean + offset
    log_integrand = y * f - f.exp() - torch.lgamma(y + 1) - 0.5 * offset**2 / variance - 0.5 * variance.log()
    result = (log_weights + log_integrand + 0.5 * z**2 + width.log()).logsumexp(0)
    step = (y == 0) & (variance > 4)
    if not bool(step.any()):
        return result
    none = cumulative(torch.zeros_like(mean), mean, variance)
    return torch.where(step & (none > 1e-8), none.log(), result)


def _mode_shift(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """How far the integrand's mode lies from the mean m: d that maximises y (m + d) - e^(m + d) - d^2 / 2v.

    d = v y - w, where w solves w + log w = log v + m + v y. With x = log w, that is e^x + x = L, which Newton's
    method solves; from the starting points below, every step goes down.
    """
    log_variance = variance.log()
    right = log_variance + mean + variance * y
    x = torch.where(right > 1, right.clamp_min(1.0).log(), right)
    for _ in range(12):
        exponential = x.exp()
        x = x - (exponential + x - right) / (exponential + 1)
    # f = x - log v loses digits for small v, m + v y - w for large ones.
    return torch.where(variance > 1, x - log_variance - mean, variance * y - x.exp())


def cumulative(k: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """P(Y <= k) for Y ~ Poisson(e^f), f ~ N(mean, variance), elementwise, to about 1e-8.

    It equals P(f < log G) with G ~ Gamma(k + 1) independent of f. Given f, the probability over G is a smooth step of
    width 1 / sqrt(k + 1) in f; given G, the probability over f is a smooth step of width sqrt(v) in log G. The
    integral left over is that of the variable with the narrower distribution: within it the step changes little.
    """
    deviation = variance.clamp_min(CERTAIN).sqrt()
    shape = k + 1
    z, log_weights = nodes_like(mean)
    rate = (mean + deviation * z).exp()
    over_rate = (log_weights.exp() * torch.special.gammaincc(shape.expand_as(rate), rate)).sum(0)
    step = 0.4
    u = torch.arange(-20.0, 9.0, step, dtype=torch.float64, device=mean.device)
    u = u.reshape(-1, *([1] * mean.dim()))
    log_gamma = shape.log() + u / shape.sqrt()
    # density of log G at log(k + 1) + u / sqrt(k + 1), relative to its value at u = 0
    density = (u * shape.sqrt() - shape * torch.expm1(u / shape.sqrt())).exp()
    over_gamma = (density * torch.special.ndtr((log_gamma - mean) / deviation)).sum(0) / density.sum(0)
    return torch.where(deviation * shape.sqrt() > 1, over_gamma, over_rate)


def quantile(level: float, distribution: Callable[[Tensor], Tensor], rate: Tensor) -> Tensor:
    """The smallest count k with P(Y <= k) >= level, elementwise, by doubling and bisection.

    Args:
        level: a probability.
        distribution: P(Y <= k) of float64 counts k.
        rate: the same quantile of the rate e^f: where to start, and the answer beyond `MANY` counts.
    """
    many = ~(rate < MANY)
    low = torch.full_like(rate, -1.0)
    high = torch.where(many, 0.0, rate).ceil().clamp_min(1.0)
    short = (distribution(high) < level) & ~many
    while bool(short.any()):
        low = torch.where(short, high, low)
        high = torch.where(short, 2 * high, high)
        short = short & (distribution(high) < level) & (high < MANY)
    high = torch.where(many, low + 1, high)
    return torch.where(many, rate, quantile_between(level, distribution, low, high))


def quantile_between(level: float, distribution: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The smallest count k with P(Y <= k) >= level, elementwise, by bisection; known is low < k <= high.

    Counts beyond `MANY` are found to a relative error of 1 / MANY.
    """
    low, high = low.floor(), high.ceil().clamp_max(torch.finfo(high.dtype).max)
    while bool((open_ := high - low > (high / MANY).clamp_min(1.0)).any()):
        middle = (low + 0.5 * (high - low)).floor()
        below = distribution(middle.clamp_min(0.0)) < level
        low = torch.where(open_ & below, middle, low)
        high = torch.where(open_ & ~below, middle, high)
    return high
