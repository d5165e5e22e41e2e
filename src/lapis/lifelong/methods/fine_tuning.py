"""Fine-tuning: each task is learnt from where the last one ended, and nothing is done against forgetting."""

from __future__ import annotations

from dataclasses import dataclass

from lapis.lifelong.learner import Learner


@dataclass(eq=False, repr=False)
class FineTuning(Learner):
    """Plain training on one task after the other: what every method must beat. Options: see `Learner`.

    >>> import torch, lapis
    >>> x = torch.linspace(-1, 1, 32)[:, None]
    >>> learner = lapis.lifelong.FineTuning(torch.nn.Linear(1, 1), "regression", epochs=60, learning_rate=0.2)
    >>> first, second = learner.learn((x, 2 * x)), learner.learn((x, -x))
    >>> round(float(learner.predict(torch.ones(1, 1)).mean))
    -1
    """
