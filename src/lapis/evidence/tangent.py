"""The mode theta* of the tangent linear model, at which the evidence of networks that are not at a mode is taken.

theta* = argmin sum_n l(f_n + J_n (theta - t), y_n) / T + 1/2 |theta - m|^2_Lambda, a convex problem for any network if
l is convex in f. Solved by Newton's method. Where outputs are few, each step is exact, in the outputs' space
(`lapis.evidence.dual`), and a change of the prior needs no further pass over the data. Otherwise a step is solved by
conjugate gradients, preconditioned with the posterior's own precision, so that a Gaussian likelihood with the dense
structure takes one product. Where weights are few and that takes long, as the curvature at theta* is not that at t, the
curvature is summed up and factorised to take the precision's place. Products of a last layer take its inputs only, not
the network (`lapis.evidence.linear_head`). t remains the linearisation point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lapis.batches import Batch, all_finite, describe
from lapis.curvature.products.jacobian import Jacobian
from lapis.curvature.products.kernel import OutputKernel
from lapis.errors import NotPositiveDefiniteError, OptionError
from lapis.evidence.dual import DualModel
from lapis.evidence.linear_head import LinearHead, linear_head
from lapis.likelihoods import Likelihood
from lapis.priors import WeightPrior
from lapis.solvers import CallablePreconditioner, Operator, conjugate_gradients

Solve = Callable[[Tensor], Tensor]
"""The posterior's covariance times weight vectors, (P,) or (k, P)."""

FEW_WEIGHTS = 2000
"""Up to this many weights the loss's curvature (P, P) may be summed up and factorised for every Newton step."""

PRODUCTS_PER_SUM = 32
"""Summing up the curvature from the rows of J takes about as long as P / 32 products with it."""

ROWS_AT_ONCE = 2**25
"""Rows of J are multiplied by the likelihood's factors for so many bytes of them at a time."""


@dataclass(frozen=True)
class TangentMode:
    """theta*, the likelihood's statistics of the linear model there, and how the search ended."""

    weights: Tensor
    """theta*, (P,) float64."""
    statistics: Tensor
    converged: bool
    remaining: float
    """Nats by which the loss may exceed its minimum: half the squared gradient in the metric of the preconditioner."""
    iterations: int
    products: int
    """Passes over the data, each with one J v and one J^T u, or the sum of the curvature; one in all in the outputs'
    space, and for a last layer."""
    reason: str
    dual: Tensor | None = field(default=None, repr=False, compare=False)
    """a (M,) with theta* = m + Lambda^-1 J^T a, when it was found in the outputs' space."""
    problem: TangentProblem | None = field(default=None, repr=False, compare=False)


