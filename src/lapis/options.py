"""Checks of arguments: against a function's own annotations, and ranges that an annotation cannot say.

Public functions begin with `check_arguments(function, locals())`: all refuse the same things, in the same words. Each
check raises an error that names the argument.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import os
import reprlib
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

from lapis.errors import DataError, LapisError, OptionError

LARGEST = 2**63 - 1
"""The largest whole number that torch can count to."""

ABSENT: Any = object()
"""In place of a default, where there is none."""

UNREADABLE = (TypeError, ValueError, RuntimeError, OverflowError)
"""What numpy and torch raise when asked to read what are no numbers."""


def check_arguments(
    function: Callable[..., Any],
    values: Mapping[str, Any],
    *,
    signed: Collection[str] = (),
    apart: Collection[str] = (),
) -> None:
    """Raise unless every argument of `function` in `values`, its `locals()`, is what its annotation says.

    A whole number is at least 1 and a float is positive, but for the names in `signed`. True is no number, NaN and
    infinity are no floats, and a Literal is one of its words. Entries of sequences and mappings are checked too.
    Arguments annotated as Any are left to the function, as data, inputs and targets come in many forms; so are those
    named in `apart`, which have checks of their own.

    >>> def draw(samples: int, progress: bool | None = None) -> None:
    ...     check_arguments(draw, locals())
    >>> draw(2, progress=3)
    Traceback (most recent call last):
    lapis.errors.OptionError: Bad progress. Expected: True or False or None. Got: 3. Do: pass such a value.
    >>> draw(0)
    Traceback (most recent call last):
    lapis.errors.OptionError: Bad samples. Expected: a whole number, at least 1. Got: 0. Do: pass such a value.
    """
    for name, default, rule in _rules(function, tuple(signed)):
        value = values.get(name, default)
        if value is not default and name not in apart and not rule.admits(value):
            raise rule.refusal(name, value)


@dataclass(frozen=True)
class Rule:
    """What an annotation admits."""

    admits: Callable[[Any], bool]
    words: str
    kind: Literal["words", "tensor", "other"] = "other"

    def refusal(self, name: str, value: Any) -> LapisError:
        """The error for a value that is not admitted."""
        got = shown(value)
        if self.kind == "words":
            return OptionError(f"Unknown {name}", expected=self.words, got=got, do="choose one of these")
        if self.kind == "tensor":
            return DataError(f"Bad {name}", expected=self.words, got=got, do=f"use torch.as_tensor({name})")
        return OptionError(f"Bad {name}", expected=self.words, got=got, do="pass such a value")


@cache
def _rules(function: Callable[..., Any], signed: tuple[str, ...]) -> list[tuple[str, Any, Rule]]:
    """The default and the rule of each parameter whose annotation says something."""
    function = inspect.unwrap(function)
    known = getattr(function, "__globals__", None) or vars(sys.modules[function.__module__])
    found: list[tuple[str, Any, Rule]] = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint = parameter.annotation
        try:
            hint = eval(hint, known) if isinstance(hint, str) else hint
        except NameError:  # a name that is imported for type checkers only
            continue
        rule = None if hint is parameter.empty else _rule(hint, name in signed)
        if rule is not None and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            default = ABSENT if parameter.default is parameter.empty else parameter.default
            found.append((name, default, rule))
    return found


def _rule(hint: Any, signed: bool = False) -> Rule | None:
    """The rule of a type; None if it admits anything."""
    if isinstance(hint, TypeVar):
        hint = Any if hint.__bound__ is None else hint.__bound__
    origin, members = get_origin(hint), get_args(hint)
    if hint is Any or getattr(hint, "_is_protocol", False):
        return None
    if hint is None or hint is type(None):
        return Rule(lambda value: value is None, "None")
    if origin in (Union, types.UnionType):
        return _any_of([_rule(member, signed) for member in members])
    if origin is Literal:
        words = " or ".join(f'"{word}"' for word in members)
        return Rule(lambda value: isinstance(value, str) and value in members, words, "words")
    if origin is collections.abc.Callable:
        return Rule(callable, "a function")
    if isinstance(origin, type) and issubclass(origin, (Sequence, Mapping)):
        return _container(origin, members, signed)
    if origin is os.PathLike:
        return Rule(lambda value: isinstance(value, os.PathLike), "a path")
    if hint is str:
        return Rule(lambda value: isinstance(value, str), "a string")
    if hint is bool:
        return Rule(lambda value: isinstance(value, bool), "True or False")
    if hint is int:
        return Rule(lambda value: _is_count(value, -math.inf if signed else 1), _count_words(None if signed else 1))
    if hint is float:
        return Rule(
            lambda value: _is_number(value) and (signed or value > 0),
            "a finite number" if signed else "a positive number",
        )
    if hint is Tensor:
        return Rule(lambda value: isinstance(value, Tensor), "a torch.Tensor", "tensor")
    if isinstance(hint, type):
        module = "torch." if hint.__module__.startswith("torch") else ""
        return Rule(lambda value: isinstance(value, hint), f"a {module}{hint.__name__}")
    return None


def _any_of(rules: Sequence[Rule | None]) -> Rule | None:
    known = [rule for rule in rules if rule is not None]
    if len(known) < len(rules):
        return None
    kinds = {rule.kind for rule in known if rule.words != "None"}
    words = " or ".join(dict.fromkeys(rule.words for rule in known))
    kind = kinds.pop() if len(kinds) == 1 else "other"
    return Rule(lambda value: any(rule.admits(value) for rule in known), words, kind)


def _container(origin: Any, members: tuple[Any, ...], signed: bool) -> Rule:
    """Entries of one type; a string is no sequence of strings."""
    length = len(members) if origin is tuple and Ellipsis not in members else None
    entry = _rule(members[0] if origin is tuple else members[-1], signed)

    def admits(value: Any) -> bool:
        if not isinstance(value, origin) or isinstance(value, (str, bytes)) or length not in (None, len(value)):
            return False
        return entry is None or all(map(entry.admits, value.values() if isinstance(value, Mapping) else value))

    form = "a mapping to" if issubclass(origin, Mapping) else f"{length} times" if length else "a sequence of"
    return Rule(admits, f"{form} {'anything' if entry is None else entry.words}")


def shown(value: Any) -> str:
    """A value for an error message: short, and of a tensor its form."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return repr(value) if isinstance(value, (int, float, str)) else reprlib.repr(value)


