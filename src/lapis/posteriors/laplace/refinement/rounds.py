"""Refinement: the best Gaussian for the tangent model, by variational inference, in place of the one at the mode.

The tangent model f_n + J_n (theta - t) is a generalised linear model. Among Gaussians q = N(m, A^-1) its
ELBO = E_q[log p(D | theta)] / T - KL(q | prior) is highest where

    A = sum_n J_n^T E_q[H_n] J_n / T + Lambda,    sum_n J_n^T E_q[g_n] / T + Lambda (m - m0) = 0,

with gradient g and Hessian H of -log p in the outputs, and the outputs of example n distributed as
N(f_n + J_n (m - t), J_n A^-1 J_n^T) under q. A round is one step of the Bayesian learning rule (Khan and Lin 2017):

    W_n <- (1 - rho) W_n + rho E_q[H_n],    m <- m - rho (sum_n J_n^T W_n J_n / T + Lambda)^-1 (gradient of the ELBO).

A round that lowers the ELBO is taken back and repeated with half the step, so that the ELBO never falls. Structured
posteriors hold their own approximation of A; the direction of m is then solved for with the exact curvature, by
conjugate gradients with A as preconditioner. For a Gaussian likelihood H is constant: A stays, m moves to the mode.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lapis.batches import Batch
from lapis.curvature.products.jacobian import Jacobian
from lapis.errors import LapisWarning, MemoryBudgetError, users_level
from lapis.posteriors.laplace.refinement.resuming import adopt, refinement_file, state
from lapis.posteriors.laplace.tuning.by_evidence import detached
from lapis.posteriors.laplace.tuning.leave_one_out import chosen_width
from lapis.predictions.expectations import expectations, hessian_factor
from lapis.progress import track
from lapis.ranks import Ranks
from lapis.solvers import CallablePreconditioner, Operator, conjugate_gradients

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily

Fitted = TypeVar("Fitted", bound="LaplaceFamily")

FIRST_STEP = 0.7
"""rho of the first round where the Hessian depends on the outputs; it grows again by GROWTH after every good round."""

GROWTH = 1.3

HALVINGS = 5
"""A round whose step was halved so often without raising the ELBO is the last."""

DIRECTION_TOLERANCE, DIRECTION_PRODUCTS = 0.1, 8
"""Relative residual, and most products over the data, of the direction of m in structured posteriors."""

LARGEST_CHANGE = math.log(10.0)
"""Largest change of a logarithm of a prior precision, or of the noise variance, in one round."""

POINTS_ERROR = 1e-3
"""Nats an example within which the ELBO cannot be raised further: fixed points give its gradient with such an error."""

SETTLED = 0.1
"""Hyperparameters whose logarithms change by less than this in a round count as tuned."""


@dataclass(frozen=True)
class Refinement:
    """The record of a refinement."""

    elbo: float
    """The ELBO of the result, nats: a lower bound of the tangent model's log evidence."""
    start: float
    """The ELBO of the Laplace posterior."""
    rounds: int
    passes: int
    """Passes over the data: for the outputs' covariance, for new curvature, and for products with a vector."""
    converged: bool
    reason: str
    trace: tuple[float, ...]
    """The ELBO after each round; it never falls."""
    tuned: bool
    """Whether prior precisions and noise were tuned by the ELBO."""
    current: bool = True
    """Whether prior, noise and temperature are still those of the refinement."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trace", tuple(self.trace))  # JSON turns tuples into lists

    def __str__(self) -> str:
        state = "converged" if self.converged else "stopped"
        return (
            f"refinement: {state} after {self.rounds} rounds and {self.passes} passes over the data ({self.reason}); "
            f"ELBO {self.start:.4f} -> {self.elbo:.4f}"
        )


@dataclass(frozen=True)
class _Evaluation:
    """The ELBO of a posterior, and what the next step needs."""

    elbo: float
    gradient: Tensor
    """sum_n J_n^T E_q[g_n] / T, (P,) float64: the data's part of the ELBO's negative gradient in m."""
    hessians: list[Tensor]
    """E_q[H_n] of each batch under the fitted likelihood's noise, (B, T, C, C), in the network's dtype."""
    statistics: Tensor
    """The likelihood's sums at the outputs' means."""


class Problem:
    """The tangent model of a posterior's data, of which each of several `ranks` holds a part."""

    def __init__(
        self, posterior: LaplaceFamily, held: Sequence[Batch], progress: bool | None, ranks: Ranks | None = None
    ) -> None:
        self.ranks = ranks
        self.held, self.progress, self.passes = held, progress, 1
        self.network, self.centre = posterior.network, posterior.point.double()
        self.jacobian = Jacobian(
            posterior.network, posterior.likelihood.canonical, held, memory_budget=posterior.facts.memory_budget
        )
        self._check_memory(posterior)
        self.targets = [
            posterior.likelihood.targets(batch.targets, f, shape)
            for batch, f, shape in zip(held, self.jacobian.outputs, self.jacobian.shapes, strict=True)
        ]

    def _check_memory(self, posterior: LaplaceFamily) -> None:
        outputs = posterior.n_outputs
        needed = 2 * self.jacobian.n_outputs * outputs * self.network.dtype.itemsize
        if needed > posterior.facts.memory_budget // 2:
            raise MemoryBudgetError(
                f"The curvature of {self.jacobian.n_outputs:,} outputs does not fit",
                expected=f"at most {posterior.facts.memory_budget // 2:,} bytes (half of memory_budget)",
                got=f"{needed:,} bytes for two matrices of {outputs} x {outputs} a position",
                do="refine with fewer examples in the fit, or fit with a larger memory_budget",
            )

    def hessians(self, posterior: LaplaceFamily) -> list[Tensor]:
        """H_n at the trained outputs, as the Laplace posterior has them."""
        found = []
        for f, y in zip(self.jacobian.outputs, self.targets, strict=True):
            factor = posterior.fitted_likelihood.factor(f, y).detach()
            found.append((factor @ factor.mT).to(self.network.dtype))
        return found

    def evaluate(self, posterior: LaplaceFamily) -> _Evaluation:
        """One pass over the data for the outputs' distribution under q, one for the gradient."""
        likelihood, fitted = posterior.likelihood, posterior.fitted_likelihood
        total, gradients, hessians, sums = 0.0, [], [], []
        outputs = posterior.outputs_of_data(self.held)
        for number, y in enumerate(track(self.targets, "refinement", len(self.targets), self.progress)):
            latent = outputs(number)
            assert latent.covariance is not None
            found = expectations(likelihood, latent.mean, latent.covariance, y, fitted)
            total += float(found.log_likelihood.sum())
            gradients.append(found.gradient[None])
            hessians.append(found.hessian.to(self.network.dtype))
            sums.append(likelihood.statistics(latent.mean.double(), y))
        temperature = posterior.temperature
        gradient = self._pulled(gradients, 1)[0].double() / temperature
        statistics = sum(sums, torch.zeros_like(posterior.curvature.statistics))
        if self.ranks is not None:
            likelihoods = statistics.new_tensor([total])
            self.ranks.add_up([likelihoods, gradient, statistics])
            total = float(likelihoods)
        self.passes += 2
        elbo = total / temperature - posterior.divergence()
        return _Evaluation(elbo, gradient, hessians, statistics)

    def _pulled(self, seeds: Sequence[Tensor], count: int) -> Tensor:
        """J^T u, (count, P), of this rank's examples, if it has any."""
        if not self.held:
            return torch.zeros(count, self.network.size, dtype=torch.float64, device=self.network.device)
        return self.jacobian.backward(seeds)

    def direction(self, posterior: LaplaceFamily, gradient: Tensor, hessians: Sequence[Tensor]) -> Tensor:
        """(sum_n J_n^T W_n J_n / T + Lambda)^-1 gradient, (P,)."""
        if posterior.is_exact:
            return posterior.solve(gradient)
        precision, scale = posterior.weight_prior.vector().detach(), float(posterior.scale.detach())

        def product(vectors: Tensor) -> Tensor:
            self.passes += len(vectors)
            pushed = self.jacobian.forward(vectors)
            seeds = [torch.einsum("btcd,kbtd->kbtc", w.to(u.dtype), u) for w, u in zip(hessians, pushed, strict=True)]
            pulled = self._pulled(seeds, len(vectors))
            return scale * (pulled if self.ranks is None else self.ranks.total(pulled)) + precision * vectors

        solved = conjugate_gradients(
            Operator(product, len(gradient), torch.float64, gradient.device),
            gradient[None],
            preconditioner=CallablePreconditioner(posterior.solve),
            tolerance=DIRECTION_TOLERANCE,
            max_iterations=DIRECTION_PRODUCTS,
            on_negative_curvature="flag",  # by rounding: the curvature is positive definite
        )
        return solved.solution[0]


