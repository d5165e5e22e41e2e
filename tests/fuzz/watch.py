"""The judge of a call: which errors may come out, what a result may hold, and what must be left as it was."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from sklearn.base import BaseEstimator

import lapis
from fuzz.calls import DEFERRED, Call, first_target, make_call, next_target, tensors_of
from fuzz.own_data import kept
from fuzz.worlds import COUNT, World, world
from untouched import portrait

PROCESSES = 2

LONGEST = 60.0
"""Seconds of processor time after which a call is given up and reported."""

INFINITE = ("lapis.metrics.nll", "lapis.imaging.psnr", *DEFERRED)
"""Where a result may be infinite, as documented: the nll of a target with probability zero, the signal-to-noise ratio
of an image that is the truth; what is checked later."""

IGNORED = (".conformal",)
"""Ends of names where NaN stands for targets that do not count, as documented."""

DRAWS = ("lapis.imaging.UNet",)
"""Networks take their first weights from torch's global generator, and what dropout leaves out, as all modules do."""

UNTRAINED = ("lapis.train", "lapis.swag")
"""Calls that change the model they are given, a copy."""


class TooLong(BaseException):
    """A call took more than LONGEST."""


@dataclass(frozen=True)
class Outcome:
    """What became of a call. `finding` is "" if all is well."""

    sequence: int
    world: str
    target: str
    call: str
    result: str
    """"returned", or the name of the error."""
    valid: bool
    finding: str = ""
    detail: str = ""

    def told(self, seed: int) -> str:
        """A finding in a few lines."""
        kind = "right arguments" if self.valid else "wrong arguments"
        last = self.detail.strip().splitlines()[-1:] or [""]
        return (
            f"{self.finding} ({kind}; {self.result}) in {self.world}: {self.call}\n  {last[0]}\n"
            f"  again: PYTHONPATH=tests python -m fuzz --seed {seed} --only {self.sequence}"
        )


@contextmanager
def confined(w: World) -> Iterator[None]:
    """Limited time, and relative paths inside the world's own folder."""

    def stop(*_: Any) -> None:
        raise TooLong

    before, folder = signal.signal(signal.SIGVTALRM, stop), Path.cwd()
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
    os.chdir(w.folder)
    try:
        with mock.patch.dict(os.environ, LAPIS_DATA=str(kept()), LAPIS_CACHE=str(w.folder / "cache")):
            yield
    finally:
        os.chdir(folder)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def global_state() -> tuple[Any, ...]:
    """Random states, modes and defaults of torch, numpy and Python."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  (the state that must not change)
    return (
        torch.get_rng_state().numpy().tobytes(), name, keys.tobytes(), *rest, random.getstate(),
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(),
    )  # fmt: skip


def watched(call: Call, w: World, number: int) -> tuple[Outcome, Any]:
    """Make the call; its outcome, and its result if there is one."""
    model, before = portrait(w.model), global_state()
    result, error, finding, detail = None, None, "", ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with confined(w):
                result = call.target.function(**call.arguments)
        except lapis.LapisError as raised:
            error = raised
        except TooLong as raised:
            error, finding = raised, "slow"
        except Exception as raised:  # noqa: BLE001  (whatever comes is judged)
            error = raised
            if not (isinstance(raised, TypeError) and not call.binds()) and not of_estimator(raised, call):
                finding, detail = "raw error", "".join(traceback.format_exception(raised))
    ours = [warning for warning in warned if "/lapis/" in warning.filename]
    other = [warning for warning in ours if not issubclass(warning.category, lapis.LapisWarning)]
    if error is None and call.forbidden:
        finding, detail = "accepted", f"{', '.join(call.forbidden)}: not what the annotation admits"
    elif error is None and not warned and not may_be_infinite(call.target.name) and not_finite(result):
        finding, detail = "not finite", "NaN or infinity without an error or a warning"
    elif not finding and other:
        finding, detail = "raw warning", str(other[0].message)
    if portrait(w.model) != model and not call.target.name.startswith(UNTRAINED):
        finding, detail = "changed model", ""
    draws = call.target.name.startswith(DRAWS) or (call.target.place[:2] == ("forward", "UNet"))
    if global_state() != before and not draws:
        finding, detail = "changed global state", ""
    said = "returned" if error is None else type(error).__name__
    outcome = Outcome(number, w.name, call.target.name, str(call), said, not call.spoiled, finding, detail)
    return outcome, result if error is None else None


def of_estimator(error: Exception, call: Call) -> bool:
    """Whether scikit-learn's own checks refuse data or options of an estimator, or the estimator does in its manner."""
    if not isinstance(call.target.owner, BaseEstimator):
        return False
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = max((i for i, name in enumerate(frames) if "/lapis/" in name), default=0)
    return "/sklearn/" in "".join(frames[ours:]) or (ours == len(frames) - 1 and type(error) is ValueError)


def may_be_infinite(name: str) -> bool:
    return name.startswith(INFINITE) or name.endswith(IGNORED)


def not_finite(result: Any) -> bool:
    return any(
        tensor.is_floating_point()
        and tensor.device.type != "meta"
        and not bool(torch.isfinite(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()).all())
        for tensor in tensors_of(result)
    )


def sequence(seed: int, number: int) -> list[Outcome]:
    """Sequence `number` of a seed: always the same calls."""
    r, w = Random(f"{seed}/{number}"), world(number % COUNT)
    outcomes: list[Outcome] = []
    target = first_target(w, r)
    if target is not None and target.name in w.raw:
        return [
            Outcome(number, w.name, target.name, f"fit of {target.name}", "", True, "raw error", w.raw[target.name])
        ]
    for step in range(4):
        if target is None:
            break
        outcome, result = watched(make_call(target, w, r), w, number)
        outcomes.append(outcome)
        if outcome.finding or result is None or r.random() < 0.2:
            break
        called = outcome.target if step == 0 else f"...{outcome.target.split('.')[-1]}"
        target = next_target(result, f"{called}()", w, r)
    return outcomes


def share(seed: int, first: int, calls: int) -> list[Outcome]:
    """Every second sequence from `first` on, until so many calls were made."""
    torch.set_num_threads(1)
    found: list[Outcome] = []
    number, told = first, time.monotonic()
    while len(found) < calls:
        latest = sequence(seed, number)
        found += latest
        number += PROCESSES
        for outcome in latest:
            if outcome.finding:
                print(outcome.told(seed), file=sys.stderr, flush=True)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            seen = sum(bool(outcome.finding) for outcome in found)
            print(
                f"process {first + 1}: {len(found):,} of {calls:,} calls, {seen} findings", file=sys.stderr, flush=True
            )
    return found
