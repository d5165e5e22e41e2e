"""What searches for the evidence's maximum share: how far they step, and what they hand back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lapis.evidence.point import Point

LONGEST_STEP = 5.0
"""A factor of exp(5) at once: gamma at the other end of a longer step has little to do with gamma here."""

HALVINGS = 30

FLAT = 1000
"""A search that can raise the evidence no more in rounding has converged when its slope is this near the tolerance."""


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
    """The step, shortened to stay in range and to be no leap."""
    short = np.minimum(np.maximum(step, -LONGEST_STEP), LONGEST_STEP)
    moved: np.ndarray = np.minimum(np.maximum(logs + short, -bounds), bounds) - logs
    return moved
