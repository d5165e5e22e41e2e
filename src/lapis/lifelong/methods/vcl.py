"""Variational continual learning, VCL (Nguyen et al. 2018)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapis.batches import Batch, batches
from lapis.errors import LapisWarning, OptionError
from lapis.lifelong.learner import Learner, Task
from lapis.lifelong.memory import Memory, OnMemory, together
from lapis.lifelong.posterior_file import pack_posterior, unpack_posterior
from lapis.likelihoods import Likelihood
from lapis.posteriors.variational import VariationalPosterior
from lapis.priors import Prior
from lapis.schema import entry, under
from lapis.training.budget import plan_budget
from lapis.training.variational.approximation import small_deviations
from lapis.training.variational.fit import variational

CORESET_STEPS = 100
"""Coresets are small: the epochs that suit a task would be a handful of steps."""

NETWORKS = 6
"""Drawn at random, to see which weights a task has nothing to say about."""


@dataclass(eq=False, repr=False)
class VCL(Learner):
    """Bayes' rule, task after task, with independent Gaussian weights fitted by the ELBO (`lapis.variational`):

    q_s maximises E_q[log p(D_s | theta)] - KL(q | q_s-1), and q_0 is the prior.

    Weights are drawn anew for every example where that is exact (local reparameterisation). Before the first task the
    network is trained plainly, and its weights are where the means start. After a task the model holds the means.

    Args:
        prior: precision of the weights before the first task, about zero.
        coreset: examples of each task that are set aside, drawn at random, as many of each class: q_s never sees them.
            Before predictions a copy of q_s is trained on those of all tasks, for at least 100 steps.
        deviation: where the deviations of weights start that no task has determined yet: the weights of a new head, or
            all of them. By default a tenth of the prior's, or of the weights' root mean square where that is less.
        deviation_rate: learning rate of the logarithms of the deviations; by default that of the means, as the paper
            has it. In a short training large ones forget: weights grow as wide as their prior before the means settle.

    Further options: see `Learner`; `schedule` and `optimiser` are for the plain training before the first task.
    """

    posteriors: ClassVar[bool] = True

    prior: float = field(default=1.0, kw_only=True)
    coreset: int | None = field(default=None, kw_only=True)
    deviation: float | None = field(default=None, kw_only=True)
    deviation_rate: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory = Memory()
        """The coresets of all tasks."""
        self._recalled: VariationalPosterior | None = None

    @property
    def posterior(self) -> VariationalPosterior:
        """q after all tasks, and after the coresets if there are any: what predictions are made with."""
        latest: VariationalPosterior = super().posterior
        if not len(self.memory):
            return latest
        if self._recalled is None:
            likelihood, numbers = OnMemory(self.memory, self.likelihood), torch.arange(len(self.memory))
            source = torch.Generator().manual_seed(len(self.tasks))
            data = self.memory.inputs, numbers
            self._recalled = self._inferred(data, likelihood, len(numbers), source, CORESET_STEPS)
        return self._recalled

    def _task(self, data: Any, head: Any) -> Task:
        task = super()._task(data, head)
        if self.coreset is not None and self.coreset >= task.n_data:
            raise OptionError(
                "The coreset leaves no examples to learn from",
                expected=f"a coreset of fewer than the task's {task.n_data} examples",
                got=str(self.coreset),
                do="make the learner with a smaller coreset",
            )
        return task

    def _train(self, task: Task) -> tuple[float, ...]:
        data = task.data
        self._pending = self.memory
        if self.coreset is not None:
            kept, rest = self._set_aside(task)
            data, self._pending = (rest.inputs, rest.targets), self.memory.with_episode(kept, task.columns)
            task = replace(task, data=data, n_data=len(rest))
        losses: tuple[float, ...] = ()
        if self._posterior is None:
            losses = self._fit(data, task.likelihood, None)
        self._found = self._inferred(data, task.likelihood, task.n_data, self.source)
        return (*losses, *(-each / task.n_data for each in self._found.inference.trace))

    def _set_aside(self, task: Task) -> tuple[Batch, Batch]:
        """The task's coreset, and all other examples."""
        whole = together(list(self._stream(task)))
        numbered = Batch(torch.arange(len(whole))[:, None], whole.targets, 0)
        assert self.coreset is not None
        index = self._chosen(task, self.coreset, "random", [numbered]).inputs[:, 0]
        others = torch.ones(len(whole), dtype=torch.bool)
        others[index] = False
        return whole.chosen(index), whole.chosen(others.nonzero()[:, 0])

    def _inferred(
        self, data: Any, likelihood: Likelihood, n_data: int, source: torch.Generator, least: int = 1
    ) -> VariationalPosterior:
        """q after these data, with the latest q for its prior; by `least` steps or more."""
        before: VariationalPosterior | None = self._posterior
        size = self._batch_size()
        each = math.ceil(n_data / size)
        budget = plan_budget(n_data, each, self.network.size, self.epochs, learning_rate=self.learning_rate)
        steps = max(least, budget.epochs * each)
        prior, mean = Prior(self.prior), self.network.flat()
        wide = prior.resolve(self.network)
        start = small_deviations(mean, wide)
        if self.deviation is not None:
            start = torch.full_like(start, self.deviation)
        first_mean, first_deviation = wide.mean.to(mean), wide.vector().detach().rsqrt().to(mean)
        if before is not None:
            first_mean, first_deviation = before.mean, before.deviation
            prior = Prior(before.deviation.double() ** -2, groups="weight", mean=before.mean.double())
            mean, start = before.mean, torch.minimum(before.deviation.to(start), start)
        touched = self._touched(data, likelihood, mean, source)
        mean, start = torch.where(touched, mean, first_mean), torch.where(touched, start, first_deviation.to(start))
        with warnings.catch_warnings():
            # a task after the other: each goes on where the last one stopped
            warnings.filterwarnings("ignore", "Variational inference has not converged", LapisWarning)
            found = variational(
                self.model,
                data,
                likelihood,
                prior=prior,
                steps=steps,
                mean=mean,
                deviation=start,
                learning_rate=budget.learning_rate,
                deviation_rate=budget.learning_rate if self.deviation_rate is None else self.deviation_rate,
                batch_size=size,
                generator=source,
                progress=self.progress,
            )
        return replace(found, likelihood=self.likelihood)

    def _touched(self, data: Any, likelihood: Likelihood, mean: Tensor, source: torch.Generator) -> Tensor:
        """Whether a task has anything to say about each weight, (P,): else q stays what it was, as is best for it.

        Weights without a gradient on a batch, under several networks drawn at random: those of other heads, and of
        inputs that are zero. (Hidden units that are silent in one network are not so in all of them.)
        """
        network = self.network
        stream, _ = batches(data, dtype=network.dtype, device=network.device, batch_size=self._batch_size())
        batch = next(iter(stream))
        spread = float(mean.square().mean().sqrt()) or 1.0
        touched = torch.zeros_like(mean, dtype=torch.bool)
        parameters = list(network.parameters.values())
        for _ in range(NETWORKS):
            noise = torch.randn(len(mean), generator=source, device=source.device, dtype=mean.dtype)
            with network.prepared(), network.at(mean + spread * noise.to(mean.device)):
                raw = network.call(batch.inputs)
                f = likelihood.canonical(raw)
                loss = likelihood.nll(f, likelihood.targets(batch.targets, f, raw.shape)).sum()
                touched |= network.gather(torch.autograd.grad(loss, parameters, allow_unused=True)) != 0
        return touched

    def _consolidate(self, task: Task) -> None:
        found, network = self._found, self.network
        with torch.no_grad():
            for name, values in network.unflatten(found.mean).items():
                network.parameters[name].copy_(values)
        self._posterior = replace(found, facts=replace(found.facts, fingerprint=network.fingerprint()))
        self.memory, self._recalled = self._pending, None

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        memory, examples = self.memory.state()
        config, tensors = pack_posterior(self._posterior)
        return {"memory": memory, "posterior": config}, tensors | {f"memory.{n}": each for n, each in examples.items()}

    def _load(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.memory = Memory.from_state(entry(config, "memory", list), under("memory.", tensors))
        self._posterior = unpack_posterior(config, tensors, self.model, self.likelihood)
