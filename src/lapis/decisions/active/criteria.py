"""How much the label of one example is worth, from the prediction of it: one number an example, larger is better."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lapis.errors import LikelihoodError
from lapis.likelihoods import Bernoulli, Categorical, Custom, Gaussian, Likelihood
from lapis.predictions import Prediction


def entropy(prediction: Prediction) -> Tensor:
    """Entropy of p(y | x); of real targets that of a Gaussian with the predicted variance, 1/2 log(2 pi e v)."""
    found: Any = prediction
    if hasattr(prediction, "entropy"):
        return per_example(found.entropy)
    return per_example(0.5 * (2 * math.pi * math.e * _of(prediction, "variance", "entropy").double()).log())


def mutual_information(prediction: Prediction) -> Tensor:
    """What the label says about the weights: entropy less expected entropy (BALD).

    Of real targets with known noise it is 1/2 log |I + V / sigma^2|, the `information_gain`.
    """
    found: Any = prediction
    if hasattr(prediction, "mutual_information"):
        return per_example(found.mutual_information)
    return information_gain(prediction)


def variation_ratios(prediction: Prediction) -> Tensor:
    """1 - max_c p(y = c | x); of yes-or-no labels min(p, 1 - p), summed over labels and positions."""
    probs = _of(prediction, "probs", "variation_ratios")
    if isinstance(prediction.likelihood, Bernoulli):
        return per_example(torch.minimum(probs, 1 - probs))
    canonical = prediction.likelihood.canonical(probs)
    return per_example(1 - canonical.amax(-1))


def variance(prediction: Prediction) -> Tensor:
    """Variance of E[y | x, weights] over the weights, summed over outputs: of probabilities, or of means.

    Probabilities to first order in the outputs, tr(P V P^T), with P the probabilities' derivative in the outputs.
    """
    if hasattr(prediction, "epistemic_variance"):
        return per_example(prediction.epistemic_variance)
    if not isinstance(prediction.likelihood, (Categorical, Bernoulli)):
        raise _refused("variance", "a regression, counts or classes", prediction.likelihood.name)
    mean, covariance = moments(prediction)
    if isinstance(prediction.likelihood, Bernoulli):
        p = mean.sigmoid()
        slope = torch.diag_embed(p * (1 - p))
    else:
        p = mean.softmax(-1)
        slope = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    return per_example((slope @ covariance @ slope).diagonal(dim1=-2, dim2=-1))


def information_gain(prediction: Prediction) -> Tensor:
    """Information about the weights, 1/2 log |I + S^T V S| with S S^T the likelihood's Hessian at the mean outputs.

    Exact for Gaussian outputs and noise; for others the gain of a Laplace approximation. Positions count one by one.
    """
    mean, covariance = moments(prediction)
    root = curvature_root(prediction.likelihood, mean)
    return per_example(gains(covariance, root))


def memorable(prediction: Prediction) -> Tensor:
    """tr H, the likelihood's curvature at the mean outputs; of classes sum_c p_c (1 - p_c)."""
    likelihood = prediction.likelihood
    if isinstance(likelihood, Gaussian):
        raise _refused("memorable", "a likelihood whose curvature depends on the example", "gaussian, always 1/sigma^2")
    return per_example(curvature_root(likelihood, prediction.latent.mean.double()).square().sum(-1))


CRITERIA: dict[str, Callable[[Prediction], Tensor]] = {
    "entropy": entropy,
    "bald": mutual_information,
    "variation_ratios": variation_ratios,
    "variance": variance,
    "information_gain": information_gain,
    "memorable": memorable,
}
"""Criteria that look at one example at a time, by their names."""


def per_example(values: Tensor) -> Tensor:
    """Values (B, ...) summed over positions and labels, (B,), in float64."""
    return values.double().reshape(values.shape[0], -1).sum(1)


def moments(prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Mean (B, T, C) and covariance (B, T, C, C) of the outputs at each position, in float64."""
    latent = prediction.latent
    mean, variances = latent.mean.double(), latent.variance.double().clamp_min(0)
    return mean, torch.diag_embed(variances) if latent.blocks is None else latent.blocks.double()


def curvature_root(likelihood: Likelihood, mean: Tensor) -> Tensor:
    """S (B, T, C, R) with S S^T the likelihood's Hessian at outputs (B, T, C), whatever the targets turn out to be."""
    if isinstance(likelihood, Custom):
        raise _refused("curvature", "a likelihood whose Hessian does not depend on the targets", "a custom likelihood")
    labels = mean.new_zeros(mean.shape[:2], dtype=torch.long) if isinstance(likelihood, Categorical) else mean * 0
    return likelihood.factor(mean, labels).double()


def gains(covariance: Tensor, root: Tensor) -> Tensor:
    """1/2 log |I + S^T V S| for covariances (..., C, C) and roots S (..., C, R)."""
    inner = root.mT @ covariance @ root
    eye = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    logdet: Tensor = torch.linalg.slogdet(eye + inner).logabsdet
    return 0.5 * logdet


def _of(prediction: Prediction, attribute: str, by: str) -> Tensor:
    """An attribute that only some likelihoods' predictions have."""
    if not hasattr(prediction, attribute):
        raise _refused(by, f"a likelihood whose predictions have `{attribute}`", prediction.likelihood.name)
    value: Tensor = getattr(prediction, attribute)
    return value


def _refused(by: str, expected: str, got: str) -> LikelihoodError:
    return LikelihoodError(
        f"Examples cannot be ranked by {by} here", expected=expected, got=got, do='use by="bald" or by="random"'
    )
