"""Tuning the prior of an implicit posterior from draws, without the evidence: expectation-maximisation.

    E: draws z_k of N(0, A^-1) under the current prior, and gamma from them
    M: alpha_g <- gamma_g / |theta_g - m_g|^2,  noise^2 <- SSE / (n - gamma),  theta at the tangent model's mode or at t

The weights are the latent variables, and `lapis.latent.em` runs the rounds. EM's own M-step is
alpha <- P / E|theta - m|^2, where E|theta - m|^2 = |mean - m|^2 + tr A^-1; as gamma = P - alpha tr A^-1, both have the
same fixed points, and MacKay's, above, comes to them in far fewer rounds.

With one group gamma is P times the share of sum_n |J_n z_k|^2_H, the variance of the draws' outputs in units of the
noise, in z_k^T A z_k (`evidence.fixed_point.determined`). Otherwise gamma_g = mean_k |e_kg|^2 - alpha_g |z_kg|^2, where
e is the white noise of z's prior part: its expectation is P_g - alpha_g E|z_g|^2, and for weights that the data do not
determine the two terms cancel exactly. (z_g . (GGN z)_g has the same expectation, but is large and of either sign when
groups compensate each other.) Gamma is clipped to [1, P_g - 1] (to P where there is one group), and to at most the
number of rows of G. The white noise is drawn once and rescaled with the prior, and every solve starts from the previous
solution, so that later rounds are cheap and the iteration x <- g(x) in x = log alpha has a limit. At theta* it tends to
overshoot, and with an uninformative prior to be slow; so from the second round on each group steps by (g(x) - x) / (1 -
s), with s the slope of g between the last two rounds.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lapis.batches import Batch
from lapis.errors import LapisWarning, OptionError, users_level
from lapis.evidence import TangentMode, TangentProblem, Tuning
from lapis.evidence.fixed_point import determined, stretch
from lapis.evidence.point import LARGEST_LOG
from lapis.latent.driver import Expected, LatentModel, em
from lapis.options import check_choice
from lapis.posteriors.laplace.matrix_free.descending import Descent
from lapis.posteriors.laplace.matrix_free.noise import noise
from lapis.posteriors.laplace.tuning import own_noise
from lapis.posteriors.laplace.tuning.foretelling import warn_of_doubt
from lapis.posteriors.laplace.tuning.leave_one_out import chosen_width
from lapis.posteriors.predicting.linearised import by_draws
from lapis.predictions import Prediction
from lapis.predictions import predict as predict_outputs
from lapis.priors import Prior
from lapis.solvers import SGDSettings, SGDState, sgd

if TYPE_CHECKING:
    from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior
    from lapis.posteriors.posterior import LatentKind

SGD_EPOCHS = 10
"""Epochs of SGD in each round; twice as many in the first."""

ENDS = LARGEST_LOG * (1 - 1e-9)
"""Precisions with a larger |log| count as having reached the end of their range."""

NOISE_ENDS = LARGEST_LOG / 2
"""The largest |log| of the noise's factor."""

FLOOR = 1e-6
"""Smallest scale of a g-prior, relative to the mean: weights that no output depends on have no curvature."""


class Draws:
    """Draws under a changing prior: always from the same white noise, with warm starts."""

    def __init__(self, posterior: ImplicitPosterior, samples: int, solver: str, batch_size: int, seed: int) -> None:
        check_choice("solver", solver, ("cg", "sgd"))
        self.z: Tensor | None = None
        self.descent: Descent | None = None
        if solver == "sgd":
            self.descent = Descent(posterior, "low_noise", batch_size, seed, samples)
            self.white = self.descent.start
            return
        self.white, self.rows = noise(posterior, seed, 0, samples)
        self.start: Tensor | None = None
        self.pulled = posterior.curvature.root_transposed(self.rows) if posterior.space == "weights" else None

    def under(self, posterior: ImplicitPosterior, progress: bool | None) -> Tensor:
        """Draws z (k, P) of N(0, A^-1) under the posterior's current prior and noise."""
        if self.descent is not None:
            return self._descended(posterior, self.descent, progress)
        gaussian = posterior.gaussian
        if self.pulled is not None:
            target = self.pulled * float(posterior.scale.detach()) ** 0.5
            solved = gaussian.solve(
                target.addcmul_(gaussian.precision.sqrt(), self.white), start=self.start, progress=progress
            )
        else:
            solved = gaussian.draws(self.white, self.rows, start=self.start, progress=progress)
        self.start = solved.result.solution
        self.z = posterior.solved(solved)
        return self.z

    def _descended(self, posterior: ImplicitPosterior, descent: Descent, progress: bool | None) -> Tensor:
        first = self.z is None
        if not first:
            descent.moved(posterior)
        start = descent.start if self.z is None else self.z.mul_(descent.root)
        steps = (2 if first else 1) * SGD_EPOCHS * len(descent.parts)
        settings = SGDSettings(steps, descent.learning_rate(0.9), 0.9, None, "tail", 0.5)
        found = sgd(descent.gradient, SGDState.begin(start, settings), progress=progress)
        descent.judged(descent.residuals(found.solution))
        self.z = found.solution.div_(descent.root)
        return self.z


