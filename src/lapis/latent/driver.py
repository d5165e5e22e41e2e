"""Expectation-maximisation: one driver for every model with latent variables z.

For any distribution q of z, with data y and parameters theta,

    log p(y | theta) = B(q, theta) + KL(q || p(z | y, theta)),    B = E_q[log p(y, z | theta)] + H(q).

    E: q <- p(z | y, theta)                    B rises to log p(y | theta): it touches
    M: theta <- argmax E_q[log p(y, z | theta)]    B rises, and log p(y | theta) with it: it climbs

Where the bound itself is out of reach, as the evidence of a network of millions of weights is, the same steps are
taken, and the rounds end when they hardly move the parameters (`moved`): tuning a prior from draws of its posterior is
such a model (`posteriors/laplace/tuning/by_draws`).

A model of an exponential family needs its data only through the sums E_q[T(y, z)] of the E-step (`Expected`), which is
what makes minibatches possible: S <- (1 - r) S + r S_batch N / M.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from lapis.errors import DataError, LapisWarning, OptionError, users_level
from lapis.options import check_arguments, shown
from lapis.progress import track

Self = TypeVar("Self", bound="LatentModel")
Model = TypeVar("Model", bound="LatentModel")

ROUNDING = 1e-9
"""A bound in float64 that falls by less than this share of its size, or nats a datum, has only been rounded."""


@dataclass(frozen=True)
class Expected:
    """The result of an E-step: expected sufficient statistics, sums over the data, and the entropy of q."""

    statistics: Mapping[str, Tensor]
    entropy: Tensor
    """H(q), 0-d; the sum over the data."""
    count: float
    """Data that the sums are over."""

    def scaled(self, factor: float) -> Expected:
        """All sums times a factor."""
        return Expected({k: factor * v for k, v in self.statistics.items()}, factor * self.entropy, factor * self.count)

    def plus(self, other: Expected) -> Expected:
        """The sums over both."""
        sums = {name: value + other.statistics[name] for name, value in self.statistics.items()}
        return Expected(sums, self.entropy + other.entropy, self.count + other.count)


class LatentModel(ABC):
    """A model with latent variables, as a value: `maximisation` returns a new one."""

    title: ClassVar[str] = "EM"
    """Of the progress bar."""

    @abstractmethod
    def expectation(self, data: Any) -> Expected:
        """E-step: the statistics under q = p(z | y, theta)."""

    @abstractmethod
    def maximisation(self: Self, expected: Expected) -> Self:
        """M-step: the model with the largest E_q[log p(y, z | theta)] (plus log prior, where it has one)."""

    def log_joint(self, expected: Expected) -> Tensor:
        """E_q[log p(y, z | theta)] (plus log prior of theta), 0-d; every model defines it, or `moved`."""
        raise OptionError(
            "The model has no bound", expected="log_joint, or moved", got=f"neither in {type(self).__name__}",
            do="define log_joint: E_q[log p(y, z | theta)] from the sums of the E-step",
        )  # fmt: skip

    def bound(self, expected: Expected) -> float:
        """B(q, theta); the log likelihood if q is this model's own posterior."""
        return float(self.log_joint(expected) + expected.entropy)

    def moved(self) -> float | None:
        """How far the last M-step moved the parameters, of a model without a bound; None of all others."""
        return None

    def unfinished(self, reason: str, rounds: int, tolerance: float) -> str:
        """What to tell the user where the rounds ended before they converged."""
        return f"EM was still climbing: {reason}. Raise rounds ({rounds}), or tolerance ({tolerance:g})."

    def vector(self) -> Tensor | None:
        """Parameters as an unconstrained vector, for acceleration; None for models that offer none."""
        return None

    def with_vector(self: Self, vector: Tensor) -> Self:
        """The model with these parameters; asked for only where `vector` offers them."""
        raise OptionError(
            "The model offers a vector", expected="with_vector beside it", got=f"none in {type(self).__name__}",
            do="define with_vector: the model with the parameters of a vector",
        )  # fmt: skip


@dataclass(frozen=True)
class Fit(Generic[Model]):
    """What `em` found."""

    model: Model
    bounds: tuple[float, ...]
    """B after every E-step (the log likelihood, and log prior); minibatches: estimates of it."""
    half_steps: tuple[float, ...]
    """B after every half-step: E, M, E, M, and so on; with minibatches as `bounds`."""
    converged: bool
    reason: str
    rounds: int
    restarts: tuple[float, ...] = field(default=())
    """The last bound of every start, where there were several."""


