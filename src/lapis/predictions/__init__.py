"""From the outputs' distribution to p(y | x): the last step of every posterior's `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, get_args

import torch

from lapis.errors import OptionError
from lapis.likelihoods import Likelihood
from lapis.options import check_arguments, check_choice
from lapis.predictions.base import Prediction
from lapis.predictions.classification import ClassificationPrediction, Link
from lapis.predictions.count import CountPrediction
from lapis.predictions.function import FunctionPrediction
from lapis.predictions.integrals.quasi import default_points
from lapis.predictions.joining import GatheredLatent, join_latents
from lapis.predictions.latent import Latent, LatentGaussian, LatentMixture, LatentSamples
from lapis.predictions.mixture import mix
from lapis.predictions.numeric import NumericPrediction
from lapis.predictions.regression import RegressionPrediction

__all__ = [
    "ClassificationPrediction",
    "CountPrediction",
    "FunctionPrediction",
    "GatheredLatent",
    "Latent",
    "LatentGaussian",
    "LatentMixture",
    "LatentSamples",
    "NumericPrediction",
    "Prediction",
    "RegressionPrediction",
    "join_latents",
    "predict",
]

DEFAULT_SAMPLES = 256


def predict(
    likelihood: Likelihood,
    latent: Latent,
    *,
    link: str | None = None,
    samples: int | None = None,
    generator: torch.Generator | None = None,
    likelihoods: Sequence[Likelihood] | None = None,
) -> Prediction:
    """p(y | x) under `likelihood` when the outputs are distributed as `latent`.

    Args:
        likelihood: p(y | f).
        latent: distribution of the canonical outputs (B, T, C); its `raw_shape` is the prediction's layout.
        link: for classes, "quasi" (default), "mean_field", "probit", "mc" or "bridge": how Gaussian logits become
            probabilities.
        samples: draws of f where Monte Carlo is needed, 256 by default; of quasi-Monte Carlo the points, 128 by
            default up to 16 classes and 512 beyond; for a mixture, of each part.
        generator: source of the draws' seed, which is 0 without one.
        likelihoods: for a mixture, p(y | f) of each part, where they differ (in their noise).

    In a mixture, `link` and `samples` apply to the Gaussian parts; parts that consist of draws need neither.
    """
    check_arguments(predict, locals())
    seed = 0
    if generator is not None:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device).item())
    if isinstance(latent, LatentMixture):
        return _predict_mixture(likelihoods or [likelihood] * len(latent.parts), latent, link, samples, seed)
    return _predict_one(likelihood, latent, link, samples, seed)


def _predict_mixture(
    likelihoods: Sequence[Likelihood], latent: LatentMixture, link: str | None, samples: int | None, seed: int
) -> Prediction:
    """The mixture of the predictions of all parts with positive weight, each as it is made alone."""
    held = [(k, weight) for k, weight in enumerate(latent.weights.tolist()) if weight > 0]
    drawn = [isinstance(latent.parts[k], LatentSamples) for k, _ in held]
    parts = []
    for (k, _), already in zip(held, drawn, strict=True):
        options = (None, None) if already and not all(drawn) else (link, samples)
        parts.append(_predict_one(likelihoods[k], latent.parts[k], *options, seed))
    return mix(latent, parts, [weight for _, weight in held])


def _predict_one(
    likelihood: Likelihood, latent: LatentGaussian | LatentSamples, link: str | None, samples: int | None, seed: int
) -> Prediction:
    chosen = _checked_link(likelihood, latent, link)
    count = _checked_samples(likelihood, latent, chosen, samples)
    if likelihood.kind == "classification":
        return ClassificationPrediction(likelihood, latent, count, seed, chosen)
    if likelihood.kind == "regression":
        return RegressionPrediction(likelihood, latent, count, seed)
    if likelihood.kind == "count":
        return CountPrediction(likelihood, latent, count, seed)
    return FunctionPrediction(likelihood, latent, count, seed)


def _checked_link(likelihood: Likelihood, latent: LatentGaussian | LatentSamples, link: str | None) -> Link | None:
    """The link to use: None unless the outputs are Gaussian logits; OptionError for a link that would be ignored."""
    gaussian_logits = likelihood.kind == "classification" and isinstance(latent, LatentGaussian)
    if link is not None and not gaussian_logits:
        about = "sampled networks" if likelihood.kind == "classification" else likelihood.name + " outputs"
        raise OptionError(
            f"A link has no meaning for {about}",
            expected="link=None",
            got=repr(link),
            do='leave link out; it belongs to linearised classification (method="linearised")',
        )
    if not gaussian_logits:
        return None
    if link is None:
        return "quasi"
    check_choice("link", link, get_args(Link))
    return cast(Link, link)


def _checked_samples(
    likelihood: Likelihood, latent: LatentGaussian | LatentSamples, link: Link | None, samples: int | None
) -> int:
    """The number of draws; OptionError for a number that would be ignored."""
    if isinstance(latent, LatentSamples):
        drawn = len(latent.values)
        if samples not in (None, drawn):
            raise OptionError(
                "The networks are drawn already",
                expected=f"samples=None or {drawn}",
                got=repr(samples),
                do="leave samples out",
            )
        return drawn
    by_quadrature = link not in ("mc", None) and (likelihood.name == "bernoulli" or latent.shape[-1] == 2)
    exact = likelihood.kind in ("regression", "count") or link == "bridge" or by_quadrature
    if samples is not None and exact and not latent.is_joint:
        about = f'the link "{link}"' if link else f"the linearised {likelihood.name} prediction"
        about += " of two classes" if by_quadrature and link != "bridge" else ""
        raise OptionError(
            f"Samples have no meaning for {about}: nothing is drawn",
            expected="samples=None",
            got=repr(samples),
            do='leave samples out, or choose method="sampled"',
        )
    if samples is not None:
        return samples
    return DEFAULT_SAMPLES if link in ("mc", None) or latent.is_joint else default_points(latent.shape[-1])
