"""What all posteriors over weights share: predictions, and the check that the network is still the one fitted."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lapis.batches import Inputs
from lapis.errors import DataError, ModelError, OptionError
from lapis.evidence import TangentMode, Tuning
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.posteriors.predicting import linearised as functional
from lapis.posteriors.predicting import sampled
from lapis.predictions import LatentGaussian, LatentSamples, Prediction
from lapis.predictions import predict as predict_outputs
from lapis.priors import Prior, WeightPrior, as_prior

FULL_COVARIANCE = 32
"""Up to this many outputs, predictions hold the full covariance between outputs unless told otherwise."""

DRAWN_NETWORKS = 20
"""Networks of a sampled prediction, when their number is not given."""


Self = TypeVar("Self", bound="GaussianPosterior")


class Posterior(ABC):
    """A distribution over the chosen weights, centred on the trained ones; a value: methods return new posteriors."""

    network: Network
    likelihood: Likelihood
    fitted_likelihood: Likelihood
    prior: Prior
    weight_prior: WeightPrior
    structure: Any
    mean: Tensor
    fingerprint: str
    temperature: float
    memory_budget: int

    @property
    def n_weights(self) -> int:
        return self.network.size

    @property
    @abstractmethod
    def n_data(self) -> int: ...

    @property
    @abstractmethod
    def n_outputs(self) -> int:
        """Outputs of the network at one position."""

    @property
    @abstractmethod
    def signature(self) -> str:
        """Shapes and dtypes of the inputs seen at the fit, for messages."""

    def __repr__(self) -> str:
        size = f"{self.n_weights:,} weights, {self.n_data:,} examples"
        return f"<{self.structure} {type(self).__name__}, {size}, {self.likelihood.name}>"

    @abstractmethod
    def sample(self, n: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the weights, (n, P)."""

    @abstractmethod
    def _outputs(self, inputs: Inputs, kind: functional.Kind) -> tuple[LatentGaussian, torch.Size]:
        """The linearised network's outputs at checked inputs, and the raw output's shape."""

    def _full_by_default(self) -> bool:
        """Whether predictions hold the covariance between an example's outputs when nothing is asked for."""
        return self.n_outputs <= FULL_COVARIANCE

    def functional_variance(self, x: Inputs, diagonal: bool = False) -> Tensor:
        """J Sigma J^T of the outputs at each example: (B, C, C), or its diagonal (B, C) laid out as the outputs are.

        Outputs with positions give one matrix a position, (B, *positions, C, C).
        """
        latent, shape = self._linearised(x, "diagonal" if diagonal else "full")
        if latent.covariance is not None:
            return self.likelihood.spread(latent.covariance, shape)
        return self.likelihood.layout(latent.variance, shape if len(shape) > 1 else (*shape, 1))

    def functional_covariance(self, x: Inputs) -> Tensor:
        """Covariance of all outputs of all examples with each other: (B, C, B, C), positions behind each B."""
        latent, shape = self._linearised(x, "joint")
        assert latent.joint is not None
        one = (latent.mean.shape[0], *self.likelihood.positions(shape), latent.mean.shape[-1])
        return latent.joint.reshape(*one, *one)

    def predict(
        self,
        x: Inputs,
        method: Literal["linearised", "sampled"] = "linearised",
        link: Literal["probit", "mc", "bridge"] | None = None,
        samples: int | None = None,
        generator: torch.Generator | None = None,
        covariance: Literal["full", "diagonal"] | None = None,
        joint: bool = False,
    ) -> Prediction:
        """The predictive distribution at `x`.

        Args:
            method: "linearised" (the network's tangent at t, exact Gaussian outputs) or "sampled" (drawn networks).
            link: for classification, how Gaussian logits become probabilities: "probit" (default), "mc", "bridge".
            samples: drawn networks (default 20), or Monte Carlo draws of the link (default 256).
            generator: source of randomness; seeded with 0 when not given.
            covariance: between an example's outputs, or variances alone; full by default up to 32 outputs.
            joint: covariance between examples too; `log_prob` is then that of the whole batch.
        """
        if method == "sampled":
            if covariance is not None or joint:
                raise OptionError(
                    "Sampled predictions hold draws, not covariances",
                    expected="covariance and joint left out",
                    got=f"covariance={covariance!r}, joint={joint}",
                    do='use method="linearised"',
                )
            return self._predict_sampled(x, link, samples, generator)
        if method != "linearised":
            raise OptionError("Unknown method", expected='"linearised" or "sampled"', got=repr(method), do="choose one")
        if covariance not in (None, "full", "diagonal"):
            raise OptionError(
                "Unknown covariance", expected='"full" or "diagonal"', got=repr(covariance), do="choose one"
            )
        full = covariance == "full" or (covariance is None and self._full_by_default())
        latent, shape = self._linearised(x, "joint" if joint else "full" if full else "diagonal")
        latent = replace(latent, raw_shape=shape)
        return predict_outputs(self.likelihood, latent, link=link, samples=samples, generator=generator)

    def _predict_sampled(
        self, x: Inputs, link: str | None, samples: int | None, generator: torch.Generator | None
    ) -> Prediction:
        self._check_model()
        inputs = functional.check_inputs(x, self.network, self.signature)
        count = self._networks() if samples is None else samples
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise OptionError("No networks to draw", expected="samples >= 1", got=repr(count), do="ask for some draws")
        source = generator or torch.Generator(self.network.device).manual_seed(0)
        network = (self.network, self.likelihood.canonical, self.n_outputs)
        if sampled.are_small(self.network, count):
            values, shape = sampled.together(*network, self.sample(count, generator=source), inputs)
        else:
            values, shape = sampled.one_by_one(*network, partial(self._draws, count, source), inputs)
        return predict_outputs(self.likelihood, LatentSamples(values, raw_shape=shape), link=link)

    def _networks(self) -> int:
        """Networks of a sampled prediction, when their number is not given."""
        return DRAWN_NETWORKS

    def _draws(self, n: int, generator: torch.Generator, inputs: Inputs) -> Iterable[Mapping[str, Tensor]]:
        """Parameters of n networks of which the drawn part is to see `inputs`, one in memory at a time."""
        return (self.network.unflatten(self.sample(1, generator=generator)[0]) for _ in range(n))

    def _linearised(self, x: Inputs, kind: functional.Kind) -> tuple[LatentGaussian, torch.Size]:
        self._check_model()
        return self._outputs(functional.check_inputs(x, self.network, self.signature), kind)

    def _check_model(self) -> None:
        """Refuse to go on with a network that is not the one fitted."""
        if not self.network.equals(self.mean) or not self.network.holds(self.fingerprint):
            raise ModelError(
                "The network has changed since the fit",
                expected="every weight, frozen ones too, and every buffer as it was",
                got="other values",
                do="fit again, or load the old state back",
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior to one file of numbers and JSON, for `lapis.load(path, model)`. Never half a file."""
        from lapis.posteriors.storage import save

        save(self, path)


class GaussianPosterior(Posterior):
    """N(mean, (scale * curvature + prior)^-1), whatever form the curvature has."""

    curvature: Any
    """Sums over data: has `statistics`, `n_data`, `outputs`, `signature` and `digest` in every form."""
    tuning: Tuning | None
    tangent: TangentMode | None

    @property
    def n_data(self) -> int:
        return int(self.curvature.n_data)

    @property
    def n_outputs(self) -> int:
        return int(self.curvature.outputs)

    @property
    def signature(self) -> str:
        return str(self.curvature.signature)

    @cached_property
    def scale(self) -> Tensor:
        """What the stored curvature is multiplied by: changed noise, and temperature."""
        scale = torch.as_tensor(self.likelihood.curvature_scale(self.fitted_likelihood), device=self.network.device)
        return scale.double() / self.temperature

    @abstractmethod
    def _logdet(self) -> Tensor:
        """log |scale * curvature + prior|, 0-d float64."""

    @abstractmethod
    def _squared_distance(self, deviations: Tensor) -> Tensor:
        """|d|^2 in the metric of the posterior precision, (n,), for deviations d (n, P) in float64."""

    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(theta) for weights (P,) or (n, P); its constant is as exact as the log evidence is."""
        if theta.shape[-1] != self.n_weights or theta.dim() > 2:
            raise DataError(
                "These are no weight vectors",
                expected=f"(..., {self.n_weights})",
                got=str(tuple(theta.shape)),
                do="pass flat weights",
            )
        quadratic = self._squared_distance(theta.reshape(-1, self.n_weights).double() - self.mean.double())
        constant = self._logdet() - self.n_weights * math.log(2 * math.pi)
        return (0.5 * (constant - quadratic)).reshape(theta.shape[:-1])

    @abstractmethod
    def effective_parameters(self) -> Tensor:
        """gamma = tr(A^-1 (A - Lambda)): how many weights the data determine."""

    def log_likelihood(self) -> Tensor:
        """log p(D | t), with all constants."""
        return self.likelihood.log_likelihood(self.curvature.statistics)

    def evidence_point(self) -> tuple[Tensor, Tensor]:
        """Weights (P,) that the evidence is taken at, theta* or t, and the likelihood's statistics there."""
        if self.tangent is not None:
            return self.tangent.weights, self.tangent.statistics
        return self.mean, self.curvature.statistics

    @property
    def mode(self) -> Tensor | None:
        """theta*, (P,) float64, after `at_tangent_mode`."""
        return None if self.tangent is None else self.tangent.weights

    def _evidence(self, logdet: Tensor) -> Tensor:
        """log p(D) when log |A| is `logdet`."""
        prior = self.weight_prior
        weights, statistics = self.evidence_point()
        distance = (prior.precision * prior.squared_distance(weights)).sum()
        fit = self.likelihood.log_likelihood(statistics) / self.temperature
        return fit + 0.5 * (prior.logdet() - distance - logdet)

    def log_evidence(self) -> Tensor:
        """log p(D) ~ log p(D | t) - 1/2 |t - m|^2_Lambda + 1/2 log |Lambda| - 1/2 log |A|, 0-d float64.

        After `at_tangent_mode` the first two terms are those of the tangent model at theta*. Exact for linear Gaussian
        models at their mode. Differentiable in the prior precision and the noise, when these require grad.
        """
        return self._evidence(self._logdet())

    def _check_prior(self, prior: WeightPrior) -> None:
        """Refuse a prior that the structure cannot hold; most take any."""

    def _changed(self: Self, **changes: Any) -> Self:
        """A copy with other fields; what was found for the old ones is dropped."""
        return replace(self, **changes, tuning=None, tangent=None)  # type: ignore[type-var]

    def with_prior(self: Self, prior: Prior | float | Tensor) -> Self:
        """The posterior under another prior; no pass over data. The evidence is taken at t again."""
        chosen = as_prior(prior)
        resolved = chosen.resolve(self.network)
        self._check_prior(resolved)
        if resolved.differs_in_precision_only(self.weight_prior):
            resolved = self.weight_prior.with_precision(resolved.precision)
        return self._changed(prior=chosen, weight_prior=resolved)

    def with_noise(self: Self, noise: float | Tensor) -> Self:
        """The posterior under another Gaussian noise (standard deviation); no pass over data."""
        changed = self._changed(likelihood=self.likelihood.with_noise(noise))
        changed.scale  # noqa: B018  (noise of other proportions is refused here, not at the first use)
        return changed

    def with_temperature(self: Self, temperature: float) -> Self:
        """The posterior at another temperature; no pass over data."""
        check_temperature(temperature)
        return self._changed(temperature=temperature)

    def _summary(self, evidence: str, gamma: str, choices: Sequence[str]) -> str:
        precision = self.weight_prior.precision.detach()
        spread = f"{float(precision.min()):.4g}" + (f" .. {float(precision.max()):.4g}" if len(precision) > 1 else "")
        lines = [
            f"{self.structure} Laplace posterior over {self.n_weights:,} weights from {self.n_data:,} examples",
            f"likelihood            {self.likelihood!r}",
            f"prior precision       {spread} ({len(precision)} group{'s' if len(precision) > 1 else ''})",
            f"log evidence          {evidence}",
            f"effective parameters  {gamma}",
            *(f"note                  {choice}" for choice in choices),
        ]
        return "\n".join(lines)


def check_draws(n: int, generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The generator to draw from (seed 0 when none is given), after checking that n draws can be asked for."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise OptionError("Nothing to sample", expected="a number n >= 1", got=repr(n), do="ask for some draws")
    return generator or torch.Generator(device).manual_seed(0)


def check_temperature(temperature: float) -> None:
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature > 0):
        raise OptionError(
            "Bad temperature", expected="a positive number", got=repr(temperature), do="use 1 for Bayes' rule"
        )
