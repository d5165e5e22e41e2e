"""The exact Laplace posterior of a network of any size: it stores only the data, and every quantity takes solves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lapis.batches import Batch, Inputs
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.curvature.sample import Sample
from lapis.errors import OptionError
from lapis.function_space.kernels import SolvedKernel
from lapis.function_space.tangent import Tangent
from lapis.likelihoods import Likelihood
from lapis.network import Network, outside_inference_mode
from lapis.options import check_arguments, check_choice
from lapis.posteriors.laplace.arguments import TuneOptions, refuse_options
from lapis.posteriors.laplace.arithmetic import removal
from lapis.posteriors.laplace.family_state import family_fields
from lapis.posteriors.laplace.matrix_free import drawing
from lapis.posteriors.laplace.matrix_free.direct import MOST_OUTPUTS
from lapis.posteriors.laplace.matrix_free.drawn import DrawnPosterior
from lapis.posteriors.laplace.matrix_free.solved import SolvedPosterior
from lapis.posteriors.laplace.matrix_free.solver import Solver
from lapis.posteriors.laplace.refinement.refinable import full_outputs
from lapis.posteriors.laplace.tuning import by_draws
from lapis.posteriors.laplace.tuning.by_evidence import regrouped
from lapis.posteriors.posterior import Facts, LatentKind, State
from lapis.posteriors.predicting.linearised import by_solves
from lapis.posteriors.same_data import same_batches
from lapis.predictions import LatentGaussian
from lapis.priors import Prior
from lapis.progress import track
from lapis.ranks import Ranks
from lapis.schema import record
from lapis.shards import Shard
from lapis.solvers import Estimate, QuadratureEstimate, SpectralQuadrature

MOST_SOLVES, REFINING_DRAWS = 2048, 64
"""A refinement solves for the covariance of each of up to so many outputs; beyond, it takes it from so many draws."""


@dataclass(frozen=True, eq=False, repr=False)
class ImplicitPosterior(SolvedPosterior):
    """N(mean, (scale * GGN + prior)^-1) with the exact GGN of the data, through products and solves.

    Made by `lapis.laplace(..., structure="implicit")`. The data and the network's outputs for them stay in memory.
    Quantities that other posteriors have in closed form take a solve here (`solve`, `sample`, `functional_variance`:
    exact to the solver's tolerance), or are estimates with a standard error (`log_evidence_estimate`,
    `effective_parameters_estimate`). `draw` returns a posterior of K weight vectors, whose predictions are cheap.

    >>> import torch, lapis
    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> model = torch.nn.Linear(1, 1).double()
    >>> posterior = lapis.laplace(model, (x, 2 * x), "regression", structure="implicit")
    >>> posterior.space
    'weights'
    >>> posterior.draw(4).predict(x).variance.shape
    torch.Size([20, 1])
    """

    kind: ClassVar[str] = "implicit"
    needs_data: ClassVar[bool] = True

    @outside_inference_mode
    def draw(
        self,
        samples: int = 8,
        *,
        solver: Literal["auto", "block", "cg", "sgd"] = "auto",
        error: float | None = None,
        objective: Literal["dual", "noisy", "low_noise"] | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        clip: float | None = None,
        generator: torch.Generator | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> DrawnPosterior:
        """A posterior that consists of K draws of this one; its predictions take K Jacobian-vector products.

        z = argmin 1/2 sum_n |S_n^T J_n z - u_n|^2 + 1/2 |z - z0|^2_Lambda, u ~ N(0, I), z0 ~ N(0, Lambda^-1), is
        exactly a draw of N(0, A^-1).

        Args:
            samples: the number of draws, K.
            solver: "block": block conjugate gradients for all draws together, until their variances have about the
                relative `error`. "cg": each draw to the solver's tolerance. "sgd": on minibatches, by Nesterov's method
                and an average over the last iterates. "auto": "sgd" where one of its options is given; "cg" for up to
                2,000 weights, where it costs little, and where `with_solver` sets a tolerance or the space of outputs;
                else "block", which alone estimates its error. SGD costs as much on a LeNet and its error depends on the
                prior: of 250 images 0.06 under a precision of 34, 0.64 under 1 ("block": 0.03; docs/matrix-free.md).
            error: of "block", 0.05 by default; from K draws variances have an error of sqrt(2 / K) in any case.
            objective: of SGD. "dual" (default) descends on one number for each row of S^T J, from which z follows:
                minibatches add no noise at the solution, so that momentum is 0.95; it keeps these numbers too.
                "low_noise" moves u from the data term into the prior's centre, z0 + Lambda^-1 sum_n J_n^T S_n u_n: the
                same minimiser, with far less noise in the gradients than "noisy", which is as written above. Momentum
                0.9 for these two, and an average over half of the iterates.
            epochs: of SGD, 20 by default.
            batch_size: of SGD, by default 64 (fewer with little data) for "dual", else 128. Data
                are divided into minibatches once, visited in a new random order in each epoch.
            learning_rate: of SGD, in units of the prior; by default half of the largest stable one; for "dual" 0.7
                of it, halved where gradients grow.
            clip: of SGD: the norm to which longer gradients are shortened, in units of the prior.
            generator: source of randomness; seeded with 0 by default. All solvers and objectives give the same
                draws for the same seed, up to their errors.
            checkpoint: a file to save progress in, at intervals and when interrupted. A call with the same arguments
                resumes from it, and gives the numbers that it would have given without the interruption.
            progress: show a bar, and beforehand the method and how long it will take; by default on a terminal only.

        Memory: about 7 blocks of (K, P) in the network's dtype for SGD, 8 for CG, 11 for "block", besides the
        network's own.
        """
        check_arguments(ImplicitPosterior.draw, locals())
        chosen = drawing.options(self, samples, solver, objective, epochs, batch_size, learning_rate, clip, error)
        source = self.source(samples, generator)
        with self.network.held():
            self.check_network()
            return drawing.draw(self, chosen, source, checkpoint, progress)

    # evidence --------------------------------------------------------------------------------------

    @cached_property
    def _spectrum(self) -> SpectralQuadrature:
        return self.gaussian.spectrum(16, 32, torch.Generator(self.network.device).manual_seed(0), False)

    def _quadrature(
        self, probes: int, steps: int, generator: torch.Generator | None, progress: bool | None
    ) -> SpectralQuadrature:
        self.check_network()
        if (probes, steps, generator) == (16, 32, None):
            return self._spectrum
        return self.gaussian.spectrum(
            probes, steps, generator or torch.Generator(self.network.device).manual_seed(0), progress
        )

    def _logdet(self) -> Tensor:
        if self.direct is not None:
            return self.direct.logdet()
        return self.weight_prior.logdet().detach() + self._spectrum.trace(torch.log).value

    def log_evidence(self) -> Tensor:
        """The value of `log_evidence_estimate()`, 0-d float64; an estimate, and not differentiable.

        Of a refined posterior it is the ELBO.
        """
        return self.log_evidence_estimate().value if self.refinement is None else self.elbo()

    @outside_inference_mode
    def log_evidence_estimate(
        self,
        *,
        probes: int = 16,
        steps: int = 32,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> QuadratureEstimate:
        """log p(D) with log |A| by stochastic Lanczos quadrature: value, standard error, and truncation bias.

        probes x steps products over the data; the error falls with the square root of `probes`, the bias with `steps`.
        """
        check_arguments(ImplicitPosterior.log_evidence_estimate, locals())
        self._refuse_if_refined("have its evidence estimated: that is its ELBO", "ask for elbo()")
        found = self._quadrature(probes, steps, generator, progress).trace(torch.log)
        value = self._evidence(self.weight_prior.logdet() + found.value).detach()
        return replace(found, value=value, standard_error=0.5 * found.standard_error, truncation=0.5 * found.truncation)

    def effective_parameters(self) -> Tensor:
        """The value of `effective_parameters_estimate()`, 0-d float64."""
        return self.effective_parameters_estimate().value if self.direct is None else self.direct.gamma()

    @outside_inference_mode
    def effective_parameters_estimate(
        self,
        *,
        probes: int = 16,
        steps: int = 32,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Estimate:
        """gamma = tr(A^-1 (A - Lambda)), by the same quadrature as the evidence, with a standard error."""
        check_arguments(ImplicitPosterior.effective_parameters_estimate, locals())
        return self._quadrature(probes, steps, generator, progress).trace(lambda t: 1 - 1 / t)

    def _gamma(self, progress: bool | None) -> Tensor:
        return self.effective_parameters_estimate(progress=progress).value

    def summary(self) -> str:
        """A few lines: size, prior, evidence and effective parameters with their standard errors."""
        if self.refinement is None:
            estimate = self.log_evidence_estimate()
            evidence = f"{float(estimate.value):.4f} +- {float(estimate.standard_error):.2g}"
        else:
            evidence = f"{float(self.elbo()):.4f}"
        gamma = self.effective_parameters_estimate()
        return self._summary(
            evidence,
            f"{float(gamma.value):.2f} +- {float(gamma.standard_error):.2g}",
            [f"exact GGN by products, solved in the space of {self.space}"],
        )

    def _tune(self, asked: TuneOptions) -> ImplicitPosterior:
        """From draws; call `draw` afterwards for a posterior to predict with."""
        self.check_network()
        check_choice("method", "draws" if asked.method is None else asked.method, ("draws",))
        if asked.solver != "sgd":
            refuse_options("Conjugate gradients see all data", batch_size=asked.batch_size)
        samples = 4 if asked.samples is None else asked.samples
        source = self.source(samples, asked.generator)
        posterior = self if asked.groups is None else regrouped(self, asked.groups)
        return by_draws.tune(
            posterior,
            samples=samples,
            solver="cg" if asked.solver is None else asked.solver,
            batch_size=128 if asked.batch_size is None else asked.batch_size,
            noise=asked.noise,
            rounds=10 if asked.max_iterations is None else asked.max_iterations,
            tolerance=0.01 if asked.tolerance is None else asked.tolerance,
            generator=source,
            progress=asked.progress,
            tolerated_loss=asked.tolerated_loss,
        )

    def _at_tangent_mode(
        self,
        data: Any,
        batch_size: int | None,
        tolerance: float | None,
        max_products: int,
        start: Tensor | None,
    ) -> ImplicitPosterior:
        """Each step of Newton's method is solved with the prior as preconditioner."""
        self._refuse_if_divided("be taken to the tangent mode", "fit in one process, or with a stored structure")
        self._check_held(data, batch_size)
        problem = by_draws.tangent_problem(self, tolerance, max_products)
        return replace(self, tangent=by_draws.tangent_mode(self, problem, problem.begin(start)))

    @outside_inference_mode
    def g_prior(self, g: float = 1.0, *, samples: int = 64, generator: torch.Generator | None = None) -> Prior:
        """A prior with precision g diag(GGN) / N: a weight's precision is proportional to its effect on the outputs.

        It makes the posterior independent of how weights are scaled, with one number g to tune. The diagonal is the
        mean square of `samples` vectors J^T S u, u ~ N(0, I): its entries have relative errors of sqrt(2 / samples).
        """
        check_arguments(ImplicitPosterior.g_prior, locals())
        return by_draws.g_prior(self, g, samples, self.source(samples, generator))

    def _sums_with(
        self, stream: Iterable[Batch], total: int | None, generator: torch.Generator | None, progress: bool | None
    ) -> ImplicitCurvature:
        """The new data are kept too."""
        self._refuse_if_divided("take more data", "fit to all data")
        refuse_options("The implicit structure draws no targets", generator=generator)
        fresh = track(stream, "outputs of the new data", total, progress)
        held = [replace(batch, index=i) for i, batch in enumerate([*self.curvature.batches, *fresh])]
        facts = self.facts
        return ImplicitCurvature(
            self.network, self.fitted_likelihood, held, facts.signature, facts.memory_budget, self.solver.mode
        )

    @outside_inference_mode
    def without(self, data: Any, *, batch_size: int | None = None) -> ImplicitPosterior:
        """See `LaplacePosterior.without`; all data are held, so that others than these are refused."""
        check_arguments(ImplicitPosterior.without, locals())
        self._refuse_if_refined("lose data: its curvature is no longer a sum", "remove them before refining")
        self._refuse_if_divided("lose data", "fit to the data that stay")
        self.check_network()
        return removal.without_held(self, data, batch_size)

    def _refuse_if_divided(self, what: str, do: str) -> None:
        if self.curvature.ranks is not None:
            raise OptionError(
                f"A posterior whose data are divided among processes cannot {what}",
                expected="one process with all data",
                got=f"rank {self.curvature.ranks.rank} of {self.curvature.ranks.size}",
                do=do,
            )

    # refinement ------------------------------------------------------------------------------------

    def _check_refinable(self) -> None:
        self._refuse_if_divided("be refined", 'fit and refine a stored structure, such as "kronecker"')

    def _data(self, data: Any, batch_size: int | None, shared: Shard | None) -> Sequence[Batch]:
        if shared is not None:
            refuse_options("An implicit posterior is refined in one process", distributed=True)
        self._check_held(data, batch_size)
        return self.curvature.batches

    def _check_held(self, data: Any, batch_size: int | None) -> None:
        """Raise DataError unless `data`, if any are passed again, are those held."""
        if data is None:
            refuse_options("The data are in their batches already", batch_size=batch_size)
        else:
            same_batches(data, self.network, self.curvature.digest, self.n_data, batch_size)

    @property
    def is_exact(self) -> bool:
        """The precision is that of the exact GGN."""
        return True

    def sample_of_data(self) -> Sequence[Batch]:
        """All data where their outputs are few enough to be factorised, else some of the examples."""
        held = self.curvature.batches
        if self.curvature.n_outputs <= MOST_OUTPUTS:
            return held
        sample = Sample(self.curvature.jacobian.outputs[0][0].numel())
        for batch in held:
            sample.add(batch)
        return sample.batches()

    def outputs_of_data(self, held: Sequence[Batch]) -> Callable[[int], LatentGaussian]:
        """By a factorisation where weights or outputs are few, by a solve for every output, or from draws."""
        if self.direct is not None and held is self.curvature.batches:
            spreads, jacobian = self.direct.covariances, self.curvature.jacobian
            moved = jacobian.forward((self.mean.double() - self.point.double())[None])
            means = [f + shift[0] for f, shift in zip(jacobian.outputs, moved, strict=True)]
            return lambda number: LatentGaussian(
                means[number],
                spreads[number].diagonal(dim1=-2, dim2=-1),
                spreads[number],
                raw_shape=tuple(jacobian.shapes[number]),
            )
        if self.direct is None and self.curvature.n_outputs > MOST_SOLVES:
            return partial(full_outputs, self.draw(REFINING_DRAWS, progress=False), held)
        return super().outputs_of_data(held)

    def recurved(
        self, held: Sequence[Batch], factors: Sequence[Tensor], progress: bool | None, ranks: Ranks | None
    ) -> ImplicitPosterior:
        return replace(self, curvature=self.curvature.with_factors(factors))

    def gamma_of_groups(self) -> Tensor:
        """Known for one group only."""
        if len(self.weight_prior.precision) > 1:
            raise OptionError(
                "An implicit posterior is refined with one prior precision tuned, or none",
                expected="one prior group, or tune=False",
                got=f"{len(self.weight_prior.precision)} groups",
                do="use refine(data, tune=False)",
            )
        return self.effective_parameters().reshape(1)

    # predictions -----------------------------------------------------------------------------------

    def _outputs(self, inputs: Inputs, kind: LatentKind) -> LatentGaussian:
        """By one solve for every output of every example; `draw` is cheaper for many inputs."""
        return by_solves(
            self.network,
            self.likelihood.canonical,
            self.n_outputs,
            self.solve,
            inputs,
            kind,
            self.facts.memory_budget,
        )

    def _weight_kernel(self, tangent: Tangent) -> SolvedKernel:
        return SolvedKernel(tangent, self.solve)

    # files -----------------------------------------------------------------------------------------

    def state(self) -> State:
        """The family's state and the solver's settings, without the data and the preconditioner."""
        self._refuse_if_refined(
            "be saved: its curvature belongs to its data", "save it before refining, or save draw()"
        )
        state, solver = super().state(), self.solver
        chosen = {name: getattr(solver, name) for name in ("space", "tolerance", "max_iterations", "mode")}
        return State(state.config | {"solver": chosen}, state.tensors)

    @classmethod
    def from_state(cls, state: State, network: Network, likelihood: Likelihood, facts: Facts) -> ImplicitPosterior:
        """The posterior with `state.data`; DataError unless their fingerprint is that of the data of the fit."""
        fields = family_fields(state, network, likelihood, facts)
        solver = record(Solver, state.entry("solver", dict))
        state.word("structure", ("implicit",))
        held = same_batches(state.data, network, state.count("digest", least=0), facts.n_data, None)
        fitted = fields["fitted_likelihood"]
        sums = ImplicitCurvature(network, fitted, held, facts.signature, facts.memory_budget)
        return cls(curvature=sums.with_mode(solver.mode), solver=solver, **fields)
