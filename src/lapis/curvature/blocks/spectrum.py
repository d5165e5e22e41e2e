"""Eigenvalues compressed to a few hundred with multiplicities, so that log-determinants cost microseconds.

The evidence needs sum_i f(log l_i) for f(x) = log(s e^x + d) and its derivatives, at many scales s and precisions d.
These f are analytic within pi of the real axis, so that interpolation between STENCIL points of a grid of step STEP in
x is exact to rounding. The sum over many eigenvalues then is a weighted sum over grid points, whatever s and d are.
Logarithms of a Kronecker product's eigenvalues are sums, so its weights are the convolution of its factors' weights:
the products themselves are never formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STEP = 1 / 16
"""Distance of grid points in the logarithm of the eigenvalue."""

STENCIL = 12
"""Grid points that interpolate one eigenvalue, with an error of about (STEP * STENCIL / (2 pi e))^STENCIL = 5e-17."""

MOST_EXACT = 4096
"""Up to this many eigenvalues are kept as they are."""

SMALLEST = 1e-100
"""Smaller eigenvalues count as zero: beside any prior precision in use they are, and the grid must end somewhere."""

CHUNK = 2**15
"""Eigenvalues interpolated in one go, few enough to stay in the cache."""


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues (n,) and how often each occurs, float64 on the processor; grid points occur fractions of times."""

    values: Tensor
    counts: Tensor


def spectrum(values: Tensor) -> Spectrum:
    """The spectrum of these eigenvalues, of any shape; negative ones stay as they are."""
    flat = values.detach().cpu().reshape(-1)
    if flat.numel() <= MOST_EXACT:
        return Spectrum(flat, torch.ones_like(flat))
    array = flat.numpy()
    positive = array > SMALLEST
    negative = array[array < 0]
    low, weights = _on_grid(array[positive])
    return _joined(low, weights, len(array) - int(positive.sum()) - len(negative), negative)


def product_spectrum(left: Tensor, right: Tensor) -> Spectrum:
    """The spectrum of K Kronecker products whose factors have eigenvalues (K, m) and (K, n), none negative."""
    groups, m = left.shape
    n = right.shape[-1]
    if groups > 1 or m * n <= MOST_EXACT:
        return spectrum(left[:, :, None] * right[:, None, :])
    factors = [part.detach().cpu().reshape(-1).numpy() for part in (left, right)]
    kept = [part[part > SMALLEST] for part in factors]
    (low_left, one), (low_right, two) = (_on_grid(part) for part in kept)
    return _joined(low_left + low_right, np.convolve(one, two), m * n - len(kept[0]) * len(kept[1]))


_POINTS = np.arange(STENCIL) - (STENCIL // 2 - 1)
_DENOMINATORS = np.array([np.prod([k - m for m in _POINTS if m != k], dtype=np.float64) for k in _POINTS])


def _on_grid(values: NDArray[Any]) -> tuple[int, NDArray[Any]]:
    """The index of the first grid point used, and the weight of every grid point from there on.

    A grid point's weight is the sum over eigenvalues of its Lagrange polynomial at log(value) / STEP.
    """
    if len(values) == 0:
        return 0, np.zeros(1)
    positions = np.log(values) / STEP
    low = int(np.floor(positions.min())) + int(_POINTS[0])
    total = np.zeros(int(np.floor(positions.max())) + int(_POINTS[-1]) - low + 1)
    for start in range(0, len(positions), CHUNK):
        part = positions[start : start + CHUNK]
        base = np.floor(part)
        distances = (part - base) - _POINTS[:, None]
        before = np.ones_like(distances)
        after = np.ones_like(distances)
        for k in range(1, STENCIL):
            np.multiply(before[k - 1], distances[k - 1], out=before[k])
            np.multiply(after[-k], distances[-k], out=after[-k - 1])
        before *= after
        before /= _DENOMINATORS[:, None]
        points = (base.astype(np.int64) - low) + _POINTS[:, None]
        total += np.bincount(points.reshape(-1), before.reshape(-1), minlength=len(total))
    return low, total


def _joined(low: int, weights: NDArray[Any], zeros: int, others: NDArray[Any] | None = None) -> Spectrum:
    """The spectrum of weighted grid points from index `low` on, a number of zeros, and others that occur once."""
    found = [np.exp(STEP * (low + np.arange(len(weights)))), np.zeros(1)]
    counts = [weights, np.full(1, float(zeros))]
    if others is not None and len(others):
        found.append(others)
        counts.append(np.ones(len(others)))
    return Spectrum(torch.from_numpy(np.concatenate(found)), torch.from_numpy(np.concatenate(counts)))


class GroupedSpectrum:
    """Eigenvalues of the curvature, each with its prior group: the posterior precision's are scale * value + alpha."""

    def __init__(self, parts: Sequence[tuple[int | Tensor, Spectrum]], groups: int) -> None:
        """Each spectrum with its group, or with the group of each of its eigenvalues."""
        self.groups = groups
        self.values = torch.cat([part.values for _, part in parts])
        self.counts = torch.cat([part.counts for _, part in parts])
        self.group: Tensor | None = None
        if groups > 1:
            self.group = torch.cat(
                [
                    torch.full(part.values.shape, group) if isinstance(group, int) else group.cpu()
                    for group, part in parts
                ]
            )

    def logdet(self, precision: Tensor, scale: Tensor) -> Tensor:
        """sum log(scale * values + precision), for precisions (groups,); differentiable in both, any number of times.

        NaN or minus infinity where the posterior precision is not positive definite.
        """
        own = precision.cpu() if self.group is None else precision.cpu()[self.group]
        return self.counts @ (self.values * scale.cpu() + own).log()
