"""The width of a classifier's posterior, by leave-one-out predictions of its training data: no validation data needed.

The evidence is blind to how sure a trained network is of data that it has not seen: where classes are nearly separable
the covariance A^-1 at the mode is far too wide. So its factor w is chosen by prediction, q = N(t, w A^-1). Without
example n, the tangent model's outputs for it are Gaussian with

    V_-n = V + V S (I - S^T V S)^-1 S^T V,    mean f + V_-n g,    V = J A^-1 J^T,

where S S^T = H and g are the Hessian and gradient of -log p(y_n | f_n). The chosen w <= 1 is the largest whose
predictions p(y_n | N(mean, w V_-n)) lose at most a tolerated number of nats an example against the best w, w = 0 (the
network alone) included. Wide is preferred: doubt far from the data costs nothing at the data. The loss is an average
over a few examples, so one standard error of it is added before it is held to the limit: with d_n the difference of an
example's loss to that at the best w,

    mean(d) + std(d) / sqrt(N) <= tolerated.

Of a refined posterior S S^T and g are expectations under itself, and its mean takes the place of f.

Exact posteriors have S^T V S < 1. A structure for which that fails overstates the doubt at its data, and the formula
does not hold: predictions of the data themselves, N(f, w V), then take the place of leave-one-out; a refined posterior
keeps w = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapis.batches import Batch
from lapis.function_space.data_view import without_itself
from lapis.predictions import LatentGaussian
from lapis.predictions import predict as predict_outputs

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily

WIDTHS = tuple(2.0**-k for k in range(13))
"""Widths that are compared, from wide to narrow; between two of them the choice is interpolated."""

LEAST = 16
"""Fewer examples are too few to judge by."""


@dataclass(frozen=True)
class _Left:
    """Outputs of some examples, each predicted without itself: mean (B, T, C), covariance or variances."""

    mean: Tensor
    covariance: Tensor | None
    variance: Tensor
    targets: Tensor
    raw_shape: tuple[int, ...]


def chosen_width(posterior: LaplaceFamily, sample: Sequence[Batch], tolerated: float) -> float:
    """The largest width whose predictions lose at most `tolerated` nats an example, less one standard error."""
    count = sum(map(len, sample))
    if count < LEAST:
        return 1.0
    parts = _left_out(posterior, sample)
    if parts is None:
        return 1.0
    losses = torch.stack([_losses(posterior, parts, width) for width in (*WIDTHS, 0.0)])
    excess = losses - losses[losses.mean(1).argmin()]
    bounds: list[float] = (excess.mean(1) + excess.std(1) / count**0.5).tolist()
    for place, width in enumerate(WIDTHS):
        if bounds[place] > tolerated:
            continue
        if place == 0:
            return 1.0
        above = bounds[place - 1]  # nearly linear in the width between two neighbours
        share = (tolerated - bounds[place]) / max(above - bounds[place], 1e-300)
        return width + min(1.0, share) * (WIDTHS[place - 1] - width)
    return WIDTHS[-1]


def _left_out(posterior: LaplaceFamily, sample: Sequence[Batch]) -> list[_Left] | None:
    """Leave-one-out where it holds for all examples, else the examples as they are; None for a refined posterior."""
    found, valid = [], posterior._full_by_default()
    outputs = posterior.outputs_of_data(sample)
    for number, batch in enumerate(sample):
        latent = outputs(number) if valid else posterior.latent(batch.inputs, "diagonal", None, None)
        assert isinstance(latent, LatentGaussian)
        found.append((latent, posterior.likelihood.targets(batch.targets, latent.mean, latent.raw_shape)))
    left = [_without_itself(posterior, latent, y) if valid else None for latent, y in found]
    if posterior.mean is not posterior.point and any(own is None for own in left):
        return None
    parts = []
    for batch, (latent, _), own in zip(sample, found, left, strict=True):
        if own is None or any(each is None for each in left):
            mean, covariance, variance = latent.mean, latent.covariance, latent.variance
        else:
            mean, covariance = own
            variance = covariance.diagonal(dim1=-2, dim2=-1)
        parts.append(_Left(mean, covariance, variance, batch.targets, latent.raw_shape))
    return parts


def _without_itself(posterior: LaplaceFamily, latent: LatentGaussian, targets: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and covariance of each example's outputs under the posterior of all others; None where that is undefined."""
    expected = posterior.mean is not posterior.point
    left = without_itself(posterior.likelihood, latent, targets, posterior.temperature, expected)
    if not bool(left.valid.all()):
        return None
    return left.mean.to(latent.mean.dtype), left.covariance.to(latent.mean.dtype)


def _losses(posterior: LaplaceFamily, parts: Sequence[_Left], width: float) -> Tensor:
    """-log p(y_n | x_n) of each example, all its positions together, with covariances times `width`; (N,) float64."""
    found = []
    for part in parts:
        covariance = None if part.covariance is None else width * part.covariance
        latent = LatentGaussian(part.mean, width * part.variance, covariance, raw_shape=part.raw_shape)
        log_prob = predict_outputs(posterior.likelihood, latent).log_prob(part.targets).detach().double()
        found.append(-log_prob.reshape(len(part.mean), -1).sum(1))
    return torch.cat(found)
