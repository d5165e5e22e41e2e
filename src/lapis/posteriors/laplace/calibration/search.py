"""Calibration: prior precisions, noise and temperature by held-out data, no worse than the network alone on them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from lapis.batches import Batch, digest
from lapis.checkpoint import Checkpoint
from lapis.curvature.sums import Curvature
from lapis.errors import DataError, LapisWarning, OptionError, users_level
from lapis.files import tensors_digest
from lapis.posteriors.laplace.calibration.held_out import (
    STEP,
    HeldOut,
    Narrowed,
    Predicted,
    Setting,
    Swept,
    fits,
    noisier,
    summed,
)
from lapis.posteriors.laplace.calibration.recalled import Recalled
from lapis.posteriors.same_data import hold_batches
from lapis.progress import track
from lapis.ranks import Ranks
from lapis.shards import Distributed, Shard, shard

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily
    from lapis.posteriors.laplace.matrix_free.drawn import DrawnPosterior
    from lapis.posteriors.over_weights import LinearisedPosterior

Fitted = TypeVar("Fitted", bound="LaplaceFamily")

GRID = range(-16, 33)
"""First grid of log2 u / STEP: from 2^-8 to 2^16 times the present prior precision."""

EXTENSION, EXTENSIONS = 24, 2
"""Grid points that are added where the best lies at an end of the grid, and how often."""

PRECISIONS = tuple(sign * STEP * step for step in (1, 2, 4, 8, 16) for sign in (-1, 1))
FACTORS = tuple(sign * step for step in (0.06, 0.12, 0.25, 0.5, 1.0, 2.0, 4.0) for sign in (-1, 1))
"""Steps of every round in log2 u, and in log2 of temperature and noise."""

FIRST = (-6.0, -3.0, 3.0, 6.0, 9.0, 12.0)
FEW = ((-2.0, -0.5, 0.5, 2.0), (-0.25, 0.25))
"""Steps in log2 u where each takes a pass over the data: at first, in the first round, and in later ones."""

GAIN, ROUNDS = 1e-4, 8
"""The search ends when a round over all factors gains less than this many nats an example, or after so many rounds."""

EQUAL = 1e-6
"""Gains over the network alone below this many nats an example are rounding, and the network alone is the choice."""

SPREAD = 1.0
"""log sharpness ~ N(0, SPREAD^2). Without it, a few examples that are all predicted well ask for logits times 32."""

PLAIN = 60.0
"""log2 of the prior factor where the network alone is best: beside such a prior no doubt is left."""


@dataclass(frozen=True)
class Calibration:
    """The record of a calibration. Log likelihoods are means over the held-out examples, in nats."""

    method: str
    """"validation": by the log likelihood of held-out data."""
    n_data: int
    """Held-out examples."""
    candidates: int
    """Settings that were compared."""
    plain: float
    """Log likelihood of the network alone."""
    before: float
    """Of the posterior as it was."""
    after: float
    """Of the result."""
    precision: tuple[float, ...]
    """Factor of each group's prior precision; one for all groups where these were not told apart."""
    temperature: float
    """Factor of the posterior's temperature."""
    noise: float
    """Factor of the noise."""
    sharpness: float
    """Factor of the logits in predictions."""
    prefers_plain: bool
    """Whether no posterior was better than the network alone; the result then predicts as the network does."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", tuple(self.precision))  # JSON turns tuples into lists

    def __str__(self) -> str:
        factors = ", ".join(f"{factor:.3g}" for factor in self.precision)
        return (
            f"{self.method}: log likelihood of {self.n_data} examples {self.before:.4f} -> {self.after:.4f} "
            f"(plain {self.plain:.4f}); prior precision x {factors}, temperature x {self.temperature:.3g}, "
            f"noise x {self.noise:.3g}, logits x {self.sharpness:.3g}, best of {self.candidates}"
        )


def calibrate(
    posterior: Fitted,
    validation: Any,
    temperature: bool,
    link: Any,
    batch_size: int | None,
    distributed: Distributed,
    checkpoint: str | os.PathLike[str] | None,
    progress: bool | None,
) -> Fitted:
    """See `LaplaceFamily.calibrate`."""
    if not isinstance(temperature, bool):
        raise OptionError(
            "The temperature is chosen by the held-out data, or stays as it is",
            expected="temperature=True or False",
            got=repr(temperature),
            do="set it by with_temperature(...), and leave it out here",
        )
    held, ranks = _held(posterior, validation, batch_size, distributed)
    sharpness, posterior = posterior.sharpness, replace(posterior, sharpness=1.0)
    start = Setting((), sharpness=math.log2(sharpness))
    asked = {"temperature": temperature, "link": link, "start": sharpness}
    recalled = _recalled(checkpoint, posterior, held, asked, ranks)
    if isinstance(posterior.curvature, Curvature) and fits(posterior, held, len(GRID), ranks):
        stored: Any = posterior
        swept = Swept(stored, held, link, GRID, progress, recalled, ranks)
        best, record = _searched(swept, start, temperature, progress)
    else:
        viewed = posterior._with_view(True)
        best, record = _searched(Predicted(viewed, held, link, recalled, ranks), start, temperature, progress)
    result: Fitted = replace(best.applied(posterior), calibration=record)
    return replace(result, mean=posterior.point, refinement=None, width=1.0) if record.prefers_plain else result


def calibrate_draws(
    posterior: DrawnPosterior,
    validation: Any,
    link: Any,
    batch_size: int | None,
    distributed: Distributed,
    progress: bool | None,
) -> DrawnPosterior:
    """See `DrawnPosterior.calibrate`."""
    held, ranks = _held(posterior, validation, batch_size, distributed)
    best, record = _searched(Narrowed(posterior, held, link, GRID, progress, ranks), Setting(()), False, progress)
    likelihood, deviations = noisier(posterior.likelihood, best.noise), posterior.deviations * 2.0 ** (-best.u[0] / 2)
    return replace(
        posterior,
        likelihood=likelihood,
        deviations=deviations,
        mean=posterior.point if record.prefers_plain else posterior.mean,
        calibration=replace(record, precision=(2 ** best.u[0],), temperature=2 ** -best.u[0]),
    )


def _recalled(
    checkpoint: str | os.PathLike[str] | None,
    posterior: LaplaceFamily,
    held: list[Batch],
    settings: dict[str, Any],
    ranks: Ranks | None,
) -> Recalled | None:
    """What an earlier run with the same posterior and data found; None without a path. Every rank has its own file."""
    if checkpoint is None:
        return None
    if ranks is not None:
        checkpoint = f"{os.fspath(checkpoint)}.{ranks.rank}of{ranks.size}"
    state = posterior.state()
    same = settings | {
        "posterior": tensors_digest(state.tensors, f"{posterior.likelihood.to_config()} {posterior.temperature}"),
        "network": posterior.facts.fingerprint,
        "data": sum(digest(batch.inputs, batch.targets) for batch in held) % 2**64,
        "batches": [len(batch) for batch in held],
        "memory_budget": posterior.facts.memory_budget,
    }
    return Recalled(Checkpoint(checkpoint, "calibration", same, posterior.network.key()), ranks)


def _held(
    posterior: LinearisedPosterior, validation: Any, batch_size: int | None, distributed: Distributed
) -> tuple[list[Batch], Ranks | None]:
    """The held-out data, or this rank's part of them, and the ranks; warns if they are those of the fit."""
    shared = _shared(posterior, validation, distributed) if distributed else None
    ranks = None if shared is None else shared.ranks
    held = hold_batches(validation, posterior.network, batch_size, shared)
    known, count = sum(digest(batch.inputs, batch.targets) for batch in held) % 2**64, sum(map(len, held))
    if shared is not None:
        shared.check_repeats(known, count)
    if not summed(count, ranks):
        raise DataError("There is no data", expected="at least one example", got="none on any rank", do="pass some")
    if posterior._fitted_to(summed(known, ranks) % 2**64):
        warnings.warn(
            "The validation data are the data of the fit, which the network predicts better than new ones: the result "
            "will be too sure. Pass examples that neither the network nor the posterior has seen.",
            LapisWarning,
            stacklevel=users_level(),
        )
    return held, ranks


