"""One optimiser step on a minibatch, shared by every way of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapis.batches import Batch
from lapis.errors import ModelError
from lapis.likelihoods import Likelihood
from lapis.network import Network, differentiating
from lapis.options import check_choice

MakeOptimiser = Callable[[list[Tensor], float], torch.optim.Optimizer]

OPTIMISERS: dict[str, MakeOptimiser] = {
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
}


def check_optimiser(optimiser: Any) -> None:
    """OptionError unless it is a name in OPTIMISERS, or a function of (parameters, learning rate)."""
    if not callable(optimiser):
        check_choice("optimiser", optimiser, OPTIMISERS)


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of every parameter group from now on."""
    for group in optimiser.param_groups:
        group["lr"] = rate


@dataclass(frozen=True)
class Step:
    """What a step saw: the loss before it, canonical outputs and targets."""

    loss: float
    f: Tensor
    y: Tensor


def take_step(
    network: Network,
    likelihood: Likelihood,
    batch: Batch,
    optimiser: torch.optim.Optimizer,
    penalty: Callable[[], Tensor],
    epoch: int,
) -> Step:
    """One step on mean_n -log p(y_n | f_n) + penalty; ModelError if this is not finite, before the weights change."""
    optimiser.zero_grad()
    with differentiating(network.device):
        raw = network.call(batch.inputs)
        f = likelihood.canonical(raw)
        y = likelihood.targets(batch.targets, f, raw.shape)
        loss = likelihood.nll(f, y).mean() + penalty()
        value = float(loss.detach())
        if not bool(torch.isfinite(loss)):
            raise ModelError(
                f"Training diverged in epoch {epoch}",
                expected="a finite loss",
                got=f"{value} on batch {batch.index}",
                do="use a smaller learning_rate, or scale the inputs and targets",
            )
        loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    return Step(value, f.detach(), y.detach())
