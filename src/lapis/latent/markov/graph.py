"""p(z_t | y) with the graph of autograd: the two recursions in log space, written out (formulas: `chain`).

Several times as slow as sums without derivatives, and every step's (B, K, K) array is kept for the backward pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lapis.latent.sequences import Layout

FLOOR = 1e-200
"""Added to probabilities of the chain: paths it forbids weigh no more, and the derivative in a zero is still right."""
EXCLUDED = -1e6
"""In place of a log density of minus infinity, whose differences would not be numbers."""


def differentiable_states(initial: Tensor, transitions: Tensor, log_densities: Tensor, layout: Layout) -> Tensor:
    """p(z_t = k | y) of each row, (N, K), for `log_densities` (T, B, K) of sequences that are possible; in float64."""
    first, steps = ((each.double() + FLOOR).log() for each in (initial, transitions))
    logs = log_densities.double()
    logs = logs.masked_fill(logs == -math.inf, EXCLUDED)
    alpha = first + logs[0]
    alphas = [alpha]
    for t, n in enumerate(layout.running[1:], 1):
        alpha = _centred((alpha[:n, :, None] + steps).logsumexp(1) + logs[t, :n])
        alphas.append(alpha)
    beta = torch.zeros_like(alpha)
    states = [(alpha + beta).softmax(-1)]
    for t in range(len(alphas) - 1, 0, -1):
        ahead = logs[t, : len(beta)] + beta
        beta = _centred((ahead[:, None, :] + steps).logsumexp(2))
        beta = torch.cat([beta, beta.new_zeros(layout.running[t - 1] - len(beta), beta.shape[1])])
        states.append((alphas[t - 1] + beta).softmax(-1))
    begins = torch.tensor([0, *layout.running[:-1]]).cumsum(0)
    return torch.cat(states[::-1])[begins[layout.time] + layout.slot]


def _centred(logs: Tensor) -> Tensor:
    """Less their largest, a constant to autograd: rounding does not grow with the length of a sequence."""
    return logs - logs.detach().amax(-1, keepdim=True)
