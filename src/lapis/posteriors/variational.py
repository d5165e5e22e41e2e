"""The posterior of variational inference: the Gaussian with the highest ELBO, for the network as it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.posteriors.diagnosis.data import Seen
from lapis.posteriors.diagnosis.report import Notes
from lapis.posteriors.evidences import Evidence
from lapis.posteriors.factored import FactoredPosterior
from lapis.posteriors.posterior import Facts, State
from lapis.priors import WeightPrior
from lapis.schema import record


@dataclass(frozen=True)
class Inference:
    """The record of a variational fit."""

    elbo: float
    """E_q[log p(D | theta)] - KL(q | prior) of the result, nats."""
    elbo_error: float
    """Standard error of `elbo`, from passes over all data with fresh draws; zero where nothing had to be drawn."""
    divergence: float
    """KL(q | prior), nats."""
    trace: tuple[float, ...]
    """Estimates of the ELBO during the fit, each the mean over an equal share of the steps."""
    steps: int
    converged: bool
    """Whether the ELBO had stopped climbing before the learning rate went down."""
    reason: str
    each_example: tuple[str, ...]
    """Parameters that were drawn anew for every example; all others once for each forward pass."""
    tuned: bool = False
    """Whether prior precisions were tuned by the ELBO."""
    noise: bool = False
    """Whether the Gaussian noise was learnt by the ELBO."""
    digest: int = 0
    """Fingerprint of the data."""

    def __post_init__(self) -> None:
        for name in ("trace", "each_example"):  # JSON turns tuples into lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def __str__(self) -> str:
        state = "converged" if self.converged else "stopped"
        return f"variational inference: {state} after {self.steps:,} steps ({self.reason}); ELBO {self.elbo:.4f}"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class VariationalPosterior(FactoredPosterior):
    """q(theta) = N(mean, diag(deviation^2) + F^T F) with the highest ELBO; made by `lapis.variational`.

    Predictions average drawn networks. With method="linearised" the network is linearised at the variational mean,
    not at the module's weights: f(x; mean) + J(x; mean) (theta - mean).
    """

    kind: ClassVar[str] = "variational"

    weight_prior: WeightPrior
    """With the tuned precisions, if they were tuned."""
    inference: Inference

    def elbo(self) -> Tensor:
        """E_q[log p(D | theta)] - KL(q | prior), 0-d float64: a lower bound of log p(D).

        An estimate with standard error `inference.elbo_error`; exact for networks of one linear layer with Gaussian
        noise.
        """
        return torch.tensor(self.inference.elbo, dtype=torch.float64, device=self.network.device)

    def state(self) -> State:
        """Mean, covariance, prior and record."""
        moments, prior = super().state().tensors, self.weight_prior
        return State({**prior.config(), "inference": asdict(self.inference)}, {**moments, **prior.tensors()})

    @classmethod
    def from_state(cls, state: State, network: Network, likelihood: Likelihood, facts: Facts) -> VariationalPosterior:
        """The posterior with the stored moments."""
        return cls(
            network=network,
            likelihood=likelihood,
            facts=facts,
            **cls._moments(state, network),
            weight_prior=WeightPrior.from_file(state.config, state.tensors, network),
            inference=record(Inference, state.entry("inference", dict)),
        )

    def _fitted_to(self, digest: int) -> bool:
        return digest == self.inference.digest

    def _evidence_of_data(self) -> Evidence:
        return Evidence(self.elbo(), self.inference.digest, "the ELBO of variational inference")

    def _advice(self, less: bool) -> str:
        return (
            "Tune prior and noise by the ELBO (tune=True, noise=True), or raise steps."
            if less
            else "Learn the noise (noise=True), use a smaller prior precision, or a covariance with rank=10."
        )

    def _examine(self, notes: Notes, seen: Seen | None, progress: bool | None) -> None:
        record, precision = self.inference, self.weight_prior.precision
        error = f"standard error {record.elbo_error:.2g}"
        notes.value("elbo", "ELBO", record.elbo, f"below log p(D); {error}")
        notes.value("divergence", "KL(q | prior)", record.divergence, f"nats, for {self.n_weights:,} weights")
        low, high = float(precision.min()), float(precision.max())
        how = "tuned by the ELBO" if record.tuned else "not tuned"
        notes.value("precision", "prior precision", low, how if low == high else f"to {high:.4g} by group; {how}")
        if self.likelihood.noise is not None:
            noise = float(self.likelihood.noise.detach().mean())
            notes.value("noise", "noise", noise, "learnt by the ELBO" if record.noise else "as given")
        if not record.converged:
            notes.finding(f"Variational inference stopped before it converged: {record.reason}.", "Raise steps.")
