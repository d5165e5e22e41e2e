"""Stacking: the weights of a mixture of predictions under which held-out data are most likely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from lapis.batches import batches, digest, naming
from lapis.errors import DataError
from lapis.progress import track

if TYPE_CHECKING:
    from lapis.posteriors.posterior import Posterior

TOLERANCE = 1e-8
"""Nats an example by which the weights may fall short of the best."""

SMALLEST, ITERATIONS = 1e-12, 20_000
"""Weight below which a component counts as left out while its weight is searched; steps of EM at most."""


def held_out_log_probs(
    posteriors: Sequence[Posterior], data: Any, batch_size: int | None, progress: bool | None
) -> tuple[Tensor, int]:
    """log p_k(y_n | x_n) of every example under every posterior, (N, K) float64, and the fingerprint of the data."""
    network, rows, found = posteriors[0].network, [], 0
    stream, total = batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)
    for batch in track(stream, "stacking", total, progress):
        with naming(batch.where):
            each = [posterior.predict(batch.inputs, progress=False).log_prob(batch.targets) for posterior in posteriors]
        rows.append(torch.stack([values.detach().double().cpu() for values in each], 1))
        found = (found + digest(batch.inputs, batch.targets)) % 2**64
    return torch.cat(rows), found


def stacked_weights(log_probs: Tensor) -> tuple[Tensor, float]:
    """argmax of L(w) = mean_n log sum_k w_k p_nk over the simplex, (K,), and a bound of what is left to gain.

    L is concave, with gradient g_k = mean_n p_nk / sum_j w_j p_nj and sum_k w_k g_k = 1. So L(w*) - L(w) is at most
    max_k g_k - 1, which ends the search: by quasi-Newton steps, then by EM, w_k <- w_k g_k, which never loses.
    """
    best = log_probs.amax(1, keepdim=True)
    impossible = (~torch.isfinite(best[:, 0])).nonzero()
    if len(impossible):
        raise DataError(
            "No component can have given these data",
            expected="a finite log probability of every example under one of the posteriors at least",
            got=f"{float(best[impossible[0]])} for example {int(impossible[0])}",
            do="check the targets, or use a larger noise",
        )
    probs = (log_probs - best).exp().numpy()

    def loss(weights: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        """-L(w) + sum_k w_k, whose minimum over w >= 0 has sum one."""
        mixed = probs @ weights
        return float(weights.sum() - np.log(mixed).mean()), 1 - (probs / mixed[:, None]).mean(0)

    count = probs.shape[1]
    start = np.full(count, 1 / count)
    options = {"ftol": 0.0, "gtol": 0.1 * TOLERANCE, "maxiter": 1000}
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(SMALLEST, None)] * count, options=options)
    weights = np.where(found.x > SMALLEST, found.x, 0.0)
    if not np.isfinite(weights).all() or (probs @ weights <= 0).any():
        weights = start
    gap = np.inf
    for _ in range(ITERATIONS):
        weights = weights / weights.sum()
        gradient = (probs / (probs @ weights)[:, None]).mean(0)
        gap = float(gradient.max()) - 1
        if gap <= TOLERANCE:
            break
        weights = np.maximum(weights, SMALLEST * (gradient > 1)) * gradient  # EM alone never leaves a weight of zero
    return torch.from_numpy(weights), max(gap, 0.0)
