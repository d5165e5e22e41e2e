"""The Laplace posterior: a Gaussian over weights, centred on the trained ones, with curvature + prior as precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lapis.batches import Inputs, batches
from lapis.curvature.accumulate import accumulate
from lapis.curvature.blocks.block import BlockGaussian
from lapis.curvature.blocks.partition import Structure, grouped_spectrum
from lapis.curvature.blocks.spectrum import GroupedSpectrum
from lapis.curvature.sums import Curvature
from lapis.errors import MemoryBudgetError
from lapis.evidence import TangentMode, Training, Tuning
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.posteriors.base import GaussianPosterior, check_draws
from lapis.posteriors.laplace import tuning_by_evidence as tuning
from lapis.posteriors.predicting import linearised as functional
from lapis.posteriors.predicting.drawn_network import DrawnNetwork, white_noise
from lapis.predictions import LatentGaussian
from lapis.priors import Groups, Prior, WeightPrior


@dataclass(frozen=True, eq=False, repr=False)
class LaplacePosterior(GaussianPosterior):
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

    @cached_property
    def gaussians(self) -> list[BlockGaussian]:
        """The posterior of each block of weights."""
        return [block.gaussian(self.weight_prior, self.scale) for block in self.curvature.blocks]

    def spectrum(self) -> GroupedSpectrum | None:
        """Eigenvalues of the curvature by prior group, where they are known and decide the log-determinant."""
        return grouped_spectrum(self.curvature.blocks, self.weight_prior)

    def summary(self) -> str:
        """A few lines: size, structure, prior, evidence, and choices made."""
        evidence = f"{float(self.log_evidence().detach()):.4f}"
        return self._summary(evidence, f"{float(self.effective_parameters().detach()):.2f}", self.choices)

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
        generator = check_draws(n, generator, self.network.device)
        # drawn one by one, so that n draws at once and n draws in turn are the same
        noise = torch.stack([white_noise(self.network, generator) for _ in range(n)])
        parts = torch.split(noise, [block.size for block in self.curvature.blocks], -1)
        draws = [g.color(part).to(self.mean.dtype) for g, part in zip(self.gaussians, parts, strict=True)]
        return self._to_flat(draws).add_(self.mean)

    def _squared_distance(self, deviations: Tensor) -> Tensor:
        pairs = zip(self.gaussians, self._to_blocks(deviations), strict=True)
        return torch.stack([(gaussian.multiply(part) * part).sum(-1) for gaussian, part in pairs]).sum(0)

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
        start: Tensor | None = None,
    ) -> LaplacePosterior:
        """The posterior whose evidence is taken at the mode theta* of the tangent linear model; `tangent` tells of it.

        theta* = argmin sum_n l(f_n + J_n (theta - t), y_n) + 1/2 |theta - m|^2_Lambda under the present prior and
        noise, for the data of the fit. t stays the linearisation point, `mean` and the centre of predictions. Trained
        networks are seldom at a mode, and with normalisation layers there is none: the evidence at t then misleads.
        `at_tangent_mode(data).tune()` goes to the joint optimum of theta*, prior and noise.

        Args:
            tolerance: nats, times the loss where that is above one, by which the loss may still fall; by default 1e-16
                for a float64 network and 1e-5 for float32.
            max_products: passes over the data, at most, for each theta*.
            start: weights (P,) to begin from; t when not given, or the prior's mean in the outputs' space.
        """
        self._check_model()
        problem = tuning.tangent_problem(self, data, batch_size, tolerance, max_products)
        return tuning.checked(tuning.at_mode(self, problem, problem.begin(start)))

    def solve(self, vectors: Tensor) -> Tensor:
        """Covariance times weight vectors (P,) or (k, P), float64."""
        parts = self._to_blocks(vectors.double().reshape(-1, self.n_weights))
        found = self._to_flat([gaussian.solve(part) for gaussian, part in zip(self.gaussians, parts, strict=True)])
        return found.reshape(vectors.shape)

    # changes ---------------------------------------------------------------------------------------

    def _check_prior(self, prior: WeightPrior) -> None:
        for block in self.curvature.blocks:
            block.check(prior)

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
        return self._changed(curvature=sums)

    # predictions -----------------------------------------------------------------------------------

    def _draws(self, n: int, generator: torch.Generator, inputs: Inputs) -> Iterable[Mapping[str, Tensor]]:
        drawn = DrawnNetwork(self.network, self.curvature.blocks, self.gaussians, self.mean, inputs)
        return (drawn.draw(generator) for _ in range(n))

    def _outputs(self, inputs: Inputs, kind: functional.Kind) -> tuple[LatentGaussian, torch.Size]:
        return functional.linearised(self.network, self.curvature, self.gaussians, inputs, kind, self.memory_budget)