def refine(
    posterior: Fitted,
    held: Sequence[Batch],
    *,
    ranks: Ranks | None,
    tune: bool | None,
    max_rounds: int,
    tolerance: float,
    tolerated_loss: float | None,
    checkpoint: str | os.PathLike[str] | None,
    progress: bool | None,
) -> Fitted:
    """See `LaplaceFamily.refine`."""
    posterior = replace(detached(posterior), tangent=None, calibration=None, sharpness=1.0)
    problem = Problem(posterior, held, progress, ranks)
    posterior = posterior._with_view(True)
    tuning = posterior.tuning is not None if tune is None else tune
    search = Search(problem, posterior, tuning, tolerance * posterior.n_data)
    kept = refinement_file(checkpoint, posterior, problem, {"tuning": tuning, "tolerance": tolerance})
    if kept is not None and kept.facts:
        adopt(search, kept.tensors, kept.facts)
    while search.rounds < max_rounds and search.advance():
        search.rounds += 1
        if kept is not None:
            found = state(search)
            adopt(search, *found)  # as a run that goes on from the file will
            kept.offer(*found)
    if not search.reason:
        search.reason = f"still rising after {max_rounds} rounds, by {search.gain:.2g} nats in the last"
    record = Refinement(
        search.now.elbo, search.trace[0], search.rounds, problem.passes, search.converged, search.reason,
        tuple(search.trace), tuning,
    )  # fmt: skip
    if not search.converged:
        warnings.warn(
            f"Refinement did not converge: {search.reason}. Raise max_rounds, or use float64.",
            LapisWarning,
            stacklevel=users_level(),
        )
    refined: Fitted = replace(search.posterior, refinement=record)
    if tolerated_loss is not None and posterior.likelihood.kind == "classification":
        refined = replace(refined, width=chosen_width(refined, refined.sample_of_data(), tolerated_loss))
    return refined._with_view(False)


