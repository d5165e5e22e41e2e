"""Laplace posteriors that go from task to task: each adds its curvature, at the weights that it was learnt with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lapis.batches import batches
from lapis.curvature.accumulate import accumulate
from lapis.curvature.blocks.block import BlockGaussian
from lapis.curvature.blocks.diagonal import DiagonalBlock
from lapis.curvature.blocks.kronecker.factors import KroneckerBlock
from lapis.curvature.moments import symmetric
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


def curvature_product(posterior: LaplacePosterior) -> Callable[[Tensor], Tensor]:
    """The function C v of weight vectors v (P,), with C the curvature of all data and without the prior.

    Kronecker factors multiply in the network's dtype, G V A: one product for each factor, where the eigenbasis of the
    posterior takes two in float64. Other structures multiply in float64.
    """
    dtype, scale, sums = posterior.network.dtype, posterior.scale.detach(), posterior.curvature
    shifts = sums.to_blocks(posterior.weight_prior.vector().detach().double()[None])
    products: list[Callable[[Tensor], Tensor]] = []
    for number, (block, shift) in enumerate(zip(sums.blocks, shifts, strict=True)):
        if isinstance(block, KroneckerBlock) and not block.separate_bias and block.site.kind != "lookup":
            left = (scale * symmetric(block.gradients)).to(dtype)
            products.append(partial(_by_factors, left, symmetric(block.mean_inputs()).to(dtype)))
        else:
            products.append(partial(_by_gaussian, posterior.gaussians[number], shift))

    def product(vector: Tensor) -> Tensor:
        parts = [times(part) for times, part in zip(products, sums.to_blocks(vector[None]), strict=True)]
        return sums.to_flat([part.to(vector.dtype) for part in parts])[0]

    return product


def _by_factors(gradients: Tensor, inputs: Tensor, vectors: Tensor) -> Tensor:
    """G V A of vectors (1, K O I), with factors (K, O, O) and (K, I, I)."""
    array = vectors.reshape(*gradients.shape[:2], -1).to(inputs.dtype)
    return (gradients @ (array @ inputs)).reshape(vectors.shape)


def _by_gaussian(gaussian: BlockGaussian, prior: Tensor, vectors: Tensor) -> Tensor:
    exact = vectors.double()
    return gaussian.multiply(exact) - prior * exact


def curvature_diagonal(posterior: LaplacePosterior) -> Tensor:
    """The curvature of each weight (P,), summed over the data, of a diagonal posterior; float64."""
    flat = torch.zeros(posterior.n_weights, dtype=torch.float64, device=posterior.network.device)
    for block in posterior.curvature.blocks:
        assert isinstance(block, DiagonalBlock)
        block.site.scatter(block.curvature, flat, posterior.network)
    return flat


def half_square(deviation: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """1/2 d^T A d of a symmetric A, with gradient A d: one product with A for both."""
    value: Tensor = _Quadratic.apply(deviation, multiply)  # type: ignore[no-untyped-call]
    return value


class _Quadratic(torch.autograd.Function):
    """`half_square`."""

    @staticmethod
    def forward(ctx: Any, deviation: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        product = multiply(deviation)
        ctx.save_for_backward(product.to(deviation.dtype))
        return 0.5 * (product * deviation).sum().to(deviation.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (product,) = ctx.saved_tensors
        return gradients[0] * product, None