class TangentProblem:
    """The data of the tangent model (targets, outputs at t, Jacobian products), and the tolerance of its solution.

    The tolerance is in nats, multiplied by the loss if that is above one. By default it is 1e-16 for a float64 network,
    1e-8 where the likelihood's curvature is not its Hessian, so that steps are no Newton steps and do not converge as
    fast, and 1e-5 for float32, whose products are no more accurate.
    """

    def __init__(
        self,
        jacobian: Jacobian,
        likelihood: Likelihood,
        batches: Sequence[Batch],
        centre: Tensor,
        tolerance: float | None = None,
        max_products: int = 2000,
    ) -> None:
        self.jacobian, self.centre, self.max_products = jacobian, centre.double(), max_products
        self._normal: Tensor | None = None
        """J^T H J (P, P) of an earlier search, where it was summed up."""
        precise = 1e-16 if likelihood.is_convex else 1e-8
        default = precise if jacobian.network.dtype == torch.float64 else 1e-5
        self.tolerance = default if tolerance is None else tolerance
        self.targets = [
            likelihood.targets(batch.targets, f, shape)
            for batch, f, shape in zip(batches, jacobian.outputs, jacobian.shapes, strict=True)
        ]

    def begin(self, weights: Tensor | None) -> TangentMode | None:
        """Weights (P,) as a starting point for `solve`."""
        if weights is None:
            return None
        size = self.jacobian.size
        fits = isinstance(weights, Tensor) and tuple(weights.shape) == (size,)
        if not fits or not bool(torch.isfinite(weights).all()):
            raise OptionError(
                "The search for theta* cannot start there",
                expected=f"finite weights ({size},), in the order of the posterior's mean",
                got="values that are not finite" if fits else describe(weights),
                do="leave start out to begin from the trained weights",
            )
        none = torch.zeros(0, dtype=torch.float64, device=self.centre.device)
        return TangentMode(weights.to(self.centre), none, False, float("inf"), 0, 0, "a start", None, self)

    def solve(
        self,
        likelihood: Likelihood,
        prior: WeightPrior,
        temperature: float,
        precondition: Solve,
        *,
        start: TangentMode | None = None,
        max_iterations: int = 50,
    ) -> TangentMode:
        """Newton steps until `remaining` is at most the tolerance; by default from t, or m in the outputs' space."""
        if self._dual is not None:
            return self._in_outputs(self._dual, likelihood, prior, temperature, start, max_iterations)
        head = self._head
        max_products, per_pass = self.max_products, 0 if head is not None else 1
        few = self.jacobian.size <= FEW_WEIGHTS and (head is not None or self.jacobian.keeps_rows)
        enough = 10 + self.jacobian.size // PRODUCTS_PER_SUM if few else max_products
        loss = _Loss(self, self.jacobian if head is None else head, likelihood, prior, temperature)
        theta = self.centre if start is None else start.weights
        f = loss.outputs(theta)
        value = loss.value(f, theta)
        products, remaining, reason = 1, float("inf"), f"{max_iterations} Newton steps were not enough"
        iteration = 0
        if self._normal is not None and likelihood.noise is None:  # summed up for another prior
            precondition = loss.metric(self._normal) or precondition
        for iteration in range(max_iterations + 1):
            gradient = loss.gradient(f, theta)
            remaining = 0.5 * float(gradient @ precondition(gradient))
            nats = self.tolerance * max(1.0, abs(value))
            if not math.isfinite(value + remaining):
                raise NotPositiveDefiniteError(
                    "The tangent model overflows",
                    expected="a finite loss and gradient",
                    got=f"a loss of {value:.3g}, and {remaining:.3g} for its distance from the minimum",
                    do="use a larger prior precision or noise, rescale inputs and targets, or use float64",
                )
            if remaining <= nats:
                reason = f"at most {remaining:.1e} nats above the minimum"
                break
            if iteration == max_iterations:
                break
            goal = min(0.1, remaining / max(1.0, abs(value))) ** 2 if likelihood.name != "gaussian" else 0.0
            solved = conjugate_gradients(
                loss.curvature(f),
                -gradient[None],
                preconditioner=CallablePreconditioner(precondition),
                energy_tolerance=2 * max(0.01 * nats, goal * remaining),
                max_iterations=max(1, min(enough, max_products - products)),
                on_negative_curvature="flag",  # by rounding, as the tangent model is convex: the step so far is good
            )
            step = solved.solution[0]
            products += per_pass * solved.products
            change = [part[0] for part in loss.jacobian.forward(step[None])]
            length, after = loss.search(f, theta, change, step, value, float(gradient @ step))
            if length == 0.0:
                reason = f"no step lowers the loss, {remaining:.1e} nats above the minimum"
                break
            theta = theta + length * step
            f = [one + length * two for one, two in zip(f, change, strict=True)]
            value = after
            if few and solved.products >= enough:
                self._normal = loss.normal(f)
                precondition = loss.metric(self._normal) or precondition
                products += per_pass
            if products >= max_products:
                gradient = loss.gradient(f, theta)
                remaining = 0.5 * float(gradient @ precondition(gradient))
                reason = f"{max_products} passes over the data were not enough"
                break
        statistics = torch.stack([likelihood.statistics(part, y) for part, y in zip(f, self.targets, strict=True)]).sum(
            0
        )
        converged = remaining <= nats
        return TangentMode(theta, statistics, converged, remaining, iteration, products, reason, None, self)

    @cached_property
    def _head(self) -> LinearHead | None:
        return linear_head(self.jacobian)

    @cached_property
    def _dual(self) -> DualModel | None:
        if not OutputKernel.suits(self.jacobian):
            return None
        return DualModel(OutputKernel(self.jacobian), self.targets, self.centre)

    def _in_outputs(
        self,
        model: DualModel,
        likelihood: Likelihood,
        prior: WeightPrior,
        temperature: float,
        start: TangentMode | None,
        max_iterations: int,
    ) -> TangentMode:
        dual = None if start is None else start.dual
        if start is not None and dual is None:
            dual = model.dual_at(start.weights, likelihood, temperature)
        found = model.minimise(likelihood, prior, temperature, self.tolerance, dual, max_iterations)
        weights = model.weights(found.dual, prior)
        return TangentMode(
            weights,
            found.statistics,
            found.converged,
            found.remaining,
            found.iterations,
            1,
            found.reason,
            found.dual,
            self,
        )


