"""Total variation, and reconstruction by it: the classical baseline, solved until its duality gap is small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapis.errors import DataError, OptionError
from lapis.imaging.operators.linear import LinearOperator
from lapis.options import check_arguments, checked_tensor, shown
from lapis.progress import track

CHECKED_EVERY = 25
"""Iterations between two looks at the duality gap."""


def differences(images: Tensor) -> Tensor:
    """Differences of neighbouring pixels (..., edges) of images (..., height, width): downwards, then to the right."""
    down, right = images[..., 1:, :] - images[..., :-1, :], images[..., :, 1:] - images[..., :, :-1]
    return torch.cat([down.flatten(-2), right.flatten(-2)], -1)


def differences_transposed(edges: Tensor, shape: tuple[int, int]) -> Tensor:
    """The adjoint of `differences`: images (..., height, width) of edge values (..., edges)."""
    height, width = shape
    down, right = edges[..., : (height - 1) * width], edges[..., (height - 1) * width :]
    down = down.reshape(*edges.shape[:-1], height - 1, width)
    right = right.reshape(*edges.shape[:-1], height, width - 1)
    images = edges.new_zeros(*edges.shape[:-1], height, width)
    images[..., 1:, :] += down
    images[..., :-1, :] -= down
    images[..., :, 1:] += right
    images[..., :, :-1] -= right
    return images


def total_variation(images: Tensor) -> Tensor:
    """Sum of |x_i - x_j| over neighbouring pixels (the anisotropic one), (...) of images (..., height, width)."""
    check_arguments(total_variation, locals())
    if checked_tensor("images", images).dim() < 2:
        raise DataError("These are no images", expected="(..., height, width)", got=shown(images), do="reshape them")
    numbers = images if images.is_floating_point() else images.double()
    return differences(numbers).abs().sum(-1)


@dataclass(frozen=True)
class VariationResult:
    """image (height, width) float64; objective: its value; gap: how far it is from the least one, at most."""

    image: Tensor
    objective: float
    gap: float
    iterations: int
    converged: bool


def tv_reconstruction(
    operator: LinearOperator,
    data: Any,
    weight: float,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    tolerance: float = 1e-4,
    max_iterations: int = 5000,
    progress: bool | None = None,
) -> VariationResult:
    """The image in `bounds` with the least 1/2 |A x - y|^2 + weight TV(x).

    By the primal-dual iteration of Chambolle and Pock with diagonal steps. With multipliers p of the data and
    |q| <= weight of the differences, z = A^T p + D^T q,

        objective(x) - least objective <= objective(x) + 1/2 |p|^2 + p^T y + sum_i max(-low z_i, -high z_i) =: gap,

    finite because the bounds are, and zero at the solution.

    Args:
        operator: A.
        data: y, in the operator's form or flat.
        weight: of the total variation: noise variance times the rate of an exponential prior on TV(x).
        bounds: of the pixels.
        tolerance: stop when gap <= tolerance * objective.
        max_iterations: or then; `converged` says which.
        progress: show a bar (None: on a terminal only).

    Pock, Chambolle, "Diagonal preconditioning for first order primal-dual algorithms in convex optimization", 2011.
    """
    check_arguments(tv_reconstruction, locals(), signed=("bounds",))
    low, high = bounds
    if low >= high:
        raise OptionError("Bad bounds", expected="low < high", got=repr(bounds), do="pass the range of the pixels")
    run = _PrimalDual(operator, operator.flat(data), weight, low, high)
    done, gap = False, run.gap()
    for gap in track(run.iterations(max_iterations), "total variation", None, progress):
        done = gap <= tolerance * run.objective()
        if done:
            break
    return VariationResult(run.x, run.objective(), gap, run.count, done)


class _PrimalDual:
    def __init__(self, operator: LinearOperator, data: Tensor, weight: float, low: float, high: float) -> None:
        self.operator, self.data, self.weight, self.low, self.high = operator, data, weight, low, high
        self.shape = operator.image_shape
        rows, columns = (torch.from_numpy(np.asarray(abs(operator.matrix).sum(axis)).ravel()) for axis in (1, 0))
        self.data_step = 1 / rows.clamp_min(1e-12)
        self.image_step = 1 / (columns.reshape(self.shape) + 4)  # each pixel is in at most four differences
        self.x = torch.full(self.shape, low, dtype=torch.float64)
        self.count = 0
        self.p, self.q = torch.zeros_like(data), torch.zeros_like(differences(self.x))

    def iterations(self, most: int) -> Iterator[float]:
        """Iterate; yields the gap now and then."""
        ahead = self.x
        for self.count in range(1, most + 1):
            residual = (self.operator @ ahead).reshape(-1) - self.data
            self.p = (self.p + self.data_step * residual) / (1 + self.data_step)
            self.q = (self.q + differences(ahead) / 2).clamp(-self.weight, self.weight)
            before = self.x
            self.x = (before - self.image_step * self._slope()).clamp(self.low, self.high)
            ahead = 2 * self.x - before
            if self.count % CHECKED_EVERY == 0 or self.count == most:
                yield self.gap()

    def _slope(self) -> Tensor:
        back = self.operator.T @ self.p.reshape(self.operator.data_shape)
        return back + differences_transposed(self.q, self.shape)

    def objective(self) -> float:
        residual = (self.operator @ self.x).reshape(-1) - self.data
        return float(residual.square().sum() / 2 + self.weight * total_variation(self.x))

    def gap(self) -> float:
        z = -self._slope()
        support = torch.maximum(self.low * z, self.high * z).sum()
        return self.objective() + float(self.p.square().sum() / 2 + self.p @ self.data + support)
