"""The mode of a linear model by Newton's method, and prior and noise by expectation-maximisation from draws."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lapis.errors import LapisWarning
from lapis.evidence import Tuning
from lapis.evidence.fixed_point import determined, stretch
from lapis.evidence.point import LARGEST_LOG
from lapis.latent.driver import Expected, LatentModel, em
from lapis.likelihoods import Likelihood
from lapis.linear_models.prior import LinearPrior
from lapis.linear_models.system import System

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

    With one group from |h^1/2 Phi z_k|^2 and |z_k|^2_Lambda, see `determined`; with several mean_k |e_kg|^2 -
    |z_kg|^2_Lambda, e the white noise of z's prior part: for weights that the data do not determine the two terms
    cancel exactly.
    """
    system, z = posterior.system, posterior.deviations
    if len(posterior.prior.precision) == 1:
        spread = [float((system.design.forward(row[None]).square() * system.curvature).sum()) for row in z]
        held = torch.stack([row.square() @ system.diagonal for row in z])
        return determined(held.new_tensor(spread), held, posterior.n_weights).reshape(1)
    total = torch.zeros_like(posterior.prior.precision)
    for number, row in enumerate(z):
        e, _ = system.noise(posterior.drawing.seed + number, 1)
        total += posterior.prior.by_group(e[0].square() - system.diagonal * row.square())
    return total / len(z)


@dataclass(frozen=True)
class Hyperparameters(LatentModel):
    """Prior precisions and noise, with the weights as latent variables: MacKay's update as the M-step of EM."""

    title: ClassVar[str] = "rounds of draws"

    posterior: LinearPosterior
    """Under these hyperparameters."""
    noise: bool
    """Whether the noise is tuned."""
    lowest: Tensor
    highest: Tensor
    """Bounds of gamma, (G,)."""
    effective: Tensor
    """gamma of the last round, (G,)."""
    change: float = math.inf
    before: tuple[Tensor, Tensor] | None = None
    """Logarithms, and where the M-step led from there, of the last round."""
    path: tuple[tuple[float, ...], ...] = ()

    def moved(self) -> float:
        """The largest change of a logarithm."""
        return self.change

    def unfinished(self, reason: str, rounds: int, tolerance: float) -> str:
        return (
            f"Tuning from draws: still moving: {reason}. Raise max_iterations ({rounds}) or tolerance ({tolerance:g}), "
            "or use fewer groups."
        )

    def expectation(self, data: Tensor) -> Expected:
        """gamma (G,) from draws, |w|^2 in units of the prior (G,), and the squared errors; `data`: targets (n,)."""
        now = self.posterior
        effective = torch.maximum(torch.minimum(gamma(now), self.highest), self.lowest)
        scales = 1.0 if now.prior.scales is None else now.prior.scales
        distance = now.prior.by_group(scales * now.mean.square()).clamp(min=torch.finfo(torch.float64).tiny)
        sums = {"effective": effective, "distance": distance}
        if self.noise:
            sums["errors"] = (data - now.system.design.forward(now.mean[None])[0]).square().sum()
        return Expected(sums, torch.tensor(math.nan), now.n_data)

    def maximisation(self, expected: Expected) -> Hyperparameters:
        """alpha_g <- gamma_g / |w_g|^2, noise^2 <- SSE / (n - gamma), stretched by the slope between rounds."""
        now, sums = self.posterior, expected.statistics
        prior, likelihood, effective = now.prior, now.likelihood, sums["effective"]
        here, there = prior.precision.log(), (effective / sums["distance"]).log()
        if self.noise and likelihood.noise is not None:
            free = max(expected.count - float(effective.sum()), 1.0)
            variance = sums["errors"].clamp(min=1e-300) / free
            here = torch.cat([here, likelihood.noise.detach().double().reshape(1).log()])
            there = torch.cat([there, 0.5 * variance.reshape(1).log()])
        there = there.clamp(-LARGEST_LOG, LARGEST_LOG)
        logs = (here + stretch(self.before, here, there) * (there - here)).clamp(-LARGEST_LOG, LARGEST_LOG)
        if len(logs) > len(prior.precision):
            likelihood = likelihood.with_noise(float(logs[-1].exp()))
        found = refitted(now, replace(prior, precision=logs[: len(prior.precision)].exp()), likelihood)
        step = (*found.prior.precision.tolist(), *([] if likelihood.noise is None else [float(likelihood.noise)]))
        return replace(
            self, posterior=found, effective=effective, change=float((there - here).abs().max()), before=(here, there),
            path=(*self.path, step),
        )  # fmt: skip


def tune(
    posterior: LinearPosterior, noise: bool, rounds: int, tolerance: float, progress: bool | None
) -> LinearPosterior:
    """See `LinearPosterior.tune`."""
    sizes = posterior.prior.by_group(torch.ones(posterior.n_weights, dtype=torch.float64))
    lowest, highest = (0.5 * sizes).clamp(max=1.0), torch.maximum(sizes - 1, 0.5 * sizes) if len(sizes) > 1 else sizes
    highest = highest.clamp(max=posterior.n_data)
    if posterior.prior.vector().shape != posterior.system.precision.shape:
        posterior = refitted(posterior, posterior.prior, posterior.likelihood)
    start = Hyperparameters(posterior, noise and posterior.likelihood.noise is not None, lowest, highest, lowest)
    fit = em(start, posterior.targets.reshape(-1), rounds=rounds, tolerance=tolerance, progress=progress)
    found, labels = fit.model.posterior, tuple(f"group {number}" for number in range(len(sizes)))
    bound = tuple(
        name for name, value in zip(labels, found.prior.precision.log().abs().tolist(), strict=True)
        if value > LARGEST_LOG * (1 - 1e-9)
    )  # fmt: skip
    record = Tuning(
        "draws", math.nan, math.nan, fit.rounds, fit.rounds, fit.converged, fit.reason, (), labels,
        tuple(fit.model.effective.tolist()), bound, fit.model.path,
    )  # fmt: skip
    if bound:
        warnings.warn(
            f"Tuning from draws: {', '.join(bound)} ran to the end of the range. Use more draws, or fewer groups.",
            LapisWarning,
            stacklevel=3,
        )
    return replace(found, tuning=record)
