"""The interface of every life-long learner: a network that is taught one task after the other."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lapis.batches import Batch, batches, describe
from lapis.errors import ModelError, OptionError
from lapis.files import write
from lapis.lifelong.heads import Columns, Head, Heads, latent_of_head, on_head
from lapis.lifelong.memory import Choice, choose_examples
from lapis.likelihoods import Likelihood, resolve
from lapis.network import Network, full_precision
from lapis.options import check_arguments
from lapis.posteriors.ensemble import EnsemblePosterior
from lapis.posteriors.posterior import MEMORY_BUDGET, Facts, LatentKind, Posterior
from lapis.posteriors.predicting.parts import latent_of_parts
from lapis.predictions import Prediction
from lapis.predictions import predict as predict_outputs
from lapis.training.budget import default_batch_size
from lapis.training.data import own_randomness, survey
from lapis.training.plain import fit_network
from lapis.training.state import load_model, model_tensors
from lapis.training.step import OPTIMISERS, MakeOptimiser, check_optimiser

MEANINGLESS = ("model", "likelihood", "heads", "optimiser", "generator", "progress")
"""Fields that are no options in a file: they have entries of their own, or none."""


@dataclass(frozen=True)
class Task:
    """A task while it is learnt."""

    data: Any
    columns: Columns
    likelihood: Likelihood
    """Of all outputs; those of other heads have no part in it."""
    n_data: int
    first: Batch


@dataclass(frozen=True)
class Learned:
    """The record of a task that was learnt."""

    columns: Columns
    n_data: int
    losses: tuple[float, ...]
    """The mean loss of every epoch, what the method adds to it included."""


@dataclass(eq=False, repr=False)
class Learner(ABC):
    """A network that learns tasks one after the other, each from its own data alone, and is to forget none.

    `learn(data, head)` trains the model in place and then consolidates: it keeps what the method needs to remember the
    task. Afterwards `predict(x, head)` answers for any task learnt so far.

    Args:
        model: the network, which is trained in place. If tasks have heads of their own, it returns the outputs of all
            heads side by side.
        likelihood: p(y | outputs of a head): see `lapis.laplace`.
        heads: names of heads, {"first": slice(0, 2), ...}, or how many outputs every head has: see `Heads`. Classes of
            a task count from 0 within its head. Without heads all tasks share all outputs.
        epochs: for each task; by default as many as make 4000 optimiser steps, times sqrt(N / 1000) for more than 1000
            examples.
        learning_rate: at the start of each task; by default 0.7 / sqrt(number of weights), within 0.001 .. 0.03.
        batch_size: for data that are not batched yet; by default 2.5e6 / number of weights, within 128 .. 2048.
        optimiser: "adam", "sgd" (momentum 0.9), or a function of (parameters, learning rate); new for every task.
        schedule: how the learning rate goes down within a task: "cosine" to zero, or "constant".
        generator: source of randomness; seeded with 0 when None.
        progress: show bars; by default on a terminal only.
    """

    posteriors: ClassVar[bool] = False
    """Whether predictions are by default those of the posterior, and not of the network alone."""

    model: nn.Module
    likelihood: Any
    heads: Any = field(default=None, kw_only=True)
    epochs: int | None = field(default=None, kw_only=True)
    learning_rate: float | None = field(default=None, kw_only=True)
    batch_size: int | None = field(default=None, kw_only=True)
    optimiser: str | MakeOptimiser = field(default="adam", kw_only=True)
    schedule: Literal["cosine", "constant"] = field(default="cosine", kw_only=True)
    generator: torch.Generator | None = field(default=None, kw_only=True)
    progress: bool | None = field(default=None, kw_only=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        LEARNERS[cls.__name__] = cls

    def __post_init__(self) -> None:
        self.likelihood = resolve(self.likelihood)
        self.network = Network(self.model)
        for kind in type(self).__mro__:  # each in the names of its own module
            if "__init__" in vars(kind) and issubclass(kind, Learner):
                check_arguments(kind.__init__, vars(self))
        check_optimiser(self.optimiser)
        self.named = Heads(self.heads)
        self.source = self.generator or torch.Generator().manual_seed(0)
        self.tasks: tuple[Learned, ...] = ()
        self.outputs = 0
        """Outputs of all heads; 0 before the first task."""
        self._posterior: Any = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {self.network.size:,} weights, {len(self.tasks)} tasks learnt>"

    # learning --------------------------------------------------------------------------------------

    def learn(self, data: Any, head: Head = None) -> Learned:
        """Train the model on a task, and keep what the method needs to remember it.

        After a failure, Ctrl-C included, model and learner are as before the call. Modes (training, evaluation) are
        always restored.

        Args:
            data: see `lapis.laplace`; pairs and Datasets are shuffled anew every epoch. They are read many times, and
                not needed any more afterwards, but for the examples that some methods keep.
            head: the task's outputs, among all that the model returns: a name or number of one of the `heads`, or a
                slice or indices. None for all of them.
        """
        task = self._task(data, head)
        weights, random = model_tensors(self.model), self.source.get_state()
        with self.network.held():
            try:
                losses = self._train(task)
                self._consolidate(task)
            except BaseException:
                load_model(self.model, weights)
                self.source.set_state(random)
                raise
        learned = Learned(task.columns, task.n_data, losses)
        self.tasks = (*self.tasks, learned)
        return learned

    def _task(self, data: Any, head: Head) -> Task:
        """The task, after every check that needs no training."""
        columns = self.named.columns(head)
        likelihood = on_head(self.likelihood, columns)
        with own_randomness(self.network, 0):
            found = survey(data, self.network, self._batch_size())
            first = next(batches(data, dtype=self.network.dtype, device=self.network.device, batch_size=8)[0])
        self.network.example, self.network.signature = found.example, describe(found.example)
        with self.network.prepared(), torch.no_grad():
            raw = self.network.call(first.inputs)
            f = likelihood.canonical(raw)
            likelihood.check_outputs(f)
            likelihood.targets(first.targets, f, raw.shape)
        self.outputs = f.shape[-1]
        return Task(data, columns, likelihood, found.n_data, first)

    def _batch_size(self) -> int:
        return default_batch_size(self.network.size) if self.batch_size is None else self.batch_size

    def _train(self, task: Task) -> tuple[float, ...]:
        """Train the model; returns each epoch's loss."""
        return self._fit(task.data, task.likelihood, self._penalty(task))

    def _fit(self, data: Any, likelihood: Likelihood, penalty: Callable[[], Tensor] | None) -> tuple[float, ...]:
        return fit_network(
            self.model,
            data,
            likelihood,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            optimiser=self._make_optimiser,
            schedule=self.schedule,
            batch_size=self._batch_size(),
            generator=self.source,
            penalty=penalty,
            progress=self.progress,
        )

    def _make_optimiser(self, parameters: list[Tensor], rate: float) -> torch.optim.Optimizer:
        make = OPTIMISERS[self.optimiser] if isinstance(self.optimiser, str) else self.optimiser
        return make(parameters, rate)

    def _penalty(self, task: Task) -> Callable[[], Tensor] | None:
        """What is added to the mean loss of a batch, as a function of the model's weights; None for nothing."""
        return None

    def _consolidate(self, task: Task) -> None:  # noqa: B027  (need not keep anything)
        """Keep what is needed of a task that was learnt. Nothing of the learner may change before all work is done."""

    def _weights(self) -> Tensor:
        """The model's weights (P,), with gradients."""
        return torch.cat([parameter.reshape(-1) for parameter in self.network.parameters.values()])

    def _stream(self, task: Task) -> Any:
        """One pass over the task's data."""
        return batches(task.data, dtype=self.network.dtype, device=self.network.device, batch_size=self.batch_size)[0]

    def _chosen(self, task: Task, points: int, choice: Choice, stream: Iterable[Batch] | None = None) -> Batch:
        """Examples of a task that are worth keeping, as many of each class; of its data, or of another stream."""
        stream = self._stream(task) if stream is None else stream
        by_class = self.likelihood.name == "categorical"
        return choose_examples(self.network, task.likelihood, stream, points, choice, self.source, by_class=by_class)

    # predicting ------------------------------------------------------------------------------------

    @property
    def posterior(self) -> Any:
        """The posterior over the weights after all tasks learnt; ModelError for methods without one."""
        if self._posterior is None:
            raise ModelError(
                f"{type(self).__name__} has no posterior",
                expected="OnlineLaplace, VCL or FROMP, after a task was learnt",
                got=f"{type(self).__name__} after {len(self.tasks)} tasks",
                do="learn a task first, or fit a posterior yourself: lapis.laplace(model, data, ...)",
            )
        return self._posterior

    def predict(
        self,
        x: Any,
        head: Head = None,
        *,
        method: Literal["network", "linearised", "sampled"] | None = None,
        samples: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """The predictive distribution at `x`.

        Args:
            x: see `lapis.Posterior.predict`.
            head: as in `learn`.
            method: "network" (its outputs alone), or "linearised" or "sampled" by the posterior, where there is one. By
                default the posterior's first method for `OnlineLaplace` and `VCL`, and the network for all others.
            samples: networks drawn for sampled predictions.
            generator: source of randomness; seeded with 0 when not given.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(Learner.predict, locals())
        columns = self.named.columns(head)
        alone = method == "network" or (method is None and not (self.posteriors and self.tasks))
        if alone and samples is not None:
            raise OptionError(
                "The network alone is not sampled", expected="samples=None", got=str(samples), do='use method="sampled"'
            )
        posterior = self._alone() if alone else self.posterior
        how = posterior.methods[0] if alone or method is None else method
        kind: LatentKind = "sampled" if how == "sampled" else "full" if posterior._full_by_default() else "diagonal"
        with self.network.held(), full_precision(self.network.device):
            posterior.check_network()
            latent = latent_of_parts(posterior, x, kind, None if alone else samples, generator, progress)
            on_head(self.likelihood, columns).check_outputs(latent.mean)
        return predict_outputs(self.likelihood, latent_of_head(latent, columns, self.likelihood))

    def _alone(self) -> Posterior:
        """The network itself, as a posterior without doubt."""
        signature, fingerprint = self.network.signature or "", self.network.fingerprint()
        facts = Facts(sum(task.n_data for task in self.tasks), self.outputs, signature, fingerprint, MEMORY_BUDGET)
        return EnsemblePosterior.of([self.network], self.likelihood, facts)

    # files -----------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write model, options and all that is remembered to one file, for `lapis.lifelong.load(path, model)`.

        A learner that is loaded goes on as this one would have.
        """
        config, tensors = self._state()
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in MEANINGLESS}
        held = {f"state.{name}": tensor for name, tensor in tensors.items()}
        held |= {f"model.{name}": tensor for name, tensor in model_tensors(self.model).items()}
        held["generator"] = self.source.get_state()
        facts = {
            "learner": type(self).__name__,
            "options": options,
            "heads": self.named.config(),
            "optimiser": self.optimiser if isinstance(self.optimiser, str) else None,
            "likelihood": self.likelihood.to_config(),
            "outputs": self.outputs,
            "signature": self.network.signature or "",
            "tasks": [asdict(task) for task in self.tasks],
            "state": config,
        }
        write(path, facts, held, "learner")

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is remembered: entries that JSON can hold, and tensors."""
        return {}, {}

    def _load(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:  # noqa: B027  (see `_state`)
        """Take over what `_state` gave; the model has its weights already."""


LEARNERS: dict[str, type[Learner]] = {}
"""Learners by their names in files."""
