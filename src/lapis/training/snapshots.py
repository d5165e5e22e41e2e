"""SWAG in one call: training, then snapshots along descent at a constant learning rate."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
from torch import Tensor, nn

from lapis.checkpoint import Checkpoint
from lapis.files import tensors_digest
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network, outside_inference_mode
from lapis.network.batch_norm import batch_norms, renewed_statistics
from lapis.options import check_arguments, check_count, check_positive
from lapis.posteriors.posterior import MEMORY_BUDGET
from lapis.posteriors.same_data import hold_batches
from lapis.posteriors.swag import SWAG, SWAGPosterior
from lapis.schema import entry, under
from lapis.training.data import survey
from lapis.training.noise import with_residual_noise
from lapis.training.plain import fit_network
from lapis.training.state import KeptEpochs, layout_digest, load_model, model_tensors
from lapis.training.step import MakeOptimiser, check_optimiser

RATE = 0.01
"""Learning rate of SGD with momentum while snapshots are taken, as published."""

COLLECTING = "collecting"
"""The stage in which snapshots are taken, in a checkpoint."""

NOISY_BATCH, FEWEST_STEPS = 128, 8
"""While snapshots are taken, batches have at most NOISY_BATCH examples, and an epoch at least FEWEST_STEPS of them if
there are enough examples: without the noise of minibatches all snapshots would be the same."""


@outside_inference_mode
def swag(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    epochs: int | None = None,
    snapshots: int = 40,
    rank: int = 20,
    learning_rate: float | None = None,
    collecting_rate: float | None = None,
    weight_decay: float = 0.0,
    optimiser: str | MakeOptimiser = "adam",
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool | None = None,
) -> SWAGPosterior:
    """Train the model, go on by SGD at a constant rate with a snapshot an epoch, and return the SWAG posterior.

    The model is left at the mean of the snapshots (stochastic weight averaging), with batch-norm statistics of these
    weights. For a training loop of your own see `lapis.SWAG`.

    Args:
        data: see `lapis.training.plain.fit_network`, as for `optimiser`, `learning_rate` and `weight_decay`.
        likelihood: see `lapis.laplace`. The noise of "regression" is that of the residuals at the end.
        epochs: of training before the first snapshot; 0 if the model is trained already.
        snapshots: epochs at the constant rate, with a snapshot at the end of each.
        rank: see `lapis.SWAG`.
        collecting_rate: the constant rate of SGD with momentum 0.9; by default 0.01, times the noise's variance if that
            is Gaussian, so that the steps are those under unit noise. The posterior's width grows with it.
        batch_size: for data that are not batched yet; by default, while snapshots are taken, at most 128 and an eighth
            of the data.
        generator: source of randomness of shuffling and dropout; seeded with 0 when None.
        checkpoint: a file in which training and snapshots are kept. When it exists the run goes on from there, and ends
            as it would have without the interruption.

    >>> import lapis
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = nn.Linear(1, 1)
    >>> posterior = lapis.swag(net, (x, 2 * x), lapis.Gaussian(0.1), epochs=200, snapshots=5, learning_rate=0.05)
    >>> posterior.collected
    5
    """
    family = resolve_likelihood(likelihood)
    collector = SWAG(model, rank)
    check_arguments(swag, locals(), signed=("epochs", "rank", "weight_decay"))
    check_count("snapshots", snapshots, least=2)
    if epochs is not None:
        check_count("epochs", epochs, least=0)
    check_positive("weight_decay", weight_decay, or_zero=True)
    check_optimiser(optimiser)
    source = generator or torch.Generator().manual_seed(0)
    if collecting_rate is None:
        noise = family.noise
        collecting_rate = RATE * (1.0 if noise is None else float(noise.detach().square().min()))
    kept = Checkpoint(None, "SWAG run", {}, "")
    if checkpoint is not None:
        found = survey(data, collector.network, NOISY_BATCH, fingerprint=True)
        same = {
            "epochs": epochs, "snapshots": snapshots, "rank": rank, "learning_rate": learning_rate,
            "collecting_rate": collecting_rate, "weight_decay": weight_decay, "batch_size": batch_size,
            "optimiser": optimiser if isinstance(optimiser, str) else "a function", "likelihood": family.to_config(),
            "seed": tensors_digest({"source": source.get_state()}), "network": layout_digest(collector.network),
            "data": hashlib.sha256(found.digest.encode()).hexdigest()[:16],
        }  # fmt: skip
        kept = Checkpoint(checkpoint, "SWAG run", same, found.digest)
    collecting = kept.facts.get("stage") == COLLECTING
    if collecting:
        collector = SWAG.restored(model, entry(kept.facts, "snapshots", dict), under("snapshots.", kept.tensors))

    def snapshots_so_far() -> tuple[dict[str, Tensor], dict[str, Any]]:
        config, tensors = collector.state()
        return {f"snapshots.{name}": each for name, each in tensors.items()}, {"snapshots": config}

    def stage(name: str) -> KeptEpochs | None:
        return None if checkpoint is None else KeptEpochs(kept, name, snapshots_so_far)

    with kept.guarded():
        if epochs != 0 and not collecting:
            fit_network(
                model, data, family, epochs=epochs, learning_rate=learning_rate, weight_decay=weight_decay,
                optimiser=optimiser, batch_size=batch_size, generator=source, progress=progress, kept=stage("training"),
            )  # fmt: skip
        if batch_size is None:
            n_data = survey(data, collector.network, NOISY_BATCH).n_data
            batch_size = max(2, min(NOISY_BATCH, n_data // FEWEST_STEPS))
        fit_network(
            model, data, family, epochs=snapshots, learning_rate=collecting_rate, weight_decay=weight_decay,
            optimiser="sgd", schedule="constant", batch_size=batch_size, generator=source, progress=progress,
            on_epoch=lambda epoch, loss: collector.collect(), kept=stage(COLLECTING),
        )  # fmt: skip
    _leave_at_mean(model, collector, data)
    if isinstance(likelihood, str):
        family = with_residual_noise(model, data, family)
    return collector.posterior(family, data, memory_budget=memory_budget)


def _leave_at_mean(model: nn.Module, collector: SWAG, data: Any) -> None:
    """Write the mean of the snapshots into the model, and batch-norm statistics of these weights."""
    network = Network(model)
    values = network.unflatten(collector.mean.to(network.dtype))
    if batch_norms(network.module):
        values |= renewed_statistics(network, values, hold_batches(data, network))
    load_model(network.module, {**model_tensors(network.module), **values})
