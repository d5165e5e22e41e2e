"""What the page may ask for: JSON, checked entry by entry, with limits that keep every answer quick."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from lapis.errors import DataError
from lapis.options import shown

Task = Literal["regression", "classification"]
Structure = Literal["dense", "kronecker", "ekfac", "diagonal"]
Activation = Literal["tanh", "relu", "gelu"]
Link = Literal["quasi", "mean_field", "probit", "bridge", "mc"]
Json: TypeAlias = dict[str, Any]

MOST_BYTES = 2**16
MOST_POINTS = 300
MOST_UNITS = 40
MOST_LAYERS = 2
REACH = 10.0
"""Largest coordinate of a point."""


@dataclass(frozen=True)
class Wish:
    """A problem to solve."""

    task: Task
    points: tuple[tuple[float, ...], ...]
    """(x, y), or (x1, x2, class)."""
    layers: int
    units: int
    activation: Activation
    structure: Structure
    link: Link
    tune: bool
    """Whether prior precision and noise maximise the evidence; else they are those below."""
    precision: float
    noise: float
    seed: int


def read(body: bytes) -> Wish:
    """The wish in a request's body; DataError that says what is wrong with it."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _wrong("request", "JSON", str(error)[:80]) from error
    if not isinstance(given, dict):
        raise _wrong("request", "an object", type(given).__name__)
    names = set(Wish.__dataclass_fields__)
    if set(given) != names:
        raise _wrong("request", f"the entries {', '.join(sorted(names))}", ", ".join(sorted(map(str, given)))[:200])
    task: Task = _word(given, "task", get_args(Task))
    return Wish(
        task=task,
        points=_points(given["points"], task),
        layers=_whole(given, "layers", 0, MOST_LAYERS),
        units=_whole(given, "units", 1, MOST_UNITS),
        activation=_word(given, "activation", get_args(Activation)),
        structure=_word(given, "structure", get_args(Structure)),
        link=_word(given, "link", get_args(Link)),
        tune=_truth(given, "tune"),
        precision=_number("precision", given["precision"], 1e-6, 1e6),
        noise=_number("noise", given["noise"], 1e-3, 10.0),
        seed=_whole(given, "seed", 0, 2**31 - 1),
    )


def _wrong(name: str, expected: str, got: str) -> DataError:
    return DataError(f"Bad {name}", expected=expected, got=got, do="send such a value")


def _word(given: Json, name: str, allowed: tuple[Any, ...]) -> Any:
    if not isinstance(given[name], str) or given[name] not in allowed:
        raise _wrong(name, " or ".join(allowed), shown(given[name])[:80])
    return given[name]


def _truth(given: Json, name: str) -> bool:
    value = given[name]
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", shown(value)[:80])
    return value


def _whole(given: Json, name: str, low: int, high: int) -> int:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(name, f"a whole number from {low} to {high}", shown(value)[:80])
    return value


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # NaN too
        raise _wrong(name, f"a number from {low:g} to {high:g}", shown(value)[:80])
    return float(value)


def _points(given: Any, task: Task) -> tuple[tuple[float, ...], ...]:
    length = 2 if task == "regression" else 3
    if not isinstance(given, list) or not 0 < len(given) <= MOST_POINTS:
        got = f"{len(given)}" if isinstance(given, list) else type(given).__name__
        raise DataError(
            "Bad points", expected=f"1 to {MOST_POINTS} points", got=got, do="click into the plot to draw some"
        )
    found = []
    for point in given:
        if not isinstance(point, list) or len(point) != length:
            raise _wrong("point", f"{length} numbers", shown(point)[:80])
        place = [_number("coordinate", value, -REACH, REACH) for value in point[:2]]
        if task == "classification":
            place.append(float(_whole({"class": point[2]}, "class", 0, 1)))
        found.append(tuple(place))
    return tuple(found)
