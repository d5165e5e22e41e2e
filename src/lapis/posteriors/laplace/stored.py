"""The Laplace posterior with stored curvature: dense, diagonal, Kronecker-factored or low-rank blocks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapis.batches import Batch, Inputs
from lapis.curvature.accumulate import accumulate, accumulate_factors
from lapis.curvature.blocks.block import BlockGaussian
from lapis.curvature.blocks.leading import RANK_FRACTION, load_leading
from lapis.curvature.blocks.partition import grouped_spectrum
from lapis.curvature.blocks.scaled import ScaledGaussian
from lapis.curvature.blocks.spectrum import GroupedSpectrum
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.curvature.sums import Curvature
from lapis.errors import LapisWarning, OptionError, check_fits, users_level
from lapis.evidence import Training
from lapis.function_space.kernels import BlockKernel
from lapis.function_space.tangent import Tangent
from lapis.likelihoods import Gaussian, Likelihood
from lapis.network import Network, full_precision, outside_inference_mode
from lapis.options import check_arguments, check_choice
from lapis.posteriors.laplace.arguments import TuneOptions, refuse_options
from lapis.posteriors.laplace.arithmetic import removal
from lapis.posteriors.laplace.curvature_state import curvature_from_state, curvature_state
from lapis.posteriors.laplace.family import LaplaceFamily
from lapis.posteriors.laplace.family_state import family_fields, statistics_from
from lapis.posteriors.laplace.tuning import by_evidence as tuning
from lapis.posteriors.laplace.tuning.foretelling import warn_of_doubt
from lapis.posteriors.laplace.tuning.leave_one_out import chosen_width
from lapis.posteriors.posterior import Facts, LatentKind, State
from lapis.posteriors.predicting.drawn_network import DrawnNetwork, white_noise
from lapis.posteriors.predicting.linearised import linearised
from lapis.posteriors.same_data import same_batches
from lapis.predictions import LatentGaussian
from lapis.priors import WeightPrior
from lapis.ranks import Ranks
from lapis.schema import optional
from lapis.shards import Shard

ROUNDED = 0.1  # rounding errors of the curvature beyond this fraction of the smallest prior precision cause a warning

DRAW_COPIES = 8
"""Float64 vectors in memory for a draw of the weights, beside the draw itself."""


@dataclass(frozen=True, eq=False, repr=False)
class LaplacePosterior(LaplaceFamily):
    """N(mean, (scale * curvature + prior)^-1) over the chosen weights. Immutable: methods return new posteriors.

    Made by `lapis.laplace`. `choices` lists decisions made on the user's behalf, `tuning` is the record of the last
    `tune`, `tangent` the mode of the tangent model if the evidence is taken there (`at_tangent_mode`), and `training`
    the record of `lapis.train`.
    """

    kind: ClassVar[str] = "laplace"

    curvature: Curvature
    choices: tuple[str, ...] = ()
    training: Training | None = None

    # blocks ----------------------------------------------------------------------------------------

    @cached_property
    def gaussians(self) -> list[BlockGaussian]:
        """The posterior of each block of weights."""
        with self.network.held():  # blocks complete their sums on first use
            return [block.gaussian(self.weight_prior, self.scale) for block in self.curvature.blocks]

    @cached_property
    def widened(self) -> list[BlockGaussian]:
        """The same with the covariance times `width`: the distribution that is drawn from and predicted with."""
        if self.width == 1.0:
            return self.gaussians
        pairs = zip(self.gaussians, self.curvature.blocks, strict=True)
        return [ScaledGaussian(gaussian, self.width, block.size) for gaussian, block in pairs]

    @cached_property
    def _trusted(self) -> list[BlockGaussian]:
        """`widened`, with a warning where the curvature was summed in too few digits for its prior."""
        error = float(self.scale.detach()) * max(block.rounding() for block in self.curvature.blocks)
        smallest = float(self.weight_prior.precision.detach().min())
        if error > ROUNDED * smallest:
            warnings.warn(
                f"The curvature was summed in {self.network.dtype}, with errors of {error:.2g} in its eigenvalues, for "
                f"a prior precision of {smallest:.2g}: variances can be off by that ratio. Use model.double().",
                LapisWarning,
                stacklevel=users_level(),
            )
        return self.widened

    def spectrum(self) -> GroupedSpectrum | None:
        """Eigenvalues of the curvature by prior group; None where they do not determine the log-determinant."""
        with self.network.held():
            return grouped_spectrum(self.curvature.blocks, self.weight_prior)

    def summary(self) -> str:
        """A few lines: size, structure, prior, evidence, and automatic choices."""
        evidence = f"{float(self.log_evidence().detach()):.4f}"
        return self._summary(evidence, f"{float(self.effective_parameters().detach()):.2f}", self.choices)

    # over weights ----------------------------------------------------------------------------------

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the weights, (samples, P); `lapis.unflatten` turns them into parameter dictionaries.

        The default generator has seed 0.
        """
        source = self.source(samples, generator)
        draws = self.mean.new_empty(samples, self.n_weights)
        step = min(samples, max(1, self.facts.memory_budget // (DRAW_COPIES * 8 * self.n_weights)))
        noise = self.mean.new_empty(step, self.n_weights)
        sizes = [block.size for block in self.curvature.blocks]
        for start in range(0, samples, step):
            some = draws[start : start + step]
            # noise drawn one by one, so that one call with n samples and n calls with one give the same draws
            for row in noise[: len(some)]:
                row.copy_(white_noise(self.network, source))
            parts = torch.split(noise[: len(some)], sizes, -1)
            with full_precision(self.network.device):
                self.curvature.fill(some, (g.color(part) for g, part in zip(self._trusted, parts, strict=True)))
            some.add_(self.mean)
        return draws

    def _squared_distance(self, deviations: Tensor) -> Tensor:
        pairs = zip(self.gaussians, self.curvature.to_blocks(deviations), strict=True)
        return torch.stack([(gaussian.multiply(part) * part).sum(-1) for gaussian, part in pairs]).sum(0)

    def marginal_variance(self) -> Tensor:
        """Variance of each weight, (P,)."""
        return self.curvature.to_flat([gaussian.variance() for gaussian in self._trusted]).to(self.mean.dtype)

    def precision(self) -> Tensor:
        """The whole precision matrix (P, P), float64: for checking, on small networks."""
        check_fits(
            8 * self.n_weights**2,
            self.facts.memory_budget,
            "The precision matrix does not fit",
            do="use marginal_variance(), sample() or log_prob()",
        )
        matrix = self.mean.new_zeros(self.n_weights, self.n_weights, dtype=torch.float64)
        indices = self.curvature.to_blocks(torch.arange(self.n_weights, device=self.network.device))
        for gaussian, index in zip(self.widened, indices, strict=True):
            matrix[index[:, None], index] = gaussian.matrix()
        return matrix

    # evidence --------------------------------------------------------------------------------------

    def _logdet(self) -> Tensor:
        """log |A|, from eigenvalues where these are available."""
        spectrum = self.spectrum()
        total = None if spectrum is None else spectrum.logdet(self.weight_prior.precision, self.scale)
        if total is not None and bool(torch.isfinite(total)):
            return total.to(self.network.device)
        return torch.stack([gaussian.logdet() for gaussian in self.gaussians]).sum()

    @outside_inference_mode
    def effective_parameters(self, *, per_group: bool = False) -> Tensor:
        """gamma = tr(A^-1 (A - Lambda)): the number of weights determined by the data, in total or per prior group."""
        check_arguments(LaplacePosterior.effective_parameters, locals())
        prior = self.weight_prior
        determined = 1 - prior.vector() * self.curvature.to_flat([gaussian.variance() for gaussian in self.gaussians])
        if not per_group:
            return determined.sum()
        return torch.zeros_like(prior.precision).index_add(0, prior.group_index(), determined)

    def _tune(self, asked: TuneOptions) -> LaplacePosterior:
        """Needs no pass over data, unless the evidence is taken at the tangent mode."""
        method = "gradient" if asked.method is None else asked.method
        check_choice("method", method, ("gradient", "fixed_point"))
        refuse_options(
            "A stored posterior is tuned without draws",
            samples=asked.samples,
            solver=asked.solver,
            batch_size=asked.batch_size,
            generator=asked.generator,
        )
        iterations = 200 if asked.max_iterations is None else asked.max_iterations
        found = tuning.tune(self, method, asked.groups, asked.noise, iterations, asked.tolerance)
        if asked.tolerated_loss is not None and self.likelihood.kind == "classification":
            return replace(found, width=chosen_width(found, found.sample_of_data(), asked.tolerated_loss))
        warn_of_doubt(found, found.sample_of_data(), lambda batch: found.predict(batch.inputs))
        return found

    def _at_tangent_mode(
        self,
        data: Any,
        batch_size: int | None,
        tolerance: float | None,
        max_products: int,
        start: Tensor | None,
    ) -> LaplacePosterior:
        problem = tuning.tangent_problem(self, data, batch_size, tolerance, max_products)
        return tuning.at_mode(self, problem, problem.begin(start), anywhere=True)

    def solve(self, vectors: Tensor) -> Tensor:
        """Covariance times weight vectors (P,) or (k, P), float64."""
        parts = self.curvature.to_blocks(self.vectors(vectors).double())
        solved = [gaussian.solve(part) for gaussian, part in zip(self.widened, parts, strict=True)]
        return self.curvature.to_flat(solved).reshape(vectors.shape)

    # changes ---------------------------------------------------------------------------------------

    def with_noise(self, noise: float | Tensor) -> LaplacePosterior:
        """See `LaplaceFamily.with_noise`; of any proportions where the outputs' curvature is kept apart."""
        likelihood = self.likelihood.with_noise(noise)
        changed = self.with_own_noise(likelihood)
        return super().with_noise(noise) if changed is None else changed._changed(likelihood=likelihood)

    def with_own_noise(self, likelihood: Likelihood) -> LaplacePosterior | None:
        """The posterior under a noise of other proportions; None where these are the same, or cannot be changed."""
        fitted, sums = self.fitted_likelihood, self.curvature
        if sums.apart is None or not isinstance(likelihood, Gaussian) or not isinstance(fitted, Gaussian):
            return None
        likelihood.check_outputs(torch.empty(1, 1, sums.outputs))
        if likelihood.has_proportions_of(fitted) or likelihood.noise.requires_grad:
            return None
        combined = sums.combined((likelihood.noise**-2).expand(sums.outputs).tolist())
        return replace(self, likelihood=likelihood, fitted_likelihood=likelihood, curvature=combined)

    def _check_prior(self, prior: WeightPrior) -> None:
        for block in self.curvature.blocks:
            block.check(prior)

    def _sums_with(
        self, stream: Iterable[Batch], total: int | None, generator: torch.Generator | None, progress: bool | None
    ) -> Curvature:
        sums = self.curvature.clone()
        accumulate(
            sums,
            self.network,
            self.fitted_likelihood,
            stream,
            total=total,
            generator=generator or torch.Generator(self.network.device).manual_seed(self.n_data),
            memory_budget=self.facts.memory_budget,
            progress=progress,
        )
        return sums

    @outside_inference_mode
    def without(self, data: Any, *, batch_size: int | None = None, progress: bool | None = None) -> LaplacePosterior:
        """The posterior after its data without these: their curvature is subtracted, the mean moved by a Newton step.

        The mean is taken to be the mode of all data, and moves to mean + A^-1 sum J^T g, with the remaining precision A
        and the gradients g of -log p(y | f) of the examples removed: exact for linear models with Gaussian noise, one
        step towards a network trained without them for others. The network's weights t stay, the linearisation and the
        evidence with them. `at_tangent_mode(rest)` checks that `rest` is the rest, and solves for its mode.

        Dense and diagonal sums are subtracted exactly. Of Kronecker posteriors the sums behind both factors are, which
        gives the factors of a fit to the rest; EKFAC keeps its bases. Refused for examples that are known not to be of
        the fit (their number, and all of them where a fit is small), and where the rest is not positive definite.

        Args:
            data: examples of the fit with their targets, in any form that `lapis.laplace` takes.
            batch_size: for data that are not batched yet.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(LaplacePosterior.without, locals())
        self._refuse_if_refined("lose data: its curvature is no longer a sum", "remove them before refining")
        with self.network.held():
            self.check_network()
            return removal.without(self, data, batch_size, progress)

    # refinement ------------------------------------------------------------------------------------

    def _check_refinable(self) -> None:
        if self.curvature.kind in ("hessian", "empirical"):
            raise OptionError(
                "Refinement averages the GGN over the posterior",
                expected='a fit with curvature="ggn", "exact" or "sampled"',
                got=repr(self.curvature.kind),
                do='fit with curvature="ggn"',
            )

    def _data(self, data: Any, batch_size: int | None, shared: Shard | None) -> Sequence[Batch]:
        return same_batches(data, self.network, self.curvature.digest, self.n_data, batch_size, shared)

    def sample_of_data(self) -> Sequence[Batch]:
        """A sample of the data of the fit; empty after loading, as files hold none."""
        return self.curvature.sample.batches()

    @property
    def is_exact(self) -> bool:
        return self.structure == "dense" and self.curvature.kind == "ggn"

    def recurved(
        self, held: Sequence[Batch], factors: Sequence[Tensor], progress: bool | None, ranks: Ranks | None
    ) -> LaplacePosterior:
        sums, budget = self.curvature.emptied(), self.facts.memory_budget
        if self.structure == "lowrank":
            like, signature = self.fitted_likelihood, self.facts.signature
            whole = ImplicitCurvature(self.network, like, held, signature, budget, ranks=ranks)
            (block,) = sums.blocks
            load_leading(
                block,
                whole.with_factors(factors),
                self.network,
                rank=None,
                threshold=RANK_FRACTION * float(self.weight_prior.vector().min()) * self.temperature,
                memory_budget=budget,
                generator=torch.Generator(self.network.device).manual_seed(0),
                progress=progress,
            )
        else:
            pairs = list(zip(held, factors, strict=True))
            accumulate_factors(sums, self.network, pairs, memory_budget=budget, progress=progress, ranks=ranks)
        return replace(self, curvature=sums)

    def gamma_of_groups(self) -> Tensor:
        return self.effective_parameters(per_group=True)

    # predictions -----------------------------------------------------------------------------------

    def quick_draws(
        self, samples: int, generator: torch.Generator, inputs: Inputs
    ) -> Iterable[Mapping[str, Tensor]] | None:
        """Draws whose wide matrices are not formed (see `DrawnNetwork`)."""
        if self.network.indices:  # parameters chosen in part would have to be reassembled for every draw
            return None
        drawn = DrawnNetwork(self.network, self.curvature.blocks, self._trusted, self.mean, inputs)
        return (drawn.draw(generator) for _ in range(samples))

    def _outputs(self, inputs: Inputs, kind: LatentKind) -> LatentGaussian:
        return linearised(self.network, self.curvature, self._trusted, inputs, kind, self.facts.memory_budget)

    def _weight_kernel(self, tangent: Tangent) -> BlockKernel:
        return BlockKernel(tangent, self.curvature.tape, self.curvature.sites_of, self._trusted, self.solve)

    # files -----------------------------------------------------------------------------------------

    def state(self) -> State:
        """The family's state, and the sums of every block."""
        state, sums = super().state(), curvature_state(self.curvature)
        config = {"choices": self.choices, "training": self.training and asdict(self.training)}
        return State(state.config | sums.config | config, state.tensors | sums.tensors)

    @classmethod
    def from_state(cls, state: State, network: Network, likelihood: Likelihood, facts: Facts) -> LaplacePosterior:
        """The posterior with the stored sums."""
        fields = family_fields(state, network, likelihood, facts)
        statistics = statistics_from(state, "statistics", likelihood, facts)
        return cls(
            curvature=curvature_from_state(state, network, likelihood, facts, statistics),
            choices=tuple(state.entry("choices", tuple[str, ...])),
            training=optional(Training, state.entry("training", dict | None)),
            **fields,
        )
