"""Networks with signs for weights, and with weights that are dropped."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lapis.learning_rule.algorithms.derivation import Derivation, Gap, generator_of, normal
from lapis.learning_rule.algorithms.descent import INPUTS, LABELS
from lapis.learning_rule.discrete import Bernoulli
from lapis.learning_rule.rule import step
from lapis.learning_rule.spike_and_slab import FixedSpikeAndSlab


class _Sign(torch.autograd.Function):
    """sign(w), with the gradient of the identity."""

    @staticmethod
    def forward(context: Any, weights: Tensor) -> Tensor:
        return weights.sign()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def straight_through(steps: int = 100) -> Derivation:
    """w <- (1 - rate) w - rate grad loss(sign w): w = lambda / beta, where the loss is multiplied by beta, to infinity.

    loss(tanh(beta w)) is then the loss at sign(w). The reference is SGD with a straight-through sign, and decay 1.
    """
    rate, beta, start = 0.05, 1e8, normal(5, 3)

    def loss(weights: Tensor) -> Tensor:
        return softplus(-LABELS * (INPUTS @ weights)).mean()

    latent = start.clone().requires_grad_()
    optimiser = torch.optim.SGD([latent], lr=rate, weight_decay=1.0)
    q, gap = Bernoulli(beta * start), Gap()
    for _ in range(steps):
        optimiser.zero_grad()
        loss(_Sign.apply(latent)).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        q = step(q, lambda theta: beta * loss(theta), rate)
        gap.add((q.logits / beta, latent), (q.mean, latent.sign()))
    return Derivation(
        "straight-through estimator", "Bernoulli (+-1)", "local", steps, gap.largest,
        "loss times beta to infinity (1e8)",
    )  # fmt: skip


def dropout(steps: int = 100) -> Derivation:
    """Dropout of hidden units, one example and one mask a step, of a network with 3, 4 and 1 units.

    The weights that leave a unit share its fate. torch's weights are the mean p m of q, since nn.Dropout divides what
    it keeps by p; the learning rate of the weights that can be dropped is p times that of others.
    """
    keep, lr, precision = 0.75, 0.1, 1e16
    sizes = [12, 4, 4, 1]  # first layer, its bias, second layer, its bias
    start = 0.7 * normal(3, sum(sizes))
    groups = torch.cat([torch.full((16,), -1), torch.arange(4), torch.full((1,), -1)])
    share = torch.where(groups < 0, 1.0, keep)
    targets = INPUTS[:, 0].sin()

    def loss(theta: Tensor, row: int, mask: Tensor | float = 1.0) -> Tensor:
        first, bias, second, last = torch.split(theta, sizes)
        hidden = torch.tanh(first.reshape(4, 3) @ INPUTS[row] + bias) * mask
        output: Tensor = second @ hidden + last[0]
        return (output - targets[row]).square()

    q = FixedSpikeAndSlab(start / share, torch.full((4,), keep), precision, groups)
    parts = [part.clone().requires_grad_() for part in torch.split(start, sizes)]
    settings = [{"params": [part], "lr": lr * (keep if i == 2 else 1)} for i, part in enumerate(parts)]
    optimiser, gap = torch.optim.SGD(settings), Gap()
    ours, draws = generator_of(0), generator_of(0)
    for number in range(steps):
        row = number % len(targets)
        mask = (q.sample(1, generator=draws)[0, 16:20] != 0) / keep
        optimiser.zero_grad()
        loss(torch.cat(parts), row, mask).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        q = step(q, partial(loss, row=row), lr * precision, "monte_carlo", samples=1, generator=ours)
        gap.add((q.mean, torch.cat(parts)))
    return Derivation(
        "dropout", "spike and slab, fixed", "one draw", steps, gap.largest, "slab's variance to 0 (1e-16)"
    )
