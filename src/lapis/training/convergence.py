"""Whether training has come to its end: how much the loss could still fall, by the posterior's own curvature."""

from __future__ import annotations

from typing import Any

import torch

from lapis.batches import batches
from lapis.posteriors import LaplacePosterior

FAR = 0.1
"""A share of what training has gained over a constant prediction; more than that must not be left to gain."""


def remaining_nats(posterior: LaplacePosterior, data: Any, batch_size: int) -> float:
    """1/2 g^T A^-1 g for the gradient g of -log p(D, theta) at t: what a Newton step promises to gain, in nats.

    It does not depend on the learning rate or the scale of the weights. 2 x this is the squared distance from t to the
    mode of the tangent model in units of the posterior's covariance; for a draw from the posterior that is gamma, on
    average, in the directions that the data determine.
    """
    network, likelihood, prior = posterior.network, posterior.likelihood, posterior.weight_prior
    point = posterior.point.double()
    gradient = prior.vector().detach() * (point - prior.mean)
    weights = list(network.parameters.values())
    with network.prepared():
        for batch in batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)[0]:
            raw = network.call(batch.inputs)
            f = likelihood.canonical(raw)
            loss = likelihood.nll(f, likelihood.targets(batch.targets, f, raw.shape)).sum()
            gradient += network.gather(torch.autograd.grad(loss, weights, allow_unused=True)).double()
    # `width` widens predictions, not the tangent model
    return 0.5 * float(gradient @ posterior.solve(gradient)) / posterior.width


def has_converged(remaining: float, gamma: float, gain: float) -> bool:
    """False for a run that is far from its end.

    That takes both: t is further from the mode than a draw from the posterior would be (remaining > gamma, twice the
    usual distance), and what is left to gain matters beside the `gain` over a constant prediction.
    """
    return remaining <= max(gamma, FAR * gain)
