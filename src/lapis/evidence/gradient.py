"""L-BFGS on the log evidence over the logarithms of the hyperparameters, where only its slope is known."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from lapis.evidence.point import Evaluate, Point, limits, relative_error
from lapis.evidence.search import FLAT, Search

FAILED_LINE_SEARCH = 2
"""L-BFGS-B's status when its approximate Hessian no longer gives an uphill direction; a restart discards it."""

RESTARTS = 3
"""Maximal number of restarts after such failures."""


def ascend(evaluate: Evaluate, start: Point, *, max_iterations: int, tolerance: float) -> Search:
    """Search from `start` until slope / max(1, gamma), the relative error of MacKay's equations, is <= `tolerance`.

    Where the posterior precision is not positive definite in float64 (tiny prior precisions on curvature without full
    rank) the evidence is set to a very low value, so that the line search backtracks.
    """
    bounds = limits(start)
    points = [start]
    trace = [start.value]

    def negative(logs: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        if np.array_equal(logs, start.logs):
            return -start.value, -start.slope
        point = evaluate(logs.copy())
        if point is None:
            return abs(start.value) * 10 + 1e10, np.zeros_like(logs)
        points.append(point)
        return -point.value, -point.slope

    def note(intermediate_result: Any) -> None:
        trace.append(max(-float(intermediate_result.fun), trace[-1]))

    goal = 0.01 * tolerance * max(1.0, float(start.gamma.sum()))
    iterations = 0
    for _ in range(RESTARTS + 1):
        best = max(points, key=lambda point: point.value)
        result = minimize(
            negative,
            best.logs,
            jac=True,
            method="L-BFGS-B",
            bounds=[(-bound, bound) for bound in bounds.tolist()],
            callback=note,
            options={
                "maxiter": max_iterations - iterations,
                "maxfun": 20 * max_iterations,
                "ftol": 1e-16,
                "gtol": goal,
            },
        )
        iterations += int(result.nit)
        before, best = best, max(points, key=lambda point: point.value)
        error = relative_error(best, bounds)
        if error <= tolerance or result.status != FAILED_LINE_SEARCH or best is before or iterations >= max_iterations:
            break
    stuck = bool(result.success) or result.status == FAILED_LINE_SEARCH
    flat = stuck and error <= FLAT * tolerance
    reason = f"no step raises the evidence, relative slope {error:.1e}" if stuck else str(result.message)
    if error <= tolerance:
        reason = f"relative slope {error:.1e}, at most {tolerance:.1g}"
    elif flat:
        reason = f"the evidence is flat to rounding, relative slope {error:.1e}"
    return Search(best, tuple(trace), iterations, len(points), error <= tolerance or flat, reason)
