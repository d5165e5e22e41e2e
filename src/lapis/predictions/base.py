"""The interface of predictions, shared by all likelihoods: moments of the outputs, and log densities of targets."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lapis.errors import OptionError
from lapis.likelihoods import Likelihood
from lapis.predictions.latent import Latent, LatentGaussian, LatentMixture


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(ABC):
    """p(y | x) for a batch of B inputs, in the layout of the network's outputs.

    Where Monte Carlo is needed, `samples` draws of f are made from `seed`: the same ones each time, so that a
    prediction's numbers never change.
    """

    likelihood: Likelihood
    latent: Latent
    samples: int
    seed: int

    @property
    def raw_shape(self) -> tuple[int, ...]:
        """Shape of the network's own output, whose layout the prediction takes."""
        return self.latent.raw_shape

    @property
    def method(self) -> Literal["linearised", "sampled", "mixture"]:
        """Origin of the outputs' distribution: the linearised network, sampled networks, or a mixture of these."""
        return "linearised" if isinstance(self.latent, LatentGaussian) else "sampled"

    @property
    def f_mean(self) -> Tensor:
        """Mean of the network's outputs."""
        return self.likelihood.layout(self.latent.mean, self.raw_shape)

    @property
    def f_variance(self) -> Tensor:
        """Marginal variances of the network's outputs."""
        return self.likelihood.layout(self.latent.variance, self.raw_shape)

    @cached_property
    def f_covariance(self) -> Tensor | None:
        """Covariance of the C outputs at each position, (B, *positions, C, C); None if not computed."""
        blocks = self.latent.blocks
        return None if blocks is None else self.likelihood.spread(blocks, self.raw_shape)

    def f_interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Lower and upper end of the central interval that holds each output of the network with probability `level`.

        Without the targets' noise: see `interval` for targets.
        """
        low, high = (self.likelihood.layout(self.latent.quantile(tail), self.raw_shape) for tail in tails(level))
        return low, high

    def log_prob(self, y: Any) -> Tensor:
        """log p(y | x) of each example, (B,): the sum of its positions' log densities.

        If the prediction was made jointly over the batch, the log density of all targets together: a 0-d
        tensor.
        """
        target = self.likelihood.targets(y, self.latent.mean, self.raw_shape)
        if self.latent.is_joint:
            return self._joint_log_prob(target)
        return self._position_log_prob(target).sum(1)

    @abstractmethod
    def _position_log_prob(self, target: Tensor) -> Tensor:
        """log p(y | x) at each position, (B, T)."""

    def _joint_log_prob(self, target: Tensor) -> Tensor:
        """log E_f[prod_n p(y_n | f_n)], 0-d, by Monte Carlo over draws of all examples' f together."""
        return _log_mean_exp(self._log_densities(target, joint=True).sum((1, 2)))

    def _log_densities(self, target: Tensor, *, joint: bool = False) -> Tensor:
        """log p(y | f) of each draw of f: (S, B, T)."""
        parts = []
        for chunk in self._draws(joint=joint):
            repeated = target.expand(len(chunk), *target.shape).flatten(0, 1)
            losses = self.likelihood.position_nll(chunk.flatten(0, 1), repeated)
            parts.append(-losses.reshape(chunk.shape[:3]))
        return torch.cat(parts)

    def _draws(self, *, joint: bool = False) -> Iterator[Tensor]:
        """Equally weighted draws of f, in chunks (S', B, T, C)."""
        assert not isinstance(self.latent, LatentMixture), "the predictions of its parts draw, each with its weight"
        return self.latent.draws(self.samples, self.seed, joint=joint)

    def _monte_carlo_log_prob(self, target: Tensor) -> Tensor:
        """log E_f[p(y | f)] at each position, (B, T), by Monte Carlo."""
        return _log_mean_exp(self._log_densities(target))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.method}, outputs {self.raw_shape}, {self.likelihood!r})"


def _log_mean_exp(values: Tensor) -> Tensor:
    return values.logsumexp(0) - math.log(len(values))


def tails(level: float) -> tuple[float, float]:
    """The two quantiles of a central interval of probability `level`."""
    if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 < level < 1:
        raise OptionError(
            "The level of an interval is a probability",
            expected="a number between 0 and 1",
            got=repr(level),
            do="pass level=0.95 for 95 percent",
        )
    return (1 - level) / 2, (1 + level) / 2
