"""Gaussian posteriors with a diagonal plus low-rank covariance, about a mean that need not be the module's weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapis.batches import Inputs
from lapis.errors import DataError
from lapis.function_space.kernels import DiagonalKernel
from lapis.function_space.tangent import Tangent
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.posteriors.over_weights import GaussianPosterior
from lapis.posteriors.posterior import Facts, LatentKind, State
from lapis.posteriors.predicting.drawn_network import white_noise
from lapis.posteriors.predicting.linearised import by_solves
from lapis.predictions import LatentGaussian


@dataclass(frozen=True, eq=False, repr=False)
class FactoredPosterior(GaussianPosterior):
    """N(mean, diag(deviation^2) + F^T F): predictions by drawn networks, or linearised at `point`.

    The module's weights are only where the mean began. `point` is the mean unless somebody says otherwise: linearised
    predictions run the network there, not at the module's weights, which are restored afterwards.

    Args:
        deviation: standard deviations (P,) of the diagonal part, positive.
        factors: F (K, P), or None for independent weights.
    """

    kind: ClassVar[str] = "gaussian"
    methods: ClassVar[tuple[str, ...]] = ("sampled", "linearised")
    _runs_at_point: ClassVar[bool] = False

    deviation: Tensor
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = bool((self.deviation > 0).all())
        fits = tuple(self.deviation.shape) == (self.n_weights,) and positive
        if not fits or (self.factors is not None and self.factors.shape[1:] != (self.n_weights,)):
            raise DataError(
                "The posterior's covariance does not fit the weights",
                expected=f"positive deviations ({self.n_weights},), and factors (K, {self.n_weights}) or None",
                got=f"{tuple(self.deviation.shape)}{'' if positive else ', not all positive,'} and "
                f"{None if self.factors is None else tuple(self.factors.shape)}",
                do="pass one deviation for each chosen weight, and one row for each factor",
            )

    def state(self) -> State:
        """Mean and covariance."""
        tensors = {"mean": self.mean, "deviation": self.deviation}
        if self.point is not self.mean:
            tensors["point"] = self.point
        if self.factors is not None:
            tensors["factors"] = self.factors
        return State(tensors=tensors)

    @classmethod
    def from_state(cls, state: State, network: Network, likelihood: Likelihood, facts: Facts) -> FactoredPosterior:
        """The posterior with the stored moments."""
        return FactoredPosterior(network, likelihood, facts, **cls._moments(state, network))

    @staticmethod
    def _moments(state: State, network: Network) -> dict[str, Any]:
        """The fields of `state`."""
        size, dtype = (network.size,), network.dtype
        mean = state.tensor("mean", size, dtype)
        return {
            "mean": mean,
            "point": state.tensor("point", size, dtype) if "point" in state.tensors else mean,
            "deviation": state.tensor("deviation", size, dtype, least=0, above=True),
            "factors": state.tensor("factors", (-1, *size), dtype) if "factors" in state.tensors else None,
        }

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """mean + deviation z + F^T u with standard normal z and u, (samples, P)."""
        source = self.source(samples, generator)
        return torch.stack([self._draw(source) for _ in range(samples)])

    def _draw(self, source: torch.Generator) -> Tensor:
        drawn = self.mean + self.deviation.to(self.mean) * white_noise(self.network, source)
        if self.factors is None:
            return drawn
        u = torch.randn(len(self.factors), dtype=self.factors.dtype, generator=source, device=source.device)
        return drawn + (u.to(self.factors.device) @ self.factors).to(drawn)

    def marginal_variance(self) -> Tensor:
        """deviation^2 + sum_k F_k^2 of each weight, (P,)."""
        variance = self.deviation.square()
        return variance if self.factors is None else variance + self.factors.square().sum(0)

    def covariance_product(self, vectors: Tensor) -> Tensor:
        """Covariance times weight vectors (P,) or (k, P), float64."""
        wide = self.vectors(vectors).double().reshape(vectors.shape)
        product = wide * self.deviation.double().square()
        if self.factors is None:
            return product
        factors = self.factors.double()
        return product + (wide @ factors.mT) @ factors

    @cached_property
    def _scaled(self) -> Tensor:
        """F / deviation, (K, P) float64; (0, P) without factors."""
        if self.factors is None:
            return self.deviation.new_zeros(0, self.n_weights, dtype=torch.float64)
        return self.factors.double() / self.deviation.double()

    @cached_property
    def _root(self) -> Tensor:
        """The Cholesky factor of I + F D^-2 F^T, (K, K), which Woodbury's identities take."""
        inner = self._scaled @ self._scaled.mT
        root: Tensor = torch.linalg.cholesky(inner + torch.eye(len(inner), dtype=inner.dtype, device=inner.device))
        return root

    def _logdet(self) -> Tensor:
        return -2 * (self.deviation.double().log().sum() + self._root.diagonal().log().sum())

    def _squared_distance(self, deviations: Tensor) -> Tensor:
        white = deviations / self.deviation.double()
        explained: Tensor = torch.linalg.solve_triangular(self._root, self._scaled @ white.mT, upper=False)
        return white.square().sum(-1) - explained.square().sum(0)

    def _outputs(self, inputs: Inputs, kind: LatentKind) -> LatentGaussian:
        with self.network.at(self.point):
            return by_solves(
                self.network,
                self.likelihood.canonical,
                self.n_outputs,
                self.covariance_product,
                inputs,
                kind,
                self.facts.memory_budget,
            )

    def _weight_kernel(self, tangent: Tangent) -> DiagonalKernel:
        return DiagonalKernel(tangent, self.deviation.double().square(), self.factors)

    def _shift(self, inputs: Inputs) -> Tensor:
        with self.network.at(self.point):
            return super()._shift(inputs)
