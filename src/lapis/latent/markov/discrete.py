"""States that emit symbols."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.latent.markov.emissions import Emissions, Sums, check_distributions, normalised
from lapis.options import check_arguments, shown


@dataclass(frozen=True)
class DiscreteEmissions(Emissions):
    """Symbols 0 to S - 1 with probabilities (K, S).

    >>> DiscreteEmissions(torch.tensor([[0.9, 0.1], [0.5, 0.5]])).n_states
    2
    """

    probabilities: Tensor

    def __post_init__(self) -> None:
        check_arguments(DiscreteEmissions, vars(self))
        check_distributions("probabilities", self.probabilities, 2)

    @property
    def n_states(self) -> int:
        return len(self.probabilities)

    def read(self, rows: Tensor) -> Tensor:
        return among(read_symbols(rows), self.probabilities.shape[1])

    def log_densities(self, rows: Tensor) -> Tensor:
        picked = self.probabilities.mT[rows.clamp(min=0)]
        return torch.where((rows < 0)[:, None], 1.0, picked).log()

    def statistics(self, rows: Tensor, weights: Tensor) -> dict[str, Tensor]:
        seen = rows >= 0
        counts = weights.new_zeros(self.probabilities.shape[::-1])
        return {"symbols": counts.index_add(0, rows[seen], weights[seen]).mT}

    def maximised(self, sums: Sums, pseudo_count: float) -> DiscreteEmissions:
        return DiscreteEmissions(normalised(sums["symbols"] + pseudo_count, self.probabilities))

    def expected(self, sums: Sums, pseudo_count: float) -> Tensor:
        return torch.xlogy(sums["symbols"] + pseudo_count, self.probabilities).sum()

    def to(self, dtype: torch.dtype) -> DiscreteEmissions:
        return DiscreteEmissions(self.probabilities.to(dtype))


def among(symbols: Tensor, count: int) -> Tensor:
    """Symbols, or an error if one is not below this number of them."""
    if int(symbols.max()) >= count:
        raise DataError(
            "A symbol is not among those that states emit",
            expected=f"0 to {count - 1}",
            got=str(int(symbols.max())),
            do="fit with symbols= as many as there are",
        )
    return symbols


def read_symbols(rows: Tensor) -> Tensor:
    """Symbols (N,) as whole numbers, -1 where NaN."""
    flat = rows[:, 0] if rows.dim() == 2 and rows.shape[1] == 1 else rows
    if flat.dim() != 1:
        raise DataError(
            "Bad sequence of symbols", expected="(T,), one symbol a step", got=shown(rows), do="pass a list of such"
        )
    missing = flat.isnan()
    known = torch.where(missing, torch.zeros_like(flat), flat)
    symbols = known.long()
    bad = (symbols != known) | (symbols < 0)
    if bool(bad.any()):
        raise DataError(
            "A symbol is not a whole number from 0 on",
            expected="0, 1, 2 ..., or NaN where missing",
            got=f"{float(known[bad][0]):g}",
            do="number the symbols",
        )
    return torch.where(missing, -1, symbols)
