"""Tuning of prior precisions and noise by maximising the evidence: choice of the search, its record, and warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lapis.errors import NotPositiveDefiniteError, OptionError
from lapis.evidence import gradient, newton
from lapis.evidence.fixed_point import climb
from lapis.evidence.point import LARGEST_LOG, Evaluate, Point, limits
from lapis.options import check_choice, check_count

Method = Literal["gradient", "fixed_point"]

DEGENERATE = 1e-6
"""A group's gamma this close to 0 or to its number of weights, relative to that number, causes a warning."""


RAISE = 5.0
"""Where the evidence cannot be computed at the start, logarithms of all precisions are raised by this until it can."""


@dataclass(frozen=True)
class Tuning:
    """The record of a tuning run."""

    method: str
    log_evidence: float
    start: float
    """Log evidence before tuning."""
    iterations: int
    evaluations: int
    converged: bool
    reason: str
    """Why the search ended."""
    trace: tuple[float, ...]
    """Log evidence after each iteration; it never falls."""
    groups: tuple[str, ...]
    gamma: tuple[float, ...]
    """Effective parameters of each group, at the end."""
    at_bound: tuple[str, ...]
    """Hyperparameters that ran to the end of their range: the data leave them undetermined."""
    path: tuple[tuple[float, ...], ...] = ()
    """Precisions, and the noise's factor, after each round of tuning from draws (which leaves the evidence NaN)."""

    def __post_init__(self) -> None:
        for name in ("trace", "groups", "gamma", "at_bound"):  # JSON turns tuples into lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "path", tuple(map(tuple, self.path)))

    def __str__(self) -> str:
        state = "converged" if self.converged else "stopped"
        known = not math.isnan(self.log_evidence)
        evidence = f"log evidence {self.start:.4f} -> {self.log_evidence:.4f}, " if known else ""
        return (
            f"{self.method}: {state} after {self.iterations} iterations ({self.reason}); "
            f"{evidence}gamma {sum(self.gamma):.2f}"
        )


def tune(
    evaluate: Evaluate,
    start: Tensor,
    names: Sequence[str],
    sizes: Tensor,
    *,
    method: str = "gradient",
    max_iterations: int = 200,
    tolerance: float | None = None,
) -> tuple[Tensor, Tuning, list[str]]:
    """Positive hyperparameters (G,), or (G + 1,) with the noise's factor last, that maximise the evidence; the record,
    and what to warn of.

    Args:
        evaluate: the evidence at given logarithms of the hyperparameters.
        start: hyperparameters to start from.
        names: names of the G prior groups.
        sizes: number of weights in each group, (G,).
        method: "gradient" (Newton's method on logarithms where second derivatives are known, else L-BFGS) or
            "fixed_point" (MacKay's updates).
        tolerance: on MacKay's equations: their largest relative error (gradient, default 1e-6), or the largest step
            in a logarithm (fixed point, default 1e-8).
    """
    check_choice("method", method, get_args(Method))
    check_count("max_iterations", max_iterations)
    if tolerance is not None and not tolerance > 0:
        raise OptionError("Bad tolerance", expected="a number > 0", got=repr(tolerance), do="leave it out")
    logs = start.detach().cpu().double().log().clamp(-LARGEST_LOG, LARGEST_LOG).numpy()
    first = _feasible(evaluate, logs, len(names))
    if first is None:
        raise NotPositiveDefiniteError(
            "The evidence does not exist at the present noise, whatever the prior",
            expected="a positive definite posterior precision",
            got="one that is not, in float64",
            do="use another noise, rescale inputs and targets, or float64",
        )
    if method == "fixed_point":
        search = climb(evaluate, first, max_iterations=max_iterations, tolerance=tolerance or 1e-8)
    else:
        ascend = gradient.ascend if first.spread is None else newton.ascend
        search = ascend(evaluate, first, max_iterations=max_iterations, tolerance=tolerance or 1e-6)
    best = search.point
    reached = (np.abs(best.logs) >= limits(best) * (1 - 1e-9)).tolist()
    tuning = Tuning(
        method,
        best.value,
        first.value,
        search.iterations,
        search.evaluations,
        search.converged,
        search.reason,
        search.trace,
        tuple(names),
        tuple(best.gamma.tolist()),
        tuple(name for name, hit in zip([*names, "noise"], reached, strict=False) if hit),
    )
    messages = degeneracies(best, tuning, sizes.cpu().numpy())
    return torch.from_numpy(np.exp(best.logs)).to(start.device), tuning, messages


def _feasible(evaluate: Evaluate, logs: NDArray[Any], groups: int) -> Point | None:
    """The evidence at `logs`, or at the first larger prior precisions at which it can be computed, if any."""
    moved = logs.copy()
    while True:
        point = evaluate(moved.copy())
        if point is not None or moved[:groups].min() >= LARGEST_LOG:
            return point
        moved[:groups] = np.minimum(moved[:groups] + RAISE, LARGEST_LOG)


def degeneracies(point: Point, tuning: Tuning, sizes: NDArray[Any]) -> list[str]:
    """Warnings about hyperparameters that the data do not determine, and about a search that did not converge."""
    messages = []
    share = point.gamma / sizes
    distance = point.penalty / np.exp(point.logs[: len(sizes)])
    tight = point.logs[: len(sizes)] > 0
    cases = (
        (distance <= 0, "has weights exactly at the prior's mean, so that its precision has no upper limit"),
        ((share < DEGENERATE) & (distance > 0) & ~tight, "is not determined by the data at all (gamma is 0)"),
        (
            (share < DEGENERATE) & (distance > 0) & tight,
            "is switched off: the evidence prefers its weights at the prior's mean (gamma is 0)",
        ),
        (
            (1 - share < DEGENERATE) & (distance > 0),
            "is determined by the data alone (gamma equals its number of weights): the prior has no say, and the "
            "network may be too small",
        ),
    )
    mentioned = set()
    for where, why in cases:
        names = [tuning.groups[i] for i in np.flatnonzero(where)]
        mentioned.update(names)
        if names:
            messages.append(f"Prior {_listed(names)} {why}. Share its precision with other weights, or fix it.")
    if "noise" in tuning.at_bound:
        size = math.exp(point.logs[-1])
        why = "the fit is perfect, and nothing bounds the noise from below" if size < 1 else "the data do not bound it"
        messages.append(
            f"The noise ran to the end of its range ({size:.3g} times what it was): {why}. Use noise=False."
        )
    others = [name for name in tuning.at_bound if name not in mentioned and name != "noise"]
    if others:
        messages.append(f"Prior {_listed(others)} ran to the end of its range: the evidence has no maximum in between.")
    if not tuning.converged:
        messages.append(
            f"Tuning stopped before it converged: {tuning.reason}. Raise max_iterations, or use the other method."
        )
    return messages


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"group{'s' if len(names) > 1 else ''} {shown}"
