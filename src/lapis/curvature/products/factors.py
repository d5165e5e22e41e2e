"""Factors S of the likelihood's Hessian in the outputs, S S^T = H, for each batch of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from lapis.curvature.budget import work_bytes
from lapis.curvature.outputs import FACTOR_COPIES, check_factors
from lapis.likelihoods import Likelihood

KEPT_FACTORS_BYTES = 64 * 2**20
"""The factors S are kept if they take at most this many bytes; otherwise each product computes them again."""


class Factors:
    """S of each batch at the trained outputs, (B, T, C, R) float64, in pieces that fit in memory, and kept if small.

    MemoryBudgetError for outputs so many that the factor of a single example would take more than `memory` bytes.
    """

    def __init__(
        self, likelihood: Likelihood, outputs: Sequence[Tensor], targets: Sequence[Tensor], memory: int
    ) -> None:
        self.likelihood, self.outputs, self.targets, self.memory = likelihood, outputs, targets, memory
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._keeps = sum(f.numel() * f.shape[-1] for f in outputs) * 8 <= min(KEPT_FACTORS_BYTES, memory // 8)

    def pieces(self, batch: int) -> Iterator[tuple[slice, Tensor]]:
        """S of a batch's examples, some at a time."""
        f, y = self.outputs[batch], self.targets[batch]
        check_factors(f[:1], self.memory, "structure='kronecker'")
        step = max(1, work_bytes(self.memory) // (FACTOR_COPIES * 8 * f[0].numel() * f.shape[-1]))
        for start in range(0, len(f), step):
            some = slice(start, min(start + step, len(f)))
            found = self._kept.get((batch, start))
            if found is None:
                found = self.likelihood.factor(f[some], y[some]).detach()
                if self._keeps:
                    self._kept[batch, start] = found
            yield some, found


class GivenFactors:
    """The same for factors S that are given, one for each batch."""

    def __init__(self, factors: Sequence[Tensor]) -> None:
        self.factors = factors

    def pieces(self, batch: int) -> Iterator[tuple[slice, Tensor]]:
        yield slice(None), self.factors[batch]
