"""Tuning a Laplace posterior by its evidence, at the trained weights t or at the tangent model's mode theta*."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lapis.curvature.products.jacobian import Jacobian
from lapis.errors import LapisWarning, NotPositiveDefiniteError, OptionError, users_level
from lapis.evidence import Evaluate, SpectralEvidence, TangentMode, TangentProblem, evaluate
from lapis.evidence import tune as maximise
from lapis.evidence.point import LARGEST_LOG
from lapis.posteriors.laplace.tuning import own_noise
from lapis.posteriors.same_data import same_batches
from lapis.priors import Groups, Prior

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily
    from lapis.posteriors.laplace.stored import LaplacePosterior

ROWS_BYTES = 2**29
"""Memory limit for storing the Jacobian's rows in the search for theta*, which multiplies by them often."""

RAISE = 4.0
"""Factor by which prior precisions are raised where the posterior cannot be factorised."""

Fitted = TypeVar("Fitted", bound="LaplaceFamily")


def tune(
    posterior: LaplacePosterior,
    method: str,
    groups: Groups | None,
    noise: bool,
    max_iterations: int,
    tolerance: float | None,
) -> LaplacePosterior:
    """See `LaplacePosterior.tune`."""
    posterior = replace(posterior, width=1.0)
    if groups is not None:
        posterior = regrouped(posterior, groups)
    if noise and posterior.curvature.apart is not None:
        found, messages = own_noise.tune(posterior, method, max_iterations, tolerance)
    else:
        found, messages = maximised(posterior, method, noise, max_iterations, tolerance)
        if noise:
            messages += own_noise.unlike(found)
    for message in messages:
        warnings.warn(message, LapisWarning, stacklevel=users_level())
    return checked(found)


def maximised(
    posterior: LaplacePosterior, method: str, noise: bool, max_iterations: int, tolerance: float | None
) -> tuple[LaplacePosterior, list[str]]:
    """The posterior at the prior precisions, and the common factor of all noises, that maximise the evidence, and what
    to warn of.
    """
    count = len(posterior.weight_prior.precision)
    candidate = candidates(posterior, count, noise)
    start = posterior.weight_prior.precision.detach()
    if noise and posterior.likelihood.noise is not None:
        start = torch.cat([start, start.new_ones(1)])
    prior = posterior.weight_prior
    names = prior.labels if prior.group_of is not None else tuple(f"weight {i}" for i in range(count))
    best, tuning, messages = maximise(
        spectral_evidence(posterior, noise) or partial(evaluate, candidate),
        start,
        names,
        prior.sizes(),
        method=method,
        max_iterations=max_iterations,
        tolerance=tolerance,
    )
    found, raised = _factorised(candidate, best, count)
    if raised > 1 or found.tangent is not None:  # theta* is solved for again, and need not be unique
        tuning = replace(tuning, log_evidence=float(found.log_evidence().detach()))
    if raised > 1:
        what = f"They were raised by a factor of {raised:.3g}" if math.isfinite(raised) else "Nor can it at any larger"
        messages.append(
            "At the prior precisions that the evidence asks for, the posterior cannot be factorised in float64. "
            f"{what}. Rescale inputs and outputs, or share precisions among more weights."
        )
    return replace(found, tuning=tuning), messages


def _factorised(
    candidate: Callable[[Tensor], LaplacePosterior], best: Tensor, count: int
) -> tuple[LaplacePosterior, float]:
    """The candidate at `best`, or at the first larger precisions at which it can be factorised, and their factor.

    The factor is infinite, and the candidate that at `best`, where it can be factorised nowhere.
    """
    raised = 1.0
    while float(best[:count].min()) * raised <= math.exp(LARGEST_LOG + 1e-6):
        found = candidate(torch.cat([best[:count] * raised, best[count:]]))
        try:
            for gaussian in found.gaussians:
                gaussian.check()
            return found, raised
        except NotPositiveDefiniteError:
            raised *= RAISE
    return candidate(best), math.inf


def checked(posterior: Fitted) -> Fitted:
    """The posterior itself; warns if theta* was not found to the requested tolerance."""
    mode = posterior.tangent
    if mode is not None and not mode.converged:
        warnings.warn(
            f"The tangent model's mode was not reached: {mode.reason}; the loss could fall by about "
            f"{mode.remaining:.2g} nats. Raise max_products, or ask for less by tolerance.",
            LapisWarning,
            stacklevel=users_level(),
        )
    return posterior


