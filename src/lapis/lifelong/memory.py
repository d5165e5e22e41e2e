"""Examples of past tasks: which are kept, with the head that they belong to, and the likelihood of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lapis.batches import Batch, Inputs, all_finite, joined, map_tensors, tensors_in
from lapis.errors import DataError
from lapis.lifelong.heads import Columns, on_head
from lapis.likelihoods import Likelihood
from lapis.likelihoods.base import Kind
from lapis.network import Network
from lapis.schema import entry, wrong

Choice = Literal["memorable", "random"]

TIES = 1e-12
"""Relative differences that decide, at random, between examples of the same curvature, as under Gaussian noise."""


@dataclass(frozen=True)
class Episode:
    """Examples of one task."""

    inputs: Inputs
    targets: Tensor
    columns: Columns

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Memory:
    """Examples of all past tasks, numbered from 0 on, task after task."""

    episodes: tuple[Episode, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.episodes))

    def with_episode(self, batch: Batch, columns: Columns) -> Memory:
        """The memory after one more task; DataError if its examples do not go with the others."""
        together = Memory((*self.episodes, Episode(batch.inputs, batch.targets, columns)))
        together.inputs  # noqa: B018  (raises here, before they are needed)
        return together

    @cached_property
    def inputs(self) -> Inputs:
        """Of all examples, in one piece."""
        return together([Batch(each.inputs, torch.zeros(len(each)), 0) for each in self.episodes]).inputs

    def chosen(self, numbers: Tensor) -> Inputs:
        """The inputs of some examples."""
        return map_tensors(lambda tensor: tensor[numbers.to(tensor.device)], self.inputs)

    def spans(self) -> Iterator[tuple[Episode, int, int]]:
        """Each episode with the number of its first example, and that after its last."""
        start = 0
        for episode in self.episodes:
            yield episode, start, start + len(episode)
            start += len(episode)

    def state(self) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """For a file."""
        config: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        for i, episode in enumerate(self.episodes):
            held = tensors_in(episode.inputs)
            tensors |= {f"{i}.{j}": tensor for j, tensor in enumerate(held)} | {f"{i}.targets": episode.targets}
            config.append({"columns": episode.columns, "form": _form(episode.inputs, iter(range(len(held))))})
        return config, tensors

    @staticmethod
    def from_state(config: Sequence[Any], tensors: Mapping[str, Tensor]) -> Memory:
        """The inverse of `state`."""
        episodes = []
        for i, each in enumerate(config):
            columns = entry(each, "columns", list[int] | None)
            inputs = _formed(entry(each, "form", dict), {n: t for n, t in tensors.items() if n.startswith(f"{i}.")}, i)
            for tensor in tensors_in(inputs):
                if len(tensor) != len(tensors[f"{i}.targets"]) or not all_finite(tensor):
                    raise wrong("memory", "as many finite inputs as targets", str(tuple(tensor.shape)))
            episodes.append(Episode(inputs, tensors[f"{i}.targets"], None if columns is None else tuple(columns)))
        return Memory(tuple(episodes))


def _form(inputs: Inputs, numbers: Iterator[int]) -> dict[str, Any]:
    """How inputs are put together from tensors, for JSON."""
    if isinstance(inputs, Tensor):
        return {"tensor": next(numbers)}
    if isinstance(inputs, Mapping):
        return {"mapping": [[key, _form(value, numbers)] for key, value in inputs.items()]}
    if isinstance(inputs, (tuple, list)):
        return {"tuple": [_form(value, numbers) for value in inputs]}
    return {"value": inputs}


def _formed(form: Mapping[str, Any], tensors: Mapping[str, Tensor], task: int) -> Inputs:
    """The inverse of `_form`."""
    if "tensor" in form:
        return tensors[f"{task}.{form['tensor']}"]
    if "mapping" in form:
        return {key: _formed(value, tensors, task) for key, value in form["mapping"]}
    if "tuple" in form:
        return tuple(_formed(value, tensors, task) for value in form["tuple"])
    return form["value"]


class OnMemory(Likelihood):
    """The likelihood of remembered examples, whose targets are their numbers: each example has its own task's head."""

    name: ClassVar[str] = "memory"
    kind: ClassVar[Kind] = "function"

    def __init__(self, memory: Memory, likelihood: Likelihood) -> None:
        super().__init__(channels=likelihood.channels)
        self.memory, self.whole = memory, likelihood

    def targets(self, y: Any, f: Tensor, raw_shape: Sequence[int] | None = None) -> Tensor:
        return torch.as_tensor(y)

    def check_outputs(self, f: Tensor) -> None:
        for episode in self.memory.episodes:
            on_head(self.whole, episode.columns).check_outputs(f)

    def position_nll(self, f: Tensor, y: Tensor) -> Tensor:
        total = f.new_zeros(f.shape[:2])
        for likelihood, rows, own in self._tasks(f, y):
            total = total.index_copy(0, rows, likelihood.position_nll(f[rows], own))
        return total

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros_like(f)
        for likelihood, rows, own in self._tasks(f, y):
            total = total.index_copy(0, rows, likelihood.gradient(f[rows], own))
        return total

    def factor(self, f: Tensor, y: Tensor) -> Tensor:
        total = torch.diag_embed(torch.zeros_like(f))
        for likelihood, rows, own in self._tasks(f, y):
            s = likelihood.factor(f[rows], own)
            total[rows, :, :, : s.shape[-1]] = s
        return total

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        total = torch.zeros_like(f)
        for likelihood, rows, own in self._tasks(f, y):
            total = total.index_copy(0, rows, likelihood.sampled_gradient(f[rows], own, generator))
        return total

    def _tasks(self, f: Tensor, y: Tensor) -> Iterator[tuple[Likelihood, Tensor, Tensor]]:
        """For each task among the examples: its likelihood, their rows in f, and their targets."""
        for episode, start, stop in self.memory.spans():
            rows = ((y >= start) & (y < stop)).nonzero()[:, 0]
            if len(rows):
                likelihood = on_head(self.whole, episode.columns)
                chosen = episode.targets.to(y.device)[y[rows] - start]
                yield likelihood, rows, likelihood.targets(chosen, f[rows])


