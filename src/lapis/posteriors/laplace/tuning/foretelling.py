"""The warning of `tune`: a posterior that predicts its own training data clearly worse than the network alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapis.batches import Batch
from lapis.errors import LapisWarning, users_level
from lapis.posteriors.diagnosis.scores import excess, plain_prediction, tolerable
from lapis.predictions import Prediction

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily

LEAST, MOST = 16, 64
"""Fewer examples are too few to judge by; more are not needed."""

ERRORS = 3.0
"""Standard errors by which predictions must be worse, besides what is tolerable, to be called so."""


def warn_of_doubt(posterior: LaplaceFamily, sample: Sequence[Batch], predict: Callable[[Batch], Prediction]) -> None:
    """Warn if the posterior's predictions of a sample of the training data are clearly worse than the network's."""
    step = max(1, sum(map(len, sample)) // MOST)
    sample = [batch.chosen(torch.arange(0, len(batch), step, device=batch.targets.device)) for batch in sample]
    count = sum(map(len, sample))
    if count < LEAST:
        return
    likelihood = posterior.likelihood
    plain: list[Tensor] = []
    found: list[Tensor] = []
    with torch.no_grad():
        for batch in sample:
            prediction = predict(batch)
            f, shape = prediction.latent.mean, prediction.raw_shape  # the network's outputs: t is the mean
            if posterior.mean is not posterior.point:
                with posterior.network.prepared(), torch.no_grad():
                    f = likelihood.canonical(posterior.network.call(batch.inputs))
            plain.append(plain_prediction(likelihood, f, shape).log_prob(batch.targets))
            found.append(prediction.log_prob(batch.targets))
    gap, error = excess(plain, found)
    if gap <= max(tolerable(likelihood, f[0].numel()), ERRORS * error):
        return
    losses = [-float(torch.cat(parts).double().mean()) for parts in (found, plain)]
    warnings.warn(
        f"The tuned posterior predicts its own training data worse than the network alone: a loss of {losses[0]:.3g} "
        f"nats an example instead of {losses[1]:.3g}, on {count} of them. It doubts what the data make sure. Use "
        'refine(data), calibrate(validation) or weights="last_layer"; diagnose(data) tells more.',
        LapisWarning,
        stacklevel=users_level(),
    )
