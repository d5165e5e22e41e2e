"""The mode of a linear model by Newton's method, and prior and noise by expectation-maximisation from draws."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapis.errors import LapisWarning
from lapis.evidence import Tuning
from lapis.evidence.fixed_point import stretch
from lapis.evidence.point import LARGEST_LOG
from lapis.likelihoods import Likelihood
from lapis.linear_models.prior import LinearPrior
from lapis.linear_models.system import System
from lapis.progress import track

if TYPE_CHECKING:
    from lapis.linear_models.posterior import Drawing, LinearPosterior

NEWTON_STEPS, HALVINGS = 50, 20
"""Steps to the mode of a likelihood that is not Gaussian, and halvings of one."""


def curvature(likelihood: Likelihood, f: Tensor, targets: Tensor) -> Tensor:
    """h, (n,): second derivatives of -log p(y | f) in f."""
    found = likelihood.factor(f.reshape(-1, 1, 1), targets).square().sum((1, 2, 3))
    return found.detach().double().expand(len(f)).contiguous()


def mode(system: System, likelihood: Likelihood, targets: Tensor, start: Tensor) -> tuple[Tensor, System]:
    """The mode of w, (d,), and A there. A Gaussian likelihood takes one solve, others Newton's method."""
    design, y = system.design, targets.reshape(-1)
    if likelihood.name == "gaussian":
        system = replace(system, curvature=curvature(likelihood, torch.zeros_like(y), targets))
        return system.solve(design.backward((system.curvature * y)[None]), start[None])[0], system

    def loss(w: Tensor, f: Tensor) -> float:
        nll = float(likelihood.nll(f.reshape(-1, 1, 1), targets).sum())
        return nll + 0.5 * float((system.diagonal * w.square()).sum())

    w = start
    f = design.forward(w[None])[0]
    now = loss(w, f)
    for _ in range(NEWTON_STEPS):
        slope = likelihood.gradient(f.reshape(-1, 1, 1), targets).reshape(-1).double()
        system = replace(system, curvature=curvature(likelihood, f, targets))
        gradient = design.backward(slope[None])[0] + system.diagonal * w
        step = system.solve(gradient[None])[0]
        gain, push = float(gradient @ step), design.forward(step[None])[0]
        if gain <= 2 * system.tolerance * max(1.0, abs(now)):
            return w - step, replace(system, curvature=curvature(likelihood, f - push, targets))
        size = 1.0
        for _ in range(HALVINGS):
            found = loss(w - size * step, f - size * push)
            if found <= now - 1e-4 * size * gain:
                break
            size /= 2
        w, f, now = w - size * step, f - size * push, found
    warnings.warn(
        f"Newton's method stopped {gain / 2:.2g} nats above the minimum. Raise the prior precision.",
        LapisWarning,
        stacklevel=4,
    )
    return w, system


def drawn(system: System, how: Drawing, start: Tensor | None, progress: bool | None) -> Tensor:
    """Draws of N(0, A^-1), (k, d)."""
    if how.solver == "sgd":
        return system.descended(how.seed, how.samples, how.epochs, how.batch_size, progress)
    return system.draws(how.seed, how.samples, start, progress)


def refitted(
    posterior: LinearPosterior, prior: LinearPrior, likelihood: Likelihood, progress: bool | None = False
) -> LinearPosterior:
    """The posterior under another prior and likelihood, with mean and draws found from those of this one on."""
    system = replace(posterior.system, precision=prior.vector())
    mean, system = mode(system, likelihood, posterior.targets, posterior.mean)
    deviations = drawn(system, posterior.drawing, posterior.deviations, progress)
    return replace(
        posterior, system=system, likelihood=likelihood, prior=prior, mean=mean, deviations=deviations, tuning=None
    )


