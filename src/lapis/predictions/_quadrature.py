"""Gauss-Hermite quadrature: expectations under a normal distribution as short weighted sums."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

NODES = 64


@lru_cache(maxsize=8)
def gauss_hermite(nodes: int = NODES) -> tuple[Tensor, Tensor]:
    """Nodes z and log weights: E[g(z)] = sum_i w_i g(z_i), z ~ N(0, 1), for polynomials of degree < 2 nodes.

    The nodes are the eigenvalues of the Jacobi matrix of the Hermite polynomials (Golub and Welsch 1969). The
    weights are 1 / sum_k h_k(z_i)^2 with h_k orthonormal: a sum of squares, so that even weights of 1e-50
    have all their digits (components of eigenvectors have not), and tails of densities come out right.
    """
    with torch.inference_mode(False):  # the result is kept, and must be usable outside
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
    """Nodes and log weights in float64 on mean's device, shaped to broadcast in front of it."""
    z, log_weights = gauss_hermite()
    shape = (-1, *([1] * mean.dim()))
    return z.to(mean.device).reshape(shape), log_weights.to(mean.device).reshape(shape)
