"""Gradient ascent on the log evidence over the logarithms of positive hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

LARGEST_LOG = 30.0
"""Hyperparameters stay within exp(-30) .. exp(30): beyond, the evidence is flat and the optimum at infinity."""


@dataclass(frozen=True)
class Tuning:
    """How a tuning run went."""

    log_evidence: float
    start: float
    evaluations: int
    converged: bool
    message: str
    at_bound: bool
    """Some hyperparameter ran into its bound: the data leave it undetermined."""


def maximise(
    objective: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    max_evaluations: int = 200,
    tolerance: float = 1e-9,
) -> tuple[Tensor, Tuning]:
    """Maximise objective(exp(u)) over u by L-BFGS from positive `start` (k,); the best value found is returned.

    >>> best, tuning = maximise(lambda x: -(x.log() - 1.0).square().sum(), torch.ones(1, dtype=torch.float64))
    >>> bool(abs(best.log() - 1) < 1e-6), tuning.converged
    (True, True)
    """
    trace: list[tuple[float, np.ndarray]] = []

    def negative(logs: np.ndarray) -> tuple[float, np.ndarray]:
        values = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            value = objective(values.exp().to(start.device))
            (slope,) = torch.autograd.grad(value, values)
        trace.append((float(value.detach()), logs.copy()))
        return -trace[-1][0], -slope.numpy()

    first = start.detach().cpu().double().log().clamp(-LARGEST_LOG, LARGEST_LOG).numpy()
    result = minimize(
        negative,
        first,
        jac=True,
        method="L-BFGS-B",
        bounds=[(-LARGEST_LOG, LARGEST_LOG)] * len(first),
        options={
            "maxfun": max_evaluations,
            "maxiter": max_evaluations,
            "ftol": tolerance * 1e-3,
            "gtol": tolerance,
        },
    )
    best, logs = max(trace, key=lambda entry: entry[0])
    tuning = Tuning(
        log_evidence=best,
        start=trace[0][0],
        evaluations=len(trace),
        converged=bool(result.success),
        message=str(result.message),
        at_bound=bool(np.any(np.abs(logs) >= LARGEST_LOG)),
    )
    return torch.tensor(logs, dtype=torch.float64, device=start.device).exp(), tuning