@dataclass(frozen=True)
class _Loss:
    """The tangent model's loss in theta, given its outputs f (a list over batches)."""

    problem: TangentProblem
    jacobian: Jacobian | LinearHead
    likelihood: Likelihood
    prior: WeightPrior
    temperature: float

    def outputs(self, theta: Tensor) -> list[Tensor]:
        jacobian = self.jacobian
        if torch.equal(theta, self.problem.centre):
            return jacobian.outputs
        change = jacobian.forward((theta - self.problem.centre)[None])
        return [f + part[0] for f, part in zip(jacobian.outputs, change, strict=True)]

    def value(self, f: Sequence[Tensor], theta: Tensor) -> float:
        data = sum(float(self.likelihood.nll(part, y).sum()) for part, y in zip(f, self.problem.targets, strict=True))
        deviation = theta - self.prior.mean
        return data / self.temperature + 0.5 * float((self.prior.vector() * deviation) @ deviation)

    def gradient(self, f: Sequence[Tensor], theta: Tensor) -> Tensor:
        seeds = [self.likelihood.gradient(part, y)[None] for part, y in zip(f, self.problem.targets, strict=True)]
        pull = self.prior.vector() * (theta - self.prior.mean)
        return self.jacobian.backward(seeds)[0] / self.temperature + pull

    def curvature(self, f: Sequence[Tensor]) -> Operator:
        """J^T H J / T + Lambda, with the likelihood's curvature H at outputs f."""
        jacobian, precision = self.jacobian, self.prior.vector()

        def product(vectors: Tensor) -> Tensor:
            data = jacobian.ggn(vectors, self.likelihood, self.problem.targets, f)
            return data / self.temperature + precision * vectors

        return Operator(product, jacobian.size, torch.float64, self.problem.centre.device)

    def normal(self, f: Sequence[Tensor]) -> Tensor:
        """J^T H J, (P, P), with the likelihood's curvature H at outputs f."""
        if isinstance(self.jacobian, LinearHead):
            return self.jacobian.normal(self.likelihood, self.problem.targets, f)
        matrix = torch.zeros(self.jacobian.size, self.jacobian.size, dtype=torch.float64, device=f[0].device)
        for j, part, y in zip(self.jacobian.rows(), f, self.problem.targets, strict=True):
            step = max(1, ROWS_AT_ONCE // (8 * j[0].numel()))
            for span in (slice(start, start + step) for start in range(0, len(j), step)):
                seeded = (self.likelihood.factor(part[span], y[span]).mT @ j[span].double()).flatten(0, -2)
                matrix.addmm_(seeded.mT, seeded)
        return matrix

    def metric(self, normal: Tensor) -> Solve | None:
        """(J^T H J / T + Lambda)^-1 for weight vectors, from J^T H J; None where rounding allows no factorisation."""
        matrix = normal / self.temperature
        matrix.diagonal().add_(self.prior.vector())
        lower, info = torch.linalg.cholesky_ex(matrix)
        if int(info) or not all_finite(lower):
            return None
        return lambda vectors: torch.cholesky_solve(vectors.reshape(-1, len(lower)).mT, lower).mT.reshape(vectors.shape)

    def search(
        self, f: Sequence[Tensor], theta: Tensor, change: Sequence[Tensor], step: Tensor, value: float, slope: float
    ) -> tuple[float, float]:
        """The first step length of 1, 1/2, 1/4 ... that lowers the loss enough, and the loss there; 0 if none does."""
        length = 1.0
        for _ in range(40):
            moved = [one + length * two for one, two in zip(f, change, strict=True)]
            after = self.value(moved, theta + length * step)
            if after <= value + 1e-4 * length * slope + 1e-14 * abs(value):
                return length, after
            length /= 2
        return 0.0, value
