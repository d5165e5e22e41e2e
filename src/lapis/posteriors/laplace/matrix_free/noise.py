"""White noise of draws: one seed for each draw, so that every method starts from the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior
    from lapis.posteriors.laplace.matrix_free.solved import SolvedPosterior


def white(posterior: SolvedPosterior, sources: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """White noise e (n, P) and u (n, M) of n draws, in the network's dtype, each from a generator."""
    like = posterior.mean.new_empty(0, dtype=posterior.network.dtype)
    e, u = (like.new_empty(len(sources), size) for size in (posterior.n_weights, posterior.curvature.rows))
    for number, source in enumerate(sources):
        for row in (e[number], u[number]):
            row.copy_(torch.randn(len(row), dtype=row.dtype, generator=source, device=source.device))
    return e, u


def noise(posterior: ImplicitPosterior, seed: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """White noise e (n, P) and u (n, M) of draws first to last - 1; each draw has its own seed, to be reproducible."""
    seeds = [(seed + number) % 2**63 for number in range(first, last)]
    return white(posterior, [torch.Generator(posterior.network.device).manual_seed(each) for each in seeds])
