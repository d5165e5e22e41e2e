"""From Gaussian logits to class probabilities: probit, mean field, Monte Carlo, Laplace bridge, quadrature.

Everything is done on log probabilities (..., K), so that no probability rounds to zero. A binary output z is
the pair of logits (-z/2, z/2), whose softmax is (sigmoid(-z), sigmoid(z)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lapis.predictions.integrals.quadrature import in_chunks, nodes_like

LARGEST_LOG_ALPHA = 60.0
"""Dirichlet distributions with parameters beyond e^60 equal a point mass to float64 precision."""

PAIRS = 2**20
"""Pairs of classes processed together (a few times 8 MB in float64)."""


def entropy(log_probs: Tensor) -> Tensor:
    """-sum_k p_k log p_k over the last dimension, in nats."""
    return -(log_probs.exp() * log_probs).sum(-1)


def pair(z: Tensor) -> Tensor:
    """Binary logits (...) as two logits (..., 2), for "no" and "yes"."""
    return torch.stack([-0.5 * z, 0.5 * z], -1)


def probit(mean: Tensor, variance: Tensor) -> Tensor:
    """Logits f / sqrt(1 + pi/8 v), whose sigmoid is nearly the mean of sigmoid(z), z ~ N(f, v) (MacKay 1992)."""
    return mean / (1 + math.pi / 8 * variance.clamp_min(0)).sqrt()


def mean_field(mean: Tensor, variance: Tensor, covariance: Tensor | None) -> Tensor:
    """log p_c, p_c ~ 1 / sum_k exp(-(f_c - f_k) / sqrt(1 + pi/8 (V_cc + V_kk - 2 V_ck))) (Lu, Ie and Sha 2020).

    MacKay's approximation of every pair of classes; for two classes it is his. A variance common to all logits cancels.
    For means and variances (N, C) and covariances (N, C, C); without these the logits are independent. In float64.
    """
    number, classes = mean.shape
    result = torch.empty(number, classes, dtype=torch.float64, device=mean.device)
    own = max(1, min(classes, PAIRS // classes))  # classes c, and then examples, of one chunk
    rows = max(1, PAIRS // (own * classes))
    for first in range(0, number, rows):
        f, v = (value[first : first + rows].double() for value in (mean, variance))
        for start in range(0, classes, own):
            chosen = slice(start, start + own)
            spread = v[:, chosen, None] + v[:, None]
            if covariance is not None:
                spread = spread - 2 * covariance[first : first + rows, chosen].double()
            exponents = probit(f[:, None] - f[:, chosen, None], spread)
            result[first : first + rows, chosen] = -exponents.logsumexp(-1)
    return result.log_softmax(-1)


def monte_carlo(draws: Iterable[Tensor], logits: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Log of the mean probabilities, and mean entropy, over draws of f that come in chunks (S', ...).

    `logits` turns draws of f into logits (S', ..., K).
    """
    total: Tensor | None = None
    expected: Tensor | None = None
    count = 0
    for chunk in draws:
        log_probs = logits(chunk).log_softmax(-1)
        part, uncertainty = log_probs.logsumexp(0), entropy(log_probs).sum(0)
        total = part if total is None else torch.logaddexp(total, part)
        expected = uncertainty if expected is None else expected + uncertainty
        count += len(chunk)
    if total is None or expected is None:
        raise ValueError("no draws")
    return (total - math.log(count)).log_softmax(-1), expected / count


