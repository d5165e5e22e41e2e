"""Predictions of classes: probabilities, and how much of the uncertainty more data would remove."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lapis.likelihoods import Bernoulli
from lapis.predictions.base import Prediction
from lapis.predictions.integrals.links import (
    bridge,
    dirichlet_entropy,
    entropy,
    expected_binary_entropy,
    expected_sigmoid,
    mean_field,
    monte_carlo,
    pair,
    probit,
    zero_sum,
)
from lapis.predictions.integrals.quadrature import in_chunks
from lapis.predictions.integrals.quasi import Points
from lapis.predictions.latent import CHUNK, LatentSamples

Link = Literal["quasi", "mean_field", "probit", "mc", "bridge"]


@dataclass(frozen=True, eq=False, repr=False)
class ClassificationPrediction(Prediction):
    """p(y | x) of classes (categorical), or of each of C yes-or-no labels (Bernoulli).

    `link` determines how the linearised network's Gaussian logits become probabilities:

    - "quasi": the mean of the probabilities over the Gaussian, by quadrature for labels and two classes, else by
      quasi-Monte Carlo with fixed points;
    - "mean_field": every pair of classes by MacKay's approximation, in closed form;
    - "probit": logits shrunk by their variance, MacKay's approximation;
    - "mc": the mean of the probabilities over Monte Carlo draws of the logits;
    - "bridge": the Laplace bridge, a Dirichlet distribution that matches the Gaussian.

    It is None for sampled networks, whose probabilities are averaged. Entropies are in nats: (B, *positions) for
    classes; one per label for labels, laid out as the outputs. Densities of labels follow from `probs`, independently
    for each label.

    `entropy` is `aleatoric_entropy` plus `mutual_information`. "mean_field" and "probit" approximate probabilities
    only, and their entropy minus an expected entropy from elsewhere would mean nothing: they take the mutual
    information of "quasi".
    """

    link: Link | None

    @property
    def probs(self) -> Tensor:
        """p(y = c | x), laid out as the outputs; for labels the probability of "yes"."""
        log_probs = self._log_probs[..., 1] if self._binary else self._log_probs
        return self.likelihood.layout(log_probs.exp(), self.raw_shape)

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty: the entropy of `probs`."""
        return self._lay(entropy(self._log_probs))

    @property
    def aleatoric_entropy(self) -> Tensor:
        """Expected entropy given the weights: the part that more data would not reduce."""
        return self._lay(torch.minimum(self._expected_entropy, entropy(self._log_probs)))  # above it by rounding only

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus expected entropy: the information that the label would give about the weights."""
        return self._lay((entropy(self._log_probs) - self._expected_entropy).clamp_min(0))

    @property
    def _binary(self) -> bool:
        return isinstance(self.likelihood, Bernoulli)

    def _logits(self, f: Tensor) -> Tensor:
        return pair(f) if self._binary else f

    @cached_property
    def _monte_carlo(self) -> tuple[Tensor, Tensor]:
        """Log of the mean probabilities, and mean entropy, over draws of f."""
        if not isinstance(self.latent, LatentSamples):
            return monte_carlo(self._draws(), self._logits)
        values = self.latent.values
        step = max(1, CHUNK // max(1, values[:, 0].numel()))  # some examples at a time, all networks
        log_probs = values.new_empty(*self.latent.shape, *([2] if self._binary else []))
        expected = values.new_empty(log_probs.shape[:-1])
        for start in range(0, len(log_probs), step):
            some = slice(start, start + step)  # written in place: small results between large ones fragment the heap
            log_probs[some], expected[some] = monte_carlo([values[:, some]], self._logits)
        return log_probs, expected

    @cached_property
    def _log_alpha(self) -> Tensor:
        """Log parameters of the Laplace bridge's Dirichlet, (B, T, K), or (B, T, C, 2) for labels; in float64."""
        mean, variance = self.latent.mean.double(), self.latent.variance.double().clamp_min(0)
        if self._binary:
            return bridge(pair(mean), pair(mean).new_ones(2) * variance.unsqueeze(-1) / 4)
        blocks = self.latent.blocks
        covariance = torch.diag_embed(variance) if blocks is None else blocks.double()
        return bridge(*zero_sum(mean, covariance))

    @cached_property
    def _log_odds(self) -> tuple[Tensor, Tensor] | None:
        """Mean and variance, in float64, of the one number z that decides between two classes, or on each label.

        (B, T) or (B, T, C); None for more classes than two.
        """
        mean, variance = self.latent.mean.double(), self.latent.variance.double()
        if self._binary:
            return mean, variance
        if mean.shape[-1] != 2:
            return None
        blocks = self.latent.blocks
        shared = 0.0 if blocks is None else 2 * blocks[..., 0, 1].double()
        return mean[..., 1] - mean[..., 0], (variance.sum(-1) - shared).clamp_min(0)

    @cached_property
    def _log_mean_probs(self) -> Tensor:
        """Log of the mean probabilities over the Gaussian, as `_log_probs`; in float64 where by quadrature."""
        if self._log_odds is not None:
            return expected_sigmoid(*self._log_odds)
        return Points(*self._flat_moments, self.samples, self.seed).log_mean_probs().reshape(self.latent.shape)

    @cached_property
    def _mean_entropy(self) -> Tensor:
        """Mean entropy over the Gaussian, as `_expected_entropy`; in float64 where by quadrature."""
        if self._log_odds is not None:
            return in_chunks(expected_binary_entropy, *self._log_odds)
        return Points(*self._flat_moments, self.samples, self.seed).mean_entropy().reshape(self.latent.shape[:-1])

    @property
    def _flat_moments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Means and variances (B T, C), and covariances (B T, C, C) where known, of the logits."""
        blocks = self.latent.blocks
        return (
            self.latent.mean.flatten(0, 1),
            self.latent.variance.flatten(0, 1),
            None if blocks is None else blocks.flatten(0, 1),
        )

    @cached_property
    def _log_probs(self) -> Tensor:
        """log p(y = c | x): (B, T, C), or (B, T, C, 2) for labels."""
        if self.link in (None, "mc"):
            return self._monte_carlo[0]
        dtype = self.latent.mean.dtype
        if self.link == "quasi":
            return self._log_mean_probs.to(dtype)
        if self.link == "mean_field" and not self._binary:
            return mean_field(*self._flat_moments).reshape(self.latent.shape).to(dtype)
        if self.link in ("probit", "mean_field"):
            return self._logits(probit(self.latent.mean, self.latent.variance)).log_softmax(-1)
        return self._log_alpha.log_softmax(-1).to(dtype)

    @cached_property
    def _expected_entropy(self) -> Tensor:
        """E[H(y | f)]: (B, T), or (B, T, C) for labels."""
        if self.link in (None, "mc"):
            return self._monte_carlo[1]
        dtype = self.latent.mean.dtype
        if self.link == "bridge":
            return dirichlet_entropy(self._log_alpha).to(dtype)
        if self.link == "quasi":
            return self._mean_entropy.to(dtype)
        information = (entropy(self._log_mean_probs) - self._mean_entropy).clamp_min(0).to(dtype)
        return (entropy(self._log_probs) - information).clamp_min(0)

    def _position_log_prob(self, target: Tensor) -> Tensor:
        """The likelihood's own density, at logits whose softmax (sigmoid) is `probs`."""
        log_probs = self._log_probs
        logits = log_probs[..., 1] - log_probs[..., 0] if self._binary else log_probs
        return -self.likelihood.position_nll(logits, target)

    def _lay(self, canonical: Tensor) -> Tensor:
        if self._binary:
            return self.likelihood.layout(canonical, self.raw_shape)
        return self.likelihood.spread(canonical, self.raw_shape)
