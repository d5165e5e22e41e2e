"""Families over finitely many weight vectors: signs (Bernoulli) and the choice of an expert (categorical)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lapis.errors import DataError
from lapis.learning_rule.expectations import Expectation, centred, check_nodes, product, refuse_curvature
from lapis.learning_rule.family import Family, Parameters, positive_vector, source_of, vector_of
from lapis.learning_rule.losses import Loss
from lapis.options import check_arguments


@dataclass(frozen=True, eq=False, repr=False)
class Bernoulli(Family):
    """Independent weights +1 or -1: q(theta) proportional to exp(lambda^T theta), mu = E[theta] = tanh(lambda).

    E_q[loss] is linear in each mu_i, with slope E[loss(theta_i = +1) - loss(theta_i = -1)] / 2. "local" is
    loss(mu), for losses that are defined between the signs; "monte_carlo" draws signs and flips each in turn;
    "quadrature" sums over all 2^P vectors.

    Args:
        logits: lambda, (P,): half the log odds of +1.

    >>> q = Bernoulli(torch.tensor([0.0, 1.0]))
    >>> [round(mu, 4) for mu in q.mean.tolist()]
    [0.0, 0.7616]
    """

    logits: Tensor

    def __post_init__(self) -> None:
        check_arguments(Bernoulli, vars(self))
        object.__setattr__(self, "logits", vector_of("logits", self.logits))

    @property
    def mean(self) -> Tensor:
        """tanh(lambda), (P,)."""
        return self.logits.tanh()

    def natural(self) -> Parameters:
        """(lambda,)."""
        return (self.logits,)

    def expectation(self) -> Parameters:
        """(tanh(lambda),)."""
        return (self.mean,)

    def with_natural(self, natural: Sequence[Tensor]) -> Bernoulli:
        """The member with logits lambda."""
        return Bernoulli(*self._parts("natural", natural))

    def with_expectation(self, expectation: Sequence[Tensor]) -> Bernoulli:
        """lambda = artanh(mu)."""
        (mean,) = self._parts("expectation", expectation)
        if float(mean.detach().abs().max()) >= 1:
            raise DataError(
                "A mean of signs is out of range", expected="-1 < mu < 1", got=f"{mean.tolist()}"[:80], do="shrink it"
            )
        return Bernoulli(mean.atanh())

    def entropy(self) -> Tensor:
        """Sum of -p log p over both signs of all weights, 0-d."""
        return (functional.softplus(2 * self.logits) - self.logits * (1 + self.mean)).sum()

    def log_prob(self, theta: Tensor) -> Tensor:
        """lambda^T theta - sum log(2 cosh lambda), for signs theta."""
        size = self.logits.abs()
        return self._rows(theta) @ self.logits - (size + functional.softplus(-2 * size)).sum()

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws (samples, P) of signs; the generator is seeded with 0 when None."""
        check_arguments(Bernoulli.sample, locals())
        uniform = torch.rand(samples, self.size, dtype=torch.float64, generator=source_of(generator))
        return torch.where(uniform < (2 * self.logits).sigmoid(), 1.0, -1.0).double()

    def loss_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """(d E[loss] / d mu,)."""
        refuse_curvature(how, "A Bernoulli")
        mean = self.mean.detach()
        if how.kind == "local":
            return (loss.gradients(mean[None])[0],)
        if how.kind == "quadrature":
            check_nodes((2, self.size))
            signs = product(torch.tensor([-1.0, 1.0]).double().expand(self.size, -1))
            with torch.enable_grad():
                leaf = mean.requires_grad_()
                expected = ((1 + signs * leaf) / 2).prod(1) @ loss.values(signs).detach()
                return torch.autograd.grad(expected, leaf)
        drawn = self.sample(how.samples, generator=how.generator)
        values = loss.values(drawn).detach()
        if how.kind == "function_values":
            return (centred(values) @ ((drawn - mean) / (1 - mean.square()).clamp_min(1e-300)),)
        slopes = []
        for i in range(self.size):
            flipped = drawn.clone()
            flipped[:, i] *= -1
            slopes.append((drawn[:, i] * (values - loss.values(flipped).detach())).mean() / 2)
        return (torch.stack(slopes),)


@dataclass(frozen=True, eq=False, repr=False)
class Categorical(Family):
    """One of K experts, as a unit vector theta (K,): lambda = log p, up to a constant, and mu = p.

    E_q[loss] = sum_k p_k loss(e_k). "local" is loss(p), the same if the loss is linear; "quadrature" sums over the
    experts; "monte_carlo" and "function_values" weigh the losses of drawn experts by 1 / p_k.

    Args:
        logits: log p, up to a constant, (K,).
    """

    logits: Tensor

    def __post_init__(self) -> None:
        check_arguments(Categorical, vars(self))
        object.__setattr__(self, "logits", vector_of("logits", self.logits).log_softmax(0))

    @property
    def mean(self) -> Tensor:
        """p, (K,)."""
        return self.logits.exp()

    def natural(self) -> Parameters:
        """(log p,)."""
        return (self.logits,)

    def expectation(self) -> Parameters:
        """(p,)."""
        return (self.mean,)

    def with_natural(self, natural: Sequence[Tensor]) -> Categorical:
        """p proportional to exp(lambda)."""
        return Categorical(*self._parts("natural", natural))

    def with_expectation(self, expectation: Sequence[Tensor]) -> Categorical:
        """lambda = log mu."""
        (probabilities,) = self._parts("expectation", expectation)
        return Categorical(distribution("expectation", probabilities).log())

    def entropy(self) -> Tensor:
        """-sum p log p, 0-d."""
        return -(self.mean * self.logits).sum()

    def log_prob(self, theta: Tensor) -> Tensor:
        """log p_k of unit vectors e_k."""
        return self._rows(theta) @ self.logits

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws (samples, K) of unit vectors; the generator is seeded with 0 when None."""
        check_arguments(Categorical.sample, locals())
        chosen = torch.multinomial(self.mean, samples, replacement=True, generator=source_of(generator))
        return functional.one_hot(chosen, self.size).double()

    def loss_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """(loss(e_k) of each expert,), up to a constant that changes no probability."""
        refuse_curvature(how, "A categorical")
        if how.kind == "local":
            return (loss.gradients(self.mean.detach()[None])[0],)
        if how.kind == "quadrature":
            return (loss.values(torch.eye(self.size, dtype=torch.float64)).detach(),)
        drawn = self.sample(how.samples, generator=how.generator)
        importance = torch.where(drawn > 0, 1 / self.mean, 0.0)  # an expert with p_k = 0 is never drawn
        return (loss.values(drawn).detach() @ importance / how.samples,)


def distribution(name: str, value: Tensor) -> Tensor:
    """Positive numbers whose sum is one."""
    found = positive_vector(name, value)
    total = float(found.detach().sum())
    if not math.isclose(total, 1, rel_tol=1e-6):
        raise DataError(
            f"{name} is no distribution", expected="positive numbers with sum one", got=f"a sum of {total:.6g}",
            do="divide by the sum",
        )  # fmt: skip
    return found / found.sum()
