"""The Laplace posterior: a Gaussian over weights, centred on the trained ones, with curvature + prior as precision."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lapis.batches import Inputs, batches
from lapis.curvature.block import BlockGaussian
from lapis.curvature.fit import Curvature, accumulate
from lapis.curvature.spectrum import GroupedSpectrum
from lapis.curvature.structure import Structure, grouped_spectrum
from lapis.errors import DataError, MemoryBudgetError, ModelError, OptionError
from lapis.evidence import TangentMode, Training, Tuning
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.posteriors import functional, tuning
from lapis.posteriors.drawn import DrawnNetwork, white_noise
from lapis.predictions import LatentGaussian, LatentSamples, Prediction
from lapis.predictions import predict as predict_outputs
from lapis.priors import Groups, Prior, WeightPrior, as_prior

FULL_COVARIANCE = 32
"""Up to this many outputs, predictions hold the full covariance between outputs unless told otherwise."""


@dataclass(frozen=True, eq=False)
class LaplacePosterior:
    """N(mean, (scale * curvature + prior)^-1) over the chosen weights; a value: methods return new posteriors.

    Made by `lapis.laplace`. `choices` says what was decided on the user's behalf, `tuning` how the last `tune` went,
    `tangent` the mode of the tangent model when the evidence is taken there (`at_tangent_mode`),
    `training` how `lapis.train` went.
    """

    network: Network
    likelihood: Likelihood
    fitted_likelihood: Likelihood
    prior: Prior
    weight_prior: WeightPrior
    curvature: Curvature
    structure: Structure
    mean: Tensor
    fingerprint: str
    temperature: float
    memory_budget: int
    choices: tuple[str, ...] = ()
    tuning: Tuning | None = None
    tangent: TangentMode | None = None
    training: Training | None = None

    # what it is ------------------------------------------------------------------------------------

    @property
    def n_weights(self) -> int:
        return self.network.size

    @property
    def n_data(self) -> int:
        return self.curvature.n_data

    @cached_property
    def scale(self) -> Tensor:
        """What the stored curvature is multiplied by: changed noise, and temperature."""
        scale = torch.as_tensor(self.likelihood.curvature_scale(self.fitted_likelihood), device=self.network.device)
        return scale.double() / self.temperature

    @cached_property
    def gaussians(self) -> list[BlockGaussian]:
        """The posterior of each block of weights."""
        return [block.gaussian(self.weight_prior, self.scale) for block in self.curvature.blocks]

    def spectrum(self) -> GroupedSpectrum | None:
        """Eigenvalues of the curvature by prior group, where they are known and decide the log-determinant."""
        return grouped_spectrum(self.curvature.blocks, self.weight_prior)

    def summary(self) -> str:
        """A few lines: size, structure, prior, evidence, and choices made."""
        precision = self.weight_prior.precision.detach()
        spread = f"{float(precision.min()):.4g}" + (f" .. {float(precision.max()):.4g}" if len(precision) > 1 else "")
        lines = [
            f"{self.structure} Laplace posterior over {self.n_weights:,} weights from {self.n_data:,} examples",
            f"likelihood            {self.likelihood!r}",
            f"prior precision       {spread} ({len(precision)} group{'s' if len(precision) > 1 else ''})",
            f"log evidence          {float(self.log_evidence().detach()):.4f}",
            f"effective parameters  {float(self.effective_parameters().detach()):.2f}",
            *(f"note                  {choice}" for choice in self.choices),
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        size = f"{self.n_weights:,} weights, {self.n_data:,} examples"
        return f"<{self.structure} LaplacePosterior, {size}, {self.likelihood.name}>"

    # over weights ----------------------------------------------------------------------------------

    def _to_flat(self, parts: list[Tensor]) -> Tensor:
        """Vectors (..., size) of each block -> (..., P)."""
        flat = parts[0].new_empty(*parts[0].shape[:-1], self.n_weights)
        for block, part in zip(self.curvature.blocks, parts, strict=True):
            for site, piece in zip(
                block.sites, torch.split(part, [site.size for site in block.sites], -1), strict=True
            ):
                site.scatter(piece.reshape(*piece.shape[:-1], *site.shape), flat, self.network)
        return flat

    def _to_blocks(self, vectors: Tensor) -> list[Tensor]:
        """(..., P) -> (..., size) for each block."""
        return [
            torch.cat([site.gather(vectors, self.network).flatten(vectors.dim() - 1) for site in block.sites], -1)
            for block in self.curvature.blocks
        ]

    def sample(self, n: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the weights, (n, P); `lapis.unflatten` turns them into parameter dictionaries.

        Without a generator the draws are those of seed 0.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise OptionError("Nothing to sample", expected="a number n >= 1", got=repr(n), do="ask for some draws")
        generator = generator or torch.Generator(self.network.device).manual_seed(0)
        # drawn one by one, so that n draws at once and n draws in turn are the same
        noise = torch.stack([white_noise(self.network, generator) for _ in range(n)])
        parts = torch.split(noise, [block.size for block in self.curvature.blocks], -1)
        draws = [g.color(part).to(self.mean.dtype) for g, part in zip(self.gaussians, parts, strict=True)]
        return self._to_flat(draws).add_(self.mean)

    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(theta) for weights (P,) or (n, P)."""
        if theta.shape[-1] != self.n_weights or theta.dim() > 2:
            raise DataError(
                "These are no weight vectors",
                expected=f"(..., {self.n_weights})",
                got=str(tuple(theta.shape)),
                do="pass flat weights",
            )
        deviations = self._to_blocks(theta.reshape(-1, self.n_weights).double() - self.mean.double())
        quadratic = sum((g.multiply(part) * part).sum(-1) for g, part in zip(self.gaussians, deviations, strict=True))
        constant = self._logdet() - self.n_weights * math.log(2 * math.pi)
        return (0.5 * (constant - quadratic)).reshape(theta.shape[:-1])

    def marginal_variance(self) -> Tensor:
        """Variance of each weight, (P,)."""
        return self._to_flat([gaussian.variance() for gaussian in self.gaussians]).to(self.mean.dtype)

    def precision(self) -> Tensor:
        """The whole precision matrix (P, P), float64: for checking, on small networks."""
        needed = 8 * self.n_weights**2
        if needed > self.memory_budget:
            raise MemoryBudgetError(
                "The precision matrix does not fit",
                expected=f"at most {self.memory_budget:,} bytes (memory_budget)",
                got=f"{needed:,} bytes",
                do="use marginal_variance(), sample() or log_prob()",
            )
        matrix = self.mean.new_zeros(self.n_weights, self.n_weights, dtype=torch.float64)
        places = self._to_blocks(torch.arange(self.n_weights, device=self.network.device))
        for gaussian, place in zip(self.gaussians, places, strict=True):
            matrix[place[:, None], place] = gaussian.matrix()
        return matrix

    # evidence --------------------------------------------------------------------------------------

    def _logdet(self) -> Tensor:
        """log |A|, on eigenvalues where these are at hand."""
        spectrum = self.spectrum()
        total = None if spectrum is None else spectrum.logdet(self.weight_prior.precision, self.scale)
        if total is not None and bool(torch.isfinite(total)):
            return total.to(self.network.device)
        return torch.stack([gaussian.logdet() for gaussian in self.gaussians]).sum()

    def log_likelihood(self) -> Tensor:
        """log p(D | t), with all constants."""
        return self.likelihood.log_likelihood(self.curvature.statistics)

    def evidence_point(self) -> tuple[Tensor, Tensor]:
        """Weights (P,) that the evidence is taken at, theta* or t, and the likelihood's statistics there."""
        if self.tangent is not None:
            return self.tangent.weights, self.tangent.statistics
        return self.mean, self.curvature.statistics

    def log_evidence(self) -> Tensor:
        """log p(D) ~ log p(D | t) - 1/2 |t - m|^2_Lambda + 1/2 log |Lambda| - 1/2 log |A|, 0-d float64.

        After `at_tangent_mode` the first two terms are those of the tangent model at theta*. Exact for linear Gaussian
        models at their mode. Differentiable in the prior precision and the noise, when these require grad.
        """
        prior = self.weight_prior
        weights, statistics = self.evidence_point()
        distance = (prior.precision * prior.squared_distance(weights)).sum()
        fit = self.likelihood.log_likelihood(statistics) / self.temperature
        return fit + 0.5 * (prior.logdet() - distance - self._logdet())

    def effective_parameters(self, *, per_group: bool = False) -> Tensor:
        """gamma = tr(A^-1 (A - Lambda)): how many weights the data determine; in all, or for each prior group."""
        prior = self.weight_prior
        kept = 1 - prior.vector() * self._to_flat([gaussian.variance() for gaussian in self.gaussians])
        if not per_group:
            return kept.sum()
        return torch.zeros_like(prior.precision).index_add(0, prior.group_index(), kept)

    def tune(
        self,
        *,
        method: Literal["gradient", "fixed_point"] = "gradient",
        groups: Groups | None = None,
        noise: bool = True,
        max_iterations: int = 200,
        tolerance: float | None = None,
    ) -> LaplacePosterior:
        """The posterior whose prior precisions, and Gaussian noise, maximise the evidence.

        At t no pass over data is made. After `at_tangent_mode` theta* follows every change of prior and noise, so that
        the result is stationary in both. `tuning` on the result tells how it went.

        Args:
            method: "gradient" (on logarithms, by Newton's method where eigenvalues decide the evidence, else L-BFGS) or
                "fixed_point" (MacKay: alpha_g = gamma_g / |theta_g - m_g|^2, noise^2 = SSE / (n - gamma), damped).
            groups: group the prior anew first: see `lapis.Prior`.
            noise: tune it too, where there is one. A noise for each output keeps its proportions.
            tolerance: on the relative error of MacKay's equations (gradient) or on the steps in logarithms.
        """
        return tuning.tune(self, method, groups, noise, max_iterations, tolerance)

    def at_tangent_mode(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        tolerance: float | None = None,
        max_products: int = 2000,
    ) -> LaplacePosterior:
        """The posterior whose evidence is taken at the mode theta* of the tangent linear model; `tangent` tells of it.

        theta* = argmin sum_n l(f_n + J_n (theta - t), y_n) + 1/2 |theta - m|^2_Lambda under the present prior and
        noise, for the data of the fit. t stays the linearisation point, `mean` and the centre of predictions. Trained
        networks are seldom at a mode, and with normalisation layers there is none: the evidence at t then misleads.
        `at_tangent_mode(data).tune()` goes to the joint optimum of theta*, prior and noise.
        """
        self._check_model()
        problem = tuning.tangent_problem(self, data, batch_size, tolerance, max_products)
        return tuning.checked(tuning.at_mode(self, problem))

    @property
    def mode(self) -> Tensor | None:
        """theta*, (P,) float64, after `at_tangent_mode`."""
        return None if self.tangent is None else self.tangent.weights

    def solve(self, vector: Tensor) -> Tensor:
        """Covariance times a weight vector (P,), float64."""
        parts = self._to_blocks(vector.double()[None])
        return self._to_flat([gaussian.solve(part) for gaussian, part in zip(self.gaussians, parts, strict=True)])[0]

    # changes ---------------------------------------------------------------------------------------

    def with_prior(self, prior: Prior | float | Tensor) -> LaplacePosterior:
        """The posterior under another prior; no pass over data. The evidence is taken at t again."""
        chosen = as_prior(prior)
        resolved = chosen.resolve(self.network)
        for block in self.curvature.blocks:
            block.check(resolved)
        if resolved.differs_in_precision_only(self.weight_prior):
            resolved = self.weight_prior.with_precision(resolved.precision)
        return replace(self, prior=chosen, weight_prior=resolved, tuning=None, tangent=None)

    def with_noise(self, noise: float | Tensor) -> LaplacePosterior:
        """The posterior under another Gaussian noise (standard deviation); no pass over data."""
        changed = replace(self, likelihood=self.likelihood.with_noise(noise), tuning=None, tangent=None)
        changed.scale  # noqa: B018  (noise of other proportions is refused here, not at the first use)
        return changed

    def with_temperature(self, temperature: float) -> LaplacePosterior:
        """The posterior at another temperature; no pass over data."""
        check_temperature(temperature)
        return replace(self, temperature=temperature, tuning=None, tangent=None)

    def update(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> LaplacePosterior:
        """The posterior that has seen `data` as well: curvature is a sum over data."""
        self._check_model()
        sums = self.curvature.clone()
        stream, total = batches(data, dtype=self.network.dtype, device=self.network.device, batch_size=batch_size)
        accumulate(
            sums,
            self.network,
            self.fitted_likelihood,
            stream,
            total=total,
            generator=generator or torch.Generator(self.network.device).manual_seed(self.n_data),
            memory_budget=self.memory_budget,
            progress=progress,
        )
        return replace(self, curvature=sums, tuning=None, tangent=None)

    # predictions -----------------------------------------------------------------------------------

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
            self._check_model()
            inputs = functional.check_inputs(x, self.network, self.curvature.signature)
            drawn = DrawnNetwork(self.network, self.curvature.blocks, self.gaussians, self.mean, inputs)
            values, shape = functional.sampled(drawn, self.curvature, inputs, samples, generator)
            return predict_outputs(self.likelihood, LatentSamples(values), raw_shape=shape, link=link)
        if method != "linearised":
            raise OptionError("Unknown method", expected='"linearised" or "sampled"', got=repr(method), do="choose one")
        if covariance not in (None, "full", "diagonal"):
            raise OptionError(
                "Unknown covariance", expected='"full" or "diagonal"', got=repr(covariance), do="choose one"
            )
        full = covariance == "full" or (covariance is None and self.curvature.outputs <= FULL_COVARIANCE)
        latent, shape = self._linearised(x, "joint" if joint else "full" if full else "diagonal")
        return predict_outputs(
            self.likelihood, latent, raw_shape=shape, link=link, samples=samples, generator=generator
        )

    def _linearised(self, x: Inputs, kind: functional.Kind) -> tuple[LatentGaussian, torch.Size]:
        self._check_model()
        inputs = functional.check_inputs(x, self.network, self.curvature.signature)
        return functional.linearised(self.network, self.curvature, self.gaussians, inputs, kind, self.memory_budget)

    def _check_model(self) -> None:
        """Refuse to go on with a network that is not the one fitted."""
        if not torch.equal(self.network.flat(), self.mean) or not self.network.holds(self.fingerprint):
            raise ModelError(
                "The network has changed since the fit",
                expected="every weight, frozen ones too, and every buffer as it was",
                got="other values",
                do="fit again, or load the old state back",
            )

    # files -----------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior to one file of numbers and JSON, for `lapis.load(path, model)`. Never half a file."""
        from lapis.posteriors.storage import save

        save(self, path)


def check_temperature(temperature: float) -> None:
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature > 0):
        raise OptionError(
            "Bad temperature", expected="a positive number", got=repr(temperature), do="use 1 for Bayes' rule"
        )
