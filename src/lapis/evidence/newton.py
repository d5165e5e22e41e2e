"""Newton's method on the log evidence in logarithms of the hyperparameters, where its derivatives have closed forms.

The evidence is concave there (see `spectral`), so that a Newton step of limited length points uphill; if it is too
long, halving it helps until rounding is reached. Groups are coupled only through the noise, so the Hessian is an arrow
matrix (a diagonal, one row and one column) and the linear system costs one pass over the groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapis.evidence.point import Evaluate, Point, limits, relative_error
from lapis.evidence.search import FLAT, HALVINGS, Search, within


def ascend(evaluate: Evaluate, start: Point, *, max_iterations: int, tolerance: float) -> Search:
    """Search from `start` until slope / max(1, gamma), the relative error of MacKay's equations, is << `tolerance`."""
    bounds = limits(start)
    point, trace, evaluations = start, [start.value], 1
    for _ in range(max_iterations):
        error = relative_error(point, bounds)
        if error <= 0.01 * tolerance:
            break
        step = _step(point, bounds)
        rounding = 1e-13 * max(1.0, abs(point.value))
        gain = float(point.slope @ step)
        best: Point | None = None
        for halving in range(HALVINGS):
            trial = evaluate(point.logs + step * 0.5**halving)
            evaluations += 1
            if trial is not None and trial.value >= point.value - rounding:
                best = trial
                break
            if gain * 0.5**halving < 10 * rounding:
                break
        if best is None or (gain < rounding and relative_error(best, bounds) >= error):
            break
        point = best
        trace.append(max(point.value, trace[-1]))
    error = relative_error(point, bounds)
    iterations = len(trace) - 1
    converged = error <= (tolerance if iterations == max_iterations else FLAT * tolerance)
    if error <= tolerance:
        reason = f"Newton's method: relative slope {error:.1e}, at most {tolerance:.1g}"
    elif iterations == max_iterations:
        reason = f"still moving after {max_iterations} iterations"
    elif converged:
        reason = f"the evidence is flat to rounding, relative slope {error:.1e}"
    else:
        reason = f"no step raises the evidence, relative slope {error:.1e}"
    return Search(point, tuple(trace), iterations, evaluations, converged, reason)


@np.errstate(over="ignore", invalid="ignore")  # where the evidence is flat the Hessian vanishes
def _step(point: Point, bounds: NDArray[Any]) -> NDArray[Any]:
    """Newton's step for the coordinates that are not at a bound, shortened to stay within the bounds.

    Shortening coordinates can turn the step downhill; then the slope, divided by the Hessian's diagonal, is used.
    """
    assert point.spread is not None
    tiny = np.finfo(np.float64).tiny
    groups = len(point.penalty)
    free = within(point.logs, np.sign(point.slope), bounds) != 0
    slope = point.slope * free
    spread = np.maximum(point.spread, 0)
    own = np.maximum(0.5 * (spread + point.penalty), tiny)
    if len(slope) == groups:
        return within(point.logs, slope / own, bounds)
    assert point.errors is not None
    joint = spread * free[:groups]
    noise = max(2 * (spread.sum() + point.errors), tiny)
    rest = max(noise - (joint * joint / own).sum(), 1e-3 * noise)
    last = np.nan_to_num((slope[-1] - (joint * slope[:groups] / own).sum()) / rest * free[-1])
    step = within(point.logs, np.nan_to_num(np.append((slope[:groups] - joint * last) / own, last) * free), bounds)
    if slope @ step > 0:
        return step
    return within(point.logs, slope / np.append(own, noise), bounds)
