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

LOG_VARIANCE = (-6.9, 12.0)
"""Bounds of log s^2. A block at the lower one is switched off, for all that the data can tell."""
LOG_LENGTH = (math.log(0.05), math.log(50.0))
LOG_NOISE = (-14.0, 14.0)
"""Bounds of the noise variance, relative to where it starts."""
RATE, REFRESHED_EVERY, PROBES, TOLERANCE = 0.3, 10, 8, 1e-2
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


def tune(
    model: ExactModel,
    prior: FilterPrior,
    noise_variance: float,
    *,
    fixed_noise: bool = False,
    point: Point = "mode",
    complexity: VariationPrior | None = None,
    max_evaluations: int = EVALUATIONS,
    progress: bool | None = None,
) -> Tuned:
    """Maximise the evidence by L-BFGS within the bounds, from the given prior and noise."""
    count = len(prior.blocks)
    start = torch.cat([prior.variances.log(), prior.lengths.log(), torch.zeros(1, dtype=torch.float64)])
    bounds = [LOG_VARIANCE] * count + [LOG_LENGTH] * count + [(0.0, 0.0) if fixed_noise else LOG_NOISE]
    trace: list[float] = []
    bar = track(iter(range(max_evaluations * 2)), "tuning by the evidence", max_evaluations, progress)

    def minus(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        next(bar, None)
        try:
            value, gradient = objective(model, torch.from_numpy(x), prior, noise_variance, point, complexity)
        except NotPositiveDefiniteError:
            return 1e30, np.zeros_like(x)
        trace.append(value)
        return -value, -gradient.numpy()

    options = {"maxfun": max_evaluations, "maxiter": max_evaluations, "ftol": 1e-9, "maxcor": 20}
    found = scipy.optimize.minimize(minus, start.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    bar.close()  # type: ignore[attr-defined]
    best = torch.from_numpy(found.x)
    tuned = prior.of(best[:count].exp(), best[count : 2 * count].exp())
    return Tuned(tuned, float(best[-1].exp()) * noise_variance, -float(found.fun), int(found.nfev), tuple(trace))


def tune_by_probes(
    model: IterativeModel,
    prior: FilterPrior,
    noise_variance: float,
    *,
    fixed_noise: bool = False,
    point: Point = "mode",
    complexity: VariationPrior | None = None,
    steps: int = STEPS,
    progress: bool | None = None,
) -> Tuned:
    """Climb the evidence by its gradients from random probes, by Adam with falling steps; the probes stay the same."""
    count = len(prior.blocks)
    values = torch.cat([prior.variances.log(), prior.lengths.log(), torch.zeros(1, dtype=torch.float64)])
    low = torch.tensor([LOG_VARIANCE[0]] * count + [LOG_LENGTH[0]] * count + [LOG_NOISE[0]], dtype=torch.float64)
    high = torch.tensor([LOG_VARIANCE[1]] * count + [LOG_LENGTH[1]] * count + [LOG_NOISE[1]], dtype=torch.float64)
    values.requires_grad_()
    optimiser = torch.optim.Adam([values], lr=RATE, betas=(0.8, 0.99))
    signs = torch.randint(2, (PROBES, len(model.data)), generator=model.generator)
    probes = (2 * signs - 1).to(model.data.dtype)
    warm, preconditioner = None, None
    for step in track(range(steps), "tuning by the evidence", steps, progress):
        optimiser.param_groups[0]["lr"] = RATE * (1 - step / steps)
        with torch.enable_grad():
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
            (gradient,) = torch.autograd.grad(-total, values)
        if fixed_noise:
            gradient[-1] = 0
        values.grad = gradient
        optimiser.step()
        with torch.no_grad():
            values.clamp_(low, high)
    found = values.detach()
    tuned = prior.of(found[:count].exp(), found[count : 2 * count].exp())
    return Tuned(tuned, float(found[-1].exp()) * noise_variance, None, steps, ())


def tuned_posterior(
    model: ExactModel | IterativeModel,
    noise_variance: float,
    *,
    fixed_noise: bool,
    complexity: float | None,
    point: Point,
    steps: int | None,
    progress: bool | None,
) -> tuple[ExactPosterior | IterativePosterior, Tuned]:
    """The posterior under a tuned prior. `complexity`: rate of the TV prior; `steps`: of the search, at most."""
    prior = FilterPrior.standard(model.tangent.blocks)
    if isinstance(model, ExactModel):
        by_variation = None if complexity is None else VariationPrior(prior.blocks, tuple(model.edges), complexity)
        tuned = tune(
            model, prior, noise_variance, fixed_noise=fixed_noise, point=point, complexity=by_variation,
            max_evaluations=steps or EVALUATIONS, progress=progress,
        )  # fmt: skip
        return model.at(tuned.prior, tuned.noise_variance), tuned
    by_variation = None
    if complexity is not None:
        shape, source = model.operator.image_shape, model.generator
        edges = sampled_variances(model.tangent, shape, COMPLEXITY_SAMPLES, source, progress)
        by_variation = VariationPrior(prior.blocks, edges, complexity)
    tuned = tune_by_probes(
        model, prior, noise_variance, fixed_noise=fixed_noise, point=point, complexity=by_variation,
        steps=steps or STEPS, progress=progress,
    )  # fmt: skip
    return model.at(tuned.prior, tuned.noise_variance), tuned
