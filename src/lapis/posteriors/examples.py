"""Passes over examples of a fit: which of them matter, and what leaving each one out would change.

The formulas are in `lapis.function_space.data_view`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lapis.batches import Batch, batches, naming
from lapis.curvature.outputs import check_spread
from lapis.errors import LapisWarning, users_level
from lapis.function_space import data_view
from lapis.likelihoods import Likelihood
from lapis.network import full_precision
from lapis.network.inputs import check_inputs
from lapis.posteriors.predicting.parts import latent_of_parts
from lapis.predictions import LatentGaussian
from lapis.progress import track

if TYPE_CHECKING:
    from lapis.posteriors.over_weights import LinearisedPosterior
    from lapis.posteriors.posterior import LatentKind


def memorable(
    posterior: LinearisedPosterior, data: Any, per_class: int, batch_size: int | None, progress: bool | None
) -> Tensor:
    """See `LinearisedPosterior.memorable`."""
    likelihood = posterior.likelihood
    by_leverage = data_view.has_constant_curvature(likelihood)
    kind = _kind(posterior) if by_leverage else "mean"
    scores: list[Tensor] = []
    labels: list[Tensor | None] = []
    for latent, targets, _ in _outputs(posterior, data, kind, batch_size, progress):
        if by_leverage:
            scores.append(data_view.leverage(likelihood, latent, targets, posterior._tempering()))
        else:
            scores.append(data_view.relevance(likelihood, latent.mean, targets))
        labels.append(data_view.classes(likelihood, targets))
    known = [label for label in labels if label is not None]
    return data_view.most(torch.cat(scores), torch.cat(known) if len(known) == len(labels) else None, per_class)


def sensitivity(
    posterior: LinearisedPosterior,
    data: Any,
    of: data_view.Of,
    exact: bool,
    batch_size: int | None,
    progress: bool | None,
) -> Tensor:
    """See `LinearisedPosterior.sensitivity`."""
    likelihood = posterior.likelihood
    if not exact and posterior.mean is posterior.point and posterior._full_by_default():
        quick = _directed(posterior, data, of, batch_size, progress)
        if quick is not None:
            return quick
    found = []
    for latent, targets, _ in _outputs(posterior, data, "full" if exact else _kind(posterior), batch_size, progress):
        if exact:
            found.append(data_view.removal(likelihood, latent, _left_out(posterior, latent, targets), of))
        else:
            found.append(data_view.sensitivity(likelihood, latent, targets, posterior._tempering(), of))
    return torch.cat(found)


def _directed(
    posterior: LinearisedPosterior, data: Any, of: data_view.Of, batch_size: int | None, progress: bool | None
) -> Tensor | None:
    """|V g| by the kernel's shortcut for one direction of the outputs; None where it has none."""
    network, likelihood, tangent = posterior.network, posterior.likelihood, posterior._tangent()
    kernel, found = posterior._weight_kernel(tangent), []
    stream, total = batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)
    with network.held(), full_precision(network.device), tangent.ready():
        posterior.check_network()
        for batch in track(stream, "examples", total, progress):
            with naming(batch.where):
                inputs = check_inputs(batch.inputs, network, posterior.facts.signature)
                direction = partial(_gradient, likelihood, batch.targets, posterior._tempering())
                result = kernel.directed(inputs, direction)
                if result is None:
                    return None
                f, _, change = result
                check_spread(change)
                found.append(data_view.size_of(likelihood, f.double(), change.double(), of))
    return torch.cat(found)


def _gradient(
    likelihood: Likelihood, targets: Tensor, temperature: float, f: Tensor, shape: tuple[int, ...], start: int
) -> Tensor:
    """g of -log p(y | f) of some of a batch's examples, from the `start`-th on."""
    f = f.double()
    own = likelihood.targets(targets[start : start + len(f)], f, shape)
    return likelihood.gradient(f, own) / temperature


def leave_one_out(posterior: LinearisedPosterior, data: Any, batch_size: int | None, progress: bool | None) -> Tensor:
    """See `LinearisedPosterior.leave_one_out`."""
    found = []
    for latent, targets, batch in _outputs(posterior, data, "full", batch_size, progress):
        left = _left_out(posterior, latent, targets)
        covariance = left.covariance.to(latent.mean.dtype)  # which says how precisely it is known
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        gone = LatentGaussian(left.mean.to(covariance.dtype), variance, covariance, raw_shape=latent.raw_shape)
        found.append(posterior._predicted(gone, None, None, None).log_prob(batch.targets).double())
    return torch.cat(found)


def _kind(posterior: LinearisedPosterior) -> LatentKind:
    return "full" if posterior._full_by_default() else "diagonal"


def _left_out(posterior: LinearisedPosterior, latent: LatentGaussian, targets: Tensor) -> data_view.WithoutItself:
    expected = posterior.mean is not posterior.point
    left = data_view.without_itself(posterior.likelihood, latent, targets, posterior._tempering(), expected)
    bad = int((~left.valid).sum())
    if bad:
        warnings.warn(
            f"{bad} of {len(left.valid)} examples have a leverage of one or more under this posterior, which "
            "overstates the doubt at its data: what is said of them without themselves is not to be trusted. Use "
            'tune(), a larger prior precision, or structure="dense".',
            LapisWarning,
            stacklevel=users_level(),
        )
    return left


def _outputs(
    posterior: LinearisedPosterior,
    data: Any,
    kind: LatentKind | Literal["mean"],
    batch_size: int | None,
    progress: bool | None,
) -> Iterator[tuple[LatentGaussian, Tensor, Batch]]:
    """Batch by batch the outputs' distribution (for "mean" with zero variances), canonical targets, and the batch."""
    network, likelihood, tangent = posterior.network, posterior.likelihood, posterior._tangent()
    deviation = None if posterior.mean is posterior.point else posterior.mean.double() - posterior.point.double()
    stream, total = batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)
    with network.held(), full_precision(network.device):
        posterior.check_network()
        for batch in track(stream, "examples", total, progress):
            with naming(batch.where):
                inputs = check_inputs(batch.inputs, network, posterior.facts.signature)
                if kind == "mean":
                    with tangent.ready():
                        jacobian = tangent.jacobian(inputs)
                        f = tangent.outputs(jacobian, deviation)
                    latent = LatentGaussian(f, torch.zeros_like(f), raw_shape=tangent.raw_shape(jacobian))
                else:
                    found = latent_of_parts(posterior, inputs, kind, None, None, False)
                    assert isinstance(found, LatentGaussian)
                    latent = found
                targets = likelihood.targets(batch.targets, latent.mean, latent.raw_shape)
            yield latent, targets, batch
