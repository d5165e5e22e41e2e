"""A block's Gaussian with its covariance multiplied by a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapis.curvature.backward.contributions import Contribution
from lapis.curvature.blocks.block import BlockGaussian, FactoredDraw


class ScaledGaussian(BlockGaussian):
    """N(0, c Sigma) for a Gaussian N(0, Sigma) over `size` weights, and c > 0."""

    def __init__(self, gaussian: BlockGaussian, factor: float, size: int) -> None:
        self.gaussian, self.factor, self.size = gaussian, factor, size

    def logdet(self) -> Tensor:
        return self.gaussian.logdet() - self.size * math.log(self.factor)

    def color(self, noise: Tensor) -> Tensor:
        return self.gaussian.color(noise) * math.sqrt(self.factor)

    def factored(self, dtype: torch.dtype) -> FactoredDraw | None:
        found = self.gaussian.factored(dtype)
        return None if found is None else replace(found, deviations=found.deviations * math.sqrt(self.factor))

    def multiply(self, vectors: Tensor) -> Tensor:
        return self.gaussian.multiply(vectors) / self.factor

    def solve(self, vectors: Tensor) -> Tensor:
        return self.gaussian.solve(vectors) * self.factor

    def variance(self) -> Tensor:
        return self.gaussian.variance() * self.factor

    def covariance(self, contributions: Sequence[Contribution], diagonal: bool) -> Tensor:
        return self.gaussian.covariance(contributions, diagonal) * self.factor

    def of_features(self, features: Tensor, diagonal: bool) -> Tensor | None:
        found = self.gaussian.of_features(features, diagonal)
        return None if found is None else found * self.factor

    def spread(self, vectors: Tensor) -> Tensor | None:
        found = self.gaussian.spread(vectors)
        return None if found is None else found * self.factor

    def features(self, contributions: Sequence[Contribution]) -> Any:
        return self.gaussian.features(contributions)

    def kernel(self, left: Any, right: Any) -> Tensor:
        return self.gaussian.kernel(left, right) * self.factor

    def matrix(self) -> Tensor:
        return self.gaussian.matrix() / self.factor
