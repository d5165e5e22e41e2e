"""Random test vectors (probes), and estimates from averages over them, with standard errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lapis.options import check_choice, check_count
from lapis.solvers.operator import Operator, normal_block

Kind = Literal["rademacher", "gaussian"]


@dataclass(frozen=True)
class Estimate:
    """An unbiased Monte Carlo estimate: value and standard error (float64, same shape), the number of samples that the
    error was taken from (its degrees of freedom plus one), and the vectors that A was applied to.
    """

    value: Tensor
    standard_error: Tensor
    samples: int
    products: int


def mean_estimate(samples: Tensor, products: int) -> Estimate:
    """Mean and standard error over the first axis of independent samples (n, ...), n >= 2."""
    samples = samples.to(torch.float64)
    return Estimate(samples.mean(0), samples.std(0) / len(samples) ** 0.5, len(samples), products)


def probe_blocks(
    operator: Operator, probes: int, generator: torch.Generator, kind: str = "rademacher", block: int = 16
) -> Iterator[Tensor]:
    """`probes` random vectors z with E[z z^T] = I, in blocks of up to `block` rows; the draws do not depend on `block`.

    Rademacher signs have the least variance for traces when nothing is known of A; Gaussian ones have the
    same distribution in every orthonormal basis.
    """
    check_count("probes", probes, least=2)
    check_count("block", block)
    check_choice("kind", kind, get_args(Kind))
    for first in range(0, probes, block):
        rows = normal_block(operator, min(block, probes - first), generator)
        yield torch.where(rows < 0, -1, 1).to(rows.dtype) if kind == "rademacher" else rows
