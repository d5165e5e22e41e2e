"""Predictions of classes: probabilities, and how much of the uncertainty more data would remove."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lapis.likelihoods import Bernoulli
from lapis.predictions._links import (
    bridge,
    dirichlet_entropy,
    entropy,
    expected_binary_entropy,
    monte_carlo,
    pair,
    probit,
    zero_sum,
)
from lapis.predictions._quadrature import in_chunks
from lapis.predictions.base import Prediction

Link = Literal["probit", "mc", "bridge"]


@dataclass(frozen=True, eq=False, repr=False)
class ClassificationPrediction(Prediction):
    """p(y | x) of classes (categorical), or of each of C yes-or-no labels (Bernoulli).

    `link` determines how the linearised network's Gaussian logits become probabilities:

    - "probit": logits shrunk by their variance, MacKay's approximation;
    - "mc": the mean of the probabilities over Monte Carlo draws of the logits;
    - "bridge": the Laplace bridge, a Dirichlet distribution that matches the Gaussian.

    It is None for sampled networks, whose probabilities are averaged. Entropies are in nats: (B, *positions) for
    classes; one per label for labels, laid out as the outputs. Densities of labels follow from `probs`, independently
    for each label.
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
        return self._lay(self._expected_entropy)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus expected entropy: the information that the label would give about the weights.

        Negative values, possible with "probit" as its probabilities are approximate, are set to zero.
        """
        return self._lay((entropy(self._log_probs) - self._expected_entropy).clamp_min(0))

    @property
    def _binary(self) -> bool:
        return isinstance(self.likelihood, Bernoulli)

    def _logits(self, f: Tensor) -> Tensor:
        return pair(f) if self._binary else f

    @cached_property
    def _monte_carlo(self) -> tuple[Tensor, Tensor]:
        """Log of the mean probabilities, and mean entropy, over draws of f."""
        return monte_carlo(self._draws(), self._logits)

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
    def _log_probs(self) -> Tensor:
        """log p(y = c | x): (B, T, C), or (B, T, C, 2) for labels."""
        if self.link == "probit":
            return self._logits(probit(self.latent.mean, self.latent.variance)).log_softmax(-1)
        if self.link == "bridge":
            return self._log_alpha.log_softmax(-1).to(self.latent.mean.dtype)
        return self._monte_carlo[0]

    @cached_property
    def _expected_entropy(self) -> Tensor:
        """E[H(y | f)]: (B, T), or (B, T, C) for labels. For probit by quadrature (labels) or Monte Carlo (classes)."""
        dtype = self.latent.mean.dtype
        if self.link == "bridge":
            return dirichlet_entropy(self._log_alpha).to(dtype)
        if self.link == "probit" and self._binary:
            mean, variance = self.latent.mean.double(), self.latent.variance.double()
            return in_chunks(expected_binary_entropy, mean, variance).to(dtype)
        return self._monte_carlo[1]

    def _position_log_prob(self, target: Tensor) -> Tensor:
        """The likelihood's own density, at logits whose softmax (sigmoid) is `probs`."""
        log_probs = self._log_probs
        logits = log_probs[..., 1] - log_probs[..., 0] if self._binary else log_probs
        return -self.likelihood.position_nll(logits, target)

    def _lay(self, canonical: Tensor) -> Tensor:
        if self._binary:
            return self.likelihood.layout(canonical, self.raw_shape)
        return self.likelihood.spread(canonical, self.raw_shape)