def zero_sum(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variances of f ~ N(mean, covariance) given that its outputs sum to zero.

    Adding a number to all logits does not change their softmax, so their sum is free; the Laplace bridge is derived
    for logits whose sum is zero. Conditioning on that gives the mean f - V1 (1^T f) / (1^T V 1) and the covariance
    V - V1 1^T V / (1^T V 1), of which the diagonal is returned. Where the sum has no variance, nothing changes.
    """
    rows = covariance.sum(-1)
    total = rows.sum(-1, keepdim=True)
    share = torch.where(total > 0, rows / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)
    variance = covariance.diagonal(dim1=-2, dim2=-1) - share * rows
    return mean - share * mean.sum(-1, keepdim=True), variance


def bridge(mean: Tensor, variance: Tensor) -> Tensor:
    """log alpha of the Laplace bridge's Dirichlet over K classes (MacKay 1998; Hobbhahn et al. 2022):

    alpha_k = (1 - 2/K + e^(f_k) / K^2 sum_l e^(-f_l)) / V_kk.
    """
    classes = mean.shape[-1]
    log_sum = mean + torch.logsumexp(-mean, -1, keepdim=True) - 2 * math.log(classes)
    if classes > 2:
        log_sum = torch.logaddexp(log_sum, torch.full_like(log_sum, math.log1p(-2 / classes)))
    return log_sum - variance.clamp_min(torch.finfo(variance.dtype).tiny).log()


def dirichlet_entropy(log_alpha: Tensor) -> Tensor:
    """Expected entropy under Dirichlet(alpha): with a = sum_k alpha_k,

    digamma(a + 1) - sum_k alpha_k / a digamma(alpha_k + 1).
    """
    excess = (log_alpha.amax(-1, keepdim=True) - LARGEST_LOG_ALPHA).clamp_min(0)
    alpha = (log_alpha - excess).exp()
    total = alpha.sum(-1)
    shares = alpha / total.unsqueeze(-1)
    return torch.digamma(total + 1) - (shares * torch.digamma(alpha + 1)).sum(-1)


def expected_binary_entropy(mean: Tensor, variance: Tensor) -> Tensor:
    """E[H(sigmoid(z))], z ~ N(mean, variance), elementwise in float64, to about 1e-8.

    By Gauss-Hermite quadrature for variances up to 1. For larger ones the entropy, a bump around z = 0, would fall
    between the nodes; there by the trapezoidal rule over the bump, |z| < 40, which converges exponentially for smooth
    functions.
    """
    variance = variance.clamp_min(0)
    z, log_weights = nodes_like(mean)
    narrow = (log_weights.exp() * entropy(pair(mean + variance.sqrt() * z).log_softmax(-1))).sum(0)
    step = 0.25
    grid = torch.arange(-40.0, 40.0 + step, step, dtype=torch.float64, device=mean.device)
    bump = step * entropy(pair(grid).log_softmax(-1))
    wide_variance = variance.clamp_min(1.0).unsqueeze(-1)
    density = (-0.5 * (grid - mean.unsqueeze(-1)) ** 2 / wide_variance).exp()
    wide = (density / (2 * math.pi * wide_variance).sqrt()) @ bump
    return torch.where(variance > 1, wide, narrow)


def expected_sigmoid(mean: Tensor, variance: Tensor) -> Tensor:
    """log E[(sigmoid(-z), sigmoid(z))], z ~ N(mean, variance): (..., 2) in float64, to about 1e-8 relative."""
    smaller = in_chunks(_log_smaller, mean.double(), variance.double())
    larger = torch.log1p(-smaller.exp())
    positive = mean > 0
    return torch.stack([torch.where(positive, smaller, larger), torch.where(positive, larger, smaller)], -1)


def _log_smaller(mean: Tensor, variance: Tensor) -> Tensor:
    """log E[sigmoid(z)], z ~ N(-|mean|, variance), elementwise in float64.

    By Gauss-Hermite quadrature for variances v up to 1. For larger ones E[sigmoid(z)] = P(z + t > 0) =
    E[Phi((m + t) / sqrt(v))] over a logistic variable t, by the trapezoidal rule. Far in the tail, m < -v/2, with
    sigmoid(z) = e^z sigmoid(-z) first: E[sigmoid(z)] = e^(m + v/2) E[sigmoid(-z')], z' ~ N(m + v, v). The integrand
    then decays as e^(-t/2) or faster.
    """
    mean, variance = -mean.abs(), variance.clamp_min(0)
    result, wide = torch.empty_like(mean), variance > 1
    m, v = mean[~wide], variance[~wide]
    z, log_weights = nodes_like(m)
    result[~wide] = (log_weights + torch.nn.functional.logsigmoid(m + v.sqrt() * z)).logsumexp(0)
    m, v = mean[wide], variance[wide]
    tail = m < -0.5 * v
    centre = torch.where(tail, -m - v, m)
    t = torch.arange(-30.0, 50.0, 0.5, dtype=torch.float64, device=mean.device)
    log_density = (-t.abs() - 2 * torch.log1p((-t.abs()).exp())).log_softmax(0)
    below: Tensor = torch.special.log_ndtr((centre.unsqueeze(-1) + t) / v.sqrt().unsqueeze(-1))
    result[wide] = (log_density + below).logsumexp(-1) + torch.where(tail, m + 0.5 * v, 0.0)
    return result.clamp_max(-math.log(2))
