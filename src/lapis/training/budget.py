"""How long to train, and how often to tune, when the user does not say: by optimiser steps, not by epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass

STEPS = 4000
"""Optimiser steps, at least. Small data need many epochs: 100 epochs of 300 examples are 300 steps, and fit nothing."""

LEAST_EPOCHS = 50
"""However large the data, they are seen at least so many times."""

BURN_IN, EVALUATIONS = 0.1, 12
"""The share of the epochs before the first evaluation, and the number of evaluations that follow, about."""

SLOWEST, FASTEST = 1e-3, 1e-2
"""Limits of the default learning rate 0.3 / sqrt(P): wide networks take smaller steps (their outputs add up more)."""


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
    n_batches: int,
    n_weights: int,
    epochs: int | None = None,
    burn_in: int | None = None,
    every: int | None = None,
    learning_rate: float | None = None,
) -> Budget:
    """The budget for an epoch of `n_batches` steps; what is given is kept, the rest follows from it.

    >>> plan_budget(n_batches=3, n_weights=401)
    Budget(epochs=1334, burn_in=133, every=100, learning_rate=0.01)
    >>> plan_budget(n_batches=469, n_weights=79_510, epochs=20)
    Budget(epochs=20, burn_in=2, every=1, learning_rate=0.0010639...)
    """
    if epochs is None:
        epochs = max(LEAST_EPOCHS, math.ceil(STEPS / n_batches))
    if burn_in is None:
        burn_in = max(1, int(BURN_IN * epochs))
    if every is None:
        every = max(1, (epochs - burn_in) // EVALUATIONS)
    if learning_rate is None:
        learning_rate = min(FASTEST, max(SLOWEST, 0.3 / math.sqrt(n_weights)))
    return Budget(epochs, burn_in, every, learning_rate)
