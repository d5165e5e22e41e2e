"""`lapis.variational`: variational inference for any network, from its options to the posterior."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.batches import Inputs, batch_length, describe, map_tensors, take
from lapis.checkpoint import Checkpoint
from lapis.curvature.tape import Tape
from lapis.errors import LapisWarning, ModelError, OptionError, check_fits, users_level
from lapis.files import tensors_digest
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network, Weights, outside_inference_mode
from lapis.options import check_arguments, check_count, check_positive
from lapis.posteriors.posterior import MEMORY_BUDGET, Facts
from lapis.posteriors.variational import Inference, VariationalPosterior
from lapis.priors import Prior, WeightPrior, as_prior
from lapis.progress import track
from lapis.training.budget import EXAMPLES, STEPS, default_batch_size, plan_budget
from lapis.training.data import own_randomness, survey
from lapis.training.variational.approximation import Approximation, small_deviations
from lapis.training.variational.ascent import LOGARITHMIC_RATE, Ascent
from lapis.training.variational.perturbation import Draws
from lapis.training.variational.reading import Reading

ROUND = 50
"""Steps, at least, that draw from one seed: a checkpoint can be written after these."""

LOADINGS_SHARE = 0.1
"""Loadings start at random and add this share, squared, to the variances: at zero the ELBO has no gradient in them."""


@outside_inference_mode
def variational(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    prior: Prior | float | Tensor = 1.0,
    steps: int | None = None,
    draws: int = 1,
    rank: int = 0,
    tune: bool = False,
    noise: bool = False,
    mean: Tensor | None = None,
    deviation: float | Tensor | None = None,
    weights: Weights = "all",
    reparameterisation: Literal["local", "weights"] = "local",
    learning_rate: float | None = None,
    deviation_rate: float = LOGARITHMIC_RATE,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool | None = None,
) -> VariationalPosterior:
    r"""Fit a Gaussian over the weights by variational inference (mean-field, unless a `rank` is given).

    q(theta) = N(mean, diag(deviation^2) + F^T F) maximises

        ELBO = E_q[log p(D | theta)] - KL(q | prior)

    by Adam on pathwise gradients: minibatches of M of the N examples, whose log likelihood counts N / M times, with
    the KL in closed form. The network is any module: weights are replaced while it runs, and the model is left as it
    was, in evaluation mode meanwhile (no dropout; running statistics of batch norm). Weights that a linear or
    convolutional layer uses once are drawn anew for every example, the others once for a batch
    (`training/variational/perturbation.py`): the gradient is unbiased either way, and far less noisy so. The expected
    log likelihood of Gaussian outputs of a last linear layer is taken in closed form.

    Args:
        model: a network, best a trained one: its weights are where the means start.
        data: see `lapis.laplace`; pairs and Datasets are shuffled anew every epoch. They are read many times.
        likelihood: see `lapis.laplace`.
        prior: a precision, or a `Prior` with groups, means and scales.
        steps: optimiser steps; by default 4000, times sqrt(N / 1000) for more than 1000 examples. The learning rate is
            constant for six tenths of them and then falls to zero. A LapisWarning says if the ELBO was still climbing.
        draws: forward passes, with fresh draws, for each step.
        rank: rows of F. With the low-rank part the weights are correlated; its draws are shared by a batch.
        tune: tune the prior's precisions by the ELBO, in closed form: P_g / E_q|theta_g - m_g|^2 for each group.
        noise: learn a Gaussian likelihood's noise by the ELBO; it starts at the likelihood's own, or for
            "regression" at the targets' standard deviation.
        mean: where the means start, (P,); by default the model's weights.
        deviation: where the deviations start, a number or (P,); by default a tenth of the prior's, or of the root mean
            square of the weights where that is less. From a Laplace posterior: `posterior.marginal_variance().sqrt()`.
        weights: which weights are uncertain, see `lapis.laplace`.
        reparameterisation: "local" as above, or "weights": every weight is drawn once for a batch.
        learning_rate: of the means; by default 0.7 / sqrt(number of weights), within 0.001 .. 0.03.
        deviation_rate: learning rate of the logarithms of the deviations, which have no scale.
        batch_size: for data that are not batched yet; by default 2.5e6 / number of weights, within 128 .. 2048.
        generator: source of randomness; seeded with 0 when None.
        checkpoint: a file in which the fit is kept. When it exists the fit goes on from there, and ends as it would
            have without the interruption.
        memory_budget: bytes, for the fit and for predictions; a `rank` that does not fit is refused at the start.
        progress: show a bar; by default on a terminal only.

    >>> import lapis
    >>> x = torch.linspace(-1, 1, 50, dtype=torch.float64)[:, None]
    >>> posterior = lapis.variational(nn.Linear(1, 1).double(), (x, 2 * x), lapis.Gaussian(0.5), steps=1500)
    >>> posterior.inference.converged, round(float(posterior.mean[0]), 2)
    (True, 1.97)
    """
    family, probe = resolve_likelihood(likelihood), Network(model)
    chosen_prior = as_prior(prior)
    check_arguments(variational, locals(), signed=("rank",), apart=("prior", "weights"))
    check_count("rank", rank, least=0)
    if noise and family.noise is None:
        raise OptionError(
            f"The {family.name} likelihood has no noise to learn",
            expected="noise=True with a Gaussian likelihood only",
            got=f"noise=True and {family.name}",
            do="leave noise out",
        )
    size = default_batch_size(probe.size) if batch_size is None else batch_size
    source = generator or torch.Generator().manual_seed(0)
    seed = int(torch.randint(2**62, (), generator=source, device=source.device))
    with own_randomness(probe, seed):
        found = survey(data, probe, size)
    network = probe if isinstance(weights, str) and weights == "all" else Network(model, weights, example=found.example)
    network.example, network.signature = found.example, describe(found.example)
    _check_memory(network, rank, memory_budget)
    weight_prior = chosen_prior.resolve(network)
    if noise and isinstance(likelihood, str):
        family = family.with_noise(found.spread)
    budget = plan_budget(found.n_data, found.n_batches, network.size, learning_rate=learning_rate)
    if steps is None:
        steps = math.ceil(STEPS * max(1.0, math.sqrt(found.n_data / EXAMPLES)))

    reading = Reading(data, network, size, seed)
    q = _start(network, weight_prior, mean, deviation, rank, reading.source(0))
    settings = {
        "steps": steps, "draws": draws, "rank": rank, "tune": tune, "noise": noise, "batch_size": size, "seed": seed,
        "reparameterisation": reparameterisation, "learning_rate": budget.learning_rate, "likelihood": repr(family),
        "deviation_rate": deviation_rate,
        "n_data": found.n_data, "fingerprint": network.fingerprint(), "n_weights": network.size,
        "start": tensors_digest({"mean": q.mean, "deviation": q.log_deviation}),
        "prior": tensors_digest({"precision": weight_prior.vector(), "mean": weight_prior.mean}),
    }  # fmt: skip
    if checkpoint is not None:
        settings["data"] = reading.digest()
    kept = Checkpoint(checkpoint, "variational fit", settings, network.key())
    with network.prepared(), kept.guarded():
        outputs = _first_look(network, family, found.example)
        local = reparameterisation == "local"
        drawn = Draws.found(network, q, _sizes(found.example), reading.source(0)) if local else Draws(network, q)
        log_noise = None
        if noise and family.noise is not None:
            log_noise = family.noise.detach().log().to(network.device).requires_grad_()
        ascent = Ascent(
            q, drawn, family, weight_prior, found.n_data, steps, draws, budget.learning_rate, tune, log_noise,
            deviation_rate,
        )  # fmt: skip
        if kept.tensors:
            ascent.load(kept.tensors, kept.facts)
        _climb(ascent, reading, found.n_batches, kept, progress)
        with reading.randomness():
            held = reading.whole()
            log_likelihoods = ascent.evaluate(held, reading.source(-1))
    if checkpoint is not None:
        kept.offer(*ascent.state(), now=True)
    facts = Facts(found.n_data, outputs, network.signature, network.fingerprint(), memory_budget)
    posterior = _posterior(ascent, network, facts, log_likelihoods, held.digest)
    if not posterior.inference.converged:
        warnings.warn(
            f"Variational inference has not converged: {posterior.inference.reason}. Raise steps (now {steps:,}), or "
            "learning_rate.",
            LapisWarning,
            stacklevel=users_level(),
        )
    return posterior


def _climb(ascent: Ascent, reading: Reading, n_batches: int, kept: Checkpoint, progress: bool | None) -> None:
    """Make all steps that are left, in rounds after which the fit can be interrupted."""
    passes = math.ceil(ROUND / n_batches)

    def rounds() -> Iterator[int]:
        while ascent.done < ascent.steps:
            yield ascent.rounds + 1

    total = math.ceil((ascent.steps - ascent.done) / (passes * n_batches))
    for number in track(rounds(), "variational inference", total, progress):
        with reading.randomness(number):
            ascent.climb(reading.epochs(passes), reading.source(number))
        if kept.path is not None:
            kept.offer(*ascent.state())


def _posterior(
    ascent: Ascent, network: Network, facts: Facts, log_likelihoods: Tensor, fingerprint: int
) -> VariationalPosterior:
    """What the ascent led to; `log_likelihoods` of all data under a few draws each."""
    q, converged, reason = ascent.q, *ascent.convergence()
    divergence = float(q.divergence(ascent.prior).detach())
    with torch.no_grad():
        mean, factors, likelihood = q.mean.detach(), q.factors(), ascent.current_likelihood()
    return VariationalPosterior(
        network=network,
        likelihood=likelihood,
        facts=facts,
        mean=mean,
        point=mean,
        deviation=q.log_deviation.detach().exp(),
        factors=factors,
        weight_prior=ascent.prior,
        inference=Inference(
            elbo=float(log_likelihoods.mean()) - divergence,
            elbo_error=float(log_likelihoods.std()) / math.sqrt(len(log_likelihoods)),
            divergence=divergence,
            trace=ascent.trace(),
            steps=ascent.steps,
            converged=converged,
            reason=reason,
            each_example=tuple(sorted(ascent.draws.each_example)),
            tuned=ascent.tunes_prior,
            noise=ascent.log_noise is not None,
            digest=fingerprint,
        ),
    )


def _check_memory(network: Network, rank: int, memory_budget: int) -> None:
    """MemoryBudgetError if q, its gradient, Adam's two moments of that, and factors in float64 do not fit."""
    needed = network.size * (4 * (2 + rank) * network.dtype.itemsize + 8 * (2 + rank))
    check_fits(
        needed,
        memory_budget,
        f"A Gaussian of rank {rank} over {network.size:,} weights does not fit",
        do="use a smaller rank, fewer weights, or a larger memory_budget",
    )


