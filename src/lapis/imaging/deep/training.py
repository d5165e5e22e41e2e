"""Finding the image: gradient descent on misfit and total variation over the weights of a network, resumable."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lapis.checkpoint import Checkpoint, Offered
from lapis.errors import ModelError
from lapis.files import tensors_digest
from lapis.imaging.operators.linear import LinearOperator
from lapis.imaging.variation import total_variation
from lapis.network.untouched import restored_modes
from lapis.progress import track
from lapis.schema import count, entry
from lapis.training.state import load_model, load_optimiser, model_tensors, optimiser_parts

WARM_UP, COOL_DOWN = 0.05, 0.25
"""Shares of the iterations over which the step size rises at first, and falls to zero in the end."""
PATIENCE = 2
"""Looks at the evidence that may find it lower than before."""
AVERAGED = 0.2
"""Looks at the evidence are at averages of the weights, over this share of the iterations between two looks: those of
single iterations jump about by more than looks differ.
"""
SPIKE = 2.0
"""Times the lowest loss so far: above, training has just jumped away, as Adam does now and then, and needs hundreds of
iterations to come back. A look at the evidence would compare that jump, and is left out; a training that ends there
goes back to the weights with the lowest loss.
"""
CONTRAST, LOOKED_EVERY, SLOWER, RESTARTS = 1e-6, 10, 1 / 3, 3
"""An image with less contrast is dead: its sigmoid is where the slope vanishes. That is looked for so often; training
then goes on with smaller steps, a few times at most: from the lowest loss where that is far below the dead image's,
else from the start.
"""
FAR = 0.1
"""Times the dead image's loss."""


