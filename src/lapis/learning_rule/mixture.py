"""Mixtures of Gaussians: an exponential family given which component a weight vector belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lapis.errors import OptionError
from lapis.learning_rule.discrete import distribution
from lapis.learning_rule.expectations import Expectation
from lapis.learning_rule.family import Family, Parameters, source_of
from lapis.learning_rule.gaussian import DiagonalGaussian, FullGaussian
from lapis.learning_rule.losses import Loss
from lapis.options import check_arguments, shown

Component = FullGaussian | DiagonalGaussian
DRAWS = 10_000
"""For the entropy, which has no closed form."""


@dataclass(frozen=True, eq=False, repr=False)
class GaussianMixture(Family):
    """sum_c w_c N(m_c, S_c^-1), a minimal conditional exponential family (Lin, Khan and Schmidt 2019).

    lambda = (log(w_c / w_K) for c < K if weights are learned, then each component's own natural parameters),
    mu = (w_c for c < K, then w_c E_c[T]). A block's gradient holds the other blocks' distributions: with
    b(theta) = loss(theta) + log q(theta),

        grad of a component = grad_E_c[T] E_c[b],    grad of a weight = E_c[b] - E_K[b].

    Components far from each other do not see each other: each then follows the rule of a single Gaussian.

    Args:
        components: at least two `FullGaussian`s or two `DiagonalGaussian`s.
        weights: w, (K,), positive with sum one; uniform when None.
        learn_weights: whether the rule moves them.
    """

    improvable: ClassVar[bool] = True

    components: tuple[Component, ...]
    weights: Tensor | None = None
    learn_weights: bool = False

    def __post_init__(self) -> None:
        check_arguments(GaussianMixture, vars(self), apart=("components",))
        given = self.components
        fits = isinstance(given, (list, tuple)) and len(given) > 1
        if not fits or not all(
            isinstance(part, (FullGaussian, DiagonalGaussian))
            and type(part) is type(given[0])
            and part.size == given[0].size
            for part in given
        ):
            raise OptionError(
                "These are no components of a mixture",
                expected="two or more FullGaussians, or DiagonalGaussians, over the same weights",
                got=shown(given),
                do="pass such a tuple",
            )
        object.__setattr__(self, "components", tuple(given))
        weights = torch.full((len(given),), 1 / len(given)).double() if self.weights is None else self.weights
        found = distribution("weights", weights)
        if len(found) != len(given):
            raise OptionError(
                "One weight for each component", expected=f"({len(given)},)", got=shown(found), do="pass so many"
            )
        object.__setattr__(self, "weights", found)

    @property
    def _weights(self) -> Tensor:
        assert self.weights is not None  # set when made
        return self.weights

    @property
    def mean(self) -> Tensor:
        """sum_c w_c m_c, (P,)."""
        return self._weights @ torch.stack([part.mean for part in self.components])

    def natural(self) -> Parameters:
        """(log odds of the weights, if learned; each component's own)."""
        odds = (self._weights[:-1] / self._weights[-1]).log()
        own = tuple(tensor for part in self.components for tensor in part.natural())
        return (odds, *own) if self.learn_weights else own

    def expectation(self) -> Parameters:
        """(weights, if learned; w_c times each component's own)."""
        own = tuple(
            weight * tensor
            for weight, part in zip(self._weights, self.components, strict=True)
            for tensor in part.expectation()
        )
        return (self._weights[:-1], *own) if self.learn_weights else own

    def with_natural(self, natural: Sequence[Tensor]) -> GaussianMixture:
        """Each component from its own, and the weights from their log odds."""
        weights, parts = self._split(self._parts("natural", natural))
        if weights is not None:
            weights = _of_odds(weights)
        components = [part.with_natural(own) for part, own in zip(self.components, parts, strict=True)]
        return self._with(components, weights)

    def with_expectation(self, expectation: Sequence[Tensor]) -> GaussianMixture:
        """The weights first, then each component from its own over w_c."""
        weights, parts = self._split(self._parts("expectation", expectation))
        if weights is not None:
            weights = distribution("weights", torch.cat([weights, 1 - weights.sum()[None]]))
        divisors = self._weights if weights is None else weights
        components = [
            part.with_expectation([tensor / weight for tensor in own])
            for part, own, weight in zip(self.components, parts, divisors, strict=True)
        ]
        return self._with(components, weights)

    def _with(self, components: Sequence[Component], weights: Tensor | None) -> GaussianMixture:
        return GaussianMixture(tuple(components), self._weights if weights is None else weights, self.learn_weights)

    def _split(self, parts: Sequence[Tensor]) -> tuple[Tensor | None, list[Sequence[Tensor]]]:
        """The weights' part if there is one, and pairs for the components."""
        start = int(self.learn_weights)
        return (parts[0] if start else None), [parts[i : i + 2] for i in range(start, len(parts), 2)]

    def entropy(self) -> Tensor:
        """-mean log q of draws with seed 0, 0-d: there is no closed form."""
        return -self.log_prob(self.sample(DRAWS)).mean()

    def log_prob(self, theta: Tensor) -> Tensor:
        """log sum_c w_c N(theta | m_c, S_c^-1) of (P,) or of each row of (n, P)."""
        theta = self._rows(theta)
        logs = [part.log_prob(theta) for part in self.components]
        return (torch.stack(logs, -1) + self._weights.log()).logsumexp(-1)

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws (samples, P): a component by its weight, then from it; the generator is seeded with 0 when None."""
        check_arguments(GaussianMixture.sample, locals())
        source = source_of(generator)
        chosen = torch.multinomial(self._weights.detach(), samples, replacement=True, generator=source)
        drawn = torch.stack([part.sample(samples, generator=source) for part in self.components])
        return drawn[chosen, torch.arange(samples)]

    def loss_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """The gradients of all blocks for a loss alone."""
        own = tuple(tensor for part in self.components for tensor in part.loss_gradient(loss, how))
        if not self.learn_weights:
            return own
        values = torch.stack([part.expected_value(loss, how) for part in self.components])
        return (values[:-1] - values[-1], *own)

    def objective_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """Those for b = loss + log q, with log q as it is now: the expectation of its own change is zero."""
        return self.loss_gradient(loss.plus(self.log_prob), how)

    def moved(self, gradient: Parameters, rate: float, improved: bool) -> GaussianMixture:
        """Each component by its own rule, improved or not; the weights' log odds by -rate times their gradient."""
        weights, parts = self._split(gradient)
        if weights is not None:
            weights = _of_odds(self.natural()[0] - rate * weights)
        components = [part.moved(tuple(own), rate, improved) for part, own in zip(self.components, parts, strict=True)]
        return self._with(components, weights)


def _of_odds(odds: Tensor) -> Tensor:
    return torch.cat([odds, torch.zeros(1, dtype=torch.float64)]).softmax(0)
