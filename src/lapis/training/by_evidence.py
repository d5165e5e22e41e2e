"""Training by maximum a posteriori, with the prior and the noise tuned by the evidence on the way."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Literal

from torch import Tensor, nn

from lapis.checkpoint import Checkpoint
from lapis.curvature.blocks.partition import NAMES
from lapis.errors import OptionError
from lapis.files import tensors_digest
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network, outside_inference_mode, restored_modes
from lapis.options import check_arguments
from lapis.posteriors import LaplacePosterior
from lapis.posteriors.laplace.fit import laplace
from lapis.priors import Prior, WeightPrior, as_prior
from lapis.progress import track
from lapis.training.budget import default_batch_size, plan_budget
from lapis.training.convergence import remaining_nats
from lapis.training.data import own_randomness, shuffled, survey
from lapis.training.run import Run
from lapis.training.state import described, layout_digest, load_model
from lapis.training.step import OPTIMISERS, MakeOptimiser, check_optimiser

FIRST_NOISE = 0.3
"""The noise starts at this share of the targets' standard deviation. From all of it the network may find no more than a
trend at first; noise and prior then settle for that, and all that is left counts as noise. From a tenth, noisy data are
overfitted beyond return."""


@outside_inference_mode
def train(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    epochs: int | None = None,
    prior: Prior | float | Tensor | None = None,
    structure: str = "auto",
    curvature: str = "ggn",
    learning_rate: float | None = None,
    optimiser: str | MakeOptimiser = "adam",
    schedule: Literal["cosine", "constant"] = "cosine",
    batch_size: int | None = None,
    burn_in: int | None = None,
    every: int | None = None,
    hyper_steps: int = 20,
    noise: bool = True,
    patience: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    seed: int = 0,
    memory_budget: int = 4 * 2**30,
    progress: bool | None = None,
) -> LaplacePosterior:
    """Train a network, with the evidence tuning prior and noise on the way, and return its Laplace posterior.

    The loss is -log p(D | theta) - log p(theta). After `burn_in` epochs, and every `every` epochs from then on,
    curvature is refitted, `hyper_steps` steps of `tune` raise the evidence in prior precisions and noise, and training
    goes on under these. No validation data are needed. At the weights of the last epoch prior and noise are tuned
    until they converge; `training` on the result tells how it went.

    While a network does not fit yet, the evidence is highest without it: noise and precisions grow, the weights go to
    zero, and training does not recover. So until the evidence beats the log likelihood of the best constant prediction,
    or half of the epochs have passed, an evaluation loosens the prior instead of tuning it, the noise may only fall,
    and weights that the prior has pulled close to zero start again from their first values. A result that is no better
    than a constant comes with a LapisWarning, and so does a run that is far from converged: where a Newton step
    promises more nats (`training.remaining`) than gamma, and than a tenth of what was gained over a constant.

    Args:
        data: a pair (inputs, targets) or a Dataset, shuffled anew every epoch, or a DataLoader or list of batches,
            used in the order they give. Inputs and targets are best scaled to standard deviations of one.
        likelihood: see `lapis.laplace`. The noise of "regression" starts at 0.3 times the targets' standard deviation.
        epochs: by default as many as make 4000 optimiser steps, times sqrt(N / 1000) for more than 1000 examples.
        prior: where the precisions start; when not given, one for each layer, P_g / |theta_g|^2 of the weights as they
            are now, so that these are a typical draw. Layers that can exchange scale (ReLU) let precisions drift for as
            long as training lasts; one for all, `Prior(1.0)`, settles.
        structure: see `lapis.laplace`; so are `curvature` and `memory_budget`.
        learning_rate: at the start; by default 0.7 / sqrt(number of weights), within 0.001 .. 0.03.
        optimiser: "adam", "sgd" (momentum 0.9), or a function of (parameters, learning rate).
        schedule: how the learning rate goes down: "cosine" to zero, or "constant".
        batch_size: for data that are not batched yet; by default 2.5e6 / number of weights, within 128 .. 2048.
        burn_in: epochs up to the first evaluation; by default a tenth of all.
        every: epochs between evaluations; by default a twelfth of the others.
        patience: stop when the evidence has not risen for this many evaluations, and return the epoch where it was
            highest. By default all epochs are trained and the last is returned: the evidence is that of a mode, and
            high early on, far from one, for want of fitted weights.
        checkpoint: a file, rewritten after every epoch. When it exists, training goes on from there, and ends as it
            would have without the interruption. Data, network and options must be the same: data that are augmented at
            random must take their randomness from torch.
        seed: of shuffling and dropout. Every epoch has its own stream of random numbers.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.linspace(-3, 3, 30)[:, None]
    >>> data = x, 2 * x + 0.1 * torch.randn_like(x)
    >>> net = nn.Linear(1, 1)
    >>> posterior = train(net, data, "regression", epochs=300, burn_in=100, every=100, learning_rate=0.05)
    >>> posterior.training.evaluated, posterior.training.converged
    ((100, 200, 300), True)
    """
    family, network = resolve_likelihood(likelihood), Network(model)
    chosen = None if prior is None else as_prior(prior)
    check_arguments(train, locals(), signed=("seed",), apart=("prior",))
    check_optimiser(optimiser)
    if NAMES.get(structure) == "implicit":
        raise OptionError(
            "Training by the evidence needs its gradient",
            expected="a structure that is stored",
            got=f"structure={structure!r}, whose evidence is an estimate",
            do='use "kronecker", "diagonal", "dense" or "lowrank"',
        )
    batch_size = default_batch_size(network.size) if batch_size is None else batch_size
    with own_randomness(network, _seed(seed, 0)):
        found = survey(data, network, batch_size, fingerprint=checkpoint is not None)
    network.example = found.example
    if isinstance(likelihood, str) and noise and family.noise is not None:
        family = family.with_noise(FIRST_NOISE * found.spread)
    if chosen is None:
        start = Prior(1.0, groups="layer").resolve(network).typical_of(network.flat())
    else:
        start = chosen.resolve(network)
    budget = plan_budget(found.n_data, found.n_batches, network.size, epochs, burn_in, every, learning_rate)
    make = OPTIMISERS[optimiser] if isinstance(optimiser, str) else optimiser
    run = Run(
        network, family, start, lambda: make(list(network.parameters.values()), budget.learning_rate), found.n_data,
        patient=patience is not None,
    )  # fmt: skip
    settings = {
        "epochs": budget.epochs, "learning_rate": budget.learning_rate, "schedule": schedule, "batch_size": batch_size,
        "seed": seed, "burn_in": budget.burn_in, "every": budget.every, "hyper_steps": hyper_steps, "noise": noise,
        "n_data": found.n_data,
        "n_weights": network.size, "network": layout_digest(network),
        "data": hashlib.sha256(found.digest.encode()).hexdigest()[:16], "structure": structure, "curvature": curvature,
        "patience": patience, "optimiser": described(run.optimiser), "likelihood": family.to_config(),
        # without one it follows from the first weights, which a network that goes on need not have
        "prior": None if prior is None else tensors_digest(start.tensors(), json.dumps(start.config())),
    }  # fmt: skip
    kept = Checkpoint(checkpoint, "training run", settings, found.digest)
    if kept.tensors:
        run.load(kept.tensors, kept.facts)

    def fit(likelihood: Likelihood, prior: WeightPrior) -> LaplacePosterior:
        return laplace(
            model, data, likelihood, structure=structure, weights="all", prior=prior.to_prior(), curvature=curvature,
            batch_size=batch_size, memory_budget=memory_budget, progress=False,
        )  # fmt: skip

    with restored_modes(model):
        for epoch in track(range(run.epoch + 1, budget.epochs + 1), "training", budget.epochs - run.epoch, progress):
            if run.reason:
                break
            with own_randomness(network, _seed(seed, epoch)):
                run.one_epoch(shuffled(data, network, batch_size), budget.rate(epoch, schedule), noise)
                if budget.evaluates(epoch):
                    run.tune(fit, hyper_steps, noise, guarded=2 * epoch <= budget.epochs)
            if patience is not None and run.waited() >= patience:
                run.reason = f"the evidence has not risen for {patience} evaluations"
            if checkpoint is not None:
                kept.offer(*run.state(), now=True)
        load_model(network.module, run.kept)
        with own_randomness(network, _seed(seed, 0)):
            return run.posterior(fit, noise, lambda posterior: remaining_nats(posterior, data, batch_size))


def _seed(seed: int, epoch: int) -> int:
    """Of the random numbers of one epoch; 0 stands for what is not part of any."""
    return seed * 1_000_003 + epoch
