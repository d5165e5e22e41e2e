"""J Sigma J^T g for one direction g of each example's outputs: two backward passes instead of one for every output.

With J^T g at hand, w -> w^T J Sigma J^T g is a linear function of a second seed w, and its gradient is the answer: one
more backward pass, through the one that took w to the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from lapis.curvature.backward.contributions import Contribution, Lookup, Outer, Rows
from lapis.curvature.backward.record import Record
from lapis.curvature.blocks.block import BlockGaussian


def directed(
    record: Record, sites_of: Sequence[Sequence[int]], gaussians: Sequence[BlockGaussian], g: Tensor
) -> Tensor | None:
    """J Sigma J^T g for g (B, T, C), alike; None where autograd cannot differentiate the network twice."""
    fixed = record.contributions(g[None])
    free = torch.zeros_like(g[None], requires_grad=True)
    try:
        moving = record.contributions(free)
        parts = (
            _paired(gaussian, [moving[site] for site in sites], [fixed[site] for site in sites])
            for gaussian, sites in zip(gaussians, sites_of, strict=True)
        )
        (found,) = torch.autograd.grad(reduce(torch.add, parts), free)
    except RuntimeError:
        return None
    return found[0].detach()


def _paired(gaussian: BlockGaussian, moving: Sequence[Contribution], fixed: Sequence[Contribution]) -> Tensor:
    """sum over examples of w^T J Sigma J^T g for one block, a function of w."""
    one, two = moving[0], fixed[0]
    if len(fixed) == 1 and isinstance(one, Outer) and isinstance(two, Outer) and two.g.shape[3] > 1:
        a = two.inputs()
        two = replace(two, inputs=lambda: a)  # made once
        spread = gaussian.spread(two.rows()[0])
        if spread is not None:
            return (one.g[:, 0] * _response(spread, two)).sum()
    both = [_both(first, second) for first, second in zip(moving, fixed, strict=True)]
    return gaussian.covariance(both, False)[:, 0, 1].sum()


def _response(spread: Tensor, contribution: Outer) -> Tensor:
    """V_b a for each example's own weights V (B, K O I) and inputs a, (K, B, T, O): of layers that share weights.

    Patches lie in memory with positions last: V a^T runs along them, many times faster than a V^T.
    """
    groups, _, batch, _, outputs = contribution.g.shape
    weights = spread.reshape(batch, groups, outputs, -1).transpose(0, 1)
    a = contribution.inputs()
    found = (weights[..., : a.shape[-1]] @ a.mT).mT
    return found + weights[..., -1].unsqueeze(2) if contribution.bias else found


def _both(one: Contribution, two: Contribution) -> Contribution:
    """The Jacobian of the seeds of both."""
    if isinstance(one, Outer) and isinstance(two, Outer):
        return replace(two, g=torch.cat([one.g, two.g], 1))
    if isinstance(one, Lookup) and isinstance(two, Lookup):
        return replace(two, g=torch.cat([one.g, two.g]))
    return Rows(torch.cat([one.rows(), two.rows()]))
