"""The Jacobian as it is: of norm layers, raw parameters, and everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """J itself, (M, B, entries)."""

    values: Tensor

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.values.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def rows(self) -> Tensor:
        return self.values

    def add_square_sum(self, total: Tensor) -> None:
        """Add the sum over examples and seeds of J^2 to `total`, which has as many entries."""
        total += self.values.square().sum((0, 1)).reshape(total.shape)

    def covariance(self, variance: Tensor, diagonal: bool) -> Tensor:
        jacobian, variance = self.values.transpose(0, 1), variance.reshape(-1)
        if diagonal:
            return torch.einsum("bmp,p->bm", jacobian.square(), variance)
        return torch.bmm(jacobian * variance, jacobian.mT)

    def project(self, vectors: Tensor) -> Tensor:
        """J v for weight vectors v (n, entries): (B, M, n)."""
        return self.values.transpose(0, 1) @ vectors.flatten(1).mT

    def along(self, vectors: Tensor) -> Tensor:
        """J[b, m, row, :] v[row, :] for v (..., I) of as many entries: (B, M, rows)."""
        weighted = self.values * vectors.reshape(-1)
        return weighted.reshape(*weighted.shape[:2], -1, vectors.shape[-1]).sum(-1).transpose(0, 1)

    def gradient(self, coefficients: Tensor) -> Tensor:
        return torch.einsum("bp,b->p", self.values[0], coefficients)

    def rotate(self, inputs: Tensor | None, outputs: Tensor, shape: tuple[int, ...]) -> Rows:
        """Rows over a (K, O, I) array in the bases of inputs (K, I, I) and outputs (K, O, O)."""
        array = outputs.mT @ self.values.reshape(*self.values.shape[:2], *shape)
        return Rows((array if inputs is None else array @ inputs).flatten(2))

    def settled(self) -> Rows:
        return self

    def double(self) -> Rows:
        return Rows(self.values.double())

    def of_seed(self, seed: int) -> Rows:
        """The Jacobian of one of the M seeds."""
        return Rows(self.values[seed : seed + 1])
