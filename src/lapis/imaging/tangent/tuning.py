"""Prior variances, length scales and noise by the evidence, with or without the predictive complexity prior."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.optimize
import torch
from numpy.typing import NDArray
from torch import Tensor

from lapis.errors import NotPositiveDefiniteError
from lapis.imaging.tangent.complexity import VariationPrior, sampled_variances
from lapis.imaging.tangent.exact import ExactModel, ExactPosterior
from lapis.imaging.tangent.filters import FilterPrior
from lapis.imaging.tangent.iterative import IterativeModel, IterativePosterior
from lapis.progress import track

Point = Literal["mode", "trained"]
Groups = Literal["blocks", "one"]

LOG_VARIANCE = (-6.9, 12.0)
"""Bounds of log s^2. A block at the lower one is switched off, for all that the data can tell."""
LOG_LENGTH = (math.log(0.05), math.log(50.0))
LOG_NOISE = (-14.0, 14.0)
"""Bounds of the noise variance, relative to where it starts."""
RATE, REFRESHED_EVERY, PROBES, TOLERANCE = 0.3, 5, 8, 1e-2
"""Of the search by probes: first step in logarithms, steps with one preconditioner, random vectors, solves."""
EVALUATIONS, STEPS = 100, 30
"""At most: of an exact evidence; of its gradients by probes."""
COMPLEXITY_SAMPLES = 8
"""Draws for each block behind the variances of differences in large images."""


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search."""

    prior: FilterPrior
    noise_variance: float
    objective: float | None
    """Log evidence, plus the log of the predictive complexity prior where it was used; None by probes."""
    evaluations: int
    trace: tuple[float, ...]
    fixed_noise: bool
    """Whether the noise was stated, not tuned."""


def objective(
    model: ExactModel,
    values: Tensor,
    prior: FilterPrior,
    noise_variance: float,
    point: Point,
    complexity: VariationPrior | None,
) -> tuple[float, Tensor]:
    """The objective at (log s^2, log l, log noise variance relative to a start) and its gradient.

    Point "mode" is the exact evidence of the linear model, which is the Laplace evidence at its own mode theta*;
    "trained" puts the trained weights t in its place: -|y - A f(t)|^2 / 2 s_y^2 - 1/2 t^T Sigma^-1 t - 1/2 log |K_yy|.
    """
    count = len(prior.blocks)
    values = values.detach().requires_grad_()
    with torch.enable_grad():
        there = prior.of(values[:count].exp(), values[count : 2 * count].exp())
        coefficients, noise = there.coefficients(), values[-1].exp() * noise_variance
        value, by_coefficients, by_noise = model.log_evidence(
            coefficients.detach(), float(noise.detach()), point == "mode"
        )
        # a function with this value's gradients: the evidence is differentiated by hand, the few numbers by autograd
        total = coefficients @ by_coefficients + noise * by_noise
        total = total - total.detach() + value
        total = total + _beside(model, there, noise, point, complexity)
        (gradient,) = torch.autograd.grad(total, values)
    return float(total.detach()), gradient


def _beside(
    model: ExactModel | IterativeModel,
    prior: FilterPrior,
    noise: Tensor,
    point: Point,
    complexity: VariationPrior | None,
) -> Tensor:
    """What the objective has beside the evidence at the mode, or beside the determinant: terms of t, complexity."""
    total = torch.zeros((), dtype=torch.float64)
    if point == "trained":
        total = total - model.network_misfit / (2 * noise) - prior.energy(model.weights) / 2
    return total if complexity is None else total + complexity.log_prob(prior)


def evidence_at(posterior: ExactPosterior | IterativePosterior, point: Point) -> float:
    """Log evidence at the linear model's mode, or Laplace's at the trained weights, as `objective` has it."""
    if point == "mode":
        return float(posterior.log_evidence())
    noise = torch.tensor(posterior.noise_variance, dtype=torch.float64)
    return float(posterior.log_normaliser() + _beside(posterior.model, posterior.prior, noise, point, None))


