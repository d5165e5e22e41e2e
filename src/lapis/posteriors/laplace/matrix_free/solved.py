"""A posterior whose precision is known by its products: solves with it, draws and marginal variances from solves."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from lapis.curvature.products.ggn import ImplicitCurvature, ImplicitGaussian, Solved, Space
from lapis.errors import LapisWarning, OptionError, users_level
from lapis.network import full_precision, outside_inference_mode
from lapis.options import check_arguments, check_count
from lapis.posteriors.laplace.family import LaplaceFamily
from lapis.posteriors.laplace.matrix_free.direct import Direct, View, view
from lapis.posteriors.laplace.matrix_free.noise import white
from lapis.posteriors.laplace.matrix_free.solver import ROUNDING, TOLERANCES, Solver
from lapis.solvers import CallablePreconditioner, Estimate, Operator, hutchinson_diagonal

BLOCKS = 12
"""Peak memory of a solve, products included, in multiples of its block of vectors, over weights and over outputs."""

MOST_VECTORS = 64
"""Maximal number of vectors solved for together."""

Self = TypeVar("Self", bound="SolvedPosterior")


@dataclass(frozen=True, eq=False, repr=False)
class SolvedPosterior(LaplaceFamily):
    """The solves of `ImplicitPosterior`."""

    curvature: ImplicitCurvature
    solver: Solver = field(default_factory=Solver)
    view: View | None = None
    """While `refine` and `calibrate` run, and weights or outputs are few: systems are then factorised."""

    @cached_property
    def direct(self) -> Direct | None:
        """The covariance without its width, factorised."""
        if self.view is None:
            return None
        return self.view.factorised(self.curvature, self.weight_prior, float(self.scale.detach()))

    def _with_view(self: Self, held: bool) -> Self:
        """See `Refinable._with_view`: J of the data, and J Lambda^-1 J^T, where these are small."""
        found = (
            view(self.curvature.jacobian, self.facts.memory_budget) if held and self.curvature.ranks is None else None
        )
        return replace(self, view=found)

    @property
    def space(self) -> Space:
        """The space in which systems are solved; by default "outputs" if examples x outputs are fewer than weights."""
        if self.solver.space != "auto":
            return self.solver.space
        return "outputs" if self.curvature.rows < self.n_weights else "weights"

    def with_solver(self: Self, **changes: Any) -> Self:
        """The same posterior with other settings of its `Solver`, such as space, tolerance or preconditioner."""
        solver = replace(self.solver, **changes)
        other = solver.preconditioner
        if other is not None and other.facts.fingerprint != self.facts.fingerprint:
            raise OptionError(
                "The preconditioner belongs to another network",
                expected="a posterior of this network with the same weights chosen",
                got=repr(other),
                do="fit it to this network",
            )
        if other is not None:
            solver = replace(solver, preconditioner=other.with_prior(self.prior))
        return replace(self, solver=solver, curvature=self.curvature.with_mode(solver.mode))

    @cached_property
    def gaussian(self) -> ImplicitGaussian:
        """N(0, A^-1) under the current prior and noise, with the solver's settings."""
        other, preconditioner = self.solver.preconditioner, None
        if other is not None:
            stored = replace(
                other, prior=self.prior, weight_prior=self.weight_prior, likelihood=self.likelihood,
                temperature=self.temperature, tuning=None, tangent=None,
            )  # fmt: skip
            preconditioner = CallablePreconditioner(lambda v: stored.solve(v).to(v.dtype))
        tolerance = self.solver.tolerance or TOLERANCES[self.network.dtype]
        return ImplicitGaussian(
            self.curvature, self.weight_prior, self.scale, self.space, tolerance, self.solver.max_iterations,
            preconditioner,
        )  # fmt: skip

    def solve(self, vectors: Tensor) -> Tensor:
        """Covariance times weight vectors (P,) or (k, P), float64."""
        self.check_network()
        if self.direct is not None:
            return (self.width * self.direct.solve(self.vectors(vectors))).reshape(vectors.shape)
        block = self.vectors(vectors).to(self.network.dtype)
        found = torch.empty_like(block, dtype=torch.float64)
        step = self.vectors_at_once()
        for part, into in zip(torch.split(block, step), torch.split(found, step), strict=True):
            with full_precision(self.network.device):
                into.copy_(self.solved(self.gaussian.solve(part)))
        return found.mul_(self.width).reshape(vectors.shape)

    def vectors_at_once(self) -> int:
        """How many vectors are solved for together within the memory budget."""
        each = BLOCKS * (self.n_weights + self.curvature.rows) * self.mean.element_size()
        return max(1, min(MOST_VECTORS, self.facts.memory_budget // each))

    def solved(self, solved: Solved) -> Tensor:
        """The solution vectors; warns if the solver did not converge."""
        if not bool(solved.result.converged.all()):
            worst = float(solved.result.relative_residuals.max())
            stopped = sorted(set(solved.result.stopped))
            near = self.solver.tolerance is None and worst <= ROUNDING * self.gaussian.tolerance
            if near and set(stopped) <= {"converged", "stagnated"}:
                return solved.vectors
            warnings.warn(
                f"A solve ended with a relative residual of {worst:.0e} ({', '.join(stopped)}), "
                f"above the tolerance of {self.gaussian.tolerance:.1e}. Raise max_iterations or tolerance by "
                "with_solver(), use a preconditioner, or float64.",
                LapisWarning,
                stacklevel=users_level(),
            )
        return solved.vectors

    # over weights ----------------------------------------------------------------------------------

    @outside_inference_mode
    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the weights, (samples, P), by exact perturb-and-solve. The default generator has seed 0."""
        self.check_network()
        source = self.source(samples, generator)
        draws = self.mean.new_empty(samples, self.n_weights)
        for some in torch.split(draws, self.vectors_at_once()):
            noise = white(self, [source] * len(some))
            with full_precision(self.network.device):
                some.copy_(self.solved(self.gaussian.draws(*noise)))
        return draws.mul_(self.width**0.5).add_(self.mean)

    def _squared_distance(self, deviations: Tensor) -> Tensor:
        return (self.gaussian.multiply(deviations.to(self.network.dtype)).double() * deviations).sum(-1)

    def marginal_variance(self) -> Tensor:
        """The value of `marginal_variance_estimate()`, (P,)."""
        return self.marginal_variance_estimate().value.to(self.mean.dtype)

    @outside_inference_mode
    def marginal_variance_estimate(self, *, probes: int = 64, generator: torch.Generator | None = None) -> Estimate:
        """The variance of each weight, (P,) float64, with its standard error: one solve for each of `probes` >= 2.

        By Hutchinson's estimator, which is exact for weights uncorrelated with all others: weights that the data do not
        determine get their prior variance.
        """
        check_arguments(SolvedPosterior.marginal_variance_estimate, locals())
        self.check_network()
        operator = Operator(self.solve, self.n_weights, torch.float64, self.network.device)
        check_count("probes", probes, least=2)
        source = generator or torch.Generator(self.network.device).manual_seed(0)
        return hutchinson_diagonal(operator, probes=probes, generator=source, block=self.vectors_at_once())
