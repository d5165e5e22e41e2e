"""Laplace posteriors that go from task to task: each adds its curvature, at the weights that it was learnt with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lapis.batches import batches
from lapis.curvature.accumulate import accumulate
from lapis.curvature.blocks.diagonal import DiagonalBlock
from lapis.likelihoods import Likelihood
from lapis.posteriors.laplace.fit import laplace
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.posteriors.posterior import Facts


def consolidated(
    before: LaplacePosterior | None,
    model: nn.Module,
    data: Any,
    on_task: Likelihood,
    likelihood: Likelihood,
    *,
    structure: str,
    prior: float,
    batch_size: int | None,
    progress: bool | None,
) -> LaplacePosterior:
    """N(t, A^-1) at the model's weights t, with A = A_before + sum_n J_n^T H_n J_n of one more task.

    Args:
        before: the posterior after the tasks before; None for the first.
        data: of the task.
        on_task: its likelihood, as one of all outputs.
        likelihood: of the posterior.
        structure: of the first; Kronecker factors of all tasks add up, as those of one data set would.
        prior: precision of the first.
    """
    if before is None:
        first = laplace(
            model, data, on_task, structure=structure, weights="all", prior=prior, batch_size=batch_size,
            progress=progress,
        )  # fmt: skip
        first.curvature.apart = None  # outputs are not kept apart: heads need not have all of them
        return replace(first, likelihood=likelihood, fitted_likelihood=likelihood)
    network, sums = before.network, before.curvature.clone()
    stream, total = batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)
    with network.held():
        accumulate(
            sums,
            network,
            on_task,
            stream,
            total=total,
            generator=torch.Generator(network.device).manual_seed(sums.n_data),
            memory_budget=before.facts.memory_budget,
            progress=progress,
        )
        mean, fingerprint = network.flat(), network.fingerprint()
    facts = Facts(sums.n_data, sums.outputs, sums.signature, fingerprint, before.facts.memory_budget)
    return replace(before, facts=facts, mean=mean, point=mean, curvature=sums)


def precision_product(posterior: LaplacePosterior, vector: Tensor) -> Tensor:
    """A v for a weight vector v (P,), float64."""
    parts = posterior._to_blocks(vector.double()[None])
    products = [gaussian.multiply(part) for gaussian, part in zip(posterior.gaussians, parts, strict=True)]
    return posterior._to_flat(products)[0]


def curvature_diagonal(posterior: LaplacePosterior) -> Tensor:
    """The curvature of each weight (P,), summed over the data, of a diagonal posterior; float64."""
    flat = torch.zeros(posterior.n_weights, dtype=torch.float64, device=posterior.network.device)
    for block in posterior.curvature.blocks:
        assert isinstance(block, DiagonalBlock)
        block.site.scatter(block.curvature, flat, posterior.network)
    return flat