class Search:
    """Rounds of the learning rule from a Laplace posterior, with the ELBO never falling."""

    def __init__(self, problem: Problem, posterior: Any, tuning: bool, nats: float) -> None:
        self.problem, self.posterior, self.tuning, self.nats = problem, posterior, tuning, nats
        self.constant = posterior.likelihood.name == "gaussian"
        """Whether H does not depend on the outputs."""
        self.weights = [] if self.constant else problem.hessians(posterior)
        """W_n of the present posterior."""
        self.now = problem.evaluate(posterior)
        self.trace = [self.now.elbo]
        self.step = 1.0 if self.constant else FIRST_STEP
        self.longest = self.step
        self.rounds = 0
        self.gain, self.converged, self.reason = math.inf, False, ""

    def advance(self) -> bool:
        """One round; False where the search has ended, with its reason."""
        changed, moved = self._retuned()
        gradient = self.now.gradient + changed.weight_prior.vector() * (
            self.posterior.mean.double() - changed.weight_prior.mean
        )
        decrement = 0.5 * float(gradient @ self.posterior.solve(gradient))
        rounding = 1e-9 * max(1.0, abs(self.now.elbo))
        if self.constant and moved <= SETTLED and decrement <= max(rounding, 1e-3 * self.nats):
            return self._end(f"at most {decrement:.1e} nats below the maximum")
        for _ in range(HALVINGS):
            candidate, weights = self._candidate(changed, gradient)
            found = self.problem.evaluate(candidate)
            if math.isfinite(found.elbo) and found.elbo >= self.now.elbo - rounding:
                break
            self.step /= 2
        else:
            if self.tuning and moved > SETTLED:  # the hyperparameters' own step may be to blame: go on without it
                self.tuning, self.step = False, self.longest
                return True
            settled = min(self.gain, decrement) <= max(10 * self.nats, POINTS_ERROR * self.posterior.n_data)
            return self._end(f"no step raises the ELBO, predicted gain {decrement:.2g} nats", settled)
        self.gain = found.elbo - self.now.elbo
        self.posterior, self.now, self.weights = candidate, found, weights
        self.trace.append(max(found.elbo, self.trace[-1]))
        self.step = min(self.longest, GROWTH * self.step)
        if self.gain <= self.nats and moved <= SETTLED and not self.constant:
            return self._end(f"the last round gained {self.gain:.2g} nats")
        return True

    def _end(self, reason: str, converged: bool = True) -> bool:
        self.reason, self.converged = reason, converged
        return False

    def _candidate(self, changed: Any, gradient: Tensor) -> tuple[Any, list[Tensor]]:
        """The posterior after a round with the present step, and its W."""
        weights = self.weights
        if not self.constant:
            weights = [torch.lerp(old, new, self.step) for old, new in zip(weights, self.now.hessians, strict=True)]
            factors = [hessian_factor(w.double()) for w in weights]
            changed = changed.recurved(self.problem.held, factors, self.problem.progress, self.problem.ranks)
            self.problem.passes += 1
        direction = self.problem.direction(changed, gradient, weights or self.now.hessians)
        mean = (self.posterior.mean.double() - self.step * direction).to(self.posterior.mean.dtype)
        return replace(changed, mean=mean), weights

    def _retuned(self) -> tuple[Any, float]:
        """The posterior under MacKay's updates of prior and noise, and the largest step in a logarithm."""
        posterior = self.posterior
        if not self.tuning:
            return posterior, 0.0
        prior = posterior.weight_prior
        gamma = posterior.gamma_of_groups()
        distance = prior.squared_distance(posterior.mean.double()).clamp(min=torch.finfo(torch.float64).tiny)
        step = (gamma.clamp(min=1e-3) / distance / prior.precision).log().clamp(-LARGEST_CHANGE, LARGEST_CHANGE)
        moved, precision = float(step.abs().max()), prior.precision * step.exp()
        changes: dict[str, Any] = {
            "prior": replace(posterior.prior, precision=precision),
            "weight_prior": prior.with_precision(precision),
        }
        noise = posterior.likelihood.noise
        if noise is not None:
            squared, counts = self.now.statistics.chunk(2)
            errors = float((squared / noise.detach().double() ** 2).sum()) / posterior.temperature
            free = max(float(counts.sum()) / posterior.temperature - float(gamma.sum()), 1.0)
            turn = min(max(math.log(max(errors, 1e-300) / free), -LARGEST_CHANGE), LARGEST_CHANGE)
            changes["likelihood"] = posterior.likelihood.with_noise(noise.detach() * math.exp(0.5 * turn))
            moved = max(moved, abs(turn))
        return replace(posterior, **changes), moved
