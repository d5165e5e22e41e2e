"""The warning of `tune`: a posterior that foretells its own training data clearly worse than the network alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapis.batches import Batch
from lapis.errors import LapisWarning
from lapis.posteriors.diagnosis.scores import excess, plain_prediction
from lapis.predictions import Prediction

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily

LEAST = 16
"""Fewer examples are too few to judge by."""

WORSE, ERRORS = 0.1, 3.0
"""Nats an example, and standard errors, by which predictions must be worse to be called so."""


def warn_of_doubt(
    posterior: LaplaceFamily, sample: Sequence[Batch], predict: Callable[[Batch], Prediction], stacklevel: int
) -> None:
    """Warn if the posterior's predictions of a sample of the training data are clearly worse than the network's.

    `stacklevel` counts from here: 2 is the caller.
    """
    count = sum(map(len, sample))
    if count < LEAST or not posterior._network_is_as_fitted():
        return
    network, likelihood = posterior.network, posterior.likelihood
    plain: list[Tensor] = []
    found: list[Tensor] = []
    with torch.no_grad():
        for batch in sample:
            with network.prepared(), torch.no_grad():
                raw = network.call(batch.inputs)
            own = plain_prediction(likelihood, likelihood.canonical(raw), tuple(raw.shape))
            plain.append(own.log_prob(batch.targets))
            found.append(predict(batch).log_prob(batch.targets))
    gap, error = excess(plain, found)
    if gap <= max(WORSE, ERRORS * error):
        return
    losses = [-float(torch.cat(parts).double().mean()) for parts in (found, plain)]
    warnings.warn(
        f"The tuned posterior foretells its own training data worse than the network alone: a loss of {losses[0]:.3g} "
        f"nats an example instead of {losses[1]:.3g}, on {count} of them. It doubts what the data make sure. Use "
        'refine(data), calibrate(validation) or weights="last_layer"; diagnose(data) tells more.',
        LapisWarning,
        stacklevel=stacklevel,
    )
