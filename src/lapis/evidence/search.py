"""Shared by all searches for the maximum of the evidence: limits on their steps, and their result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lapis.evidence.point import Point

LONGEST_STEP = 5.0
"""Largest step in a logarithm, a factor of exp(5): gamma at the end of a longer step would differ too much."""

HALVINGS = 30
"""A step that still lowers the evidence after this many halvings is abandoned."""

FLAT = 1000
"""If rounding prevents a further rise of the evidence, a slope below this many tolerances counts as converged."""


@dataclass(frozen=True)
class Search:
    """The best point, the evidence after each iteration (never falling), and why the search ended."""

    point: Point
    trace: tuple[float, ...]
    iterations: int
    evaluations: int
    converged: bool
    reason: str


def within(logs: NDArray[Any], step: NDArray[Any], bounds: NDArray[Any]) -> NDArray[Any]:
    """The step, each coordinate shortened to at most LONGEST_STEP and so that logs + step stays within +-bounds."""
    short = np.minimum(np.maximum(step, -LONGEST_STEP), LONGEST_STEP)
    moved: NDArray[Any] = np.minimum(np.maximum(logs + short, -bounds), bounds) - logs
    return moved
