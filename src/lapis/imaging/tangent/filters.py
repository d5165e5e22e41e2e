"""The Gaussian prior on convolution weights: blocks, each with a variance and a length scale inside its filters.

Weights of different filters are independent; those of one k x k filter have covariance s^2 exp(-d / l), d the distance
of two taps. d takes few values d_r (six for 3 x 3), so a block's covariance is s^2 sum_r exp(-d_r / l) D_r with fixed
0/1 matrices D_r, and anything linear in the covariance needs computing only once for each r.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from lapis.errors import ModelError

VARIANCE, LENGTH = 1.0, 0.1
"""Where tuning begins, as published."""


@dataclass(frozen=True)
class Block:
    """Convolutions that share a prior: names of their weights, and the side k of their filters."""

    name: str
    weights: tuple[str, ...]
    side: int
    size: int
    """Number of weights."""

    @property
    def taps(self) -> int:
        return self.side**2

    @cached_property
    def _classes(self) -> tuple[Tensor, Tensor]:
        row, column = np.divmod(np.arange(self.taps), self.side)
        squares = (row[:, None] - row) ** 2 + (column[:, None] - column) ** 2
        values, classes = np.unique(squares, return_inverse=True)
        return torch.from_numpy(np.sqrt(values)), torch.from_numpy(classes.reshape(squares.shape))

    @property
    def distances(self) -> Tensor:
        """d_r, ascending from 0, float64 (r,)."""
        return self._classes[0]

    @cached_property
    def indicators(self) -> Tensor:
        """D_r (r, taps, taps) float64: 1 where two taps are at distance d_r."""
        return torch.nn.functional.one_hot(self._classes[1], len(self.distances)).movedim(-1, 0).to(torch.float64)


def blocks_of(network: nn.Module) -> tuple[Block, ...]:
    """The trainable convolutions of a network, those in the same module and with the same filters together."""
    found: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d) and module.weight.requires_grad:
            if module.kernel_size[0] != module.kernel_size[1]:
                raise ModelError(
                    f"The filters of {name} are not square", expected="k x k filters", got=str(module.kernel_size),
                    do="use square filters",
                )  # fmt: skip
            weight = (f"{name}.weight" if name else "weight", module.weight.numel())
            found.setdefault((name.rpartition(".")[0], module.kernel_size[0]), []).append(weight)
    if not found:
        raise ModelError(
            "No weights for a prior", expected="trainable Conv2d layers", got="none", do="use such a network"
        )
    sides = [parent for parent, _ in found]
    return tuple(
        Block(
            f"{parent or 'network'}{f' {side}x{side}' if sides.count(parent) > 1 else ''}",
            tuple(name for name, _ in weights), side, sum(size for _, size in weights),
        )
        for (parent, side), weights in found.items()
    )  # fmt: skip


@dataclass(frozen=True)
class FilterPrior:
    """Variances s^2 and length scales l of the blocks, (blocks,) float64; lengths count for filters of several taps."""

    blocks: tuple[Block, ...]
    variances: Tensor
    lengths: Tensor

    @classmethod
    def standard(cls, blocks: tuple[Block, ...], variance: float = VARIANCE, length: float = LENGTH) -> FilterPrior:
        ones = torch.ones(len(blocks), dtype=torch.float64)
        return cls(blocks, variance * ones, length * ones)

    def of(self, variances: Tensor, lengths: Tensor) -> FilterPrior:
        return replace(self, variances=variances, lengths=lengths)

    def coefficients(self) -> Tensor:
        """s^2 exp(-d_r / l) of all blocks and distances, one after the other; differentiable."""
        parts = [
            variance * torch.exp(-block.distances / length)
            for block, variance, length in zip(self.blocks, self.variances, self.lengths, strict=True)
        ]
        return torch.cat(parts)

    def covariances(self) -> list[Tensor]:
        """Of each block's filters, (taps, taps)."""
        split = torch.split(self.coefficients(), [len(block.distances) for block in self.blocks])
        return [torch.einsum("r,rpq->pq", c, b.indicators) for b, c in zip(self.blocks, split, strict=True)]

    def times(self, vectors: Tensor) -> Tensor:
        """Sigma v for each row of (k, P)."""
        return self._filterwise(vectors, self.covariances())

    def draws(self, white: Tensor) -> Tensor:
        """Draws of N(0, Sigma) (k, P) from white noise of the same form."""
        return self._filterwise(white, [torch.linalg.cholesky(matrix).mT for matrix in self.covariances()])

    def energy(self, weights: Tensor) -> Tensor:
        """w^T Sigma^-1 w of one weight vector (P,); differentiable in variances and lengths."""
        total = weights.new_zeros(())
        for part, block, matrix in zip(self._split(weights[None]), self.blocks, self.covariances(), strict=True):
            filters = part.reshape(-1, block.taps)
            total = total + (torch.linalg.solve(matrix, filters.mT @ filters)).trace()
        return total

    def _split(self, vectors: Tensor) -> tuple[Tensor, ...]:
        return torch.split(vectors, [block.size for block in self.blocks], -1)

    def _filterwise(self, vectors: Tensor, matrices: list[Tensor]) -> Tensor:
        """Each filter times its block's matrix from the right."""
        parts = []
        for part, block, matrix in zip(self._split(vectors), self.blocks, matrices, strict=True):
            filters = part.reshape(len(vectors), -1, block.taps) @ matrix.to(vectors.dtype)
            parts.append(filters.reshape(len(vectors), -1))
        return torch.cat(parts, -1)
