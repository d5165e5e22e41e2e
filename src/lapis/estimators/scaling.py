"""Columns scaled to a mean of zero and a standard deviation of one, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """x -> (x - mean) / scale, column by column; both (D,) in float64."""

    mean: Tensor
    scale: Tensor

    @staticmethod
    def of(values: Tensor) -> Scaling:
        """That of the columns of values (N, D); a constant column is only centred.

        >>> scaling = Scaling.of(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        >>> scaling.apply(torch.tensor([[3.0, 6.0]])).tolist()
        [[1.0, 1.0]]
        """
        mean, scale = values.double().mean(0), values.double().std(0, correction=0)
        rounding = 1e-12 * (mean.abs() + 1)
        return Scaling(mean, torch.where(scale > rounding, scale, torch.ones_like(scale)))

    def apply(self, values: Tensor) -> Tensor:
        return (values - self.mean) / self.scale

    def undo(self, values: Tensor) -> Tensor:
        return values * self.scale + self.mean
