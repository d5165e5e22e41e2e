"""The loop of active learning: fit what has labels, choose what to label next, go on; resumed after an interruption."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lapis.batches import as_inputs, as_tensor, batch_length, digest, map_tensors
from lapis.checkpoint import Checkpoint
from lapis.decisions.active.acquisition import By, acquire
from lapis.errors import DataError, OptionError
from lapis.options import check_arguments
from lapis.posteriors import Posterior
from lapis.progress import track
from lapis.schema import entry


@dataclass(frozen=True)
class Round:
    """One round: what had labels, and how well the posterior fitted to it predicts the test set."""

    labels: int
    seconds: float
    scores: dict[str, float]
    """"nll", and "error" (share of wrong classes) or "rmse" where they mean something; empty without a test set."""


@dataclass(frozen=True)
class History:
    """All rounds of an active learner."""

    rounds: tuple[Round, ...]
    indices: Tensor
    """Examples of the pool in the order in which they were labelled."""
    posterior: Posterior
    """Fitted to all of them."""

    def labels_to(self, value: float, score: str = "error") -> int | None:
        """The number of labels with which `score` first was `value` or lower; None if it never was."""
        check_arguments(History.labels_to, locals(), signed=("value",))
        return next((r.labels for r in self.rounds if score in r.scores and r.scores[score] <= value), None)


def learn(
    fit: Callable[[Any], Posterior],
    pool: Any,
    budget: int,
    *,
    start: int | Sequence[int] = 20,
    each: int = 10,
    by: By = "bald",
    test: Any = None,
    candidates: int | None = None,
    samples: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> History:
    """Label examples of a pool where that helps most: fit, choose, label, again, until `budget` labels are spent.

    Args:
        fit: takes (inputs, targets) of the labelled examples and returns a posterior; a function that trains a network
            from a fixed seed makes runs repeatable, and an interrupted run end as one that was not.
        pool: (inputs, targets) in memory. Targets are looked at only for examples that were chosen.
        budget: labels in the end.
        start: labelled at first: a number of examples drawn at random, or their indices.
        each: examples labelled a round.
        by: how they are chosen, as in `acquire`.
        test: (inputs, targets) on which every round is scored.
        candidates: of "batch" and "diverse", as in `acquire`.
        samples: networks drawn for sampled predictions.
        checkpoint: a file that is written after every round; a run that finds it goes on from there.
        generator: source of randomness; seeded with 0 when not given.
        progress: show a bar; by default on a terminal only.
    """
    check_arguments(learn, locals())
    inputs, targets = _pair(pool, "pool")
    judged = None if test is None else _pair(test, "test set")
    size = batch_length(inputs)
    source = generator or torch.Generator().manual_seed(0)
    first = _first(start, size, source)
    if not len(first) <= budget <= size:
        raise OptionError(
            "Bad budget",
            expected=f"from {len(first)}, the labels of the start, to {size}, the size of the pool",
            got=str(budget),
            do="choose a budget between them",
        )
    key = str(digest(inputs, targets))
    same = {"pool": key, "start": first, "each": each, "by": by, "candidates": candidates, "samples": samples}
    kept = Checkpoint(checkpoint, "run of active learning", same, key)
    chosen = list(first)
    rounds: list[Round] = []
    if kept.tensors:
        chosen = kept.tensors["indices"].tolist()
        source.set_state(kept.tensors["generator"])
        done = [Round(**entry({"round": facts}, "round", dict)) for facts in entry(kept.facts, "rounds", list)]
        chosen, rounds = chosen[:budget], [one for one in done if one.labels <= budget]
    posterior: Posterior | None = None
    known = len(kept.tensors["indices"]) if kept.tensors else 0
    left = 1 + math.ceil((budget - len(chosen)) / each)
    for _ in track(range(left), "active learning", left, progress):
        began = time.perf_counter()
        rows = torch.tensor(chosen)
        posterior = fit((_rows(inputs, rows), targets[rows]))
        if not rounds or rounds[-1].labels < len(chosen):  # else it has been scored by a run that ended here
            scored = {} if judged is None else _scores(posterior, *judged, samples)
            rounds.append(Round(len(chosen), time.perf_counter() - began, scored))
        wanted = min(each, budget - len(chosen))
        if wanted:
            chosen += acquire(
                posterior,
                inputs,
                wanted,
                by,
                exclude=rows,
                candidates=candidates,
                samples=samples,
                generator=source,
                progress=False,
            ).tolist()
        if len(chosen) < known:
            continue  # an earlier run went further, and its file is left alone
        state = {"indices": torch.tensor(chosen), "generator": source.get_state()}
        kept.offer(state, {"rounds": [asdict(one) for one in rounds]}, now=True)
    assert posterior is not None, "there is at least one round"
    return History(tuple(rounds), torch.tensor(chosen), posterior)


def _rows(inputs: Any, rows: Tensor) -> Any:
    """Some examples."""
    return map_tensors(lambda tensor: tensor[rows], inputs)


def _scores(posterior: Posterior, inputs: Any, targets: Tensor, samples: int | None) -> dict[str, float]:
    """Test scores of a posterior."""
    prediction: Any = posterior.predict(inputs, samples=samples, progress=False)
    found = {"nll": -prediction.log_prob(targets).double().mean().item()}
    if posterior.likelihood.name == "categorical":
        guess = prediction.likelihood.canonical(prediction.probs).argmax(-1).reshape(targets.shape)
        found["error"] = (guess != targets.to(guess.device)).double().mean().item()
    elif posterior.likelihood.name == "bernoulli":
        found["error"] = ((prediction.probs > 0.5).double() != targets.to(prediction.probs)).double().mean().item()
    elif hasattr(prediction, "mean"):
        gap = prediction.mean - targets.to(prediction.mean).reshape(prediction.mean.shape)
        found["rmse"] = gap.square().mean().sqrt().item()
    return found


def _pair(data: Any, what: str) -> tuple[Any, Tensor]:
    """Inputs and targets in memory, of one length."""
    if not (isinstance(data, (tuple, list)) and len(data) == 2):
        raise DataError(
            f"The {what} must be in memory", expected="a pair (inputs, targets)", got=type(data).__name__, do="pass one"
        )
    targets = as_tensor(data[1], f"targets of the {what}")
    inputs = as_inputs(data[0], torch.get_default_dtype(), torch.device("cpu"))
    length = batch_length(inputs)
    if targets.dim() == 0 or len(targets) != length:
        raise DataError(
            f"Inputs and targets of the {what} differ in length",
            expected=f"{length} targets",
            got=f"targets of shape {tuple(targets.shape)}",
            do="pass one target for each example",
        )
    return inputs, targets


def _first(start: int | Sequence[int], size: int, source: torch.Generator) -> list[int]:
    """Indices of the examples that are labelled at first."""
    if isinstance(start, int):
        if start > size:
            raise OptionError(
                "Bad start", expected=f"at most the pool's {size} examples", got=str(start), do="lower it"
            )
        return [int(i) for i in torch.randperm(size, generator=source, device=source.device)[:start]]
    indices = [int(i) for i in start]
    if not indices or len(set(indices)) < len(indices) or min(indices) < 0 or max(indices) >= size:
        raise OptionError(
            "Bad start", expected=f"different indices from 0 to {size - 1}", got=f"{indices[:5]}", do="check them"
        )
    return indices
