"""XTrace: the trace of A with every vector used both for the sketch and as a sample, and an unbiased error for it.

Epperly, Tropp, Webber, "XTrace: Making the Most of Every Sample in Stochastic Trace Estimation", 2024. The standard
error is our own: theirs takes the samples for independent, and was found to fall short of the true error by up to 1.7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapis.options import check_count
from lapis.solvers.operator import Operator, dots, normal_block
from lapis.solvers.probes import Estimate
from lapis.solvers.trace import applied_in_blocks


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
    """
    check_count("products", products, least=4, most=2 * operator.size)
    m = products // 2
    probes = normal_block(operator, m, generator)
    images = applied_in_blocks(operator, probes, block)
    basis, lost = _leave_one_out(images)
    basis_images = applied_in_blocks(operator, basis, block)
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
