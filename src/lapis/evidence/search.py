"""What a search for the evidence's maximum hands back."""

from __future__ import annotations

from dataclasses import dataclass

from lapis.evidence.point import Point


@dataclass(frozen=True)
class Search:
    """The best point, the evidence after each iteration (never falling), and why the search ended."""

    point: Point
    trace: tuple[float, ...]
    iterations: int
    evaluations: int
    converged: bool
    reason: str