def _shared(posterior: LinearisedPosterior, validation: Any, distributed: Distributed) -> Shard:
    """This rank's part of the held-out data; OptionError unless all ranks hold the same posterior of their own."""
    ranks = Ranks.joined(f"distributed={distributed!r}")
    if getattr(getattr(posterior, "curvature", None), "ranks", None) is not None:
        raise OptionError(
            "The processes of an implicit posterior solve together, for the same held-out data",
            expected="distributed=False: its solves are divided already",
            got=f"distributed={distributed!r}",
            do="leave distributed out, or calibrate posterior.draw()",
        )
    state = posterior.state()
    ranks.check_same({
        "network": posterior.network.fingerprint(),
        "posterior": tensors_digest(state.tensors, f"{posterior.likelihood.to_config()}"),
    })  # fmt: skip
    return shard(validation, ranks, distributed)


def _searched(held: HeldOut, start: Setting, temperature: bool, progress: bool | None) -> tuple[Setting, Calibration]:
    """The best setting and the record of the search from `start`; warns if the network alone is better."""
    count = held.count
    search = _Search(held, replace(start, u=(0.0,) * held.axes), count, progress)
    best = search.run(temperature)
    plain = search.plain(temperature)
    plain_best = held.plain(plain.noise, plain.sharpness)
    prefers_plain = plain_best + _log_prior(plain) + EQUAL * count >= search.merit(best)
    if prefers_plain:
        doubtful, best = search.value(best), plain
        search.values[best] = plain_best
        warnings.warn(
            f"No prior predicts the {count} validation examples better than the network alone "
            f"(log likelihood {plain_best / count:.4f} an example; {doubtful / count:.4f} with error "
            f"bars): the result predicts as the network does{_times(plain)}, without doubt about its weights. Try "
            'refine(data) before calibrate, structure="dense" or "ekfac", or weights="last_layer".',
            LapisWarning,
            stacklevel=users_level(),
        )
    return best, Calibration(
        "validation",
        count,
        search.candidates,
        search.held.plain(0.0) / count,
        search.values[search.start] / count,
        search.values[best] / count,
        tuple(2 ** (u - best.v) for u in best.u),
        2**best.temperature,
        2**best.noise,
        2**best.sharpness,
        prefers_plain,
    )


