"""What a calibration finds, piece by piece, kept in a file that it goes on from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapis.checkpoint import Checkpoint
from lapis.ranks import Ranks
from lapis.schema import entry, sound


@dataclass(frozen=True)
class Part:
    """Held-out examples of one shape: means (B, T, C), F (groups, K, B, T, C[, C]) on the grid, targets as given."""

    mean: Tensor
    grid: Tensor
    targets: Tensor
    raw_shape: tuple[int, ...]


class Recalled:
    """What a calibration found so far, in order, from a checkpoint: a run that goes on takes it from there.

    Which passes and candidates come next depends on what was found before only, and so does the order.
    """

    def __init__(self, checkpoint: Checkpoint, ranks: Ranks | None = None) -> None:
        self.checkpoint = checkpoint
        self.tensors: dict[str, Tensor] = {}
        self.pieces: list[dict[str, Any]] = []
        self._before = list(entry(checkpoint.facts, "pieces", list[dict[str, Any]])) if checkpoint.facts else []
        self._ranks = ranks

    def agree(self) -> None:
        """Forget what some rank does not know: values are sums over all of them."""
        if self._ranks is not None:
            del self._before[min(self._ranks.numbers(len(self._before))) :]

    def part(self, make: Callable[[], Part], device: torch.device) -> Part:
        """Held-out examples on a grid, in the order in which they are asked for."""
        number = len(self.pieces)
        names = [f"{number}.{name}" for name in ("mean", "grid", "targets")]
        if number < len(self._before):
            shape = entry(self._before[number], "shape", list[int])
            with sound("calibration"):
                mean, grid, targets = (self.checkpoint.tensors[name].to(device) for name in names)
                made = Part(mean, grid, targets, tuple(shape))
        else:
            made = make()
        tensors = dict(zip(names, (made.mean, made.grid, made.targets), strict=True))
        self._found({"shape": list(made.raw_shape)}, tensors)
        return made

    def value(self, make: Callable[[], float]) -> float:
        """The log likelihood of a candidate."""
        known = self._before[len(self.pieces) :]
        found = float(entry(known[0], "value", float | str)) if known else make()
        self._found({"value": found if math.isfinite(found) else str(found)}, {})
        return found

    def _found(self, fact: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.pieces.append(fact)
        self.tensors |= tensors
        if len(self.pieces) > len(self._before):
            self.checkpoint.offer(self.tensors, {"pieces": self.pieces})
