"""How sure a classifier that was trained by the evidence may be: a factor of its logits, by leave-one-out."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from lapis.errors import LapisError, LapisWarning
from lapis.function_space.data_view import without_itself
from lapis.network import Network
from lapis.posteriors.laplace.fit import laplace
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.predictions import LatentGaussian

LARGEST = 2000
"""Weights of a last layer whose dense posterior is cheap beside training."""

LEAST = 16
"""Fewer examples are too few to judge by."""

SPREAD = 1.0
"""log s ~ N(0, SPREAD^2): examples that are all predicted well would ask for any s."""

BATCH = 512
"""Examples predicted together."""

FACTORS: tuple[float, ...] = tuple(2.0 ** (k / 8) for k in range(-16, 25))


def chosen_sharpness(posterior: LaplacePosterior, x: Tensor, y: Tensor) -> float:
    """The s that maximises sum_n log softmax(s f_-n)[y_n] + log N(log s; 0, 1); 1 where leave-one-out is not defined.

    A prior by the evidence, chosen with Kronecker factors, holds the logits back, and a network that is right is then
    too cautious. f_-n are the outputs for example n of the last layer without it: the mean f + V_-n g of its dense
    Laplace posterior (see `laplace/tuning/leave_one_out`). Features are those of all examples, as a pass over the data
    for each would cost a training.
    """
    if len(y) < LEAST:
        return 1.0
    left = _left_out(posterior, x, y)
    if left is None:
        return 1.0

    def loss(factor: float) -> float:
        fit = float(torch.nn.functional.cross_entropy(factor * left, y, reduction="sum"))
        return fit + 0.5 * (math.log(factor) / SPREAD) ** 2

    best: float = min(FACTORS, key=loss)
    return best


def _left_out(posterior: LaplacePosterior, x: Tensor, y: Tensor) -> Tensor | None:
    """f_-n, (N, C) in float64; None for a network whose last layer is too large or cannot be found."""
    network = posterior.network.module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapisWarning)
        try:
            if Network(network, "last_layer", example=x[:2]).size > LARGEST:
                return None
            last = laplace(
                network, (x, y), posterior.likelihood, structure="dense", weights="last_layer",
                progress=False,
            )  # fmt: skip
            last = last.tune(tolerated_loss=None)
        except LapisError:
            return None
    parts = []
    for start in range(0, len(y), BATCH):
        batch = slice(start, start + BATCH)
        latent = last.latent(x[batch], "full", None, None)
        assert isinstance(latent, LatentGaussian)
        targets = last.likelihood.targets(y[batch], latent.mean, latent.raw_shape)
        left = without_itself(last.likelihood, latent, targets, last.temperature, False)
        if not bool(left.valid.all()):
            return None
        parts.append(left.mean[:, 0].double())
    return torch.cat(parts).detach()
