"""Checks of arguments that many functions share. Each raises an OptionError that names the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from lapis.errors import OptionError


def check_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> None:
    """Raise unless `value` is an int with least <= value <= most. True and False are no counts, nor is 2.0.

    >>> check_count("samples", 0)
    Traceback (most recent call last):
    lapis.errors.OptionError: Bad samples. Expected: a whole number, at least 1. Got: 0. Do: pass such a number.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        raise OptionError(
            f"Bad {name}",
            expected=f"a whole number, at least {least}" + ("" if most is None else f" and at most {most}"),
            got=repr(value),
            do="pass such a number",
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
            got=repr(value),
            do="choose one of these",
        )


def check_positive(name: str, value: Any, *, or_zero: bool = False) -> None:
    """Raise unless `value` is a finite number above zero, or zero where that is allowed.

    >>> check_positive("tolerance", -1)
    Traceback (most recent call last):
    lapis.errors.OptionError: Bad tolerance. Expected: a positive number. Got: -1. Do: pass such a number.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        expected = "zero, or a positive number" if or_zero else "a positive number"
        raise OptionError(f"Bad {name}", expected=expected, got=repr(value), do="pass such a number")


def check_generator(generator: Any) -> None:
    """Raise unless `generator` is a torch.Generator, or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(
            "This is no source of randomness",
            expected="a torch.Generator, or None for seed 0",
            got=repr(generator),
            do="pass torch.Generator().manual_seed(...)",
        )
