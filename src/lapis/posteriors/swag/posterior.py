"""SWAG (Maddox et al. 2019): a Gaussian fitted to the weights that stochastic gradient descent passes through.

theta = mean + (Sigma_d^(1/2) z1 + D z2 / sqrt(K - 1)) / sqrt(2), with z1, z2 ~ N(0, I): half of the covariance is the
variance Sigma_d of each weight over all snapshots, half is D D^T / (K - 1) for the last K deviations D from the
*running* mean. With rank 0 it is the diagonal one, theta = mean + Sigma_d^(1/2) z1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from lapis.batches import Batch, Inputs, digest
from lapis.curvature.outputs import check_outputs
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.network.batch_norm import renewed_statistics
from lapis.options import check_arguments
from lapis.posteriors.over_weights import WeightPosterior
from lapis.posteriors.posterior import Facts, LatentKind, State
from lapis.posteriors.same_data import same_batches
from lapis.predictions import Latent, LatentSamples
from lapis.schema import wrong

KEPT_STATISTICS = 256
"""Drawn networks whose batch-norm statistics are remembered: inputs in many parts ask for the same networks again."""


@dataclass(frozen=True, eq=False, repr=False)
class SWAGPosterior(WeightPosterior):
    """N(mean, (diag(variance) + D^T D / (K - 1)) / 2) over all trainable weights; made by `SWAG.posterior`."""

    kind: ClassVar[str] = "swag"

    mean: Tensor
    """(P,)."""
    variance: Tensor
    """Of each weight over all snapshots, (P,)."""
    deviations: Tensor
    """The last K deviations from the running mean, (K, P); none in the diagonal case."""
    collected: int
    """Snapshots behind it."""

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the weights, (samples, P). The default generator has seed 0."""
        source = self.source(samples, generator)
        return torch.stack([self._draw(source) for _ in range(samples)])

    def _draw(self, source: torch.Generator) -> Tensor:
        noise = torch.randn(
            self.n_weights + len(self.deviations), dtype=self.mean.dtype, generator=source, device=source.device
        ).to(self.mean.device)
        own, shared = noise[: self.n_weights], noise[self.n_weights :]
        draw = self.variance.sqrt() * own
        if len(self.deviations):
            draw = (draw + shared @ self.deviations / math.sqrt(len(self.deviations) - 1)) / math.sqrt(2)
        return self.mean + draw

    def marginal_variance(self) -> Tensor:
        """Variance of each weight, (P,)."""
        return marginal_variance(self.variance, self.deviations)

    def state(self) -> State:
        """Moments and deviations."""
        tensors = {"mean": self.mean, "variance": self.variance}
        if len(self.deviations):
            tensors["deviations"] = self.deviations
        return State({"collected": self.collected}, tensors)

    @classmethod
    def from_state(cls, state: State, network: Network, likelihood: Likelihood, facts: Facts) -> SWAGPosterior:
        """The posterior with these moments."""
        size, dtype = (network.size,), network.dtype
        mean = state.tensor("mean", size, dtype)
        variance = state.tensor("variance", size, dtype, least=0.0)
        deviations = mean[None][:0]
        if "deviations" in state.tensors:
            deviations = state.tensor("deviations", (-1, *size), dtype)
            if len(deviations) < 2:
                raise wrong("deviations", "at least two", str(len(deviations)))
        return cls(network, likelihood, facts, mean, variance, deviations, state.count("collected", least=2))


@dataclass(frozen=True, eq=False, repr=False)
class RenewedSWAGPosterior(SWAGPosterior):
    """SWAG for networks with batch norm, whose statistics are renewed for every drawn network by a pass over data."""

    kind: ClassVar[str] = "swag with batch norm"
    needs_data: ClassVar[bool] = True

    batches: Sequence[Batch] = ()
    _statistics: dict[bytes, dict[str, Tensor]] = field(default_factory=dict)
    """By the digest of the weights."""

    def statistics(self, weights: Tensor) -> dict[str, Tensor]:
        """Batch-norm buffers by name under these weights (P,), from one pass over the data."""
        check_arguments(RenewedSWAGPosterior.statistics, locals())
        key = hashlib.sha256(weights.detach().cpu().contiguous().numpy().data).digest()
        if key not in self._statistics:
            while len(self._statistics) >= KEPT_STATISTICS:
                del self._statistics[next(iter(self._statistics))]
            self._statistics[key] = renewed_statistics(self.network, self.network.unflatten(weights), self.batches)
        return self._statistics[key]

    def latent(
        self, inputs: Inputs, kind: LatentKind, samples: int | None, generator: torch.Generator | None
    ) -> Latent:
        """Outputs of drawn networks, each with its own statistics."""
        count = self._networks() if samples is None else samples
        outputs = []
        for weights in self.draws(count, self.source(count, generator)):
            state = {**self.network.unflatten(weights), **self.statistics(weights)}
            with self.network.prepared(), torch.no_grad():
                raw = self.network.call(inputs, state)
            outputs.append(self.likelihood.canonical(raw))
            check_outputs(outputs[-1], self.n_outputs)
        return LatentSamples(torch.stack(outputs), raw_shape=tuple(raw.shape))

    def _fitted_to(self, found: int) -> bool:
        return found == self._digest()

    def _digest(self) -> int:
        return sum(digest(batch.inputs, batch.targets) for batch in self.batches) % 2**64

    def state(self) -> State:
        """Moments and deviations, and the fingerprint of the data."""
        state = super().state()
        return State({**state.config, "digest": self._digest()}, state.tensors)

    @classmethod
    def from_state(cls, state: State, network: Network, likelihood: Likelihood, facts: Facts) -> RenewedSWAGPosterior:
        """The posterior with `state.data`; DataError unless their fingerprint is that of the data it was made with."""
        held = same_batches(state.data, network, state.count("digest", least=0), facts.n_data, None)
        plain = SWAGPosterior.from_state(state, network, likelihood, facts)
        return cls(
            network, likelihood, facts, plain.mean, plain.variance, plain.deviations, plain.collected, tuple(held)
        )


def marginal_variance(variance: Tensor, deviations: Tensor) -> Tensor:
    """diag((diag(variance) + D^T D / (K - 1)) / 2); the variance alone without deviations."""
    if not len(deviations):
        return variance
    return (variance + deviations.square().sum(0) / (len(deviations) - 1)) / 2