@dataclass(frozen=True)
class Hyperparameters(LatentModel):
    """Prior precisions and noise, with the weights as latent variables: MacKay's update is EM."""

    title: ClassVar[str] = "rounds of draws"

    posterior: ImplicitPosterior
    """Under these hyperparameters."""
    sampler: Draws
    base: Tensor | None
    """The noise that `factor` multiplies; None if it is not tuned."""
    precision: Tensor
    """(G,)"""
    factor: float
    lowest: Tensor
    highest: Tensor
    """Bounds of gamma, (G,)."""
    effective: Tensor = field(default_factory=lambda: torch.zeros(0))
    """gamma of the last round, (G,)."""
    change: float = math.inf
    before: tuple[Tensor, Tensor] | None = None
    """log alpha, and where the M-step led from there, of the last round."""
    path: tuple[tuple[float, ...], ...] = ()

    def moved(self) -> float:
        """The largest change of a logarithm."""
        return self.change

    def unfinished(self, reason: str, rounds: int, tolerance: float) -> str:
        return f"Tuning from draws was still moving: {reason}. Raise max_iterations, or tolerance ({tolerance:g})."

    def expectation(self, data: Tensor) -> Expected:
        """gamma (G,) from draws, |theta - m|^2 (G,), and the noise's statistics; `data`: the group of each weight."""
        current, z = self.posterior, self.sampler.under(self.posterior, False)
        if len(self.precision) == 1:
            spread = float(current.scale.detach()) * current.curvature.root(z).double().square().sum(1)
            held = torch.stack([row.double().square() @ current.gaussian.precision.double() for row in z])
            gamma = determined(spread, held, current.n_weights).reshape(1)
        else:
            share = (self.sampler.white.square() - current.gaussian.precision * z.square()).double().mean(0)
            gamma = torch.zeros_like(self.precision).index_add(0, data, share)
        gamma = torch.maximum(torch.minimum(gamma, self.highest), self.lowest)
        weights, statistics = current.evidence_point()
        distance = current.weight_prior.squared_distance(weights).clamp(min=torch.finfo(torch.float64).tiny)
        sums = {"effective": gamma, "distance": distance, "noise": statistics.detach().double()}
        return Expected(sums, torch.tensor(math.nan), current.n_data)

    def maximisation(self, expected: Expected) -> Hyperparameters:
        """MacKay's update, stretched by the slope between rounds."""
        gamma = expected.statistics["effective"]
        here, there = self.precision.log(), (gamma / expected.statistics["distance"]).log()
        there = there.clamp(-LARGEST_LOG, LARGEST_LOG)
        moved, factor = float((there - here).abs().max()), self.factor
        stretched = here + stretch(self.before, here, there) * (there - here)
        precision = stretched.clamp(-LARGEST_LOG, LARGEST_LOG).exp()
        if self.base is not None:
            wanted = self._noise(expected.statistics["noise"], float(gamma.sum()))
            factor, moved = math.exp(wanted), max(moved, abs(wanted - math.log(factor)))
        step = (*precision.tolist(), *([factor] if self.base is not None else []))
        return replace(
            self,
            posterior=_with(self.posterior, precision, self.base, factor),
            precision=precision,
            factor=factor,
            effective=gamma,
            change=moved,
            before=(here, there),
            path=(*self.path, step),
        )

    def _noise(self, statistics: Tensor, effective: float) -> float:
        """log of the noise's factor: noise^2 <- SSE / (n - gamma)."""
        squared, counts = statistics.chunk(2)
        sigma, temperature = self.posterior.likelihood.noise, self.posterior.temperature
        assert sigma is not None
        errors = float((squared / sigma.detach().to(squared) ** 2).sum()) / temperature
        free = max(float(counts.sum()) / temperature - effective, 1.0)
        wanted = math.log(self.factor) + 0.5 * math.log(max(errors, 1e-300) / free)
        return min(max(wanted, -NOISE_ENDS), NOISE_ENDS)


