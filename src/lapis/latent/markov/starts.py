"""Where EM starts from: random chains that tend to stay, symbols near their frequencies, means by k-means."""

from __future__ import annotations

import torch
from torch import Tensor

from lapis.latent.markov.discrete import DiscreteEmissions
from lapis.latent.markov.gaussian import GaussianEmissions

DOUBLE = torch.float64


def random_rows(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Probabilities, uniform on the simplex."""
    draws = -torch.rand(shape, generator=generator, dtype=DOUBLE).clamp_min(1e-300).log()
    return draws / draws.sum(-1, keepdim=True)


def random_transitions(states: int, generator: torch.Generator) -> Tensor:
    """Half a random row, half staying."""
    return 0.5 * random_rows((states, states), generator) + 0.5 * torch.eye(states, dtype=DOUBLE)


def random_symbols(
    rows: Tensor, known: Tensor | None, states: int, symbols: int, generator: torch.Generator
) -> DiscreteEmissions:
    """Half a random row, half the frequencies of all symbols, or of those of a state where some are known."""
    counts = torch.bincount(rows[rows >= 0], minlength=symbols).to(DOUBLE).expand(states, symbols) + 1e-3
    if known is not None:
        for state in range(states):
            mine = rows[(known == state) & (rows >= 0)]
            if len(mine):
                counts = counts.clone()
                counts[state] = torch.bincount(mine, minlength=symbols) + 0.5
    frequencies = counts / counts.sum(-1, keepdim=True)
    return DiscreteEmissions(0.5 * random_rows((states, symbols), generator) + 0.5 * frequencies)


def clustered(
    rows: Tensor, known: Tensor | None, states: int, diagonal: bool, floor: float, generator: torch.Generator
) -> GaussianEmissions:
    """Means by k-means (from k-means++, with rows of known states held there), the covariance of all rows for each."""
    least, centre = smallest_variances(rows, floor)
    variances, seen = least / floor, ~rows.isnan()
    x = torch.where(seen, rows - centre, 0.0)
    means = _k_means(x / variances.sqrt(), known, states, generator) * variances.sqrt() + centre
    if diagonal:
        spread = variances.expand(states, -1)
    else:
        whole = x[seen.all(1)]
        one = whole.mT @ whole / max(len(whole), 1) + torch.diag(1e-3 * variances)
        spread = one.expand(states, *one.shape)
    return GaussianEmissions(means, spread.clone()).with_least(least, centre)


def smallest_variances(rows: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """A share of the variances of all rows (of 1 where they are constant), and their mean, (D,)."""
    count = (~rows.isnan()).sum(0).clamp_min(1)
    centre = rows.nan_to_num().sum(0) / count
    variances = (rows - centre).nan_to_num().square().sum(0) / count
    return floor * torch.where(variances > 0, variances, 1.0), centre


def _k_means(x: Tensor, known: Tensor | None, states: int, generator: torch.Generator, rounds: int = 10) -> Tensor:
    """Centres (K, D)."""
    fixed = torch.full((len(x),), -1) if known is None else known
    centres: list[Tensor] = []
    nearest = torch.full((len(x),), torch.inf, dtype=x.dtype)
    for state in range(states):
        mine = x[fixed == state]
        if len(mine):
            pick = mine.mean(0)
        else:
            chances = nearest if centres else torch.ones_like(nearest)
            chances = torch.where(fixed < 0, chances, 0.0)
            if not float(chances.sum()) > 0:
                chances = torch.ones_like(nearest)
            pick = x[int(torch.multinomial(chances, 1, generator=generator))]
        centres.append(pick)
        nearest = torch.minimum(nearest, (x - pick).square().sum(1))
    found = torch.stack(centres)
    for _ in range(rounds):
        owner = torch.where(fixed >= 0, fixed, torch.cdist(x, found).argmin(1))
        sizes = torch.bincount(owner, minlength=states)
        sums = torch.zeros_like(found).index_add(0, owner, x)
        found = torch.where((sizes > 0)[:, None], sums / sizes.clamp_min(1)[:, None].to(x.dtype), found)
    return found
