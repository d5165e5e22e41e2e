"""Random Fourier features (Rahimi and Recht 2007): a linear model in them is nearly a Gaussian process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lapis.errors import DataError, OptionError
from lapis.options import check_arguments

DEGREES = {"matern12": 1.0, "matern32": 3.0, "matern52": 5.0}
"""Degrees of freedom of the t distribution of a Matern kernel's frequencies."""


@dataclass(frozen=True)
class RandomFourierFeatures:
    """phi(x) = sqrt(2 / D) [cos(W x), sin(W x)]: phi(x) . phi(x') tends to a kernel k(x - x') with k(0) = 1 as D grows.

    W (D / 2, inputs) are draws from the kernel's spectral density. Under weights with prior precision alpha, a function
    has prior variance 1 / alpha.

    Args:
        inputs: numbers in an input.
        size: D, the number of features; even.
        lengthscale: one for all inputs, or (inputs,).
        kernel: "rbf", exp(-|x - x'|^2 / 2 lengthscale^2), or a Matern kernel: "matern12", "matern32", "matern52".
        seed: of the frequencies.

    >>> features = RandomFourierFeatures(2, 4000)
    >>> x = torch.tensor([[0.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    >>> phi = features(x)
    >>> bool((phi[0] @ phi[1] - math.exp(-0.5)).abs() < 0.1)
    True
    """

    inputs: int
    size: int = 1000
    lengthscale: float | Tensor = field(default=1.0)
    kernel: Literal["rbf", "matern12", "matern32", "matern52"] = "rbf"
    seed: int = 0

    def __post_init__(self) -> None:
        check_arguments(RandomFourierFeatures, vars(self), signed=("seed",))
        scale = torch.as_tensor(self.lengthscale)
        if scale.shape not in ((), (self.inputs,)) or not bool((scale > 0).all()):
            raise OptionError(
                "Bad lengthscale",
                expected=f"a positive number, or {self.inputs} of them",
                got=f"shape {tuple(scale.shape)}",
                do="pass one for all inputs, or one each",
            )
        if self.size % 2:
            raise OptionError("An odd number of features", expected="pairs", got=str(self.size), do="add one to size")

    @cached_property
    def frequencies(self) -> Tensor:
        """W, (D / 2, inputs) float64."""
        source = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.size // 2, self.inputs, dtype=torch.float64, generator=source)
        if self.kernel != "rbf":
            degrees = DEGREES[self.kernel]
            squares = torch.randn(self.size // 2, int(degrees), dtype=torch.float64, generator=source).square().sum(1)
            drawn = drawn * (degrees / squares).sqrt()[:, None]
        return drawn / torch.as_tensor(self.lengthscale, dtype=torch.float64)

    def __call__(self, x: Tensor) -> Tensor:
        """phi(x), (B, D), for inputs (B, inputs), or (B,) where an input is one number."""
        x = torch.as_tensor(x, dtype=torch.float64)
        x = x[:, None] if x.dim() == 1 and self.inputs == 1 else x
        if x.dim() != 2 or x.shape[1] != self.inputs:
            raise DataError(
                "These inputs have no features",
                expected=f"(B, {self.inputs})",
                got=str(tuple(x.shape)),
                do="pass one row for each example",
            )
        angles = x @ self.frequencies.mT
        return torch.cat([angles.cos(), angles.sin()], 1).mul_(math.sqrt(2 / self.size))
