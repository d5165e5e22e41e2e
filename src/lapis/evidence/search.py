"""What the searches for the evidence's maximum have in common: limits on their steps, and their result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lapis.evidence.point import Point

LONGEST_STEP = 5.0
"""A factor of exp(5) at once: gamma at the other end of a longer step has little to do with gamma here."""

HALVINGS = 30
"""A step that still lowers the evidence after this many halvings is given up."""

FLAT = 1000
"""When rounding keeps a search from raising the evidence further, a slope below this many tolerances is converged."""


@dataclass(frozen=True)
class Search:
    """The best point, the evidence after each iteration (never falling), and why the search ended."""

    point: Point
    trace: tuple[float, ...]
    iterations: int
    evaluations: int
    converged: bool
    reason: str


def within(logs: np.ndarray, step: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The step, each coordinate shortened to at most LONGEST_STEP and so that logs + step stays within +-bounds."""
    short = np.minimum(np.maximum(step, -LONGEST_STEP), LONGEST_STEP)
    moved: np.ndarray = np.minimum(np.maximum(logs + short, -bounds), bounds) - logs
    return moved
