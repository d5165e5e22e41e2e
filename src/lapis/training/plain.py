"""Plain training: the weights that maximise the likelihood, or the posterior density, by minibatch descent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network, restored_modes
from lapis.options import check_arguments, check_positive
from lapis.progress import track
from lapis.training.budget import default_batch_size, plan_budget
from lapis.training.data import own_randomness, shuffled, survey
from lapis.training.state import KeptEpochs
from lapis.training.step import OPTIMISERS, MakeOptimiser, check_optimiser, set_rate, take_step


def fit_network(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    epochs: int | None = None,
    learning_rate: float | None = None,
    weight_decay: float = 0.0,
    optimiser: str | MakeOptimiser = "adam",
    schedule: Literal["cosine", "constant"] = "cosine",
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    penalty: Callable[[], Tensor] | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
    progress: bool | None = None,
    kept: KeptEpochs | None = None,
) -> tuple[float, ...]:
    """Train the model in place on mean_n -log p(y_n | f_n) + weight_decay / 2 |theta|^2; returns each epoch's loss.

    With weight_decay = prior precision / N this is maximum a posteriori, without it maximum likelihood. All trainable
    parameters are trained, in training mode; modes are restored at the end, also after a failure.

    Args:
        data: a pair (inputs, targets) or a Dataset, shuffled anew every epoch, or a DataLoader or list of batches,
            used in the order they give.
        likelihood: see `lapis.laplace`.
        epochs: by default as many as make 4000 optimiser steps, times sqrt(N / 1000) for more than 1000 examples.
        learning_rate: at the start; by default 0.7 / sqrt(number of weights), within 0.001 .. 0.03.
        weight_decay: part of the loss, not decoupled from it as in AdamW.
        optimiser: "adam", "sgd" (momentum 0.9), or a function of (parameters, learning rate).
        schedule: how the learning rate goes down: "cosine" to zero, or "constant".
        batch_size: for data that are not batched yet; by default 2.5e6 / number of weights, within 128 .. 2048.
        generator: source of randomness of shuffling and dropout; seeded with 0 when None. torch's global generator is
            left as it was.
        penalty: called at every step; the 0-d tensor that it returns is added to the loss, and differentiated.
        on_epoch: called with the epoch's number, from one, and its mean loss, after each epoch.
        progress: show a bar; by default on a terminal only.
        kept: where the state after each epoch goes, and that of an earlier run comes from.

    >>> x = torch.linspace(-1, 1, 32)[:, None]
    >>> net = nn.Linear(1, 1)
    >>> losses = fit_network(net, (x, 2 * x), "regression", epochs=300, learning_rate=0.05)
    >>> round(float(net.weight.detach()), 2)
    2.0
    """
    family = resolve_likelihood(likelihood)
    network = Network(model)
    check_arguments(fit_network, locals(), signed=("weight_decay",))
    check_positive("weight_decay", weight_decay, or_zero=True)
    check_optimiser(optimiser)
    batch_size = default_batch_size(network.size) if batch_size is None else batch_size
    source = generator or torch.Generator().manual_seed(0)
    with own_randomness(network, _seed(source)):
        found = survey(data, network, batch_size)
    budget = plan_budget(found.n_data, found.n_batches, network.size, epochs, learning_rate=learning_rate)
    parameters = list(network.parameters.values())
    make = OPTIMISERS[optimiser] if isinstance(optimiser, str) else optimiser
    descent = make(parameters, budget.learning_rate)

    def regulariser() -> Tensor:
        decay = 0.5 * weight_decay * torch.stack([p.square().sum() for p in parameters]).sum()
        return decay if penalty is None else decay + penalty()

    losses = [] if kept is None else kept.resume(model, descent, source)
    with restored_modes(model):
        left = range(len(losses) + 1, budget.epochs + 1)
        for epoch in track(left, "training", len(left), progress):
            model.train()
            set_rate(descent, budget.rate(epoch, schedule))
            total, count = 0.0, 0
            with own_randomness(network, _seed(source)):
                for batch in shuffled(data, network, batch_size):
                    step = take_step(network, family, batch, descent, regulariser, epoch)
                    total, count = total + step.loss * len(batch), count + len(batch)
            descent.zero_grad()
            losses.append(total / count)
            if on_epoch is not None:
                on_epoch(epoch, losses[-1])
            if kept is not None:
                kept.after(model, descent, source, losses, epoch == budget.epochs)
    network.check_finite()
    return tuple(losses)


def _seed(source: torch.Generator) -> int:
    """A seed for one epoch."""
    return int(torch.randint(2**62, (), generator=source, device=source.device))
