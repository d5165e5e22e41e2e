"""Seeds: vectors at the outputs whose backpropagation gives the rows of S^T J, or of J itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lapis.likelihoods import Likelihood


def curvature_seeds(
    kind: str,
    likelihood: Likelihood,
    f: Tensor,
    y: Tensor,
    *,
    fisher_samples: int,
    generator: torch.Generator,
    at_once: int,
) -> Iterator[Tensor]:
    """Seeds (m, B, T, C), at most `at_once` at a time, whose outer products sum to the curvature in f (B, T, C)."""
    if kind == "empirical":
        yield likelihood.gradient(f, y)[None]
    elif kind == "sampled":
        weight = fisher_samples**-0.5
        for _ in range(fisher_samples):
            yield weight * likelihood.sampled_gradient(f, y, generator)[None]
    else:
        yield from position_seeds(likelihood.factor(f, y), at_once)


def position_seeds(factor: Tensor, at_once: int) -> Iterator[Tensor]:
    """The columns of S (B, T, C, R) as seeds (m, B, T, C): one position at a time, the others zero."""
    batch, positions, outputs, _ = factor.shape
    for position in range(positions):
        columns = factor[:, position].permute(2, 0, 1)
        for start in range(0, len(columns), at_once):
            chosen = columns[start : start + at_once]
            if positions == 1:
                yield chosen[:, :, None]
            else:
                seeds = factor.new_zeros(len(chosen), batch, positions, outputs)
                seeds[:, :, position] = chosen
                yield seeds


def unit_factor(f: Tensor) -> Tensor:
    """S = I for every position of f (B, T, C): its columns seed the rows of J."""
    batch, positions, outputs = f.shape
    return torch.eye(outputs, dtype=f.dtype, device=f.device).expand(batch, positions, outputs, outputs)
