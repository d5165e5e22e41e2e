"""Likelihoods of the cases: the library's object, and the same density written naively with torch.distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

F64 = torch.float64


@dataclass(frozen=True)
class LikelihoodSpec:
    """A likelihood of the library (`build`) beside its naive definition.

    nll(f (T, C), y) -> 0-d: the negative log-likelihood of one example, y (T,) classes or (T, D) values.
    targets(generator, f) -> y: targets in the user's layout for raw outputs f.
    fisher(f (T, C)) -> (T C, T C): where the curvature in f is a Fisher matrix in closed form, not a Hessian.
    """

    name: str
    build: Callable[[], Any]
    nll: Callable[[Tensor, Tensor], Tensor]
    targets: Callable[[torch.Generator, Tensor], Tensor]
    fisher: Callable[[Tensor], Tensor] | None = None
    channels: str = "last"
    samples: bool = True


def gaussian(noise: float | list[float] = 0.7, *, flat: bool = False, channels: str = "last") -> LikelihoodSpec:
    sigma = torch.tensor(noise, dtype=F64)

    def build() -> Any:
        import lapis

        return lapis.Gaussian(noise=noise if isinstance(noise, float) else sigma, channels=channels)

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        y = f + torch.randn(f.shape, generator=generator, dtype=F64)
        return y.flatten() if flat else y

    def nll(f: Tensor, y: Tensor) -> Tensor:
        return -torch.distributions.Normal(f, sigma.expand_as(f)).log_prob(y).sum()

    name = "gaussian" if isinstance(noise, float) else "gaussian-per-output"
    return LikelihoodSpec(name, build, nll, targets, channels=channels)


def categorical(*, soft: bool = False, ignore: bool = False, channels: str = "last") -> LikelihoodSpec:
    def build() -> Any:
        import lapis

        return lapis.Categorical(channels=channels)

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        last = f.movedim(1, -1) if channels == "first" else f
        noisy = last + torch.randn(last.shape, generator=generator, dtype=F64)
        if soft:
            y = noisy.softmax(-1)
            return y.movedim(-1, 1) if channels == "first" else y
        y = noisy.argmax(-1)
        if ignore:
            y[torch.rand(y.shape, generator=generator) < 0.3] = -100
        return y

    def nll(f: Tensor, y: Tensor) -> Tensor:
        if soft:
            return -(y * f.log_softmax(-1)).sum()
        seen = zip(f, y, strict=True)
        return sum((F.cross_entropy(row, label) for row, label in seen if label != -100), 0 * f.sum())

    name = "categorical" + "-soft" * soft + "-ignore" * ignore
    return LikelihoodSpec(name, build, nll, targets, channels=channels)


def bernoulli(*, flat: bool = False, channels: str = "last", dtype: torch.dtype = torch.bool) -> LikelihoodSpec:
    def build() -> Any:
        import lapis

        return lapis.Bernoulli(channels=channels)

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        y = torch.bernoulli(f.sigmoid(), generator=generator).to(dtype)
        return y.flatten() if flat else y

    def nll(f: Tensor, y: Tensor) -> Tensor:
        return -torch.distributions.Bernoulli(logits=f).log_prob(y.to(f.dtype)).sum()

    return LikelihoodSpec("bernoulli", build, nll, targets, channels=channels)


def poisson(*, channels: str = "last") -> LikelihoodSpec:
    def build() -> Any:
        import lapis

        return lapis.Poisson(channels=channels)

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        return torch.poisson(f.exp(), generator=generator).long()

    def nll(f: Tensor, y: Tensor) -> Tensor:
        return -torch.distributions.Poisson(f.exp()).log_prob(y.to(f.dtype)).sum()

    return LikelihoodSpec("poisson", build, nll, targets, channels=channels)


def heteroscedastic() -> LikelihoodSpec:
    def build() -> Any:
        import lapis

        return lapis.HeteroscedasticGaussian()

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        return mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=generator, dtype=F64)

    def nll(f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        return -torch.distributions.Normal(mean, (log_variance / 2).exp()).log_prob(y).sum()

    def fisher(f: Tensor) -> Tensor:
        _, log_variance = f.chunk(2, -1)
        diagonal = torch.cat([(-log_variance).exp(), torch.full_like(log_variance, 0.5)], -1)
        return torch.diag(diagonal.flatten())

    return LikelihoodSpec("heteroscedastic", build, nll, targets, fisher)


def log_cosh(f: Tensor, y: Tensor) -> Tensor:
    """-log of the density sech(f - y) / pi for each row: convex, with heavier tails than a Gaussian."""
    z = f - y
    return (z + F.softplus(-2 * z) - math.log(2.0) + math.log(math.pi)).flatten(1).sum(1)


def custom() -> LikelihoodSpec:
    def build() -> Any:
        import lapis

        return lapis.Custom(log_cosh)

    def targets(generator: torch.Generator, f: Tensor) -> Tensor:
        return f + torch.randn(f.shape, generator=generator, dtype=F64)

    def nll(f: Tensor, y: Tensor) -> Tensor:
        return (torch.cosh(f - y) * math.pi).log().sum()

    return LikelihoodSpec("custom", build, nll, targets, samples=False)