def tune(
    model: ExactModel,
    prior: FilterPrior,
    noise_variance: float,
    *,
    fixed_noise: bool = False,
    point: Point = "mode",
    complexity: VariationPrior | None = None,
    groups: Groups = "blocks",
    max_evaluations: int = EVALUATIONS,
    progress: bool | None = None,
) -> Tuned:
    """Maximise the evidence by L-BFGS within the bounds, from the given prior and noise."""
    spread = _spread(len(prior.blocks), groups)
    free = spread.shape[1] // 2
    bounds = [LOG_VARIANCE] * free + [LOG_LENGTH] * free + [(0.0, 0.0) if fixed_noise else LOG_NOISE]
    trace: list[float] = []
    bar = track(iter(range(max_evaluations * 2)), "tuning by the evidence", max_evaluations, progress)

    def minus(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        next(bar, None)
        try:
            value, gradient = objective(model, spread @ torch.from_numpy(x), prior, noise_variance, point, complexity)
        except NotPositiveDefiniteError:
            return 1e30, np.zeros_like(x)
        trace.append(value)
        return -value, -(gradient @ spread).numpy()

    options = {"maxfun": max_evaluations, "maxiter": max_evaluations, "ftol": 1e-9, "maxcor": 20}
    first = _start(prior, spread).numpy()
    found = scipy.optimize.minimize(minus, first, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    bar.close()  # type: ignore[attr-defined]
    tuned, noise = _outcome(prior, spread @ torch.from_numpy(found.x))
    return Tuned(tuned, noise * noise_variance, -float(found.fun), int(found.nfev), tuple(trace), fixed_noise)


def _spread(count: int, groups: Groups) -> Tensor:
    """Values of the blocks (log s^2 of each, log l of each, log noise) as a 0/1 matrix times those that are free."""
    if groups == "blocks":
        return torch.eye(2 * count + 1, dtype=torch.float64)
    which = torch.tensor([0] * count + [1] * count + [2])
    return torch.nn.functional.one_hot(which, 3).to(torch.float64)


def _start(prior: FilterPrior, spread: Tensor) -> Tensor:
    """The free values at the prior: means over the blocks that share one."""
    values = torch.cat([prior.variances.log(), prior.lengths.log(), torch.zeros(1, dtype=torch.float64)])
    return values @ spread / spread.sum(0)


def _outcome(prior: FilterPrior, values: Tensor) -> tuple[FilterPrior, float]:
    """Of values of the blocks: the prior, and the noise variance relative to its start."""
    variances, lengths = values[:-1].exp().chunk(2)
    return prior.of(variances, lengths), float(values[-1].exp())


def tune_by_probes(
    model: IterativeModel,
    prior: FilterPrior,
    noise_variance: float,
    *,
    fixed_noise: bool = False,
    point: Point = "mode",
    complexity: VariationPrior | None = None,
    groups: Groups = "blocks",
    steps: int = STEPS,
    progress: bool | None = None,
) -> Tuned:
    """Climb the evidence by its gradients from random probes, by Adam with falling steps; the probes stay the same."""
    count = len(prior.blocks)
    spread = _spread(count, groups)
    low = torch.tensor([LOG_VARIANCE[0]] * count + [LOG_LENGTH[0]] * count + [LOG_NOISE[0]], dtype=torch.float64)
    high = torch.tensor([LOG_VARIANCE[1]] * count + [LOG_LENGTH[1]] * count + [LOG_NOISE[1]], dtype=torch.float64)
    low, high = ((limits @ spread) / spread.sum(0) for limits in (low, high))
    free = _start(prior, spread).requires_grad_()
    optimiser = torch.optim.Adam([free], lr=RATE, betas=(0.8, 0.99))
    signs = torch.randint(2, (PROBES, len(model.data)), generator=model.generator)
    probes = (2 * signs - 1).to(model.data.dtype)
    warm, preconditioner = None, None
    for step in track(range(steps), "tuning by the evidence", steps, progress):
        optimiser.param_groups[0]["lr"] = RATE * (1 - step / steps)
        with torch.enable_grad():
            values = spread @ free
            there = prior.of(values[:count].exp(), values[count : 2 * count].exp())
            coefficients, noise = there.coefficients(), values[-1].exp() * noise_variance
            here, level = prior.of(there.variances.detach(), there.lengths.detach()), float(noise.detach())
            if preconditioner is None or step % REFRESHED_EVERY == 0:
                preconditioner = model.preconditioner(here, level)
            by_coefficients, by_noise, warm = model.gradients(
                here, level, probes, preconditioner, warm, TOLERANCE, point == "mode"
            )
            total = coefficients @ by_coefficients + noise * by_noise
            total = total + _beside(model, there, noise, point, complexity)
            (gradient,) = torch.autograd.grad(-total, free)
        if fixed_noise:
            gradient[-1] = 0
        free.grad = gradient
        optimiser.step()
        with torch.no_grad():
            free.clamp_(low, high)
    tuned, factor = _outcome(prior, spread @ free.detach())
    return Tuned(tuned, factor * noise_variance, None, steps, (), fixed_noise)


def tuned_posterior(
    model: ExactModel | IterativeModel,
    noise_variance: float,
    *,
    fixed_noise: bool,
    complexity: float | None,
    point: Point,
    steps: int | None,
    progress: bool | None,
    groups: Groups = "blocks",
) -> tuple[ExactPosterior | IterativePosterior, Tuned]:
    """The posterior under a tuned prior. `complexity`: rate of the TV prior; `steps`: of the search, at most."""
    prior = FilterPrior.standard(model.tangent.blocks)
    if isinstance(model, ExactModel):
        by_variation = None if complexity is None else VariationPrior(prior.blocks, tuple(model.edges), complexity)
        tuned = tune(
            model, prior, noise_variance, fixed_noise=fixed_noise, point=point, complexity=by_variation,
            groups=groups, max_evaluations=steps or EVALUATIONS, progress=progress,
        )  # fmt: skip
        return model.at(tuned.prior, tuned.noise_variance), tuned
    by_variation = None
    if complexity is not None:
        shape, source = model.operator.image_shape, model.generator
        edges = sampled_variances(model.tangent, shape, COMPLEXITY_SAMPLES, source, progress)
        by_variation = VariationPrior(prior.blocks, edges, complexity)
    tuned = tune_by_probes(
        model, prior, noise_variance, fixed_noise=fixed_noise, point=point, complexity=by_variation,
        groups=groups, steps=steps or STEPS, progress=progress,
    )  # fmt: skip
    return model.at(tuned.prior, tuned.noise_variance), tuned
