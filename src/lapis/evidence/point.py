"""The evidence at one setting of the hyperparameters: value, slope, and what MacKay's equations read off them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lapis.errors import NotPositiveDefiniteError
from lapis.likelihoods import Likelihood
from lapis.priors import WeightPrior

LARGEST_LOG = 30.0
"""Precisions, and the noise variance's factor, stay within exp(-30) .. exp(30): beyond, nothing changes any more."""


class Tunable(Protocol):
    """What tuning needs to know of a posterior."""

    @property
    def likelihood(self) -> Likelihood: ...
    @property
    def temperature(self) -> float: ...
    @property
    def weight_prior(self) -> WeightPrior: ...

    def log_evidence(self) -> Tensor:
        """0-d, differentiable in prior precisions and noise."""

    def evidence_point(self) -> tuple[Tensor, Tensor]:
        """The weights (P,) at which the evidence is taken, and the likelihood's statistics there."""


Candidate = Callable[[Tensor], Tunable]
"""Hyperparameters (groups,), or (groups + 1,) with a factor of the noise at the end, to a posterior that has them."""


@dataclass(frozen=True)
class Point:
    """log Z and its slope in u = log(alpha_1 .. alpha_G[, s]), s the factor of the noise's standard deviation.

    d log Z / d log alpha_g = 1/2 (gamma_g - alpha_g |theta_g - m_g|^2), and with E = sum of squared errors over the
    noise's variance and n targets, d log Z / d log s = E/T + gamma - n/T, T the temperature. So the slope holds gamma.
    """

    logs: Tensor
    value: float
    slope: Tensor
    penalty: Tensor
    """alpha_g |theta_g - m_g|^2 for each group."""
    errors: Tensor | None
    """E/T, or None when the noise is not tuned."""

    @cached_property
    def gamma(self) -> Tensor:
        """Effective parameters of each group."""
        return (2 * self.slope[: len(self.penalty)] + self.penalty).clamp(min=0)

    def fixed_point_step(self) -> Tensor:
        """From here to alpha_g = gamma_g / |theta_g - m_g|^2 and noise^2 = SSE / (n - T gamma), in logarithms."""
        tiny = torch.finfo(torch.float64).tiny
        step = self.gamma.clamp(min=tiny).log() - self.penalty.clamp(min=tiny).log()
        if self.errors is None:
            return step
        free = (self.errors - self.slope[-1]).clamp(min=tiny)  # (n - T gamma) / T
        return torch.cat([step, 0.5 * (self.errors.clamp(min=tiny).log() - free.log()).reshape(1)])


def evaluate(candidate: Candidate, logs: Tensor, groups: int) -> Point | None:
    """The evidence at exp(logs) (float64, on the processor), or None where the posterior does not exist in rounding."""
    leaf = logs.detach().clone().requires_grad_()
    try:
        with torch.enable_grad():
            model = candidate(leaf.exp())
            value = model.log_evidence()
            (slope,) = torch.autograd.grad(value, leaf)
    except NotPositiveDefiniteError:
        return None
    if not (bool(torch.isfinite(value)) and bool(torch.isfinite(slope).all())):
        return None
    prior = model.weight_prior
    weights, statistics = model.evidence_point()
    penalty = (prior.precision * prior.squared_distance(weights)).detach().cpu()
    errors = None
    if len(logs) > groups and model.likelihood.noise is not None:
        squared, _ = statistics.detach().cpu().chunk(2)
        errors = (squared / model.likelihood.noise.detach().cpu().double() ** 2).sum() / model.temperature
    return Point(leaf.detach(), float(value.detach()), slope.detach(), penalty, errors)


def limits(length: int, groups: int) -> Tensor:
    """Largest |log| of each hyperparameter: the noise enters by its square."""
    return torch.tensor([LARGEST_LOG] * groups + [LARGEST_LOG / 2] * (length - groups), dtype=torch.float64)