def em(
    model: Model | Callable[[torch.Generator], Model],
    data: Any,
    *,
    rounds: int = 200,
    tolerance: float = 1e-6,
    restarts: int = 1,
    batch_size: int | None = None,
    accelerate: bool = False,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Fit[Model]:
    """Fit a model with latent variables by expectation-maximisation.

    Args:
        model: where to start; or a function of a generator that makes starts, for `restarts`.
        data: what the model's `expectation` takes; for minibatches a tensor, or a list of sequences.
        rounds: at most this many E- and M-steps from each start.
        tolerance: ends when a round raises the bound by less than this many nats a datum; with minibatches, when three
            epochs raise it by less than three times that.
        restarts: starts, of which the best is kept.
        batch_size: data a step, for stochastic EM: statistics are averaged with a rate of (2 + t)^-0.7.
        accelerate: extrapolate from every two steps (SQUAREM), and take it only where the bound does not fall.
        generator: source of randomness for starts and minibatches; seeded with 0 when not given.
        progress: show a bar; by default on a terminal only.
    """
    check_arguments(em, locals(), apart=("model",), signed=("tolerance",))
    if tolerance < 0:
        raise OptionError("Bad tolerance", expected="a number from 0 on", got=repr(tolerance), do="pass such a value")
    source = generator or torch.Generator().manual_seed(0)
    if restarts > 1 and isinstance(model, LatentModel):
        raise OptionError(
            "Every restart would be the same",
            expected="a function of a generator that makes a start",
            got=type(model).__name__,
            do="pass such a function, or leave restarts out",
        )
    if not isinstance(model, LatentModel) and not callable(model):
        raise OptionError(
            "Bad model", expected="a LatentModel, or a function that makes one", got=type(model).__name__, do="pass one"
        )
    best: Fit[Model] | None = None
    ends: list[float] = []
    for _ in range(restarts):
        start = model if isinstance(model, LatentModel) else model(source)
        _startable(start, accelerate, batch_size)
        if batch_size is None:
            found = _ascend(start, data, rounds, tolerance, accelerate, progress)
        else:
            found = _stochastic(start, data, rounds, tolerance, batch_size, source, progress)
        if not found.bounds and restarts > 1:
            raise OptionError(
                "Starts cannot be compared",
                expected="a model with a bound",
                got=f"{type(start).__name__}, which has none",
                do="leave restarts out",
            )
        ends += found.bounds[-1:]
        if best is None or found.bounds[-1] > best.bounds[-1]:
            best = found
    assert best is not None
    if not best.converged:
        told = best.model.unfinished(best.reason, rounds, tolerance)
        warnings.warn(told, LapisWarning, stacklevel=users_level())
    return Fit(best.model, best.bounds, best.half_steps, best.converged, best.reason, best.rounds, tuple(ends))


def _startable(start: object, accelerate: bool, batch_size: int | None) -> None:
    """Raise unless EM can begin at `start` with these options."""
    if not isinstance(start, LatentModel):
        raise OptionError(
            "A start is no model", expected="a LatentModel", got=type(start).__name__, do="let the function make one"
        )
    if batch_size is None:
        return
    if accelerate:
        raise OptionError(
            "Minibatches cannot be accelerated",
            expected="accelerate=True or batch_size: whether an extrapolation is taken, the bound of all data decides",
            got="both",
            do="leave one out",
        )
    if start.moved() is not None:
        raise OptionError(
            "Minibatches need a bound", expected="a model with log_joint", got=type(start).__name__,
            do="leave batch_size out",
        )  # fmt: skip


def _ascend(
    model: Model, data: Any, rounds: int, tolerance: float, accelerate: bool, progress: bool | None
) -> Fit[Model]:
    """E- and M-steps from one start until the bound hardly rises, or without one the parameters hardly move."""
    if model.moved() is not None:
        return _settle(model, data, rounds, tolerance, progress)
    expected = _expectation(model, data)
    bounds = [_finite(model.bound(expected))]
    half_steps = [bounds[0]]
    done, gain = 0, math.inf
    for _ in track(range(rounds), model.title, rounds, progress):
        before = model
        model = _maximisation(model, expected)
        half_steps.append(model.bound(expected))
        if accelerate:
            model = _leap(before, model, data, half_steps[-1])
        expected = _expectation(model, data)
        bounds.append(_finite(model.bound(expected)))
        half_steps.append(bounds[-1])
        done, gain = done + 1, bounds[-1] - bounds[-2]
        if gain < -_rounding(expected) * max(1.0, abs(bounds[-1]), expected.count):
            raise DataError(
                "The bound fell, which EM never does",
                expected=f"at least {bounds[-2]:.10g}",
                got=f"{bounds[-1]:.10g}",
                do="check expectation, maximisation and log_joint of the model",
            )
        if gain <= tolerance * expected.count:
            break
    reason = f"the last of {done} rounds raised the bound by {gain:.3g} nats"
    return Fit(model, tuple(bounds), tuple(half_steps), gain <= tolerance * expected.count, reason, done)


def _settle(model: Model, data: Any, rounds: int, tolerance: float, progress: bool | None) -> Fit[Model]:
    """E- and M-steps until the parameters hardly move."""
    moved, done = math.inf, 0
    for _ in track(range(rounds), model.title, rounds, progress):
        model = _maximisation(model, _expectation(model, data))
        distance = model.moved()
        assert distance is not None
        moved, done = distance, done + 1
        if moved <= tolerance:
            break
    return Fit(model, (), (), moved <= tolerance, f"the last round changed a logarithm by {moved:.2g}", done)


def _leap(before: Model, after: Model, data: Any, floor: float) -> Model:
    """SQUAREM: from x0, x1 = M(x0) and x2 = M(x1) to x0 - 2 a r + a^2 v, if the bound there is no lower."""
    x0, x1 = before.vector(), after.vector()
    if x0 is None or x1 is None:
        return after
    expected = after.expectation(data)
    second = after.maximisation(expected)
    x2 = second.vector()
    assert x2 is not None
    r, v = x1 - x0, x2 - 2 * x1 + x0
    size = float(v.norm())
    if size == 0 or not math.isfinite(size):
        return second
    step = -max(1.0, float(r.norm()) / size)
    least = max(floor, second.bound(expected))
    while step < -1:
        candidate = after.with_vector(x0 - 2 * step * r + step**2 * v)
        try:
            value = candidate.bound(candidate.expectation(data))
        except (DataError, RuntimeError):
            value = -math.inf
        if value >= least:
            return candidate
        step = (step - 1) / 2 if step < -1.01 else -1.0
    return second


def _stochastic(
    model: Model, data: Any, rounds: int, tolerance: float, batch_size: int, source: torch.Generator,
    progress: bool | None,
) -> Fit[Model]:  # fmt: skip
    """Stochastic EM: running averages of the statistics, an M-step after every minibatch; `rounds` are epochs.

    Estimates of an epoch's bound are noisy, so three epochs are compared with the three before them.
    """
    sliced = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping)
    if not sliced or (isinstance(data, Tensor) and not data.dim()):
        raise DataError(
            "These data cannot be cut into batches", expected="a tensor, or a list of data", got=shown(data),
            do="pass one, or leave batch_size out",
        )  # fmt: skip
    total = len(data)
    if total < 1:
        raise DataError("There is no data", expected="at least one datum", got="none", do="pass some")
    averaged: Expected | None = None
    bounds: list[float] = []
    steps, gain = 0, math.inf
    for _ in track(range(rounds), "epochs of EM", rounds, progress):
        order = torch.randperm(total, generator=source)
        estimate = 0.0
        for part in torch.split(order, batch_size):
            batch = [data[int(i)] for i in part] if isinstance(data, (list, tuple)) else data[part]
            expected = _expectation(model, batch)
            estimate += model.bound(expected)
            scaled = expected.scaled(total / len(part))
            rate = 1.0 if averaged is None else (2 + steps) ** -0.7
            averaged = scaled if averaged is None else averaged.scaled(1 - rate).plus(scaled.scaled(rate))
            model = _maximisation(model, averaged)
            steps += 1
        bounds.append(_finite(estimate))
        if len(bounds) >= 6:
            gain = (sum(bounds[-3:]) - sum(bounds[-6:-3])) / 3
        assert averaged is not None
        if gain <= 3 * tolerance * averaged.count:
            break
    assert averaged is not None
    converged = gain <= 3 * tolerance * averaged.count
    told = f"raised the bound by {gain:.3g} nats" if len(bounds) >= 6 else "are too few to judge"
    reason = f"the last 3 of {len(bounds)} epochs {told}"
    return Fit(model, tuple(bounds), tuple(bounds), converged, reason, len(bounds))


def _expectation(model: LatentModel, data: Any) -> Expected:
    found = model.expectation(data)
    if not isinstance(found, Expected):
        raise OptionError(
            f"The E-step of {type(model).__name__} gives no expectations", expected="an Expected", got=shown(found),
            do="let expectation return Expected(statistics, entropy, count)",
        )  # fmt: skip
    return found


def _maximisation(model: Model, expected: Expected) -> Model:
    found = model.maximisation(expected)
    if not isinstance(found, LatentModel):
        raise OptionError(
            f"The M-step of {type(model).__name__} gives no model", expected="a LatentModel", got=shown(found),
            do="let maximisation return a new model",
        )  # fmt: skip
    return found


def _rounding(expected: Expected) -> float:
    """The share that rounding may take of a bound, in the precision of the statistics."""
    return max(ROUNDING, 100 * torch.finfo(expected.entropy.dtype).eps)


def _finite(bound: float) -> float:
    if not math.isfinite(bound):
        raise DataError(
            "The bound is not finite",
            expected="data that the model can have produced, at any parameters",
            got=f"a log likelihood of {bound}",
            do="check the data and the start",
        )
    return bound