def together(parts: Sequence[Batch]) -> Batch:
    """All examples as one batch; DataError where their shapes differ."""
    whole = joined(parts)
    if whole is None:
        shapes = {str([tuple(tensor.shape[1:]) for tensor in tensors_in(part.inputs)]) for part in parts}
        raise DataError(
            "The examples have different shapes, and cannot be kept together",
            expected="inputs, and targets, of one shape and dtype",
            got=" and ".join(sorted(shapes)),
            do="pad or resize the inputs",
        )
    return whole


def choose_examples(
    network: Network,
    likelihood: Likelihood,
    stream: Iterable[Batch],
    points: int,
    choice: Choice,
    generator: torch.Generator,
    *,
    by_class: bool,
) -> Batch:
    """`points` examples of a stream, in one pass; `by_class` as many of each class, where an example has one.

    "memorable" are those of largest curvature tr(H), where the network is least sure; "random" any.
    """
    best: dict[int, tuple[Tensor, Batch]] = {}
    with network.prepared(), torch.no_grad():
        for batch in stream:
            scores = torch.rand(len(batch), dtype=torch.float64, generator=generator, device=generator.device)
            scores = scores.to(network.device)
            if choice == "memorable":
                raw = network.call(batch.inputs)
                f = likelihood.canonical(raw)
                trace = likelihood.curvature_trace(f, likelihood.targets(batch.targets, f, raw.shape)).sum(1).double()
                scores = trace * (1 + TIES * scores)
            single = by_class and batch.targets.dim() == 1 and not batch.targets.is_floating_point()
            classes = batch.targets.long() if single else torch.zeros(len(batch), dtype=torch.int64)
            for label in set(classes.tolist()):
                rows = (classes == label).nonzero()[:, 0]
                best[label] = _best(best.get(label), scores[rows.to(scores.device)], batch.chosen(rows), points)
    labels = sorted(best)
    counts = [points // len(labels) + (i < points % len(labels)) for i in range(len(labels))]
    best_of = [best[label][1] for label in labels]
    found = [each.chosen(torch.arange(min(n, len(each)))) for each, n in zip(best_of, counts, strict=True)]
    return together(found)


def _best(held: tuple[Tensor, Batch] | None, scores: Tensor, batch: Batch, points: int) -> tuple[Tensor, Batch]:
    """The examples of highest score among those held and new ones, the highest first."""
    if held is not None:
        scores, batch = torch.cat([held[0], scores]), together([held[1], batch])
    top = scores.topk(min(points, len(scores))).indices
    return scores[top], batch.chosen(top)