def _first_look(network: Network, likelihood: Likelihood, example: Inputs) -> int:
    """The number of outputs, after a check of a few examples: they must not see each other."""
    _refuse_checkpointing(network, example)
    f = Tape(network, likelihood.canonical).record(example).f
    likelihood.check_outputs(f)
    suspicion = likelihood.suspicion(f)
    if suspicion is not None:
        warnings.warn(suspicion, LapisWarning, stacklevel=users_level())
    return f.shape[-1]


def _refuse_checkpointing(network: Network, example: Inputs) -> None:
    """ModelError if layers run again in the backward pass, where they would no longer have the drawn weights."""
    again: list[bool] = []
    output = network.call(example)
    hooks = [m.register_forward_pre_hook(lambda *_: again.append(True)) for m in network.module.modules()]
    try:
        torch.autograd.grad(output.sum(), list(network.parameters.values()), allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    if again:
        raise ModelError(
            "Layers run again in the backward pass, when the drawn weights are no longer in their place",
            expected="a network without activation checkpointing",
            got=f"{len(again)} calls of layers in a backward pass",
            do="switch activation checkpointing off for this fit",
        )


def _sizes(example: Inputs) -> list[Inputs]:
    """The examples in two batches of different sizes."""
    length = batch_length(example)
    if length == 1:
        return [example, map_tensors(lambda tensor: torch.cat([tensor, tensor]), example)]
    return [example, take(example, 0, length - 1)]


def _start(
    network: Network,
    prior: WeightPrior,
    mean: Tensor | None,
    deviation: float | Tensor | None,
    rank: int,
    generator: torch.Generator,
) -> Approximation:
    """The Gaussian to start from."""
    centre = network.flat() if mean is None else _vector("mean", mean, network, positive=False)
    if deviation is None:
        spread = small_deviations(centre, prior)
    elif isinstance(deviation, Tensor) and deviation.dim():
        spread = _vector("deviation", deviation, network, positive=True)
    else:
        check_positive("deviation", float(deviation))
        spread = torch.full_like(centre, float(deviation))
    spread = spread.to(centre)
    loadings = None
    if rank:
        noise = torch.randn(rank, network.size, dtype=network.dtype, generator=generator, device=generator.device)
        loadings = (LOADINGS_SHARE * noise / math.sqrt(rank)).requires_grad_()
    return Approximation(centre.requires_grad_(), spread.log().requires_grad_(), loadings)


def _vector(name: str, value: Any, network: Network, positive: bool) -> Tensor:
    """A copy of a checked vector over the chosen weights, in their dtype."""
    fits = isinstance(value, Tensor) and tuple(value.shape) == (network.size,)
    if not fits or not bool(torch.isfinite(value).all()) or (positive and not bool((value > 0).all())):
        raise OptionError(
            f"Bad {name} to start from",
            expected=f"a finite{' and positive' if positive else ''} tensor ({network.size},)",
            got=str(tuple(value.shape)) + (" with other values" if fits else "")
            if isinstance(value, Tensor)
            else repr(value),
            do="pass one number for each chosen weight, in the order of named_parameters()",
        )
    copied: Tensor = value.detach().to(network.device, network.dtype, copy=True)
    return copied
