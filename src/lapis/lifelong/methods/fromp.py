"""Functional regularisation of the memorable past, FROMP (Pan et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lapis.batches import Inputs
from lapis.errors import NotPositiveDefiniteError
from lapis.lifelong.heads import Columns, on_head
from lapis.lifelong.learner import Learner, Task
from lapis.lifelong.memory import Choice, Episode, Memory
from lapis.lifelong.methods.consolidation import consolidated, half_square
from lapis.lifelong.posterior_file import pack_posterior, unpack_posterior
from lapis.likelihoods import Likelihood
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.schema import entry, tensor, under


@dataclass(frozen=True)
class Anchor:
    """The predictions of one past task's memorable examples, and how sure the network was of them."""

    means: Tensor
    """E[y | x] (M, T, C) of the head's outputs: probabilities, for classes."""
    inverse: Tensor
    """(K + jitter I)^-1 for each position and output, (T, C, M, M)."""


Group: TypeAlias = tuple[Likelihood, Tensor, Tensor, Tensor]
"""S tasks with one head and M examples each: likelihood, rows (S M,), p_past (S, M, T, C), inverses (S, T, C, M, M)."""


@dataclass(eq=False, repr=False)
class FROMP(Learner):
    """Predictions at memorable examples of past tasks are held where they were:

    mean_n l_n + strength / 2 sum_s sum_c (p - p_past)^T K_sc^-1 (p - p_past),

    with p (M,) the probabilities of class c at the M examples kept of task s (outputs, for regression), p_past those
    before the new task, and K_sc = J_p Sigma J_p^T their covariance under the posterior over the weights, with J_p the
    Jacobian of p. Sigma is diagonal: the inverse of the prior's precision and the GGN of all data so far.

    p_past and the inverses are computed once a task; a step runs the network once more, on all memorable examples or on
    those of some tasks.

    Args:
        points: examples kept of each task, as many of each class.
        choice: "memorable": those of largest curvature, at which the network is least sure, or "random".
        strength: tau of the paper, of the past.
        prior: precision of the weights.
        jitter: added to the diagonal of K.
        tasks_at_a_step: past tasks whose regulariser is computed at a step, drawn at random and weighted so that their
            mean is that of all: the time of a step then does not grow with the number of tasks. None: all of them.
        clip: norm of the gradient at most; steps on kernels that are nearly singular can be wild. None: no limit.

    Further options: see `Learner`. The paper's: split MNIST 40 points, strength 10, learning rate 1e-4, 15 epochs,
    clip 1; permuted MNIST 200 points, strength .5, rate 1e-3, 10 epochs, clip .005, prior 1e-5, jitter 1e-5.
    """

    points: int = field(default=40, kw_only=True)
    choice: Choice = field(default="memorable", kw_only=True)
    strength: float = field(default=10.0, kw_only=True)
    prior: float = field(default=1e-3, kw_only=True)
    jitter: float = field(default=1e-6, kw_only=True)
    tasks_at_a_step: int | None = field(default=None, kw_only=True)
    clip: float | None = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory = Memory()
        self.anchors: tuple[Anchor, ...] = ()

    def _task(self, data: Any, head: Any) -> Task:
        task = super()._task(data, head)
        on_head(self.likelihood, task.columns).link(torch.zeros(1, 1, self.outputs))  # an error where there is none
        return task

    def _penalty(self, task: Task) -> Callable[[], Tensor] | None:
        if not self.tasks:
            return None
        held = list(zip(self.memory.spans(), self.anchors, strict=True))
        some = self.tasks_at_a_step
        if some is None or some >= len(held):
            groups = self._grouped(held, 0)
            return lambda: self._regulariser(self.memory.inputs, groups)
        single = [(episode.inputs, self._grouped([pair], start)) for pair in held for episode, start, _ in pair[:1]]

        def estimate() -> Tensor:
            """Of tasks drawn at random, times their share: `fit_network` has seeded the global generator."""
            drawn = [single[i] for i in torch.randperm(len(single))[:some]]
            total = torch.stack([self._regulariser(inputs, groups) for inputs, groups in drawn]).sum()
            return len(single) / some * total

        return estimate

    def _grouped(self, held: list[tuple[tuple[Episode, int, int], Anchor]], offset: int) -> list[Group]:
        """Tasks of one head and size together; their rows among inputs whose first has the number `offset`."""
        alike: dict[tuple[Columns, int], list[tuple[int, int, Anchor]]] = {}
        for (episode, start, stop), anchor in held:
            alike.setdefault((episode.columns, len(episode)), []).append((start - offset, stop - offset, anchor))
        return [
            (
                on_head(self.likelihood, columns),
                torch.cat([torch.arange(start, stop, device=self.network.device) for start, stop, _ in each]),
                torch.stack([anchor.means for _, _, anchor in each]),
                torch.stack([anchor.inverse for _, _, anchor in each]),
            )
            for (columns, _), each in alike.items()
        ]

    def _regulariser(self, inputs: Inputs, groups: list[Group]) -> Tensor:
        """strength / 2 sum_sc (p - p_past)^T K^-1 (p - p_past): one forward pass, tasks with one head together."""
        f = self.likelihood.canonical(self.network.call(inputs))
        total: Tensor = f.new_zeros(())
        for likelihood, rows, means, inverse in groups:
            gap = likelihood.link(f if len(rows) == len(f) else f[rows]).reshape(means.shape) - means
            total = total + half_square(gap.permute(0, 2, 3, 1).unsqueeze(-1), partial(torch.matmul, inverse))
        return self.strength * total

    def _make_optimiser(self, parameters: list[Tensor], rate: float) -> torch.optim.Optimizer:
        optimiser = super()._make_optimiser(parameters, rate)

        def clip(*_: Any) -> None:
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, self.clip)

        optimiser.register_step_pre_hook(clip)
        return optimiser

    def _consolidate(self, task: Task) -> None:
        posterior = consolidated(
            self._posterior,
            self.model,
            task.data,
            task.likelihood,
            self.likelihood,
            structure="diagonal",
            prior=self.prior,
            batch_size=self.batch_size,
            progress=self.progress,
        )
        kept = self._chosen(task, self.points, self.choice)
        memory = self.memory.with_episode(kept, task.columns)
        anchors = tuple(self._anchored(posterior, memory, number) for number in range(len(memory.episodes)))
        self._posterior, self.memory, self.anchors = posterior, memory, anchors

    def _anchored(self, posterior: LaplacePosterior, memory: Memory, number: int) -> Anchor:
        """Predictions of one task's examples, and their kernels, at the network's present weights."""
        episode, sums, dtype = memory.episodes[number], posterior.curvature, self.network.dtype
        likelihood = on_head(self.likelihood, episode.columns)
        with posterior.network.prepared():
            record = sums.tape.record(episode.inputs)
            f = record.f.detach()
            means, slopes = likelihood.link(f), likelihood.link_slope(f)
            kernels = []
            for position in range(f.shape[1]):
                for output in range(means.shape[-1]):
                    seed = torch.zeros_like(f)
                    seed[:, position] = slopes[:, position, output]
                    found = record.contributions(seed[None])
                    total = f.new_zeros(len(f), len(f), dtype=torch.float64)
                    for gaussian, sites in zip(posterior.gaussians, sums.sites_of, strict=True):
                        features = gaussian.features([found[site] for site in sites])
                        total += gaussian.kernel(features, features)[:, 0, :, 0]
                    kernels.append(total)
        kernel = torch.stack(kernels).reshape(f.shape[1], means.shape[-1], len(f), len(f))
        kernel.diagonal(dim1=-2, dim2=-1).add_(self.jitter)
        root, failed = torch.linalg.cholesky_ex(kernel)
        if bool(failed.any()):
            raise NotPositiveDefiniteError(
                "The kernel of the memorable examples cannot be inverted",
                expected="a positive definite matrix",
                got=f"one that is not, with jitter {self.jitter:g}",
                do="use a larger jitter, or model.double()",
            )
        return Anchor(means.to(dtype), torch.cholesky_inverse(root).to(dtype))

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        memory, examples = self.memory.state()
        config, tensors = pack_posterior(self._posterior)
        tensors |= {f"memory.{name}": each for name, each in examples.items()}
        for i, anchor in enumerate(self.anchors):
            tensors |= {f"anchor.{i}.means": anchor.means, f"anchor.{i}.inverse": anchor.inverse}
        return {"memory": memory, "posterior": config}, tensors

    def _load(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.memory = Memory.from_state(entry(config, "memory", list), under("memory.", tensors))
        self._posterior = unpack_posterior(config, tensors, self.model, self.likelihood)
        found, dtype = under("anchor.", tensors), self.network.dtype
        anchors = []
        for i, episode in enumerate(self.memory.episodes):
            means = tensor(found, f"{i}.means", (len(episode), -1, -1), dtype)
            shape = (*means.shape[1:], len(episode), len(episode))
            anchors.append(Anchor(means, tensor(found, f"{i}.inverse", shape, dtype)))
        self.anchors = tuple(anchors)
