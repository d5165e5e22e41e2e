"""What each job must reach, and whether it does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.measure import EPOCH, OURS

SAME = 0.02
"""Answers that differ by more than this belong to another definition of the same thing."""
ROUNDING = 1e-6
"""Peers compute their evidence in float32: a smaller relative difference cannot be told from none."""
MEMORY_NOISE = 4 * 2**20
"""Growth below this cannot be told from none."""
MEMORY_SAME = 0.02
"""Nor can growths be told apart that differ by less than this."""
FLOOR = {"speed": 1 / 1.1, "memory": 0.8}
"""Of every job: no peer faster by more than 10 %, none that needs less memory by more than 20 %."""

TARGETS: dict[tuple[str, str], dict[str, float]] = {
    ("a", "kron_fit"): {"speed": 4, "epochs": 3.5, "memory": 1},
    ("b", "kron_fit"): {"speed": 2, "epochs": 4, "memory": 1},
    ("a", "diag_fit"): {"speed": 2, "epochs": 2.5},
    ("b", "diag_fit"): {"speed": 2.5, "epochs": 4.5},
    ("a", "kron_predict64"): {"speed": 800, "memory": 200},
    ("b", "kron_predict64"): {"speed": 20, "memory": 8},
    ("a", "diag_predict64"): {"speed": 300},
    ("a", "kron_tune"): {"speed": 100, "evidence": 0},
    ("b", "kron_tune"): {"speed": 100, "evidence": 0},
    ("a", "kron_sample"): {"speed": 5},
    ("b", "kron_sample"): {"speed": 1.3},
    ("b", "last_fit"): {"epochs": 0.5},
    ("d", "dense_fit"): {"speed": 3, "share": 0.6},
    ("h", "dense_fit"): {"speed": 3, "share": 0.6},
    ("c", "kron_fit"): {"epochs": 8},
    ("e", "kron_fit"): {"epochs": 8},
    ("c", "kron_predict256"): {"megabytes": 500},
    ("e", "kron_predict256"): {"megabytes": 500},
    ("a", "ggn_vectors1"): {"speed": 1, "epochs": 2.6, "memory": 1},
    ("a", "ggn_vectors8"): {"speed": 1, "epochs": 11.5, "memory": 1},
    ("b", "ggn_vectors1"): {"speed": 1, "epochs": 2.0, "memory": 1},
    ("b", "ggn_vectors8"): {"speed": 1, "epochs": 9.9, "memory": 1},
    ("c", "ggn_vectors1"): {"speed": 1, "epochs": 2.1, "memory": 1},
    ("c", "ggn_vectors8"): {"speed": 1, "epochs": 15, "memory": 1},
    **{(case, f"ggn_vectors{k}"): {"speed": 1, "memory": 1} for case in "defg" for k in (1, 8)},
}


@dataclass(frozen=True)
class Result:
    """A contender's part of a row; `deviation` is the largest relative difference of its answer from ours."""

    seconds: list[float]
    memory: int | None
    error: str | None
    deviation: float | None
    value: float | None
    """The evidence that tuning reached."""

    @property
    def time(self) -> float:
        ordered = sorted(self.seconds)
        middle = len(ordered) // 2
        if not ordered:
            return math.nan
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True)
class Row:
    """One job on one case, by everybody."""

    case: str
    job: str
    flops: float | None
    results: dict[str, Result]
    rate: float

    @cached_property
    def peers(self) -> dict[str, Result]:
        """Those that did it."""
        return {name: result for name, result in self.results.items() if name not in (OURS, EPOCH) and result.seconds}

    def same(self, name: str) -> bool:
        """Whether a peer computed what we did."""
        deviation = self.results[name].deviation
        return deviation is None or deviation <= SAME

    def marked(self, name: str) -> str:
        return name if self.same(name) else f"{name}*"

    @classmethod
    def load(cls, row: dict[str, Any], rate: float) -> Row:
        results = {name: Result(**result) for name, result in row["results"].items()}
        return cls(row["case"], row["job"], row["flops"], results, rate)

    @property
    def ours(self) -> Result:
        return self.results[OURS]

    @property
    def rivals(self) -> list[str]:
        """Peers that did the same; where none did, all of them."""
        return [name for name in self.peers if self.same(name)] or list(self.peers)

    @property
    def fastest(self) -> str | None:
        return min(self.rivals, key=lambda name: self.peers[name].time, default=None)

    @property
    def leanest(self) -> str | None:
        return min(self.rivals, key=lambda name: self.peers[name].memory or 0, default=None)

    def epochs(self, result: Result) -> float:
        return result.time / self.results[EPOCH].time

    @property
    def limit(self) -> float | None:
        """Seconds."""
        return None if self.flops is None else self.flops / self.rate

    def reached(self, quantity: str) -> float | None:
        """What we reached of a quantity that targets name; None where there is nobody to compare with."""
        if quantity == "speed":
            return self.peers[self.fastest].time / self.ours.time if self.fastest else None
        if quantity == "memory":
            if self.leanest is None or self.ours.memory is None:
                return None
            theirs = self.peers[self.leanest].memory or 0
            ratio = max(theirs, MEMORY_NOISE) / max(self.ours.memory, MEMORY_NOISE)
            return 1.0 if abs(ratio - 1) <= MEMORY_SAME else ratio
        if quantity == "evidence":
            values = [peer.value for name, peer in self.peers.items() if peer.value is not None and self.same(name)]
            if not values or self.ours.value is None:
                return None
            difference = self.ours.value - max(values)
            return 0.0 if abs(difference) <= ROUNDING * abs(max(values)) else difference
        if quantity == "megabytes":
            return None if self.ours.memory is None else self.ours.memory / 2**20
        if quantity == "share":
            return None if self.limit is None else self.limit / self.ours.time
        return self.epochs(self.ours)

    def missed(self) -> Iterator[str]:
        """A phrase for each target that is not reached."""
        if not self.ours.seconds:
            yield f"failed: {self.ours.error}"
            return
        for quantity, wanted in (FLOOR | TARGETS.get((self.case, self.job), {})).items():
            reached = self.reached(quantity)
            at_most = quantity in ("epochs", "megabytes")
            if reached is not None and (reached > wanted if at_most else reached < wanted):
                yield f"{quantity} {reached:.3g}"

    def target(self) -> str:
        phrases = {
            "speed": "{:g} x faster",
            "epochs": "at most {:g} epochs",
            "memory": "{:g} x less memory",
            "megabytes": "below {:g} MB",
            "share": "{:.0%} of the matrix-product rate",
            "evidence": "higher evidence",
        }
        wanted = TARGETS.get((self.case, self.job), {})
        return ", ".join(phrases[quantity].format(number) for quantity, number in wanted.items())
