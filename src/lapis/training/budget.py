"""How long to train, and how often to tune, when the user does not say: by optimiser steps, not by epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass

STEPS, EXAMPLES = 4000, 1000
"""Optimiser steps, at least: 100 epochs of 300 examples are a few hundred, and fit nothing. Data of more than EXAMPLES
tell finer things, which take longer to learn: STEPS sqrt(N / EXAMPLES)."""

LEAST_EPOCHS = 10
"""However large the data, they are seen at least so many times."""

BURN_IN, EVALUATIONS = 0.1, 12
"""The share of the epochs before the first evaluation, and the number of evaluations that follow, about."""

RATE, SLOWEST, FASTEST = 0.7, 1e-3, 3e-2
"""The default learning rate is RATE / sqrt(P), within limits: the more weights add up, the smaller their steps."""

WORK, SMALLEST, LARGEST = 2_500_000, 128, 2048
"""Default batches have WORK / P examples, within limits. Steps of a small network take the same time for many examples
as for few, and minibatch noise acts as a further prior: units are pruned that the data could use."""


def default_batch_size(n_weights: int) -> int:
    """Examples in a batch, before the number of examples is known.

    >>> default_batch_size(501), default_batch_size(79_510)
    (2048, 128)
    """
    return min(LARGEST, max(SMALLEST, WORK // n_weights))


@dataclass(frozen=True)
class Budget:
    """The length of training, in epochs, and the learning rate it begins with."""

    epochs: int
    burn_in: int
    """Epochs up to the first evaluation."""
    every: int
    """Epochs from one evaluation to the next."""
    learning_rate: float

    def evaluates(self, epoch: int) -> bool:
        """Whether prior and noise are tuned after this epoch; they always are after the last."""
        return epoch == self.epochs or (epoch >= self.burn_in and (epoch - self.burn_in) % self.every == 0)

    def rate(self, epoch: int, schedule: str) -> float:
        """The learning rate of an epoch, counted from one."""
        decay = 0.5 * (1 + math.cos(math.pi * (epoch - 1) / self.epochs)) if schedule == "cosine" else 1.0
        return self.learning_rate * decay


def plan_budget(
    n_data: int,
    n_batches: int,
    n_weights: int,
    epochs: int | None = None,
    burn_in: int | None = None,
    every: int | None = None,
    learning_rate: float | None = None,
) -> Budget:
    """The budget for `n_data` examples in `n_batches` batches; what is given is kept, the rest follows from it.

    >>> plan_budget(n_data=277, n_batches=3, n_weights=401)
    Budget(epochs=1334, burn_in=133, every=100, learning_rate=0.03)
    >>> plan_budget(n_data=60_000, n_batches=469, n_weights=79_510, epochs=20)
    Budget(epochs=20, burn_in=2, every=1, learning_rate=0.0024824...)
    """
    if epochs is None:
        steps = STEPS * max(1.0, math.sqrt(n_data / EXAMPLES))
        epochs = max(LEAST_EPOCHS, math.ceil(steps / n_batches))
    if burn_in is None:
        burn_in = max(1, int(BURN_IN * epochs))
    if every is None:
        every = max(1, (epochs - burn_in) // EVALUATIONS)
    if learning_rate is None:
        learning_rate = min(FASTEST, max(SLOWEST, RATE / math.sqrt(n_weights)))
    return Budget(epochs, burn_in, every, learning_rate)
