"""Gaussian noise from the residuals of a trained network."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lapis.batches import batches
from lapis.likelihoods import Gaussian, Likelihood
from lapis.network import Network


def with_residual_noise(model: nn.Module, data: Any, likelihood: Likelihood) -> Likelihood:
    """The likelihood with the noise that maximises it: the root of the mean squared residual of all outputs.

    Likelihoods without Gaussian noise, and residuals of zero, leave it as it is.
    """
    if not isinstance(likelihood, Gaussian):
        return likelihood
    network = Network(model)
    total = torch.zeros((), dtype=torch.float64, device=network.device)
    count = 0
    with network.prepared(), torch.no_grad():
        for batch in batches(data, dtype=network.dtype, device=network.device)[0]:
            raw = network.call(batch.inputs)
            f = likelihood.canonical(raw)
            y = likelihood.targets(batch.targets, f, raw.shape)
            total += (y - f).double().square().sum()
            count += f.numel()
    return likelihood.with_noise((total / count).sqrt()) if float(total) > 0 else likelihood
