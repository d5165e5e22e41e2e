"""Traces and diagonals from products with random vectors, each with its standard error.

Hutchinson needs nothing of A. Hutch++ (and XTrace, in xtrace.py) first captures A's leading range and samples only what
remains: for a decaying spectrum its error falls like 1/products or faster, Hutchinson's like 1/sqrt(products).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapis.options import check_count
from lapis.solvers.operator import Operator, dots, normal_block
from lapis.solvers.probes import Estimate, Kind, mean_estimate, probe_blocks


def hutchinson_trace(
    operator: Operator, *, probes: int, generator: torch.Generator, kind: Kind = "rademacher", block: int = 16
) -> Estimate:
    """tr A = E[z^T A z]; with Rademacher z and symmetric A each sample has variance 2 sum_(i != j) A_ij^2."""
    samples = [dots(z, operator(z)) for z in probe_blocks(operator, probes, generator, kind, block)]
    return mean_estimate(torch.cat(samples), probes)


def hutchinson_diagonal(operator: Operator, *, probes: int, generator: torch.Generator, block: int = 16) -> Estimate:
    """diag A = E[z * A z], Rademacher z, with a standard error for each entry; the error's variance is the sum of the
    squares of the row's other entries. Value and error (P,) float64; exact for a diagonal A.
    """
    mean = torch.zeros(operator.size, dtype=torch.float64, device=operator.device)
    spread = torch.zeros_like(mean)
    seen = 0
    for z in probe_blocks(operator, probes, generator, "rademacher", block):
        for sample in z * operator(z):  # Welford's update: no cancellation, no storage for the samples
            seen += 1
            shift = sample - mean
            mean += shift / seen
            spread += shift * (sample - mean)
    return Estimate(mean, (spread / (probes - 1) / probes).sqrt(), probes, probes)


def hutch_plus_plus(operator: Operator, *, products: int, generator: torch.Generator, block: int = 16) -> Estimate:
    """Hutch++: tr A = tr(Q A Q^T) + E[g^T P A P g], Q an orthonormal basis of A's sketch, P = I - Q^T Q.

    A third of the products each for the sketch, for A on Q, and for the remainder; unbiased given Q, so the standard
    error of the remainder is that of the whole. `products` >= 6; memory 3 blocks of (products / 3, P).

    Meyer, Musco, Musco, Woodruff, "Hutch++: Optimal Stochastic Trace Estimation", 2021.
    """
    check_count("products", products, least=6)
    sketch = min(products // 3, operator.size)
    basis = torch.linalg.qr(applied_in_blocks(operator, normal_block(operator, sketch, generator), block).mT).Q.mT
    captured = dots(basis, applied_in_blocks(operator, basis, block)).sum()
    rest, samples = products - 2 * sketch, []
    for g in probe_blocks(operator, rest, generator, "rademacher", block):
        g = g - (g @ basis.mT) @ basis
        samples.append(dots(g, operator(g)))
    remainder = mean_estimate(torch.cat(samples), products)
    return Estimate(captured + remainder.value, remainder.standard_error, rest, products)


def applied_in_blocks(operator: Operator, vectors: Tensor, block: int) -> Tensor:
    """A v for all rows, `block` at a time."""
    check_count("block", block)
    if len(vectors) == 0:
        return vectors
    return torch.cat([operator(vectors[first : first + block]) for first in range(0, len(vectors), block)])
