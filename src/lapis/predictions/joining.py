"""Concatenation of the latents (distributions of outputs) of consecutive batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lapis.errors import DataError, ModelError
from lapis.predictions.latent import Latent, LatentGaussian, LatentMixture, LatentSamples


def join_latents(parts: Sequence[Latent]) -> Latent:
    """The latents of consecutive batches as the latent of all their examples, in the order given.

    All parts must be of one kind, with outputs of one shape. Sample s of every part must be the output of the same
    network s, so sampled parts have equally many samples; mixtures must have the same weights, and are joined component
    by component. Covariances between the outputs of a position are kept if all parts have them. Joint latents raise
    ModelError: they lack the covariances between examples of different batches.
    """
    if not parts:
        raise DataError("There are no latents to join", expected="at least one", got="none", do="pass some batches")
    _check_alike(parts)
    mixtures = [part for part in parts if isinstance(part, LatentMixture)]
    if not mixtures:
        return _join_plain([part for part in parts if not isinstance(part, LatentMixture)])
    _check_equal("weights of the mixtures", [mixture.weights.tolist() for mixture in mixtures])
    components = zip(*(mixture.parts for mixture in mixtures), strict=True)  # component k of every batch's mixture
    return LatentMixture(tuple(_join_plain(batches) for batches in components), mixtures[0].weights)


def _join_plain(parts: Sequence[LatentGaussian | LatentSamples]) -> LatentGaussian | LatentSamples:
    _check_alike(parts)
    raw_shape = (sum(part.raw_shape[0] for part in parts), *parts[0].raw_shape[1:])
    samples = [part.values for part in parts if isinstance(part, LatentSamples)]
    if samples:
        _check_equal("numbers of sampled networks", [len(values) for values in samples])
        return LatentSamples(torch.cat(samples, 1), raw_shape=raw_shape)
    covariances = [part.blocks for part in parts if part.blocks is not None]
    return LatentGaussian(
        torch.cat([part.mean for part in parts]),
        torch.cat([part.variance for part in parts]),
        torch.cat(covariances) if len(covariances) == len(parts) else None,
        raw_shape=raw_shape,
    )


def _check_alike(parts: Sequence[Latent]) -> None:
    """Raise unless all parts are of the first one's kind and shape, and none is joint."""
    if any(part.is_joint for part in parts):
        raise ModelError(
            "Joint latents cannot be joined",
            expected="latents without covariances between examples",
            got="a joint one",
            do="predict all examples in one batch, or without joint",
        )
    kinds = [(type(part).__name__, part.shape[1:], part.raw_shape[1:]) for part in parts]
    message = "{}, (T, C) = {}, raw shape of one example {}"
    for kind in kinds:
        if kind != kinds[0]:
            raise ModelError(
                "Latents of different kinds or shapes cannot be joined",
                expected=message.format(*kinds[0]) + ", as the first",
                got=message.format(*kind),
                do="join the outputs of one network",
            )


def _check_equal(what: str, values: Sequence[object]) -> None:
    for value in values:
        if value != values[0]:
            raise ModelError(
                f"The {what} that are to be joined differ",
                expected=f"{values[0]}, as in the first batch",
                got=str(value),
                do="join the batches of one posterior",
            )
