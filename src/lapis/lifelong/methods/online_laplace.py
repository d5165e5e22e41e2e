"""Online Laplace approximations (Ritter, Botev and Barber 2018): the posterior of one task is the prior of the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from lapis.lifelong.learner import Learner, Task
from lapis.lifelong.methods.consolidation import consolidated, curvature_product, half_square
from lapis.lifelong.posterior_file import pack_posterior, unpack_posterior
from lapis.posteriors.laplace.stored import LaplacePosterior


@dataclass(eq=False, repr=False)
class OnlineLaplace(Learner):
    """Bayes' rule, task after task, with Gaussian posteriors N(theta_s, A_s^-1):

    mean_n l_n + 1 / (2 N) (theta - theta_s)^T (strength (A_s - A_0) + A_0) (theta - theta_s) for a task of N examples;
    then A_s+1 = A_s + sum_n J_n^T H_n J_n, at the weights that it was learnt with, and A_0 is the prior's precision.

    For linear models with Gaussian noise and strength 1 the posterior is exactly that of all data at once. `posterior`
    is a `LaplacePosterior`: it predicts, samples, and is saved as any other. Its evidence is not one, as the sums over
    data belong to different weights.

    Args:
        structure: "diagonal", "kronecker" (factors of all tasks add up, as those of one data set would), or "dense".
        strength: of past data; 1 is Bayes' rule. It does not strengthen the prior, which would hold every weight fast.
        prior: precision of the weights before the first task, about zero.

    Further options: see `Learner`.
    """

    posteriors: ClassVar[bool] = True

    structure: Literal["diagonal", "kronecker", "dense"] = field(default="kronecker", kw_only=True)
    strength: float = field(default=1.0, kw_only=True)
    prior: float = field(default=1.0, kw_only=True)

    def _penalty(self, task: Task) -> Callable[[], Tensor]:
        before: LaplacePosterior | None = self._posterior
        if before is None:
            return lambda: 0.5 * self.prior / task.n_data * self._weights().square().sum()
        product, mean = curvature_product(before), before.mean

        def pull(deviation: Tensor) -> Tensor:
            return (self.strength * product(deviation) + self.prior * deviation) / task.n_data

        return lambda: half_square(self._weights() - mean, pull)

    def _consolidate(self, task: Task) -> None:
        self._posterior = consolidated(
            self._posterior,
            self.model,
            task.data,
            task.likelihood,
            self.likelihood,
            structure=self.structure,
            prior=self.prior,
            batch_size=self.batch_size,
            progress=self.progress,
        )

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = pack_posterior(self._posterior)
        return {"posterior": config}, tensors

    def _load(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._posterior = unpack_posterior(config, tensors, self.model, self.likelihood)
