"""Random calls of the public interface: 500 here, more with `make fuzz`. The fuzzer itself must find what is wrong."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import lapis
from fuzz.calls import CHANCES, MODULES, RESULTS, Call, Target, make_call, roots
from fuzz.values import refused
from fuzz.watch import PROCESSES, share, watched
from fuzz.worlds import world
from lapis.posteriors import Posterior

SEED, CALLS = 0, 500


@pytest.mark.parametrize("first", range(PROCESSES))
def test_random_calls_end_in_a_result_or_an_error_of_ours(first: int) -> None:
    outcomes = share(SEED, first, CALLS // PROCESSES)
    findings = [outcome for outcome in outcomes if outcome.finding]
    again = "PYTHONPATH=tests python -m fuzz --seed {} --only {}"
    assert not findings, "\n\n".join(
        f"{found.finding}: {found.call}\n{found.detail}\n{again.format(SEED, found.sequence)}" for found in findings
    )
    assert len({outcome.world for outcome in outcomes}) > 50
    assert sum(outcome.result == "returned" for outcome in outcomes) > CALLS // 8
    assert sum(outcome.result != "returned" for outcome in outcomes) > CALLS // 8


def test_a_sequence_is_the_same_again() -> None:
    one, two = share(3, 0, 20), share(3, 0, 20)
    assert [outcome.call for outcome in one] == [outcome.call for outcome in two]
    assert [outcome.result for outcome in one] == [outcome.result for outcome in two]


def raises(x: Tensor) -> Tensor:
    return x.shape[7]  # type: ignore[return-value]


def takes_anything(samples: int = 1) -> Tensor:
    return torch.zeros(3)


def gives_nan(samples: int) -> Tensor:
    return torch.tensor([math.nan])


def draws_from_the_global_generator(samples: int) -> Tensor:
    return torch.randn(3)


def trains(model: torch.nn.Module) -> None:
    next(model.parameters()).data.add_(1)


def switches_mode(model: torch.nn.Module) -> None:
    model.train(not model.training)


def warns_of_something_else(samples: int) -> Tensor:
    warnings.warn_explicit("deprecated", DeprecationWarning, "/somewhere/lapis/file.py", 1)
    return torch.zeros(3)


@pytest.mark.parametrize(
    ("function", "arguments", "finding"),
    [
        (raises, {"x": torch.ones(2)}, "raw error"),
        (takes_anything, {"samples": "a"}, "accepted"),
        (takes_anything, {"samples": -1}, "accepted"),
        (gives_nan, {"samples": 1}, "not finite"),
        (draws_from_the_global_generator, {"samples": 1}, "changed global state"),
        (warns_of_something_else, {"samples": 1}, "raw warning"),
        (trains, {}, "changed model"),
        (switches_mode, {}, "changed model"),
        (takes_anything, {"samples": 2}, ""),
        (takes_anything, {"nonsense": 2}, ""),  # as Python raises
    ],
)
def test_what_is_wrong_is_found(function: Callable[..., Any], arguments: dict[str, Any], finding: str) -> None:
    w = world(0)
    if function in (trains, switches_mode):
        w = type(w)(w.case, w.dtype)
        arguments = {"model": w.model}
    target = Target("a function", function, ())
    made = make_call(target, w, Random(0))
    spoiled = tuple(name for name in arguments if name in target.hints)
    forbidden = tuple(name for name in spoiled if refused(target.hints[name], arguments[name], name))
    outcome, _ = watched(Call(made.target, arguments, spoiled, forbidden), w, 0)
    assert outcome.finding == finding, outcome


def test_every_public_function_is_called() -> None:
    """Nothing is left out but what `fuzz.calls` names with a reason, and classes that are made by functions only."""
    called = {target.name.rpartition(".")[2] for targets in roots().values() for target in targets}
    for module in MODULES.values():
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing) and name not in called and name not in RESULTS:
                assert isinstance(thing, type)
                assert issubclass(thing, (Exception, Posterior)) or inspect.isabstract(thing)


def test_every_public_room_is_called() -> None:
    named = {name for name in lapis.__all__ if inspect.ismodule(getattr(lapis, name))}
    assert named <= set(MODULES)
    assert set(CHANCES) == {"posterior", "thing", *MODULES}