@dataclass(frozen=True)
class Task:
    """What the network is to explain: y = A f(inputs) + noise, with few and small edges.

    The loss is |y - A f|^2 / (2 noise^2) + variation * TV(f): minus the log of a posterior, up to constants.
    """

    operator: LinearOperator
    data: Tensor
    """y (measurements,), in the network's dtype."""
    inputs: Tensor
    """(1, channels, height, width), fixed."""
    noise: float
    variation: float
    iterations: int
    rate: float
    seed: int

    def loss(self, image: Tensor) -> Tensor:
        misfit = (self.operator @ image).reshape(-1) - self.data
        return misfit.square().sum() / (2 * self.noise**2) + self.variation * total_variation(image)

    def step_size(self, iteration: int) -> float:
        """Of iteration 0, 1, ...: rising, constant, falling."""
        left = (self.iterations - iteration) / (COOL_DOWN * self.iterations)
        return self.rate * min(1.0, (iteration + 1) / max(1.0, WARM_UP * self.iterations), left)

    def facts(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        values = torch.from_numpy(self.operator.matrix.data)
        indices = torch.from_numpy(self.operator.matrix.indices.astype("int64"))
        seen = {"data": self.data, "inputs": self.inputs, "values": values, "indices": indices}
        return {
            "data": tensors_digest(seen)[:16], "noise": self.noise, "variation": self.variation,
            "iterations": self.iterations, "rate": self.rate, "seed": self.seed,
        }  # fmt: skip


@dataclass
class Trained:
    """How the training went: the loss of each iteration, and the evidence where it was looked at."""

    losses: list[float] = field(default_factory=list)
    evidences: list[tuple[int, float]] = field(default_factory=list)
    """(iterations, log evidence)."""
    stopped_at: int = 0
    """Iterations behind the weights that were kept."""


def fit_image(
    network: nn.Module,
    task: Task,
    *,
    watch: Callable[[], float] | None = None,
    looks: int = 10,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Trained:
    """Train the network in place, by Adam.

    Args:
        network: makes images (1, height, width) of the task's inputs.
        task: data, loss, and how long.
        watch: the log evidence of the linearised network. It is asked for `looks` times on the way, at an exponential
            average of the weights; when it has fallen twice in a row training ends, and the average with the highest
            is kept. Where the loss has just jumped up there is no look.
        looks: how often.
        checkpoint: a file that keeps the state, and from which an interrupted run goes on as if it had not been.
        progress: show a bar (None: on a terminal only).
    """
    same = task.facts() | {"looks": looks if watch else 0, "weights": sum(p.numel() for p in network.parameters())}
    kept = Checkpoint(checkpoint, "deep image prior", same, "")
    every = max(1, task.iterations // looks)
    run = _Run(network, task, every * AVERAGED if watch else 0.0)
    with restored_modes(network), torch.random.fork_rng(devices=[]), kept.guarded():
        torch.manual_seed(task.seed)
        run.mark()
        if kept.tensors:
            run.load(kept.tensors, kept.facts)
        kept.follow(run.state)
        left = range(run.iteration, task.iterations)
        for iteration in track(left, "deep image prior", len(left), progress):
            if watch is not None and run.look_is_due(every):
                run.look(watch)
            if run.ended():
                break
            network.train()
            run.step(iteration)
            kept.follow(run.state)
        if watch is not None and run.look_is_due(every):
            run.look(watch)
        kept.follow(run.state, now=True)
    if run.best:
        load_model(network, run.best)
    else:
        run.undo_jump()
    with torch.no_grad():
        if _is_dead(network(task.inputs)[0]):
            raise _dead(task)
    return run.trained


def _is_dead(image: Tensor) -> bool:
    return float(image.detach().max() - image.detach().min()) < CONTRAST * max(1.0, float(image.detach().abs().max()))


def _dead(task: Task) -> ModelError:
    return ModelError(
        "Training the deep image prior ended in a constant image",
        expected="some contrast",
        got="the same value in every pixel",
        do=f"pass a smaller rate than {task.rate:g}, or check the data",
    )


class _Run:
    def __init__(self, network: nn.Module, task: Task, averaged: float) -> None:
        self.network, self.task = network, task
        self.optimiser = torch.optim.Adam(network.parameters(), lr=task.rate)
        self.iteration, self.trained = 0, Trained()
        self.best: dict[str, Tensor] = {}
        self.restarts = 0
        self._first = model_tensors(network)
        self._least, self._lowest = math.inf, dict[str, Tensor]()
        """The lowest loss since training began, and the weights that have it."""
        self._averaged = averaged
        """Iterations behind `_average`; 0 for none."""
        self._average = model_tensors(network) if averaged else {}
        self._has_buffers = any(True for _ in network.buffers())
        self._random = torch.get_rng_state()
        self._whole = True

    def mark(self) -> None:
        """The state is whole: whoever goes on from it draws the same random numbers next."""
        self._random = torch.get_rng_state()
        self._whole = True

    def step(self, iteration: int) -> None:
        self._whole = not self._has_buffers  # which may change on the way forward; weights change below only
        for group in self.optimiser.param_groups:
            group["lr"] = self.task.step_size(iteration) * SLOWER**self.restarts
        self.optimiser.zero_grad()
        with torch.enable_grad():
            image = self.network(self.task.inputs)[0]
            loss = self.task.loss(image)
            loss.backward()  # type: ignore[no-untyped-call]
        value = float(loss.detach())
        if not value < float("inf"):
            raise ModelError(
                "Training the deep image prior diverged", expected="a finite loss", got=str(value),
                do="pass a smaller rate",
            )  # fmt: skip
        if value < self._least:
            self._least, self._lowest = value, model_tensors(self.network)
        self._whole = False
        self.optimiser.step()
        if iteration % LOOKED_EVERY == 0 and _is_dead(image):
            self._restart(value)
        self._follow_weights()
        self.trained.losses.append(value)
        self.iteration = self.trained.stopped_at = iteration + 1
        self.mark()

    def _follow_weights(self) -> None:
        state = self.network.state_dict() if self._average else {}
        for name, mean in self._average.items():
            share = 1 / max(1.0, self._averaged)
            mean.copy_(torch.lerp(mean, state[name], share) if mean.is_floating_point() else state[name])

    def _restart(self, dead_loss: float) -> None:
        self.restarts += 1
        if self.restarts > RESTARTS:
            raise _dead(self.task)
        if self._least > FAR * dead_loss:
            self._least, self._lowest = math.inf, {}
        there = self._lowest or self._first
        load_model(self.network, there)
        self._average = {name: value.clone() for name, value in there.items() if name in self._average}
        self.optimiser = torch.optim.Adam(self.network.parameters(), lr=self.task.rate)

    def undo_jump(self) -> None:
        """Go back to the lowest loss from a jump that was not over in the end."""
        losses = self.trained.losses
        if self._lowest and losses[-1] > SPIKE * self._least:
            load_model(self.network, self._lowest)
            self.trained.stopped_at = len(losses) - 1 - losses[::-1].index(self._least)

    def look_is_due(self, every: int) -> bool:
        looks = self.trained.evidences
        return self.iteration > 0 and self.iteration % every == 0 and (not looks or looks[-1][0] != self.iteration)

    def look(self, watch: Callable[[], float]) -> None:
        self._whole = False
        there = model_tensors(self.network)
        load_model(self.network, self._average)
        self.network.eval()
        try:
            with torch.no_grad():
                loss = float(self.task.loss(self.network(self.task.inputs)[0]))
            evidence = watch() if loss <= SPIKE * min(self.trained.losses) else None
        finally:
            load_model(self.network, there)
        if evidence is None:
            return self.mark()
        self.trained.evidences.append((self.iteration, evidence))
        if evidence >= max(value for _, value in self.trained.evidences):
            self.best = {name: value.clone() for name, value in self._average.items()}
        self._stop_at_best()
        self.mark()

    def _stop_at_best(self) -> None:
        if self.trained.evidences:
            self.trained.stopped_at = max(self.trained.evidences, key=lambda pair: pair[1])[0]

    def ended(self) -> bool:
        values = [value for _, value in self.trained.evidences]
        return len(values) > PATIENCE and max(values[-PATIENCE:]) < max(values[:-PATIENCE])

    def state(self) -> Offered:
        if not self._whole:
            return None
        moments, facts = optimiser_parts(self.optimiser)
        tensors = {f"network.{name}": value for name, value in model_tensors(self.network).items()}
        tensors |= {f"optimiser.{name}": value.clone() for name, value in moments.items()}
        tensors |= {f"average.{name}": value.clone() for name, value in self._average.items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        tensors |= {f"lowest.{name}": value for name, value in self._lowest.items()}
        tensors["random"] = self._random
        trained = self.trained
        numbers = {"iteration": self.iteration, "losses": trained.losses, "evidences": trained.evidences}
        numbers |= {"least": self._least if self._lowest else None}
        return tensors, numbers | {"optimiser": facts, "restarts": self.restarts}

    def load(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        load_model(self.network, part("network."))
        load_optimiser(self.optimiser, part("optimiser."), entry(facts, "optimiser", dict))
        self._average, self.best, self._lowest = part("average."), part("best."), part("lowest.")
        self._least = entry(facts, "least", float) if self._lowest else math.inf
        self.restarts = count(facts, "restarts", least=0, most=RESTARTS)
        self.iteration = self.trained.stopped_at = count(facts, "iteration", least=0)
        self.trained.losses = [float(value) for value in entry(facts, "losses", list)]
        self.trained.evidences = [(int(when), float(value)) for when, value in entry(facts, "evidences", list)]
        self._stop_at_best()
        torch.set_rng_state(tensors["random"])
        self.mark()