def spectral_evidence(posterior: LaplacePosterior, noise: bool) -> Evaluate | None:
    """The evidence from the curvature's eigenvalues; None if they do not determine it, or theta* is used."""
    prior = posterior.weight_prior
    if posterior.tangent is not None:
        return None
    for block in posterior.curvature.blocks:
        block.prepare_spectra(prior)
    spectrum = posterior.spectrum()
    if spectrum is None:
        return None
    statistics, temperature = posterior.curvature.statistics, posterior.temperature
    errors = targets = 0.0
    if noise and posterior.likelihood.noise is not None:
        squared, counts = statistics.chunk(2)
        errors = float((squared / posterior.likelihood.noise.detach().double() ** 2).sum()) / temperature
        targets = float(counts.sum()) / temperature
    return SpectralEvidence(
        spectrum,
        float(posterior.scale.detach()),
        prior.sizes().cpu().numpy(),
        prior.squared_distance(posterior.point).cpu().numpy(),
        float(posterior.log_likelihood().detach()) / temperature,
        errors,
        targets,
    )


def candidates(posterior: LaplacePosterior, count: int, noise: bool) -> Callable[[Tensor], LaplacePosterior]:
    """The posterior as a function of its hyperparameters; theta*, if used, is recomputed from the latest one."""
    base = posterior.likelihood.noise if noise else None
    latest = posterior.tangent
    if latest is not None and latest.problem is None:
        raise OptionError(
            "The tangent model's data are not at hand: files do not hold them",
            expected="posterior.at_tangent_mode(data).tune()",
            got="a posterior from a file",
            do="call at_tangent_mode(data) first",
        )

    def candidate(values: Tensor) -> LaplacePosterior:
        nonlocal latest
        precision = values[:count].to(posterior.network.device)
        prior = replace(posterior.prior, precision=precision)
        changes: dict[str, Any] = {"prior": prior, "weight_prior": posterior.weight_prior.with_precision(precision)}
        if base is not None:
            changes["likelihood"] = posterior.likelihood.scaled_noise(values[count].to(base.device))
        changed = replace(posterior, **changes, tuning=None)
        if latest is not None:
            changed = at_mode(changed, latest.problem, latest)
            latest = changed.tangent
        return changed

    return candidate


def at_mode(
    posterior: LaplacePosterior,
    problem: TangentProblem | None,
    start: TangentMode | None = None,
    *,
    anywhere: bool = False,
) -> LaplacePosterior:
    """The posterior with `tangent` computed under its own prior and noise.

    NotPositiveDefiniteError if its precision cannot be factorised, unless the mode is to be found `anywhere`: it exists
    there too, but is found more slowly, and a search would soon leave such a point.
    """
    assert problem is not None
    with torch.no_grad():
        frozen = detached(posterior)
        vector = frozen.weight_prior.vector()
        solve: Callable[[Tensor], Tensor] = frozen.solve
        try:
            for gaussian in frozen.gaussians if anywhere else ():
                gaussian.check()
        except NotPositiveDefiniteError:
            solve = vector.reciprocal().mul
        mode = problem.solve(frozen.likelihood, frozen.weight_prior, posterior.temperature, solve, start=start)
    return replace(posterior, tangent=mode)


def detached(posterior: Fitted) -> Fitted:
    """The posterior with prior precision and noise detached from autograd's graph, and its covariance as it follows."""
    prior = posterior.weight_prior.with_precision(posterior.weight_prior.precision.detach())
    noise = posterior.likelihood.noise
    likelihood = posterior.likelihood if noise is None else posterior.likelihood.with_noise(noise.detach())
    return replace(posterior, weight_prior=prior, likelihood=likelihood, width=1.0)


def tangent_problem(
    posterior: LaplacePosterior, data: Any, batch_size: int | None, tolerance: float | None, max_products: int
) -> TangentProblem:
    """The tangent model for the data of the fit; DataError for other data."""
    network = posterior.network
    held = same_batches(data, network, posterior.curvature.digest, posterior.n_data, batch_size)
    jacobian = Jacobian(
        network,
        posterior.curvature.tape.outputs,
        held,
        memory_budget=posterior.facts.memory_budget,
        kept_bytes=ROWS_BYTES,
    )
    return TangentProblem(jacobian, posterior.likelihood, held, posterior.point, tolerance, max_products)


def regrouped(posterior: Fitted, groups: Groups) -> Fitted:
    """The posterior with other prior groups, each at precision P_g / |t_g - m_g|^2, at which t_g is a typical draw.

    This start follows the weights' scale, so that tuning of scale-free weights does not depend on that scale. Groups at
    the prior's mean start at one.
    """
    fresh = Prior(1.0, groups, posterior.prior.mean, posterior.prior.scales).resolve(posterior.network)
    posterior._check_prior(fresh)
    typical = fresh.typical_of(posterior.point)
    prior = Prior(typical.precision, groups, posterior.prior.mean, posterior.prior.scales)
    return replace(posterior, prior=prior, weight_prior=typical, tuning=None)