def gamma(posterior: LinearPosterior) -> Tensor:
    """The effective parameters of each group, (G,), from the draws z.

    With one group mean_k |h^1/2 Phi z_k|^2; with several mean_k |e_kg|^2 - |z_kg|^2_Lambda, e the white noise of z's
    prior part: for weights that the data do not determine the two terms cancel exactly.
    """
    system, z = posterior.system, posterior.deviations
    if len(posterior.prior.precision) == 1:
        spread = [float((system.design.forward(row[None]).square() * system.curvature).sum()) for row in z]
        return torch.tensor([sum(spread) / len(spread)], dtype=torch.float64)
    total = torch.zeros_like(posterior.prior.precision)
    for number, row in enumerate(z):
        e, _ = system.noise(posterior.drawing.seed + number, 1)
        total += posterior.prior.by_group(e[0].square() - system.diagonal * row.square())
    return total / len(z)


def tune(
    posterior: LinearPosterior, noise: bool, rounds: int, tolerance: float, progress: bool | None
) -> LinearPosterior:
    """See `LinearPosterior.tune`."""
    sizes = posterior.prior.by_group(torch.ones(posterior.n_weights, dtype=torch.float64))
    lowest, highest = (0.5 * sizes).clamp(max=1.0), torch.maximum(sizes - 1, 0.5 * sizes)
    highest = highest.clamp(max=posterior.n_data)
    tuned = noise and posterior.likelihood.noise is not None
    found, moved, done = posterior, math.inf, 0
    path: list[tuple[float, ...]] = []
    determined, before = lowest, None
    if posterior.prior.vector().shape != posterior.system.precision.shape:
        found = refitted(posterior, posterior.prior, posterior.likelihood)
    for _ in track(range(rounds), "rounds of draws", rounds, progress):
        prior = found.prior
        determined = torch.maximum(torch.minimum(gamma(found), highest), lowest)
        scales = 1.0 if prior.scales is None else prior.scales
        distance = prior.by_group(scales * found.mean.square()).clamp(min=torch.finfo(torch.float64).tiny)
        here, there = prior.precision.log(), (determined / distance).log()
        likelihood = found.likelihood
        if tuned and likelihood.noise is not None:
            rest = found.targets.reshape(-1) - found.system.design.forward(found.mean[None])[0]
            free = max(found.n_data - float(determined.sum()), 1.0)
            variance = rest.square().sum().clamp(min=1e-300) / free
            here = torch.cat([here, likelihood.noise.detach().double().reshape(1).log()])
            there = torch.cat([there, 0.5 * variance.reshape(1).log()])
        there = there.clamp(-LARGEST_LOG, LARGEST_LOG)
        moved = float((there - here).abs().max())
        logs = (here + stretch(before, here, there) * (there - here)).clamp(-LARGEST_LOG, LARGEST_LOG)
        before = here, there
        if len(logs) > len(prior.precision):
            likelihood = likelihood.with_noise(float(logs[-1].exp()))
        found = refitted(found, replace(prior, precision=logs[: len(prior.precision)].exp()), likelihood)
        path.append(
            (*found.prior.precision.tolist(), *([float(likelihood.noise)] if likelihood.noise is not None else []))
        )
        done += 1
        if moved <= tolerance:
            break
    reason = f"the last round changed a logarithm by {moved:.2g}"
    labels = tuple(f"group {number}" for number in range(len(sizes)))
    bound = tuple(
        name for name, value in zip(labels, found.prior.precision.log().abs().tolist(), strict=True)
        if value > LARGEST_LOG * (1 - 1e-9)
    )  # fmt: skip
    record = Tuning(
        "draws", math.nan, math.nan, done, done, moved <= tolerance, reason, (), labels, tuple(determined.tolist()),
        bound, tuple(path),
    )  # fmt: skip
    if not record.converged or bound:
        what = f"{', '.join(bound)} ran to the end of the range" if bound else f"still moving: {reason}"
        warnings.warn(
            f"Tuning from draws: {what}. Raise max_iterations or tolerance, or use fewer groups.",
            LapisWarning,
            stacklevel=3,
        )
    return replace(found, tuning=record)
