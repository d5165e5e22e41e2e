"""J Sigma J^T for a Jacobian that is a tensor, block by block, as modules of plain tensor operations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapis.curvature.blocks.block import BlockGaussian
from lapis.curvature.blocks.diagonal import DiagonalGaussian
from lapis.curvature.blocks.kronecker.eigenbasis import EigenbasisGaussian
from lapis.curvature.blocks.scaled import ScaledGaussian
from lapis.errors import StructureError
from lapis.posteriors.laplace.stored import LaplacePosterior

LARGEST = 4096
"""Weights of a block whose covariance has no simpler form than a matrix."""


class _Diagonal(nn.Module):
    """Independent weights."""

    deviation: Tensor

    def __init__(self, variance: Tensor) -> None:
        super().__init__()
        self.register_buffer("deviation", variance.sqrt())

    def forward(self, jacobian: Tensor) -> Tensor:
        """J Sigma^1/2 from J (B, C, n)."""
        return jacobian * self.deviation


class _Dense(nn.Module):
    """A root R of the covariance R R^T."""

    root: Tensor

    def __init__(self, root: Tensor) -> None:
        super().__init__()
        self.register_buffer("root", root)

    def forward(self, jacobian: Tensor) -> Tensor:
        return jacobian @ self.root


class _Factored(nn.Module):
    """A matrix (O, I) of weights whose covariance is diagonal in a basis of its outputs and one of its inputs."""

    deviation: Tensor
    outputs: Tensor
    inputs: Tensor

    def __init__(self, variance: Tensor, outputs: Tensor, inputs: Tensor) -> None:
        super().__init__()
        self.register_buffer("deviation", variance.sqrt())
        self.register_buffer("outputs", outputs)
        self.register_buffer("inputs", inputs)

    def forward(self, jacobian: Tensor) -> Tensor:
        array = jacobian.reshape(*jacobian.shape[:-1], *self.deviation.shape)
        rotated: Tensor = self.outputs.mT @ array @ self.inputs * self.deviation
        return rotated.flatten(-2)


class Covariance(nn.Module):
    """V = J Sigma J^T of each example, (B, C, C), from its Jacobian in the order of the flat weights, (B, C, P)."""

    def __init__(self, posterior: LaplacePosterior) -> None:
        super().__init__()
        order = torch.arange(posterior.n_weights, device=posterior.network.device)
        self.roots = nn.ModuleList()
        pairs = zip(posterior.curvature.blocks, posterior.widened, strict=True)
        for number, (block, gaussian) in enumerate(pairs):
            index = torch.cat([site.gather(order, posterior.network).flatten() for site in block.sites])
            self.register_buffer(f"index{number}", index)
            self.roots.append(_root(gaussian, len(index)))
        self.to(posterior.network.dtype)

    def forward(self, jacobian: Tensor) -> Tensor:
        parts = [root(jacobian[..., getattr(self, f"index{i}")]) for i, root in enumerate(self.roots)]
        whitened = torch.cat(parts, -1)
        return whitened @ whitened.mT


def _root(gaussian: BlockGaussian, size: int) -> nn.Module:
    """The covariance's root in the simplest form that is exact."""
    factor = 1.0
    while isinstance(gaussian, ScaledGaussian):
        factor *= gaussian.factor
        gaussian = gaussian.gaussian
    with torch.no_grad():
        if isinstance(gaussian, DiagonalGaussian):
            return _Diagonal(factor * gaussian.variance())
        if type(gaussian) is EigenbasisGaussian and len(gaussian.outputs) == 1 and gaussian.back is not None:
            variance, outputs, inputs = gaussian.factors(torch.float64)
            assert inputs is not None
            return _Factored(factor * variance[0], outputs[0], inputs[0])
        if size > LARGEST:
            raise StructureError(
                f"A covariance of {size:,} weights is too large to export as a matrix",
                expected=f"at most {LARGEST:,} weights in a block, or a diagonal or Kronecker structure",
                got=type(gaussian).__name__,
                do='fit with weights="last_layer", or structure="kronecker" or "diagonal"',
            )
        eye = torch.eye(size, dtype=torch.float64, device=_device(gaussian))
        return _Dense(gaussian.color(eye).mT * factor**0.5)


def _device(gaussian: BlockGaussian) -> torch.device:
    return gaussian.variance().device
