"""Gradient ascent on the log evidence over the logarithms of the hyperparameters, by L-BFGS."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

from lapis.evidence.point import Candidate, Point, evaluate, limits
from lapis.evidence.search import Search

FLAT = 1000
"""A search that can raise the evidence no more in rounding has converged when its slope is this near the tolerance."""


def ascend(candidate: Candidate, start: Point, groups: int, *, max_iterations: int, tolerance: float) -> Search:
    """From `start` until slope / max(1, gamma), the relative error of MacKay's equations, is at most `tolerance`.

    Where the posterior does not exist in rounding (a precision of nothing on curvature without full rank) the evidence
    counts as very low, so that the line search turns back.
    """
    bounds = limits(len(start.logs), groups)
    points = [start]
    trace = [start.value]

    def negative(logs: np.ndarray) -> tuple[float, np.ndarray]:
        values = torch.tensor(logs, dtype=torch.float64)
        if torch.equal(values, start.logs):
            return -start.value, -start.slope.numpy()
        point = evaluate(candidate, values, groups)
        if point is None:
            return abs(start.value) * 10 + 1e10, np.zeros_like(logs)
        points.append(point)
        return -point.value, -point.slope.numpy()

    def note(intermediate_result: Any) -> None:
        trace.append(max(-float(intermediate_result.fun), trace[-1]))

    goal = 0.01 * tolerance * max(1.0, float(start.gamma.sum()))
    result = minimize(
        negative,
        start.logs.numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-bound, bound) for bound in bounds.tolist()],
        callback=note,
        options={"maxiter": max_iterations, "maxfun": 20 * max_iterations, "ftol": 1e-16, "gtol": goal},
    )
    best = max(points, key=lambda point: point.value)
    inside = ((best.logs + best.slope.sign()).clamp(-bounds, bounds) - best.logs).abs() > 0
    error = float((best.slope.abs() * inside).max()) / max(1.0, float(best.gamma.sum()))
    flat = bool(result.success) and error <= FLAT * tolerance
    reason = str(result.message)
    if error <= tolerance:
        reason = f"relative slope {error:.1e}, at most {tolerance:.1g}"
    elif flat:
        reason = f"the evidence is flat to rounding, relative slope {error:.1e}"
    return Search(best, tuple(trace), int(result.nit), len(points), error <= tolerance or flat, reason)
