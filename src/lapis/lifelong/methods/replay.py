"""Learners that keep examples of past tasks, and train on them beside the new ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapis.lifelong.learner import Learner, Task
from lapis.lifelong.memory import Choice, Memory, OnMemory, together
from lapis.schema import entry


@dataclass(eq=False, repr=False)
class Replay(Learner):
    """Keeps a few examples of each task, and adds their loss to that of the new one:

    mean_n l_n + strength N_past / N mean_m l_m, with m a batch of remembered examples, drawn anew at every step.

    With strength 1 the past counts as much as if all its N_past examples were still there.

    Args:
        points: examples kept of each task, as many of each class.
        choice: "random", or "memorable": those of largest curvature, at which the network is least sure.
        strength: of the past.

    Further options: see `Learner`.
    """

    points: int = field(default=200, kw_only=True)
    choice: Choice = field(default="random", kw_only=True)
    strength: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory = Memory()

    def _penalty(self, task: Task) -> Callable[[], Tensor] | None:
        if not self.tasks:
            return None
        likelihood = OnMemory(self.memory, self.likelihood)
        size = min(self._batch_size(), len(self.memory))
        weight = self.strength * sum(past.n_data for past in self.tasks) / task.n_data

        def penalty() -> Tensor:
            chosen = torch.randperm(len(self.memory))[:size]  # `fit_network` has seeded the global generator
            f = likelihood.canonical(self.network.call(self.memory.chosen(chosen)))
            return weight * likelihood.nll(f, chosen.to(f.device)).mean()

        return penalty

    def _consolidate(self, task: Task) -> None:
        kept = self._chosen(task, self.points, self.choice)
        self.memory = self.memory.with_episode(kept, task.columns)

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = self.memory.state()
        return {"memory": config}, tensors

    def _load(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.memory = Memory.from_state(entry(config, "memory", list), tensors)


@dataclass(eq=False, repr=False)
class Joint(Learner):
    """Keeps all data, and trains on those of all tasks together: no life-long learning, but what it is measured by.

    Options: see `Learner`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory = Memory()

    def _train(self, task: Task) -> tuple[float, ...]:
        self._pending = self.memory.with_episode(together(list(self._stream(task))), task.columns)
        everything = self._pending.inputs, torch.arange(len(self._pending))
        return self._fit(everything, OnMemory(self._pending, self.likelihood), None)

    def _consolidate(self, task: Task) -> None:
        self.memory = self._pending

    _state, _load = Replay._state, Replay._load
