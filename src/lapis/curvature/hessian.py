"""The true Hessian of the summed negative log-likelihood in the weights, for the dense structure."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lapis.curvature.backward.record import Record
from lapis.curvature.blocks.block import Block
from lapis.errors import ModelError
from lapis.likelihoods import Likelihood
from lapis.network import Network


def twice_differentiable() -> AbstractContextManager[None]:
    """For forward passes: attention by plain products, as torch's fused kernels have first derivatives only."""
    return sdpa_kernel(SDPBackend.MATH)


def add_hessian(block: Block, network: Network, likelihood: Likelihood, record: Record, targets: Tensor) -> None:
    """Add d^2 sum_n nll_n / d theta^2, one row at a time, to a block over all weights."""
    parameters = list(network.parameters.values())
    loss = likelihood.nll(record.f, targets).sum()
    gradient = network.gather(torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True))
    order = torch.cat(
        [site.gather(torch.arange(network.size, device=network.device), network).reshape(-1) for site in block.sites]
    )
    if not gradient.requires_grad:  # nll and network are both linear: the Hessian is zero
        return
    for row, index in enumerate(order.tolist()):
        try:
            second = torch.autograd.grad(gradient[index], parameters, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise ModelError(
                "The network has no second derivatives",
                expected="operations that torch can differentiate twice",
                got=str(error).strip().splitlines()[0],
                do='use curvature="ggn", which needs first derivatives only',
            ) from error
        block.add_row(row, network.gather(second)[order])
