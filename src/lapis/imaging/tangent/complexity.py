"""The predictive complexity prior: length scales by the total variation of the images that they lead to.

With kappa(l) = E[TV(x)], x ~ N(0, J_b Sigma_b(l) J_b^T) for one block b, an exponential prior on kappa becomes

    p(l) = rate exp(-rate kappa(l)) |d kappa / d l|,

in each block that has a length scale. Differences of neighbouring pixels are Gaussian, so that kappa is known in closed
form, E|u| = sqrt(2 / pi) sd(u): kappa = sqrt(2 / pi) sum_e sqrt(sum_r c_r v_er), where c_r = s^2 exp(-d_r / l) and
v_er = [D J_b (I x D_r) J_b^T D^T]_ee does not depend on the prior. The v_er are taken from J where it is in memory, and
from random vectors where it is not: with e ~ N(0, I) over filters and u_p = D J_b (e at tap p of each filter),
v_er = E[sum_(p, q at distance d_r) u_p u_q].

Nalisnick, Gordon, Hernandez-Lobato, "Predictive complexity priors", 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.imaging.tangent.filters import Block, FilterPrior
from lapis.imaging.tangent.linearised import TangentImage
from lapis.imaging.variation import differences
from lapis.progress import track

LEAST = 1e-12
"""Added to variances of differences and to |d kappa / d l|, which may vanish."""


@dataclass(frozen=True)
class VariationPrior:
    """The prior of all blocks' length scales; `variances` are v of each block, (r, edges)."""

    blocks: tuple[Block, ...]
    variances: tuple[Tensor, ...]
    rate: float

    def expected_variation(self, prior: FilterPrior) -> Tensor:
        """kappa of each block's own images, (blocks,)."""
        return torch.stack([self._kappa(*entries) for entries in self._entries(prior)])

    def log_prob(self, prior: FilterPrior) -> Tensor:
        """log p(l), summed over blocks with several taps; differentiable, to second order in l."""
        total = torch.zeros((), dtype=torch.float64)
        for block, v, variance, length in self._entries(prior):
            if block.taps == 1:
                continue
            # d/dl sqrt(w) = w' / (2 sqrt(w)) with w = sum_r c_r v_r and c_r' = c_r d_r / l^2
            c = variance * torch.exp(-block.distances / length)
            spread = (c @ v + LEAST).sqrt()
            slope = ((c * block.distances / length**2) @ v / (2 * spread)).sum()
            kappa = math.sqrt(2 / math.pi) * spread.sum()
            total = total + math.log(self.rate) - self.rate * kappa
            total = total + torch.log(math.sqrt(2 / math.pi) * slope.abs() + LEAST)
        return total

    def _kappa(self, block: Block, v: Tensor, variance: Tensor, length: Tensor) -> Tensor:
        c = variance * torch.exp(-block.distances / length)
        return math.sqrt(2 / math.pi) * (c @ v + LEAST).sqrt().sum()

    def _entries(self, prior: FilterPrior) -> list[tuple[Block, Tensor, Tensor, Tensor]]:
        return list(zip(self.blocks, self.variances, prior.variances, prior.lengths, strict=True))


def sampled_variances(
    tangent: TangentImage,
    shape: tuple[int, int],
    samples: int,
    generator: torch.Generator,
    progress: bool | None = None,
) -> tuple[Tensor, ...]:
    """Estimates of v (r, edges) of each block; any combination with a valid covariance is >= 0, since each is a mean of
    quadratic forms in the covariance."""
    found = []
    first = 0
    for block in track(tangent.blocks, "variances of differences", len(tangent.blocks), progress):
        v = torch.zeros(len(block.distances), 1, dtype=torch.float64)
        together = max(1, tangent.together // block.taps)
        for done in range(0, samples, together):
            k = min(together, samples - done)
            white = torch.randn(k, block.size // block.taps, generator=generator, dtype=torch.float64)
            taps = torch.zeros(k, block.taps, tangent.size, dtype=tangent.dtype)
            for tap in range(block.taps):
                taps[:, tap, first + tap : first + block.size : block.taps] = white.to(tangent.dtype)
            images = tangent.push(taps.flatten(0, 1)).to(torch.float64)
            u = differences(images.reshape(k, block.taps, *shape))
            v = v + torch.einsum("rpq,kpe,kqe->re", block.indicators, u, u) / samples
        found.append(v)
        first += block.size
    return tuple(found)
