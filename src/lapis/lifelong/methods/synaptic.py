"""Synaptic intelligence (Zenke, Poole and Ganguli 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapis.lifelong.learner import Learner, Task
from lapis.schema import tensor


@dataclass(eq=False, repr=False)
class SI(Learner):
    """Weights whose changes lowered the loss of past tasks are held near the values they had:

    mean_n l_n + strength sum_i Omega_i (theta_i - centre_i)^2, where each task adds w_i / (D_i^2 + damping) to Omega_i:
    w_i = -sum over steps of g_i dtheta_i, the part of the loss's decrease that is due to weight i (g: gradient of the
    task's own loss, without the penalty), and D_i its change over the whole task. Negative w_i count as zero.

    It costs nothing but the steps of training themselves.

    Args:
        strength: c, of the past.
        damping: keeps weights that hardly moved from counting without bound.

    Further options: see `Learner`.
    """

    strength: float = field(default=1.0, kw_only=True)
    damping: float = field(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.importance = torch.zeros(self.network.size, dtype=torch.float64, device=self.network.device)
        """Omega, (P,)."""
        self.centre = self.network.flat()
        """The weights after the latest task, (P,)."""
        self._path = torch.zeros_like(self.importance)

    def _train(self, task: Task) -> tuple[float, ...]:
        self._start, self._path = self.network.flat(), torch.zeros_like(self.importance)
        return super()._train(task)

    def _penalty(self, task: Task) -> Callable[[], Tensor] | None:
        if not self.tasks:
            return None
        weight = (self.strength * self.importance).to(self.network.dtype)
        return lambda: (weight * (self._weights() - self.centre).square()).sum()

    def _make_optimiser(self, parameters: list[Tensor], rate: float) -> torch.optim.Optimizer:
        """The optimiser, with the path integral taken at each of its steps."""
        optimiser = super()._make_optimiser(parameters, rate)
        pull = 2 * self.strength * self.importance if self.tasks else torch.zeros_like(self.importance)
        held: list[tuple[Tensor, Tensor]] = []

        def before(*_: Any) -> None:
            weights = self.network.flat()
            gradient = self.network.gather([p.grad for p in parameters]).double()
            held.append((weights, gradient - pull * (weights - self.centre).double()))

        def after(*_: Any) -> None:
            weights, gradient = held.pop()
            self._path -= gradient * (self.network.flat() - weights).double()

        optimiser.register_step_pre_hook(before)
        optimiser.register_step_post_hook(after)
        return optimiser

    def _consolidate(self, task: Task) -> None:
        now = self.network.flat()
        change = (now - self._start).double().square()
        self.importance = self.importance + self._path.clamp(min=0) / (change + self.damping)
        self.centre = now

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"importance": self.importance, "centre": self.centre}

    def _load(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        size = (self.network.size,)
        self.importance = tensor(tensors, "importance", size, least=0)
        self.centre = tensor(tensors, "centre", size, self.network.dtype)
