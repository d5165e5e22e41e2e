"""Traces and diagonals from products with random vectors, each with its standard error.

Hutchinson's estimator needs nothing of A. Hutch++ and XTrace first capture A's leading range, and sample only the
remainder: for a decaying spectrum their error falls like 1/products or faster, Hutchinson's like 1/sqrt(products).
XTrace uses every vector twice, for the range and as a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapis.options import check_arguments, check_count
from lapis.solvers.operator import Operator, dots, normal_block
from lapis.solvers.probes import Estimate, Kind, mean_estimate, probe_blocks


def hutchinson_trace(
    operator: Operator, *, probes: int, generator: torch.Generator, kind: Kind = "rademacher", block: int = 16
) -> Estimate:
    """tr A = E[z^T A z]; with Rademacher z and symmetric A each sample has variance 2 sum_(i != j) A_ij^2."""
    check_arguments(hutchinson_trace, locals())
    samples = [dots(z, operator(z)) for z in probe_blocks(operator, probes, generator, kind, block)]
    return mean_estimate(torch.cat(samples), probes)


def hutchinson_diagonal(operator: Operator, *, probes: int, generator: torch.Generator, block: int = 16) -> Estimate:
    """diag A = E[z * A z], Rademacher z, with a standard error for each entry; the error's variance is the sum of the
    squares of the row's other entries. Value and error (P,) float64; exact for a diagonal A.
    """
    check_arguments(hutchinson_diagonal, locals())
    mean = torch.zeros(operator.size, dtype=torch.float64, device=operator.device)
    spread = torch.zeros_like(mean)
    seen = 0
    for z in probe_blocks(operator, probes, generator, "rademacher", block):
        for sample in z * operator(z):  # Welford's update: no cancellation, no storage for the samples
            seen += 1
            shift = sample - mean
            mean += shift / seen
            spread += shift * (sample - mean)
    return Estimate(mean, (spread / (probes - 1) / probes).sqrt(), probes, probes)


def hutch_plus_plus(operator: Operator, *, products: int, generator: torch.Generator, block: int = 16) -> Estimate:
    """Hutch++: tr A = tr(Q A Q^T) + E[g^T P A P g], Q an orthonormal basis of A's sketch, P = I - Q^T Q.

    A third of the products each for the sketch, for A on Q, and for the remainder; unbiased given Q, so the standard
    error of the remainder is that of the whole. `products` >= 6; memory 3 blocks of (products / 3, P).

    Meyer, Musco, Musco, Woodruff, "Hutch++: Optimal Stochastic Trace Estimation", 2021.
    """
    check_arguments(hutch_plus_plus, locals())
    check_count("products", products, least=6)
    sketch = min(products // 3, operator.size)
    basis = torch.linalg.qr(_applied_in_blocks(operator, normal_block(operator, sketch, generator), block).mT).Q.mT
    captured = dots(basis, _applied_in_blocks(operator, basis, block)).sum()
    rest, samples = products - 2 * sketch, []
    for g in probe_blocks(operator, rest, generator, "rademacher", block):
        g = g - (g @ basis.mT) @ basis
        samples.append(dots(g, operator(g)))
    remainder = mean_estimate(torch.cat(samples), products)
    return Estimate(captured + remainder.value, remainder.standard_error, rest, products)


def xtrace(operator: Operator, *, products: int, generator: torch.Generator, block: int = 16) -> Estimate:
    """tr A from m = products / 2 Gaussian vectors w_i, each left out of the sketch that its own sample uses.

    Y = A w, Q = orth(Y). Without column i the range of Y loses one direction s_i of Q, so that every leave-one-out
    basis is known: Q_i Q_i^T = Q (I - s_i s_i^T) Q^T. With u_i = (I - Q_i Q_i^T) w_i,

        t_i = tr(Q_i^T A Q_i) + (P - rank Q_i) u_i^T A u_i / |u_i|^2;

    the estimate is their mean: unbiased, and exact when rank A < m or m = P.

    The t_i depend on each other, through the sketches they share. With t_ij the sample i when j too is left out of the
    sketch, cov(t_i, t_j) = E[(t_i - t_ij)(t_j - t_ji)]: t_ij does not know w_j, and given w_i and all the others both
    t_j and t_ji have mean tr A, so that the cross terms vanish. Hence s^2 / m + mean_(i != j) (t_i - t_ij)(t_j - t_ji)
    is an unbiased estimate of the mean's variance, s^2 being the samples' own (the second term is used when positive;
    chance can make it negative). It needs no more products with A.

    `products` in [4, 2 P]; memory 6 blocks of (m, P).

    Epperly, Tropp, Webber, "XTrace: Making the Most of Every Sample in Stochastic Trace Estimation", 2024. The standard
    error is our own: theirs treats the samples as independent, and fell short of the true error by a factor of up to
    1.7 in our tests.
    """
    check_arguments(xtrace, locals())
    check_count("products", products, least=4, most=2 * operator.size)
    m = products // 2
    probes = normal_block(operator, m, generator)
    images = _applied_in_blocks(operator, probes, block)
    basis, lost = _leave_one_out(images)
    basis_images = _applied_in_blocks(operator, basis, block)
    core = (basis @ basis_images.mT).to(torch.float64)
    coordinates = (probes @ basis.mT).to(torch.float64)
    inside = coordinates - lost * (lost * coordinates).sum(1, keepdim=True)
    outside = probes - inside.to(basis.dtype) @ basis
    outside_images = images - inside.to(basis.dtype) @ basis_images
    captured = torch.trace(core) - ((lost @ core) * lost).sum(1)
    left = operator.size - len(basis) + lost.any(1)
    energy, length = dots(outside, outside_images), dots(outside, outside)
    # Below this a remainder is rounding: Q_i holds all of w_i, and nothing is left to sample.
    rounding = operator.size * torch.finfo(operator.dtype).eps
    samples = captured + _sampled(left, energy, length, rounding)
    # u_i^T (A + A^T) Q^T, (m, r): how a sample's energy changes when its sketch loses one more direction.
    slope = (outside_images @ basis.mT + outside @ basis_images.mT).to(torch.float64)
    changes = torch.zeros(m, m, dtype=torch.float64, device=operator.device)
    for i in range(m):
        # Leaving out j as well loses the part of s_j orthogonal to s_i, the unit rows of `also` (m, r).
        also = lost - (lost @ lost[i])[:, None] * lost[i]
        size = also.norm(dim=1, keepdim=True)
        gone = (size > torch.finfo(torch.float64).eps) & (torch.arange(m, device=size.device) != i)[:, None]
        also = torch.where(gone, also / torch.where(gone, size, 1), 0)
        curvature, part = ((also @ core) * also).sum(1), also @ coordinates[i]
        without = _sampled(
            left[i] + gone[:, 0],
            energy[i] + part * (also @ slope[i]) + part.square() * curvature,
            length[i] + part.square(),
            rounding,
        )
        changes[i] = samples[i] - (captured[i] - curvature + without)
    shared = ((changes * changes.mT).sum() - changes.diagonal().square().sum()) / (m * (m - 1))
    variance = samples.var() / m + shared.clamp(min=0)
    return Estimate(samples.mean(), variance.sqrt(), m, m + len(basis))


def _sampled(left: Tensor, energy: Tensor, length: Tensor, rounding: float) -> Tensor:
    """What Q_i misses of the trace, judged by one direction: its dimension times u^T A u / u^T u."""
    known = length > rounding
    return torch.where(known, left * energy / torch.where(known, length, 1), 0)


def _leave_one_out(images: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis (r, P) of the rows of `images` (m, P), and in its coordinates the unit direction (m, r),
    float64, that is lost when row i is left out; 0 when the other rows span it too (r < m).

    With images^T = Q^T U S V^T, leaving out i loses a direction exactly when row i of V has length 1, and it is that of
    S^-1 V^T e_i.
    """
    basis, triangle = torch.linalg.qr(images.mT)
    left, singular, right = torch.linalg.svd(triangle.to(torch.float64))
    kept = singular > singular[0] * len(singular) * torch.finfo(images.dtype).eps
    left, singular, right = left[:, kept], singular[kept], right[kept]
    needed = right.square().sum(0) > 1 - 1e-10  # all of them, to rounding, when nothing was dropped
    lost = (right * (singular.min() / singular)[:, None]).mT if len(singular) else right.mT
    length = lost.norm(dim=1, keepdim=True)
    lost = torch.where(needed[:, None], lost / length, torch.zeros_like(lost))
    return (basis @ left.to(basis.dtype)).mT, lost


def _applied_in_blocks(operator: Operator, vectors: Tensor, block: int) -> Tensor:
    """A v for all rows, `block` at a time."""
    check_count("block", block)
    if len(vectors) == 0:
        return vectors
    return torch.cat([operator(vectors[first : first + block]) for first in range(0, len(vectors), block)])
