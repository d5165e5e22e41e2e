"""Stochastic gradient descent on quadratics 1/2 z^T A z - b^T z, many right-hand sides at once.

For problems where even one exact product with A is expensive: each step sees an unbiased estimate of A z - b, from a
minibatch. Nesterov momentum, clipping by norm, and an average over iterates, which removes most of the noise that a
constant step leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lapis.errors import DataError, OptionError
from lapis.options import check_arguments
from lapis.progress import track
from lapis.solvers.eigen import largest_eigenvalue
from lapis.solvers.operator import Operator, norms

Averaging = Literal["tail", "geometric", "none"]
Gradient = Callable[[Tensor, int], Tensor]

GROWTH = 1e6
"""A gradient this many times the first one is a divergence; noise and momentum stay far below."""


@dataclass(frozen=True)
class SGDSettings:
    """Settings of a run; their values are checked on creation.

    Args:
        steps: of the whole run, interruptions or not.
        learning_rate: see `sgd_learning_rate`.
        momentum: Nesterov's, in [0, 1).
        clip: gradients longer than this are shortened to it, each right-hand side on its own.
        averaging: "tail", the mean of the last `tail` of the steps (Polyak); "geometric", weights falling by a factor e
            every `tail` * steps steps, without bias from the start; "none", the last iterate.
        tail: in (0, 1].
    """

    steps: int
    learning_rate: float
    momentum: float = 0.9
    clip: float | None = None
    averaging: Averaging = "tail"
    tail: float = 0.5

    def __post_init__(self) -> None:
        check_arguments(SGDSettings, vars(self), signed=("momentum",))
        ranges = {
            "momentum": (0 <= self.momentum < 1, "a number in [0, 1)"),
            "tail": (0 < self.tail <= 1, "a number in (0, 1]"),
        }
        for name, (fits, expected) in ranges.items():
            if not fits:
                raise OptionError(
                    f"SGD cannot use this {name}",
                    expected=expected,
                    got=repr(getattr(self, name)),
                    do="pass such a number",
                )

    def average_weight(self, step: int) -> float:
        """The weight w of iterate `step` (from 1) in average <- (1 - w) average + w iterate."""
        if self.averaging == "none":
            return 1.0
        if self.averaging == "tail":
            return 1 / max(1, step - int((1 - self.tail) * self.steps))
        rate = 1 / max(1.0, self.tail * self.steps)
        # Weights (1 - rate)^(age), normalised to sum to 1 at every step.
        return rate / (1 - (1 - rate) ** step) if rate < 1 else 1.0


@dataclass
class SGDState:
    """Everything a resumed run needs to end as an uninterrupted one would: `tensors` for a file, `config` for JSON.

    step: steps done. iterate, velocity, average (k, P). gradient_norms (steps, k): of the stochastic gradients before
    clipping, zero for steps to come. clipped (k,): how many gradients were shortened.
    """

    settings: SGDSettings
    step: int
    iterate: Tensor
    velocity: Tensor
    average: Tensor
    gradient_norms: Tensor
    clipped: Tensor

    @staticmethod
    def begin(start: Tensor, settings: SGDSettings) -> SGDState:
        """The state before the first step, from `start` (k, P), which is not changed."""
        if start.dim() != 2 or start.numel() == 0 or not start.is_floating_point() or not start.isfinite().all():
            raise DataError(
                "SGD cannot start here",
                expected="a finite block (k, P), one vector per row",
                got=f"{tuple(start.shape)} {start.dtype}",
                do="pass zeros, or an earlier solution",
            )
        start = start.detach()
        history = torch.zeros(settings.steps, len(start), dtype=torch.float64, device=start.device)
        clipped = torch.zeros(len(start), dtype=torch.int64, device=start.device)
        return SGDState(settings, 0, start.clone(), torch.zeros_like(start), start.clone(), history, clipped)

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in _TENSORS}

    def config(self) -> dict[str, Any]:
        return {"step": self.step, **asdict(self.settings)}

    @staticmethod
    def load(tensors: dict[str, Tensor], config: dict[str, Any]) -> SGDState:
        """The inverse of `tensors` and `config`."""
        settings = SGDSettings(**{name: value for name, value in config.items() if name != "step"})
        return SGDState(settings, config["step"], **{name: tensors[name].clone() for name in _TENSORS})

    def clone(self) -> SGDState:
        return SGDState.load(self.tensors(), self.config())


_TENSORS = ("iterate", "velocity", "average", "gradient_norms", "clipped")


@dataclass(frozen=True)
class SGDResult:
    """solution (k, P): the average (the last iterate without averaging); state: to look at or go on from; stopped:
    "steps" when all were done, or "callback".
    """

    solution: Tensor
    state: SGDState
    stopped: Literal["steps", "callback"]


def sgd(
    gradient: Gradient,
    state: SGDState,
    *,
    callback: Callable[[SGDState], bool | None] | None = None,
    progress: bool | None = False,
) -> SGDResult:
    """Descend from `state` to the end of its settings' steps; `state` itself is left as it was.

    v <- momentum v + g, z <- z - learning_rate (g + momentum v): Nesterov's method in its look-ahead variable, where g
    is taken.

    Args:
        gradient: gradient(z (k, P), step) -> (k, P), an unbiased estimate of A z - b. Let the minibatch and any noise
            depend on `step` (counted from 0) only: then a resumed run equals an uninterrupted one.
        state: `SGDState.begin(start, settings)`, or that of an earlier, shorter run.
        callback: sees the live state after each step (`clone` it to keep it); returning True stops.
        progress: show a bar (None: on a terminal only).

    Raises OptionError on divergence. Memory: 4 blocks of (k, P) beyond the gradient's own.
    """
    check_arguments(sgd, locals())
    state = state.clone()
    stopped: Literal["steps", "callback"] = "steps"
    for _ in track(_descend(gradient, state), "SGD", state.settings.steps - state.step, progress):
        if callback is not None and callback(state):
            stopped = "callback"
            break
    return SGDResult(state.average, state, stopped)


def _descend(gradient: Gradient, state: SGDState) -> Iterator[None]:
    settings = state.settings
    for step in range(state.step, settings.steps):
        slope = gradient(state.iterate, step).detach()
        if slope.shape != state.iterate.shape or slope.dtype != state.iterate.dtype:
            raise DataError(
                "The gradient does not fit",
                expected=f"{tuple(state.iterate.shape)} {state.iterate.dtype}",
                got=f"{tuple(slope.shape)} {slope.dtype}",
                do="return the gradient in the shape and dtype of the iterate",
            )
        length = norms(slope)
        state.gradient_norms[step] = length
        _check_growth(state, step, length)
        if settings.clip is not None:
            state.clipped += length > settings.clip
            slope = slope * (settings.clip / length).clamp(max=1).to(slope.dtype)[:, None]
        state.velocity.mul_(settings.momentum).add_(slope)
        state.iterate.sub_(slope, alpha=settings.learning_rate)
        state.iterate.sub_(state.velocity, alpha=settings.learning_rate * settings.momentum)
        state.average.lerp_(state.iterate, settings.average_weight(step + 1))
        state.step = step + 1
        yield


def _check_growth(state: SGDState, step: int, length: Tensor) -> None:
    first = state.gradient_norms[0]
    if not bool(length.isfinite().all()) or bool(((length > GROWTH * first) & (first > 0)).any()):
        raise OptionError(
            f"SGD diverged at step {step}",
            expected="a learning rate below 2 (1 + momentum) / (1 + 2 momentum) / (the largest eigenvalue of A)",
            got=f"learning_rate={state.settings.learning_rate:g}, gradients of norm up to {float(length.max()):.3g}",
            do="lower learning_rate (see sgd_learning_rate), use larger minibatches, or clip",
        )


def sgd_learning_rate(
    operator: Operator, *, momentum: float = 0.9, fraction: float = 0.5, steps: int = 20, generator: torch.Generator
) -> float:
    """`fraction` of the largest stable rate, 2 (1 + m) / ((1 + 2 m) l) with l the top eigenvalue of `operator`.

    Beyond that rate Nesterov's recursion r^2 - (1 + m)(1 - q) r + m (1 - q), q = rate * l, has a root outside the unit
    circle. With minibatches pass the product of one, scaled like its gradient: its top eigenvalue is the larger one.
    """
    check_arguments(sgd_learning_rate, locals(), signed=("momentum",))
    if not 0 < fraction < 1 or not 0 <= momentum < 1:
        raise OptionError(
            "No stable learning rate",
            expected="fraction in (0, 1), momentum in [0, 1)",
            got=f"{fraction}, {momentum}",
            do="leave them out",
        )
    top = largest_eigenvalue(operator, steps=steps, generator=generator)
    if not top > 0:
        raise OptionError(
            "No learning rate for this operator",
            expected="a positive top eigenvalue",
            got=f"{top:.3g}",
            do="check that the operator is positive definite and not 0",
        )
    return fraction * 2 * (1 + momentum) / ((1 + 2 * momentum) * top)
