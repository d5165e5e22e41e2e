"""Latents, the distributions of the outputs f: Gaussian (linearised network), draws (sampled networks), or a mixture.

All hold canonical outputs (B, T, C), for B examples, T positions and C outputs per position, together with
`raw_shape`, the shape of the network's own output, whose layout predictions have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from lapis.errors import ModelError, NotPositiveDefiniteError, OptionError
from lapis.predictions.integrals.mixtures import normal_quantile, quantile_between, total_variance, weighted_sum
from lapis.predictions.integrals.quadrature import in_chunks
from lapis.predictions.integrals.students import student_cumulative, student_quantile

CHUNK = 2**20
"""Numbers in a chunk of Monte Carlo draws, approximately (8 MB in float64, of which there are a few copies)."""


@dataclass(frozen=True, eq=False)
class LatentGaussian:
    """f ~ N(mean, covariance) for B examples, T positions, C outputs.

    Args:
        mean: (B, T, C).
        variance: marginal variances (B, T, C).
        covariance: of the outputs of each position, (B, T, C, C), or None when only the variances are known;
            the outputs are then treated as independent.
        joint: covariance of all outputs of all examples, (B T C, B T C) in the order of mean.flatten(), or None.
        raw_shape: shape of the network's own output. By default that of a network with channels last: (B, C) for one
            position, (B, T, C) for several.
        degrees: the number of draws that the variances are mean squares of, so that they are uncertain themselves; None
            where they are known. Intervals and densities of real targets account for it.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None
    joint: Tensor | None = None
    raw_shape: tuple[int, ...] = ()
    degrees: int | None = None

    def __post_init__(self) -> None:
        if self.mean.dim() != 3:
            raise ModelError(
                "The mean of the outputs has the wrong shape",
                expected="(B, T, C): examples, positions, outputs",
                got=str(tuple(self.mean.shape)),
                do="pass canonical outputs, likelihood.canonical(output)",
            )
        _fill_raw_shape(self)
        outputs, total = self.mean.shape[-1], self.mean.numel()
        _check_shape("variance", self.variance, tuple(self.mean.shape))
        if self.covariance is not None:
            _check_shape("covariance", self.covariance, (*self.mean.shape, outputs))
        if self.joint is not None:
            _check_shape("joint covariance", self.joint, (total, total))

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, T, C)."""
        return tuple(self.mean.shape)

    @property
    def blocks(self) -> Tensor | None:
        """Covariance of each position's outputs, (B, T, C, C), extracted from `joint` if only that is known."""
        if self.covariance is not None or self.joint is None:
            return self.covariance
        batch, positions, outputs = self.mean.shape
        cells = self.joint.reshape(batch * positions, outputs, batch * positions, outputs)
        diagonal = cells.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        return diagonal.reshape(batch, positions, outputs, outputs)

    @cached_property
    def deviation(self) -> Tensor:
        """Marginal standard deviations; variances that are negative by rounding count as zero."""
        return self.variance.clamp_min(0).sqrt()

    @cached_property
    def _root(self) -> Tensor | None:
        blocks = self.blocks
        return None if blocks is None else square_root(blocks)

    @property
    def is_joint(self) -> bool:
        """Whether the covariance between examples is known, and densities are those of the whole batch."""
        return self.joint is not None

    def scaled(self, factor: float) -> LatentGaussian:
        """The distribution of factor * f."""
        square = factor**2
        covariance = None if self.covariance is None else square * self.covariance
        joint = None if self.joint is None else square * self.joint
        return replace(
            self, mean=factor * self.mean, variance=square * self.variance, covariance=covariance, joint=joint
        )

    def quantile(self, level: float) -> Tensor:
        """f with P(output <= f) = level, (B, T, C): Student's t where the variances are estimates from draws."""
        if self.degrees is None:
            return self.mean + normal_quantile(level) * self.deviation
        values = self.mean.double(), self.variance.double().clamp_min(0), torch.zeros_like(self.mean.double())
        return in_chunks(partial(student_quantile, level, degrees=self.degrees), *values).to(self.mean.dtype)

    def cumulative(self, f: Tensor) -> Tensor:
        """P(output <= f), (B, T, C) float64."""
        mean, deviation = self.mean.double(), self.deviation.double()
        if self.degrees is None:
            below = torch.special.ndtr((f - mean) / torch.where(deviation == 0, 1.0, deviation))
        else:
            values = f.double(), mean, deviation.square(), torch.zeros_like(mean)
            below = in_chunks(partial(student_cumulative, degrees=self.degrees), *values)
        return torch.where(deviation == 0, (f >= mean).double(), below)

    def draws(self, samples: int, seed: int, *, joint: bool = False) -> Iterator[Tensor]:
        """Draws of f in chunks (S', B, T, C).

        With `joint`, draws have the covariance between all examples; without, positions are drawn independently.
        """
        generator = torch.Generator(device=self.mean.device).manual_seed(seed)
        whole = square_root(self.joint) if joint and self.joint is not None else None
        done = 0
        while done < samples:
            count = min(samples - done, max(1, CHUNK // max(1, self.mean.numel())))
            noise = torch.randn(
                count, *self.mean.shape, dtype=self.mean.dtype, device=self.mean.device, generator=generator
            )
            if whole is not None:
                change = (noise.flatten(1) @ whole.T).reshape(noise.shape)
            elif self._root is not None:
                change = torch.einsum("btcd,sbtd->sbtc", self._root, noise)
            else:
                change = noise * self.deviation
            yield self.mean + change
            done += count


@dataclass(frozen=True, eq=False)
class LatentSamples:
    """Outputs of S networks drawn from the posterior, each with weight 1/S.

    Args:
        values: (S, B, T, C).
        joint: whether densities are those of all examples together, each network predicting the whole batch.
        raw_shape: shape of the network's own output, as for `LatentGaussian`.
    """

    values: Tensor
    joint: bool = False
    raw_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.values.dim() != 4 or self.values.shape[0] == 0:
            raise ModelError(
                "Outputs of sampled networks have the wrong shape",
                expected="(S, B, T, C) with S >= 1",
                got=str(tuple(self.values.shape)),
                do="stack the outputs of the sampled networks",
            )
        _fill_raw_shape(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, T, C)."""
        return tuple(self.values.shape[1:])

    @cached_property
    def mean(self) -> Tensor:
        return self.values.mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """Variance over the S networks, divided by S: they are the whole distribution, not a sample of one."""
        return self.values.var(0, unbiased=False)

    @cached_property
    def blocks(self) -> Tensor:
        """Covariance over the S networks at each position, (B, T, C, C), divided by S like the variance."""
        away = self.values.double() - self.values.double().mean(0)
        return (torch.einsum("sbtc,sbtd->btcd", away, away) / len(away)).to(self.values.dtype)

    @property
    def is_joint(self) -> bool:
        return self.joint

    def scaled(self, factor: float) -> LatentSamples:
        """The distribution of factor * f."""
        return LatentSamples(factor * self.values, self.joint, self.raw_shape)

    def quantile(self, level: float) -> Tensor:
        """f that a share `level` of the networks is below, (B, T, C), between two of them by a straight line."""
        return torch.quantile(self.values.double(), level, 0).to(self.values.dtype)

    def cumulative(self, f: Tensor) -> Tensor:
        """The share of networks whose outputs are at most f, (B, T, C) float64."""
        return (self.values <= f).double().mean(0)

    def draws(self, samples: int, seed: int, *, joint: bool = False) -> Iterator[Tensor]:
        """The networks' outputs, in chunks; the arguments, which `LatentGaussian.draws` needs, have no effect."""
        yield from torch.split(self.values, max(1, CHUNK // max(1, self.values[0].numel())))


@dataclass(frozen=True, eq=False)
class LatentMixture:
    """A mixture of K latents over the same inputs, with weights w_k: for example of K posteriors in an ensemble.

    Args:
        parts: the K latents. Their shapes agree, and all are joint or none is.
        weights: (K,), non-negative with sum one; kept in float64.
    """

    parts: tuple[LatentGaussian | LatentSamples, ...]
    weights: Tensor

    def __post_init__(self) -> None:
        weights = self.weights.detach().double()
        total = weights.sum().item()
        if weights.shape != (len(self.parts),) or not bool((weights >= 0).all()) or abs(total - 1) > 1e-5:
            raise OptionError(
                "These are no weights of a mixture",
                expected=f"{len(self.parts)} non-negative numbers whose sum is one, one for each part",
                got=f"shape {tuple(weights.shape)}, sum {total:.6g}: {weights.flatten()[:8].tolist()}",
                do="divide the weights by their sum",
            )
        kinds = [(part.shape, part.raw_shape, part.is_joint) for part in self.parts]
        for kind in kinds:
            if kind != kinds[0]:
                raise ModelError(
                    "The parts of a mixture do not fit together",
                    expected="canonical shape {}, raw shape {}, joint: {}, as the first part".format(*kinds[0]),
                    got="canonical shape {}, raw shape {}, joint: {}".format(*kind),
                    do="mix the outputs of networks at the same inputs",
                )
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "weights", weights / total)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, T, C)."""
        return self.parts[0].shape

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """Shape of the network's own output, the same for all parts."""
        return self.parts[0].raw_shape

    @property
    def is_joint(self) -> bool:
        return self.parts[0].is_joint

    def scaled(self, factor: float) -> LatentMixture:
        """The distribution of factor * f."""
        return LatentMixture(tuple(part.scaled(factor) for part in self.parts), self.weights)

    def cumulative(self, f: Tensor) -> Tensor:
        """P(output <= f), (B, T, C) float64."""
        return weighted_sum(self.weights.tolist(), (part.cumulative(f) for part in self.parts))

    def quantile(self, level: float) -> Tensor:
        """f with P(output <= f) = level, (B, T, C)."""
        own = torch.stack([part.quantile(level).double() for part in self.parts])
        return quantile_between(level, self.cumulative, own).to(self.mean.dtype)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        means, variances = [part.mean for part in self.parts], [part.variance for part in self.parts]
        mean, variance = total_variance(self.weights.tolist(), means, variances)
        return mean.to(means[0].dtype), variance.to(means[0].dtype)

    @property
    def mean(self) -> Tensor:
        """sum_k w_k m_k, (B, T, C)."""
        return self._moments[0]

    @property
    def variance(self) -> Tensor:
        """Variance within the parts plus variance between their means, (B, T, C)."""
        return self._moments[1]

    @cached_property
    def blocks(self) -> Tensor | None:
        """sum_k w_k (V_k + (m_k - m)(m_k - m)^T), (B, T, C, C); None where a part's covariance V_k is not known."""
        terms = []
        for part in self.parts:
            if part.blocks is None:
                return None
            gap = part.mean.double() - self.mean
            terms.append(part.blocks + gap.unsqueeze(-1) * gap.unsqueeze(-2))
        return weighted_sum(self.weights.tolist(), terms).to(self.mean.dtype)


Latent = LatentGaussian | LatentSamples | LatentMixture
"""A distribution of the outputs. All have shape, raw_shape, mean, variance, blocks, is_joint and scaled."""


def square_root(covariance: Tensor) -> Tensor:
    """R with R R^T = covariance, for positive semi-definite matrices (..., C, C), singular ones too.

    From eigenvalues: a Cholesky factor of a singular matrix would need jitter on the diagonal.
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    largest = values.abs().amax(-1, keepdim=True)
    # Rounding turns zero eigenvalues into at least about -eps, relative to the largest; a limit of -sqrt(eps)
    # distinguishes these from truly negative ones.
    if not bool((values >= -(torch.finfo(covariance.dtype).eps ** 0.5) * largest).all()):
        raise NotPositiveDefiniteError(
            "A covariance of the outputs has negative eigenvalues",
            expected="eigenvalues >= 0",
            got=f"{values.min().item():.4g}",
            do="refit in float64, or with a larger prior precision",
        )
    root: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return root.to(covariance.dtype)


def _fill_raw_shape(latent: LatentGaussian | LatentSamples) -> None:
    """Set the default raw shape if there is none; ModelError for a raw shape that does not fit the outputs."""
    batch, positions, outputs = latent.shape
    default = (batch, outputs) if positions == 1 else (batch, positions, outputs)
    shape = tuple(latent.raw_shape or default)
    if shape[0] != batch or math.prod(shape) != math.prod(latent.shape):
        raise ModelError(
            "The shape of the network's own output does not fit its canonical outputs",
            expected=f"{batch} examples with {positions} x {outputs} outputs each",
            got=str(shape),
            do="pass the shape of the network's output as raw_shape, or leave it out",
        )
    object.__setattr__(latent, "raw_shape", shape)


def _check_shape(what: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ModelError(
            f"The {what} of the outputs has the wrong shape",
            expected=str(expected),
            got=str(tuple(tensor.shape)),
            do="pass outputs as (examples, positions, outputs)",
        )