class _Search:
    """Coordinate ascent: along each factor in turn, the best of a line of candidates."""

    def __init__(self, held: HeldOut, start: Setting, count: int, progress: bool | None) -> None:
        self.held, self.start, self.count, self.progress = held, start, count, progress
        self.values: dict[Setting, float] = {}
        self.candidates = 0

    def value(self, setting: Setting) -> float:
        if setting not in self.values:
            self.values[setting] = self.held.log_likelihood(setting)
            self.candidates += 1
        return self.values[setting]

    def merit(self, setting: Setting) -> float:
        """What is maximised: the log likelihood, and a weak prior on the sharpness."""
        return self.value(setting) + _log_prior(setting)

    def best_of(self, settings: Iterable[Setting]) -> Setting:
        return max(settings, key=self.merit)

    def run(self, temperature: bool) -> Setting:
        """The best setting found; the present one is among the candidates."""
        held = self.held
        noise = held.posterior.likelihood.noise is not None
        self.value(self.start)
        best = self._first_line(replace(self.start, noise=self.plain(False).noise))
        for number in range(ROUNDS):
            before = self.merit(best)
            precisions = PRECISIONS if held.indices is not None else FEW[min(number, 1)]
            if noise:
                best = self._line(best, FACTORS, lambda s, step: replace(s, noise=s.noise + step))
            if temperature:
                best = self._line(best, FACTORS, lambda s, step: replace(s, temperature=s.temperature + step))
                if held.posterior.likelihood.kind == "classification":
                    best = self._line(best, FACTORS, lambda s, step: replace(s, sharpness=s.sharpness + step))
            best = self._line(best, precisions, lambda s, step: replace(s, u=tuple(u + step for u in s.u)))
            for axis in range(held.axes if held.axes > 1 else 0):
                best = self._line(best, precisions, _along(axis))
            if number > 0 and self.merit(best) - before < GAIN * self.count:
                break
        return self.best_of([self.start, best])

    def _first_line(self, best: Setting) -> Setting:
        """Along all precisions together, over the whole grid, which grows while the best lies at one of its ends."""
        held = self.held
        if held.indices is None:
            line = [best, *(replace(best, u=(step,)) for step in FIRST)]
            return self.best_of(track(line, "candidates", len(line), self.progress))
        plain = held.plain(best.noise)
        before = -math.inf
        for attempt in range(EXTENSIONS + 1):
            best = self.best_of(replace(best, u=(STEP * index,) * held.axes) for index in held.indices)
            value, place = self.value(best), round(best.u[0] / STEP)
            ends = place == held.indices[0], place == held.indices[-1] and value > plain
            # go on downwards while there is something to gain, or still no doubt to speak of
            useful = value - before > GAIN * self.count or abs(value - plain) < GAIN * self.count
            if attempt == EXTENSIONS or not any(ends) or not useful:
                break
            before = value
            held.extend(*(EXTENSION * end for end in ends))
        return best

    def _line(self, best: Setting, steps: Iterable[float], move: Callable[[Setting, float], Setting]) -> Setting:
        return self.best_of([best, *(move(best, step) for step in steps)])

    def plain(self, temperature: bool) -> Setting:
        """The best setting without doubt: the network alone, its noise scaled, and with `temperature` its logits."""
        likelihood = self.held.posterior.likelihood
        best = Setting((0.0,) * self.held.axes)
        moves: list[Callable[[Setting, float], Setting]] = []
        if likelihood.noise is not None:
            moves.append(lambda s, step: replace(s, noise=s.noise + step))
        if temperature and likelihood.kind == "classification":
            moves.append(lambda s, step: replace(s, sharpness=s.sharpness + step))

        def merit(s: Setting) -> float:
            return self.held.plain(s.noise, s.sharpness) + _log_prior(s)

        for move in moves * ROUNDS:
            best = max([best, *(move(best, step) for step in FACTORS)], key=merit)
        return replace(best, u=tuple(PLAIN + 2 * best.noise for _ in best.u))


def _log_prior(setting: Setting) -> float:
    """Log density of the sharpness, up to a constant, in nats."""
    return -0.5 * (setting.sharpness * math.log(2) / SPREAD) ** 2


def _times(setting: Setting) -> str:
    """The network's sharpness in words."""
    return f" with its logits times {2**setting.sharpness:.3g}" if setting.sharpness else ""


def _along(axis: int) -> Callable[[Setting, float], Setting]:
    """Moves one precision by a step."""
    return lambda s, step: replace(s, u=tuple(u + step * (i == axis) for i, u in enumerate(s.u)))
