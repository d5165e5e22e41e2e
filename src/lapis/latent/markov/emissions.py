"""What the states of a hidden Markov model emit: symbols, Gaussian vectors, or what a network gives densities of.

An emission reads rows, gives log densities (N, K), and takes its part in EM: sums over rows weighted by p(z_t | y), and
the parameters that maximise sum_t E[log b(y_t)] given these sums. Rows that are missing (NaN) have density 1 in every
state: they carry no information.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from lapis.errors import DataError, OptionError
from lapis.options import checked_tensor, shown

Sums = Mapping[str, Tensor]


class Emissions(ABC):
    """Densities of observations in each of K states, as a value."""

    @property
    @abstractmethod
    def n_states(self) -> int:
        """K."""

    @abstractmethod
    def read(self, rows: Tensor) -> Tensor:
        """Rows (N,) or (N, D) as `log_densities` takes them, or an error."""

    @abstractmethod
    def log_densities(self, rows: Tensor) -> Tensor:
        """log b_k(row), (N, K)."""

    @abstractmethod
    def statistics(self, rows: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Sums over rows with weights (N, K)."""

    @abstractmethod
    def maximised(self, sums: Sums, pseudo_count: float) -> Emissions:
        """The emissions with the largest `expected`."""

    @abstractmethod
    def expected(self, sums: Sums, pseudo_count: float) -> Tensor:
        """sum_t E[log b(y_t)], plus the log prior, 0-d."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Emissions:
        """In another precision."""


def check_distributions(name: str, value: Tensor, axes: int) -> None:
    """Raise unless rows of `value` are probabilities that sum to 1."""
    numbers = checked_tensor(name, value).detach()
    total = numbers.sum(-1)
    near = 1e-4 if numbers.dtype in (torch.float32, torch.float16, torch.bfloat16) else 1e-8
    if not numbers.is_floating_point() or numbers.dim() != axes:
        got = shown(value)
    elif not bool((numbers >= 0).all()):
        got = "a negative number, or NaN"
    elif bool((total - 1).abs().max() > near):
        got = f"a sum of {float(total.flatten()[(total - 1).abs().argmax()]):.6g}"
    else:
        return
    raise OptionError(
        f"Bad {name}", expected=f"{axes} axes, along the last probabilities that sum to 1", got=got, do="normalise them"
    )


def normalised(counts: Tensor, otherwise: Tensor) -> Tensor:
    """Rows over their sums; those without any counts as they were."""
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total.clamp_min(torch.finfo(counts.dtype).tiny), otherwise)


def whole_rows_missing(rows: Tensor) -> None:
    """Raise if a row is missing in part only."""
    missing = rows.isnan()
    if bool((missing.any(1) & ~missing.all(1)).any()):
        raise DataError(
            "A row is missing in part",
            expected="whole rows of NaN",
            got="NaN in some columns",
            do='use covariance="diagonal", or make the whole row NaN',
        )
