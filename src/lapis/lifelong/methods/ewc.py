"""Elastic weight consolidation (Kirkpatrick et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapis.lifelong.learner import Learner, Task
from lapis.lifelong.methods.consolidation import consolidated, curvature_diagonal
from lapis.schema import tensor


@dataclass(eq=False, repr=False)
class EWC(Learner):
    """Weights that past tasks need are held near the values they had:

    mean_n l_n + strength / (2 N) sum_s sum_i F_si (theta_i - theta_si)^2 for a task of N examples,

    with theta_s the weights after task s, F_s the diagonal of its Fisher information sum_n J_n^T H_n J_n: exact, and
    example by example, not squares of batches' gradients. Two vectors hold the penalties of any number of tasks.

    With strength 1 each penalty is the Laplace approximation of that task's log likelihood; independent weights
    underestimate how few changes are harmless, and a larger strength is usual.

    Args:
        strength: of the past.

    Further options: see `Learner`. `OnlineLaplace(structure="diagonal")` is the variant with one centre, the latest
    weights, and a prior.
    """

    strength: float = field(default=1000.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.importance = torch.zeros(self.network.size, dtype=torch.float64, device=self.network.device)
        """sum_s F_s, (P,)."""
        self.pull = torch.zeros_like(self.importance)
        """sum_s F_s theta_s, (P,)."""

    def _penalty(self, task: Task) -> Callable[[], Tensor] | None:
        if not self.tasks:
            return None
        centre = torch.where(self.importance > 0, self.pull / self.importance, 0.0).to(self.network.dtype)
        weight = (self.strength / task.n_data * self.importance).to(self.network.dtype)
        return lambda: 0.5 * (weight * (self._weights() - centre).square()).sum()

    def _consolidate(self, task: Task) -> None:
        fitted = consolidated(
            None,
            self.model,
            task.data,
            task.likelihood,
            self.likelihood,
            structure="diagonal",
            prior=1.0,
            batch_size=self.batch_size,
            progress=self.progress,
        )
        fisher = curvature_diagonal(fitted)
        self.importance, self.pull = self.importance + fisher, self.pull + fisher * fitted.mean.double()

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"importance": self.importance, "pull": self.pull}

    def _load(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        size = (self.network.size,)
        self.importance, self.pull = tensor(tensors, "importance", size, least=0), tensor(tensors, "pull", size)
