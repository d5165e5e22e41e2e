"""Pictures of priors: images drawn from total variation, from the tuned tangent model, and from one without lengths."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapis import imaging

SPREAD = 12**-0.5
"""Standard deviation of a pixel, that of the uniform distribution on [0, 1]."""


def variation_samples(
    shape: tuple[int, int], rate: float, count: int, sweeps: int, generator: torch.Generator
) -> Tensor:
    """Images (count, height, width) in [0, 1] from p(x) ~ exp(-rate TV(x)), by Gibbs sampling.

    Given its neighbours a pixel's density is exponential between any two of them: a piece is drawn by its mass, and a
    value in it by inversion. Pixels of one colour of a chessboard are drawn together.
    """
    height, width = shape
    x = torch.rand(count, height, width, generator=generator, dtype=torch.float64)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    for _ in range(sweeps):
        for colour in (0, 1):
            drawn = _given_neighbours(x, rate, generator)
            x = torch.where((rows + columns) % 2 == colour, drawn, x)
    return x


def _given_neighbours(x: Tensor, rate: float, generator: torch.Generator) -> Tensor:
    """Every pixel drawn anew given its four neighbours; those outside of the image are at nan, and do not count."""
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1), value=float("nan"))
    around = torch.stack([padded[:, :-2, 1:-1], padded[:, 2:, 1:-1], padded[:, 1:-1, :-2], padded[:, 1:-1, 2:]], -1)
    there = ~around.isnan()
    known = torch.where(there, around, 1.0).sort(-1).values  # absent ones at the end, where no piece follows
    number = there.sum(-1, keepdim=True)
    ends = torch.cat([torch.zeros_like(known[..., :1]), known, torch.ones_like(known[..., :1])], -1)
    low, high = ends[..., :-1], ends[..., 1:]
    slope = rate * (number - 2 * torch.arange(5).clamp(max=4)).to(x.dtype)  # of the log density in piece 0, 1, ...
    at_low = -rate * (torch.where(there, (around - 0).abs(), 0.0)).sum(-1, keepdim=True)
    steps = (slope * (high - low)).cumsum(-1)
    start = at_low + torch.cat([torch.zeros_like(steps[..., :1]), steps[..., :-1]], -1)
    width = high - low
    flat = slope.abs() < 1e-12
    safe = torch.where(flat, 1.0, slope)
    mass = torch.where(flat, width, torch.expm1(safe * width) / safe)
    weights = (start - start.amax(-1, keepdim=True)).exp() * mass
    piece = torch.multinomial(weights.reshape(-1, 5), 1, generator=generator).reshape(*x.shape, 1)
    u = torch.rand(*x.shape, 1, generator=generator, dtype=x.dtype)
    a, length, tilt = low.gather(-1, piece), width.gather(-1, piece), slope.gather(-1, piece)
    level = tilt.abs() < 1e-12
    inner = torch.where(level, 1.0, tilt)
    within = torch.where(level, u * length, torch.log1p(u * torch.expm1(inner * length)) / inner)
    return (a + within)[..., 0]


def surrogate_samples(
    shape: tuple[int, int], variation: float, count: int, generator: torch.Generator
) -> tuple[Tensor, list[float]]:
    """Images around 1/2 from the Gaussian surrogate of the TV prior, and their length scales.

    f ~ N(1/2, s^2 exp(-d / l)), l ~ Exp(kappa(l)) |d kappa / d l|, where kappa(l) = E[TV(f)] = edges * sqrt(2 / pi)
    * sqrt(2 s^2 (1 - exp(-1 / l))). So kappa is exponential with mean `variation`, cut off at kappa(0): draw it, and
    solve for l.
    """
    height, width = shape
    edges = (height - 1) * width + height * (width - 1)
    most = edges * 2 * SPREAD / math.sqrt(math.pi)
    shares = torch.rand(count, generator=generator, dtype=torch.float64) * -math.expm1(-most / variation)
    kappa = -variation * torch.log1p(-shares)
    lengths = -1 / torch.log1p(-((kappa / most) ** 2))
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).to(torch.float64)
    distances = torch.cdist(places, places)
    images = []
    for length in lengths:
        factor = torch.linalg.cholesky(torch.exp(-distances / length))
        white = torch.randn(height * width, generator=generator, dtype=torch.float64)
        images.append(0.5 + SPREAD * (factor @ white).reshape(shape))
    return torch.stack(images), lengths.tolist()


def prior_samples(found: imaging.Reconstruction, count: int, generator: torch.Generator, factorised: bool) -> Tensor:
    """Images (count, height, width) of the tangent model's prior, around zero; `factorised` forgets the lengths."""
    prior = found.prior
    if factorised:
        prior = prior.of(prior.variances, torch.full_like(prior.lengths, 0.01))
    white = torch.randn(count, found.posterior.model.weights.numel(), generator=generator, dtype=torch.float64)
    return found.posterior.model.push(prior.draws(white)).reshape(count, *found.operator.image_shape)


def relevance(found: imaging.Reconstruction) -> dict[str, float]:
    """Each block's share of the prior variance of the measurements: zero is a block that was switched off."""
    prior, model = found.prior, found.posterior.model
    shares = prior.coefficients() * model.grams.diagonal(dim1=1, dim2=2).sum(1)
    parts = torch.split(shares, [len(block.distances) for block in prior.blocks])
    total = shares.sum()
    return {block.name: float(part.sum() / total) for block, part in zip(prior.blocks, parts, strict=True)}
