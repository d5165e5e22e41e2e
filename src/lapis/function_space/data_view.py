"""The data view of a posterior: which examples it rests on, and what leaving each one out would change.

With V = J Sigma J^T of an example's outputs, S S^T = H and g the Hessian and gradient of its -log p(y | f):

* relevance tr(H): how much curvature, and so precision, the example brings (memorable past). Where H is the same for
  all examples (Gaussian noise) the leverage tr(S^T V S) takes its place.
* sensitivity |V g|: error times variance, the change of the outputs when the example leaves, to first order.
* without itself: the tangent model's outputs under the posterior of all others,
  V_-n = V + V S (I - S^T V S)^-1 S^T V, mean f + V_-n g. Exact for linear Gaussian models at their mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lapis.likelihoods import Categorical, Gaussian, Likelihood
from lapis.predictions import LatentGaussian
from lapis.predictions.expectations import expectations, hessian_factor

LARGEST_LEVERAGE = 0.999
"""S^T V S has eigenvalues below one in exact posteriors; beyond this, leave-one-out is not to be trusted."""

NO_CLASS = -1

Of = Literal["outputs", "predictions"]


@dataclass(frozen=True)
class WithoutItself:
    """Outputs of examples, each under the posterior of all others, float64; the largest leverage of each, (B, T)."""

    mean: Tensor
    covariance: Tensor
    leverage: Tensor

    @property
    def valid(self) -> Tensor:
        """Whether the formula holds for all positions of an example, (B,)."""
        return (self.leverage <= LARGEST_LEVERAGE).all(-1)


def without_itself(
    likelihood: Likelihood, latent: LatentGaussian, targets: Tensor, temperature: float, expected: bool
) -> WithoutItself:
    """Mean and covariance of each example's outputs under the posterior of all others.

    Args:
        latent: with covariances between the outputs of each position.
        targets: canonical ones.
        temperature: the likelihood enters as p(y | f)^(1 / temperature).
        expected: whether the posterior rests on expectations of H and g under itself: a refined one.
    """
    f, v = latent.mean.double(), latent.covariance
    assert v is not None
    v = v.double()
    if expected:
        found = expectations(likelihood, f, v, targets)
        s, gradient = hessian_factor(found.hessian), found.gradient
    else:
        s, gradient = likelihood.factor(f, targets), likelihood.gradient(f, targets)
    s, gradient = s / temperature**0.5, gradient / temperature
    vs = v @ s
    leverage, vectors = torch.linalg.eigh(s.mT @ vs)
    rotated = vs @ vectors
    room = (1 - leverage).clamp(min=1 - LARGEST_LEVERAGE)
    covariance = v + (rotated / room.unsqueeze(-2)) @ rotated.mT
    mean = f + (covariance @ gradient.unsqueeze(-1)).squeeze(-1)
    return WithoutItself(mean, covariance, leverage.amax(-1))


def sensitivity(likelihood: Likelihood, latent: LatentGaussian, targets: Tensor, temperature: float, of: Of) -> Tensor:
    """|V g| of each example over all its outputs, (B,) float64; of variances only where covariances are not known."""
    f = latent.mean.double()
    gradient = likelihood.gradient(f, targets) / temperature
    if latent.covariance is None:
        change = latent.variance.double() * gradient
    else:
        change = (latent.covariance.double() @ gradient.unsqueeze(-1)).squeeze(-1)
    return size_of(likelihood, f, change, of)


def removal(likelihood: Likelihood, latent: LatentGaussian, left: WithoutItself, of: Of) -> Tensor:
    """|V_-n g|, the change of the outputs in a refit of the tangent model, (B,) float64."""
    f = latent.mean.double()
    return size_of(likelihood, f, left.mean - f, of)


def size_of(likelihood: Likelihood, f: Tensor, change: Tensor, of: Of) -> Tensor:
    """The norm of a change of the outputs f (B, T, C), or of what it makes of the predictions, (B,)."""
    if of == "predictions":
        change = (likelihood.link_slope(f) @ change.unsqueeze(-1)).squeeze(-1)
    norms: Tensor = torch.linalg.vector_norm(change.flatten(1), dim=1)
    return norms


def has_constant_curvature(likelihood: Likelihood) -> bool:
    """Whether H is the same for all examples, so that it ranks none."""
    return isinstance(likelihood, Gaussian)


def relevance(likelihood: Likelihood, f: Tensor, targets: Tensor) -> Tensor:
    """tr(H) of each example over all its positions, (B,) float64."""
    return likelihood.curvature_trace(f.double(), targets).sum(1)


def leverage(likelihood: Likelihood, latent: LatentGaussian, targets: Tensor, temperature: float) -> Tensor:
    """tr(S^T V S) of each example over all its positions, (B,) float64."""
    s = likelihood.factor(latent.mean.double(), targets)
    if latent.covariance is None:
        found = (s.square().sum(-1) * latent.variance.double()).sum((1, 2))
    else:
        found = (s * (latent.covariance.double() @ s)).sum((1, 2, 3))
    return found / temperature


def classes(likelihood: Likelihood, targets: Tensor) -> Tensor | None:
    """The class of each example, (B,) int64, from canonical targets; None where an example has no single one."""
    if likelihood.kind != "classification" or targets.shape[1] != 1:
        return None
    if isinstance(likelihood, Categorical):
        if targets.is_floating_point():
            return targets[:, 0].argmax(-1)
        ignored = -1 if likelihood.ignore_index is None else likelihood.ignore_index
        return torch.where(targets[:, 0] == ignored, NO_CLASS, targets[:, 0].long())
    return (targets[:, 0, 0] > 0.5).long() if targets.shape[-1] == 1 else None


def most(scores: Tensor, labels: Tensor | None, count: int) -> Tensor:
    """Indices of the `count` largest scores of each class, class after class, or of all; the largest first."""
    order = scores.argsort(descending=True, stable=True)
    if labels is None:
        return order[:count]
    return torch.cat([order[labels[order] == label][:count] for label in sorted(set(labels.tolist()) - {NO_CLASS})])
