"""A row of the table of derivations: the iterates of the rule beside those of an algorithm written without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

TOLERANCE = 1e-6
"""Of every difference, in float64; where a limit is taken, at the finite value that stands for it."""


@dataclass(frozen=True)
class Derivation:
    """An algorithm that follows from the rule, and how exactly."""

    algorithm: str
    family: str
    """The choice of q."""
    expectation: str
    """The choice of E_q[loss], and what else is approximated."""
    steps: int
    difference: float
    """The largest between an iterate of the rule and the algorithm's own."""
    limit: str = ""
    """What is taken to a limit; "" if the two are the same at any step."""


@dataclass(frozen=True)
class Derivations(Sequence[Derivation]):
    """The table of derivations; prints as one."""

    rows: tuple[Derivation, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    @property
    def hold(self) -> bool:
        """Whether every difference is at most 1e-6."""
        return all(row.difference <= TOLERANCE for row in self.rows)

    def __str__(self) -> str:
        head = ("algorithm", "distribution q", "expectation", "steps", "difference", "limit")
        cells = [
            (row.algorithm, row.family, row.expectation, str(row.steps), f"{row.difference:.1e}", row.limit or "none")
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        right = {3, 4}

        def line(entries: Sequence[str]) -> str:
            padded = (
                entry.rjust(width) if i in right else entry.ljust(width)
                for i, (entry, width) in enumerate(zip(entries, widths, strict=True))
            )
            return "  ".join(padded).rstrip()

        return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, cells)])


class Gap:
    """The largest difference between tensors or arrays that were compared so far."""

    def __init__(self) -> None:
        self.largest = 0.0

    def add(self, *pairs: tuple[Any, Any]) -> None:
        """Compare now: iterates may change in place."""
        for one, other in pairs:
            self.largest = max(self.largest, float(np.abs(_array(one) - _array(other)).max()))


def _array(value: Any) -> Any:
    return np.asarray(value.detach() if isinstance(value, torch.Tensor) else value, dtype=np.float64)


def generator_of(seed: int) -> torch.Generator:
    """A source of data or draws."""
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=generator_of(seed))
