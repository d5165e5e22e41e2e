"""Quadrature: expectations under a normal distribution as short weighted sums, for many elements at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

NODES = 64
ELEMENTS = 2**14
"""Elements processed together: with a few hundred nodes each, about 32 MB in float64."""


@lru_cache(maxsize=8)
def gauss_hermite(nodes: int = NODES) -> tuple[Tensor, Tensor]:
    """Nodes z and log weights: E[g(z)] = sum_i w_i g(z_i), z ~ N(0, 1), for polynomials of degree < 2 nodes.

    The nodes are the eigenvalues of the Jacobi matrix of the Hermite polynomials (Golub and Welsch 1969). The
    weights are 1 / sum_k h_k(z_i)^2 with the orthonormal polynomials h_k. As sums of squares lose no digits, even
    weights of 1e-50 are accurate, which those from the eigenvectors are not, and tails of densities come out right.
    """
    with torch.inference_mode(False):  # the result is cached, and must be usable outside inference mode
        k = torch.arange(1, nodes, dtype=torch.float64, device="cpu").sqrt()
        z = torch.linalg.eigvalsh(torch.diag(k, 1) + torch.diag(k, -1))
        z = (z - z.flip(0)) / 2  # exactly symmetric
        previous, current, total = torch.zeros_like(z), torch.ones_like(z), torch.ones_like(z)
        for degree in range(1, nodes):
            # z h_{n-1} = sqrt(n) h_n + sqrt(n-1) h_{n-2}
            previous, current = current, (z * current - (degree - 1) ** 0.5 * previous) / degree**0.5
            total = total + current**2
        return z, -total.log()


def nodes_like(mean: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss-Hermite nodes and log weights in float64 on mean's device, shaped to broadcast in front of it."""
    return _in_front(*gauss_hermite(), mean)


def grid_like(mean: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes from -14 to 14, 1/8 apart, with log weights, as `nodes_like`: the trapezoidal rule.

    For functions that change within less than a standard deviation, where Gauss-Hermite has too few nodes. It
    converges exponentially for smooth functions too.
    """
    step = 0.125
    z = torch.arange(-14.0, 14.0 + step, step, dtype=torch.float64)
    return _in_front(z, (-0.5 * z**2).log_softmax(0), mean)


def _in_front(z: Tensor, log_weights: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    shape = (-1, *([1] * mean.dim()))
    return z.to(mean.device).reshape(shape), log_weights.to(mean.device).reshape(shape)


def in_chunks(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """An elementwise function of tensors of one shape, applied in chunks of elements to bound its memory."""
    flat = [value.flatten() for value in values]
    parts = [function(*part) for part in zip(*(torch.split(value, ELEMENTS) for value in flat), strict=True)]
    return torch.cat(parts).reshape(values[0].shape)
