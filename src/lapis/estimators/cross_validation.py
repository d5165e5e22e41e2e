"""What the evidence cannot tell of a classifier, by cross-validation: is its prior too tight, how sure may it be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lapis.posteriors.laplace.fit import laplace
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.training.plain import fit_network

FOLDS = 3

LEAST = 16
"""Fewer different examples are too few to judge by."""

LOOSER = (1.0, 1 / 4, 1 / 16)
"""Factors of the evidence's prior precision, each network trained on from the one before."""

FIRST, NEXT = 0.4, 0.2
"""Shares of the evidence's training: for the first prior of a fold, or to train on with all data; for each other."""

SHARPNESSES = tuple(2.0 ** (k / 8) for k in range(-16, 25))

SPREAD = 1.0
"""log s ~ N(0, SPREAD^2): examples that are all predicted well would ask for any s."""

BATCH = 200
"""Small batches, whose steps are cheap and no worse. One more where a single example would be left, which batch
normalisation refuses."""


@dataclass(frozen=True)
class Chosen:
    """Factors of the prior precision and of the logits."""

    looser: float = 1.0
    sharpness: float = 1.0


@dataclass(frozen=True)
class Trainer:
    """How networks are trained on: under the prior N(0, 1 / precision), for a share of so many steps."""

    steps: int
    learning_rate: float | None
    seed: int

    def train(self, network: nn.Module, x: Tensor, y: Tensor, precision: float, share: float) -> None:
        batch_size = BATCH + (len(x) % BATCH == 1)
        epochs = math.ceil(share * self.steps / math.ceil(len(x) / batch_size))
        fit_network(
            network, (x, y), "classification", epochs=epochs, batch_size=batch_size, weight_decay=precision / len(x),
            learning_rate=self.learning_rate, generator=torch.Generator().manual_seed(self.seed), progress=False,
        )  # fmt: skip


def cross_validated(
    posterior: LaplacePosterior,
    x: Tensor,
    y: Tensor,
    structure: str,
    make: Callable[[int], nn.Module],
    trainer: Trainer,
) -> LaplacePosterior:
    """The posterior with its logits times the chosen s; of the network trained on, if a looser prior was chosen.

    Tuning and training in turns can end at too tight a prior, which holds weights and logits back: the digits' log
    evidence, the dense one too, is 200 nats higher for a network under a tenth of the precision. But it goes on rising
    where predictions become worse, so that examples held out must decide.

    Args:
        posterior: trained by the evidence on inputs (N, D) and classes (N,), with one prior precision for all weights.
        make: a new network from a seed.
    """
    precision = float(posterior.weight_prior.precision.detach())
    network = posterior.network.module
    logits = held_out_logits(precision, x, y, make, trainer)
    chosen = Chosen() if logits is None else judged(logits, y)
    if chosen.looser < 1:
        trainer.train(network, x, y, chosen.looser * precision, FIRST)
        again = laplace(network, (x, y), posterior.likelihood, structure=structure, weights="all", progress=False)
        posterior = replace(again.tune(), training=posterior.training)
    return replace(posterior, sharpness=chosen.sharpness)


def held_out_logits(
    precision: float, x: Tensor, y: Tensor, make: Callable[[int], nn.Module], trainer: Trainer
) -> Tensor | None:
    """Of every example by a network that was trained without it, for each prior: (len(LOOSER), N, C) in float64.

    Equal rows are held out together. None for too few different ones, or where `make` returns one network every time.
    """
    different, which = torch.unique(x, dim=0, return_inverse=True)
    networks = [make(trainer.seed + 1 + number) for number in range(FOLDS)]
    if len(different) < LEAST or len(set(map(id, networks))) < FOLDS:
        return None
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(trainer.seed))
    fold = (order % FOLDS)[which]
    found: list[list[Tensor]] = [[] for _ in LOOSER]
    for number, network in enumerate(networks):
        seen = fold != number
        for factor, logits in zip(LOOSER, found, strict=True):
            trainer.train(network, x[seen], y[seen], factor * precision, FIRST if factor == 1 else NEXT)
            with torch.no_grad():
                logits.append(network.eval()(x[~seen]).double())
    places = torch.cat([(fold == number).nonzero()[:, 0] for number in range(FOLDS)])
    return torch.stack([torch.cat(logits)[places.argsort()] for logits in found])


def judged(logits: Tensor, y: Tensor) -> Chosen:
    """For each prior s minimises sum_n l_n - log N(log s; 0, 1), where l_n = -log softmax(s f_n)[y_n]; then the prior.

    A looser prior must win beyond chance: the one with the smallest mean(d) + std(d) / sqrt(N), where d_n is l_n
    less that under the evidence's own prior.
    """
    factors = torch.tensor(SHARPNESSES, dtype=torch.float64)
    losses = torch.stack(
        [
            torch.stack([nn.functional.cross_entropy(s * each, y, reduction="none") for s in SHARPNESSES])
            for each in logits
        ]
    )  # (priors, sharpnesses, N)
    best = (losses.sum(2) + 0.5 * (factors.log() / SPREAD) ** 2).argmin(1)
    at_best = losses[torch.arange(len(losses)), best]
    excess = at_best - at_best[0]
    prior = int((excess.mean(1) + excess.std(1) / len(y) ** 0.5).argmin())
    return Chosen(LOOSER[prior], SHARPNESSES[int(best[prior])])
