"""The evidence at one setting of the hyperparameters: value, slope, and the terms of MacKay's equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lapis.errors import MemoryBudgetError, StructureError
from lapis.likelihoods import Likelihood
from lapis.priors import WeightPrior

LARGEST_LOG = 30.0
"""Precisions, and the factor of the noise variance, stay within exp(-30) .. exp(30): beyond, nothing changes."""


class Tunable(Protocol):
    """The part of a posterior's interface that tuning needs."""

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
"""Maps hyperparameters (G,), or (G + 1,) with a factor of the noise last, to a posterior with these."""


@dataclass(frozen=True)
class Point:
    """log Z and its slope in u = log(alpha_1 .. alpha_G[, s]), where s is a factor of the noise's standard deviation.

    d log Z / d log alpha_g = 1/2 (gamma_g - alpha_g |theta_g - m_g|^2), and d log Z / d log s = E/T + gamma - n/T, with
    E the sum of squared errors over the noise's variance, n targets and temperature T. So the slope determines gamma.
    """

    logs: NDArray[Any]
    value: float
    slope: NDArray[Any]
    penalty: NDArray[Any]
    """alpha_g |theta_g - m_g|^2 for each group."""
    errors: float | None
    """E/T, or None when the noise is not tuned."""
    spread: NDArray[Any] | None = None
    """V_g, from which second derivatives follow (see `spectral`); None when only the slope is known."""

    @cached_property
    def gamma(self) -> NDArray[Any]:
        """Effective parameters of each group."""
        gamma: NDArray[Any] = np.maximum(2 * self.slope[: len(self.penalty)] + self.penalty, 0)
        return gamma

    def fixed_point_step(self) -> NDArray[Any]:
        """The step to alpha_g = gamma_g / |theta_g - m_g|^2 and noise^2 = SSE / (n - T gamma), in logarithms."""
        step: NDArray[Any] = _log(self.gamma) - _log(self.penalty)
        if self.errors is None:
            return step
        free = self.errors - self.slope[-1]  # (n - T gamma) / T
        return np.append(step, 0.5 * (_log(self.errors) - _log(free)))


def _log(values: Any) -> NDArray[Any]:
    """Logarithm of numbers >= 0, where zero counts as the smallest positive float."""
    logs: NDArray[Any] = np.log(np.maximum(values, np.finfo(np.float64).tiny))
    return logs


def evaluate(candidate: Candidate, logs: NDArray[Any]) -> Point | None:
    """The evidence of a candidate at exp(logs), with its slope by automatic differentiation; None as in `Evaluate`."""
    leaf = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
    try:
        with torch.enable_grad():
            model = candidate(leaf.exp())
            value = model.log_evidence()
            (slope,) = torch.autograd.grad(value, leaf)
    except MemoryBudgetError:
        raise
    except (StructureError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return None
    if not (bool(torch.isfinite(value)) and bool(torch.isfinite(slope).all())):
        return None
    prior = model.weight_prior
    weights, statistics = model.evidence_point()
    penalty = (prior.precision * prior.squared_distance(weights)).detach().cpu().numpy()
    errors = None
    if len(logs) > len(penalty) and model.likelihood.noise is not None:
        squared, _ = statistics.detach().cpu().chunk(2)
        errors = float((squared / model.likelihood.noise.detach().cpu().double() ** 2).sum()) / model.temperature
    return Point(logs, float(value.detach()), slope.numpy(), penalty, errors)


Evaluate = Callable[[NDArray[Any]], "Point | None"]
"""Maps logarithms of the hyperparameters to the evidence there; None where it cannot be computed in float64 (a
posterior precision that is not positive definite, products that overflow)."""


def limits(point: Point) -> NDArray[Any]:
    """Largest |log| of each hyperparameter; half as large for the noise, whose square is a variance."""
    bounds = np.full_like(point.logs, LARGEST_LOG)
    bounds[len(point.penalty) :] /= 2
    return bounds


def relative_error(point: Point, bounds: NDArray[Any]) -> float:
    """Relative error of MacKay's equations: the largest slope that does not point out of range, over max(1, gamma)."""
    inside = (np.abs(point.logs) < bounds) | (point.slope * point.logs < 0)
    return float((np.abs(point.slope) * inside).max()) / max(1.0, float(point.gamma.sum()))