def _is_number(value: Any) -> bool:
    """A finite one: comparisons, other than math.isfinite, bear integers of any size."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any, least: float, most: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= (most or LARGEST)


def _count_words(least: int | None, most: int | None = None) -> str:
    words = "a whole number" if least is None else f"a whole number, at least {least}"
    return words if most is None else f"{words} and at most {most}"


def check_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> None:
    """Raise unless `value` is an int with least <= value <= most. True and False are no counts, nor is 2.0.

    >>> check_count("samples", 0)
    Traceback (most recent call last):
    lapis.errors.OptionError: Bad samples. Expected: a whole number, at least 1. Got: 0. Do: pass such a number.
    """
    if not _is_count(value, least, most):
        raise OptionError(f"Bad {name}", expected=_count_words(least, most), got=shown(value), do="pass such a number")


def checked_tensor(name: str, value: Any) -> Tensor:
    """The value, if it is a dense tensor of real numbers, and of one at least."""
    if not isinstance(value, Tensor):
        what, expected, do = "is no tensor", "a torch.Tensor", f"use torch.as_tensor({name})"
    elif value.is_complex() or value.layout != torch.strided or value.device.type == "meta":
        what, expected, do = "holds no real numbers", "a dense tensor of real numbers", "convert it"
    elif not value.numel():
        what, expected, do = "is empty", "at least one value", "check the data"
    else:
        return value
    raise DataError(f"{name} {what}", expected=expected, got=shown(value), do=do)


def checked_numbers(name: str, value: Any) -> Tensor:
    """Finite numbers, as float64 on the CPU."""
    numbers = checked_tensor(name, value).to("cpu", torch.float64)
    bad = int((~numbers.isfinite()).sum())
    if bad:
        got = f"{bad} NaN or infinite of {numbers.numel()}"
        raise DataError(f"{name} is not finite", expected="finite numbers", got=got, do="check the values")
    return numbers


def checked_device(device: str | torch.device) -> torch.device:
    """The device, if this torch has it; not "meta", where numbers have no values."""
    try:
        found = torch.device(device)
        if found.type != "meta":
            torch.empty(0, device=found)
            return found
        reason = "no place for values"
    except (RuntimeError, AssertionError, ImportError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
    raise OptionError(
        "Bad device",
        expected="one that this torch can use, such as 'cpu' or 'cuda'",
        got=f"{str(device)!r} ({reason})",
        do="choose another",
    )


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise unless `value` is one of the words in `allowed`.

    >>> check_choice("method", "newton", ("cg", "sgd"))
    Traceback (most recent call last):
    lapis.errors.OptionError: Unknown method. Expected: "cg" or "sgd". Got: 'newton'. Do: choose one of these.
    """
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        raise OptionError(
            f"Unknown {name}",
            expected=" or ".join(f'"{word}"' for word in words),
            got=shown(value),
            do="choose one of these",
        )


def check_between(name: str, value: Any, low: float, high: float) -> None:
    """Raise unless `value` is a number with low < value < high.

    >>> check_between("level", 95, 0, 1)
    Traceback (most recent call last):
    lapis.errors.OptionError: Bad level. Expected: a number between 0 and 1. Got: 95. Do: pass such a number.
    """
    if not _is_number(value) or not low < value < high:
        raise OptionError(
            f"Bad {name}", expected=f"a number between {low:g} and {high:g}", got=shown(value), do="pass such a number"
        )


def check_positive(name: str, value: Any, *, or_zero: bool = False) -> None:
    """Raise unless `value` is a finite number above zero, or zero where that is allowed.

    >>> check_positive("tolerance", -1)
    Traceback (most recent call last):
    lapis.errors.OptionError: Bad tolerance. Expected: a positive number. Got: -1. Do: pass such a number.
    """
    if not _is_number(value) or value < 0 or (value == 0 and not or_zero):
        expected = "zero, or a positive number" if or_zero else "a positive number"
        raise OptionError(f"Bad {name}", expected=expected, got=shown(value), do="pass such a number")