def tune(
    posterior: ImplicitPosterior,
    *,
    samples: int,
    solver: str,
    batch_size: int,
    noise: bool,
    rounds: int,
    tolerance: float,
    generator: torch.Generator,
    progress: bool | None,
    tolerated_loss: float | None,
) -> ImplicitPosterior:
    """See `ImplicitPosterior.tune`."""
    posterior = replace(posterior, width=1.0)
    prior = posterior.weight_prior
    if prior.group_of is None:
        raise OptionError(
            "A few draws cannot tune a precision for every weight",
            expected="groups of weights",
            got='groups="weight"',
            do='use groups="parameter" or "layer", or fix some proportions: Prior(scales=...)',
        )
    sizes, index = prior.sizes(), prior.group_index()
    lowest, highest = torch.minimum(sizes / 2, torch.ones_like(sizes)), torch.maximum(sizes - 1, sizes / 2)
    highest = highest if len(sizes) > 1 else sizes
    highest = highest.clamp(max=posterior.curvature.rows)
    base = posterior.likelihood.noise if noise else None
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    sampler = Draws(posterior, samples, solver, batch_size, seed)
    precision = prior.precision.detach().clone()
    start = Hyperparameters(_with(posterior, precision, base, 1.0), sampler, base, precision, 1.0, lowest, highest)
    fit = em(start, index, rounds=rounds, tolerance=tolerance, progress=progress)
    end, precision, factor = fit.model, fit.model.precision, fit.model.factor
    bound = [name for name, value in zip(prior.labels, precision.log().abs().tolist(), strict=True) if value > ENDS]
    if base is not None and abs(math.log(factor)) > NOISE_ENDS * (1 - 1e-9):
        bound.append("noise")
    tuning = Tuning(
        "draws", math.nan, math.nan, fit.rounds, fit.rounds, fit.converged, fit.reason, (), tuple(prior.labels),
        tuple(end.effective.tolist()), tuple(bound), end.path,
    )  # fmt: skip
    if bound:
        warnings.warn(
            f"Hyperparameters {', '.join(map(repr, bound))} ran to the end of their range: the draws see too little of "
            "what the data say about them. Use more draws, or fewer groups.",
            LapisWarning,
            stacklevel=users_level(),
        )
    for message in own_noise.unlike(end.posterior) if base is not None else ():
        warnings.warn(message, LapisWarning, stacklevel=users_level())
    found, z = replace(end.posterior, tuning=tuning), sampler.z
    assert z is not None
    sample = found.sample_of_data()
    if tolerated_loss is not None and found.likelihood.kind == "classification":
        viewed = found._with_view(True)
        if viewed.view is not None:
            return replace(found, width=chosen_width(viewed, sample, tolerated_loss))
    warn_of_doubt(found, sample, lambda batch: _foretold(found, z, batch))
    return found


def _foretold(posterior: ImplicitPosterior, z: Tensor, batch: Batch) -> Prediction:
    """The prediction of a few examples with the covariance of draws z (k, P): relative errors of sqrt(2 / k)."""
    kind: LatentKind = "full" if posterior._full_by_default() else "diagonal"
    deviations, canonical = z.to(posterior.network.dtype), posterior.likelihood.canonical
    latent = by_draws(
        posterior.network, canonical, posterior.n_outputs, deviations, batch.inputs, kind, posterior.facts.memory_budget
    )
    return predict_outputs(posterior.likelihood, latent)


def _with(posterior: ImplicitPosterior, precision: Tensor, base: Tensor | None, factor: float) -> ImplicitPosterior:
    """The posterior under other hyperparameters; theta*, if used, is recomputed for them."""
    changes: dict[str, Any] = {
        "prior": replace(posterior.prior, precision=precision),
        "weight_prior": posterior.weight_prior.with_precision(precision),
    }
    if base is not None:
        changes["likelihood"] = posterior.likelihood.with_noise(base.detach() * factor)
    changed = replace(posterior, **changes, tuning=None)
    if posterior.tangent is None:
        return changed
    return replace(changed, tangent=tangent_mode(changed, posterior.tangent.problem, posterior.tangent))


def tangent_problem(posterior: ImplicitPosterior, tolerance: float | None, max_products: int) -> TangentProblem:
    """The tangent model of the posterior's own data."""
    curvature = posterior.curvature
    return TangentProblem(
        curvature.jacobian, posterior.likelihood, curvature.batches, posterior.point, tolerance, max_products
    )


def tangent_mode(
    posterior: ImplicitPosterior, problem: TangentProblem | None, start: TangentMode | None
) -> TangentMode:
    """theta* under the posterior's prior and noise."""
    if problem is None:
        problem = tangent_problem(posterior, None, 2000)
    vector = posterior.weight_prior.vector().detach()
    prior = posterior.weight_prior.with_precision(posterior.weight_prior.precision.detach())
    with torch.no_grad():
        return problem.solve(posterior.likelihood, prior, posterior.temperature, lambda v: v / vector, start=start)


def g_prior(posterior: ImplicitPosterior, g: float, samples: int, generator: torch.Generator) -> Prior:
    """See `ImplicitPosterior.g_prior`."""
    total = torch.zeros(posterior.n_weights, dtype=torch.float64, device=posterior.network.device)
    rows = posterior.curvature.rows
    for start in range(0, samples, posterior.vectors_at_once()):
        count = min(posterior.vectors_at_once(), samples - start)
        how: dict[str, Any] = {"dtype": posterior.network.dtype, "generator": generator, "device": generator.device}
        u = torch.stack([torch.randn(rows, **how) for _ in range(count)]).to(posterior.network.device)
        total += posterior.curvature.root_transposed(u).double().square().sum(0)
    diagonal = total * float(posterior.scale.detach()) / (samples * posterior.n_data)
    return Prior(g, "one", posterior.prior.mean, diagonal.clamp(min=FLOOR * float(diagonal.mean())))
