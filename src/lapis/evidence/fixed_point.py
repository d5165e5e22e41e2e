"""MacKay's fixed point: alpha_g <- gamma_g / |theta_g - m_g|^2, noise^2 <- SSE / (n - gamma), monotone and accelerated.

In logarithms every coordinate of the step has the sign of the evidence's slope, so the step points uphill: if the
evidence falls, the step was too long, and halving it helps until rounding is reached. Plain iterations can be slow
(when noise and precision compensate each other), so Anderson extrapolation from the last few iterates is used wherever
it raises the evidence.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lapis.evidence.point import Evaluate, Point, limits
from lapis.evidence.search import HALVINGS, Search, within

SHORTEST, LONGEST = 0.4, 2.0
"""Bounds of 1 / (1 - s): slopes from -1.5 to 0.5 are corrected fully."""

MEMORY = 5
"""Number of past iterates used by the extrapolation."""


def climb(evaluate: Evaluate, start: Point, *, max_iterations: int, tolerance: float) -> Search:
    """Iterate from `start` until every step in a logarithm is at most `tolerance`."""
    bounds = limits(start)
    point, trace, evaluations = start, [start.value], 1
    past: deque[tuple[NDArray[Any], NDArray[Any]]] = deque(maxlen=MEMORY)
    for iteration in range(max_iterations):
        step = within(point.logs, point.fixed_point_step(), bounds)
        if np.abs(step).max() <= tolerance:
            return Search(point, tuple(trace), iteration, evaluations, True, f"steps below {tolerance:.1g}")
        past.append((point.logs, step))
        rounding = 1e-13 * max(1.0, abs(point.value))
        best: Point | None = None
        if len(past) > 2:
            best = evaluate(point.logs + within(point.logs, _extrapolated(past), bounds))
            evaluations += 1
            if best is not None and best.value < point.value - rounding:
                best = None
                past.clear()
        halving = 0
        while best is None and halving < HALVINGS:
            trial = evaluate(point.logs + step * 0.5**halving)
            evaluations += 1
            if trial is not None and trial.value >= point.value - rounding:
                best = trial
            elif (point.slope @ step) * 0.5**halving < 10 * rounding:
                return Search(point, tuple(trace), iteration, evaluations, True, "the evidence is flat to rounding")
            halving += 1
        if best is None:
            reason = "no step along the fixed point's direction raises the evidence"
            return Search(point, tuple(trace), iteration, evaluations, False, reason)
        point = best
        trace.append(max(point.value, trace[-1]))
    reason = f"still moving after {max_iterations} iterations"
    return Search(point, tuple(trace), max_iterations, evaluations, False, reason)


def _extrapolated(past: deque[tuple[NDArray[Any], NDArray[Any]]]) -> NDArray[Any]:
    """Anderson's step: the combination of past iterates whose steps cancel best, and its own step."""
    iterates, steps = (np.stack(parts, 1) for parts in zip(*past, strict=True))
    differences = np.diff(steps)
    mix = np.linalg.lstsq(differences, steps[:, -1], rcond=None)[0]
    step: NDArray[Any] = steps[:, -1] - (np.diff(iterates) + differences) @ mix
    return step


def stretch(before: tuple[Tensor, Tensor] | None, here: Tensor, there: Tensor, longest: float = LONGEST) -> Tensor:
    """1 / (1 - s) for each coordinate, at most `longest` (Aitken).

    s is the slope of the update x -> g(x) between x and g(x) of the last round and of this one (`here`, `there`).
    """
    if before is None:
        return torch.ones_like(here)
    step = here - before[0]
    slope = torch.where(step == 0, 0.0, (there - before[1]) / torch.where(step == 0, 1.0, step))
    return torch.where(slope < 1, 1 / (1 - slope.clamp(max=0.99)), longest).clamp(SHORTEST, longest)


def determined(explained: Tensor, held: Tensor, weights: int) -> Tensor:
    """gamma, 0-d, from draws z (k) of N(0, A^-1) by explained = |G z|^2 and held = |z|^2_Lambda, (k,) each.

    Both add up to z^T A z, which is `weights` on average. So gamma = weights * explained / (explained + held), with
    means over the draws: a number between 0 and `weights`, of variance 2 / k sum (h_i - gamma / weights)^2 for
    leverages h_i, where the mean of |G z|^2 alone has 2 / k sum h_i^2, far more where most weights are determined.
    """
    data = explained.double().mean()
    return weights * data / (data + held.double().mean())
