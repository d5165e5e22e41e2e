"""A posterior over weights of -1 and +1: independent signs, predictions by drawn binary networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.posteriors.over_weights import WeightPosterior
from lapis.posteriors.posterior import Facts, State


@dataclass(frozen=True, eq=False, repr=False)
class BinaryPosterior(WeightPosterior):
    """q(w = +1) = sigmoid(2 natural) for each weight on its own; made by `lapis.optim.BayesBiNN`.

    Running statistics of batch norm are the module's own for every draw.

    Args:
        natural: parameters lambda (P,), half the log odds of +1.
    """

    kind: ClassVar[str] = "binary"

    natural: Tensor

    def __post_init__(self) -> None:
        if tuple(self.natural.shape) != (self.n_weights,):
            raise DataError(
                "The natural parameters do not fit the weights",
                expected=f"a vector ({self.n_weights},)",
                got=str(tuple(self.natural.shape)),
                do="pass one number for each chosen weight",
            )

    @property
    def mean(self) -> Tensor:
        """E[w] = tanh(natural), (P,)."""
        return self.natural.tanh()

    @property
    def mode(self) -> Tensor:
        """The most probable binary network, (P,)."""
        return torch.where(self.natural >= 0, 1.0, -1.0).to(self.natural.dtype)

    def marginal_variance(self) -> Tensor:
        """1 - E[w]^2 of each weight, (P,)."""
        return 1 - self.mean.square()

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Binary weight vectors, (samples, P). The default generator has seed 0."""
        source = self.source(samples, generator)
        uniform = [
            torch.rand(self.n_weights, dtype=self.natural.dtype, generator=source, device=source.device)
            for _ in range(samples)
        ]
        chance = torch.sigmoid(2 * self.natural)
        return torch.where(torch.stack(uniform).to(chance.device) < chance, 1.0, -1.0).to(chance.dtype)

    def state(self) -> State:
        """The natural parameters."""
        return State(tensors={"natural": self.natural})

    @classmethod
    def from_state(cls, state: State, network: Network, likelihood: Likelihood, facts: Facts) -> BinaryPosterior:
        """The posterior with the stored parameters."""
        return cls(network, likelihood, facts, state.tensor("natural", (network.size,), network.dtype))
