"""What a file must say: entries of the expected type, tensors of the expected shape, or a FileError that names them.

A digest tells that a file was not damaged, not that its contents make sense. These checks cost little, come before
anything is allocated, and hold for whoever wrote the file.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from lapis.errors import FileError, LapisError

T = TypeVar("T")

RAW = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError, ArithmeticError)
"""Raised by code that is given contents it was not made for."""


def wrong(name: str, expected: str, got: str) -> FileError:
    """The error for an entry that does not fit."""
    return FileError(f"The file's {name} does not fit", expected=expected, got=got, do="use the original file")


@contextmanager
def sound(what: str) -> Iterator[None]:
    """Turn what goes wrong inside, with contents of a file, into a FileError about `what`."""
    try:
        yield
    except LapisError:
        raise
    except KeyError as error:
        raise wrong(what, f"an entry {error}", "none") from error
    except RAW as error:
        raise wrong(what, "contents as Lapis writes them", f"{type(error).__name__}: {error}") from error


def entry(config: Any, name: str, hint: Any) -> Any:
    """The entry of a dictionary, of the type that `hint` says: int, float | None, tuple[str, ...], and so on."""
    if not isinstance(config, Mapping) or name not in config:
        raise wrong(name, _named(hint), "none")
    if not matches(config[name], hint):
        raise wrong(name, _named(hint), _short(config[name]))
    return config[name]


def number(config: Any, name: str, *, least: float = 0.0, above: bool = True) -> float:
    """A finite number above `least`, or from there on."""
    value = float(entry(config, name, float))  # whole numbers come as int, of any size
    if not math.isfinite(value) or value < least or (above and value == least):
        raise wrong(name, f"a finite number {'>' if above else '>='} {least:g}", repr(value))
    return value


def count(config: Any, name: str, *, least: int = 1, most: int | None = None) -> int:
    """A whole number from `least` to `most`."""
    value: int = entry(config, name, int)
    if value < least or (most is not None and value > most):
        raise wrong(name, f"a whole number from {least}" + ("" if most is None else f" to {most}"), repr(value))
    return value


def word(config: Any, name: str, allowed: Sequence[str]) -> str:
    """One of the words allowed."""
    value: str = entry(config, name, str)
    if value not in allowed:
        raise wrong(name, " or ".join(map(repr, allowed)), _short(value))
    return value


def tensor(
    tensors: Mapping[str, Tensor],
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype | None = torch.float64,
    *,
    least: float | None = None,
    above: bool = False,
) -> Tensor:
    """A finite tensor of this shape (-1 for any length) and dtype (None for any), with entries from `least` on."""
    found = tensors.get(name)
    expected = f"a tensor {tuple(shape)}{'' if dtype is None else f' of {dtype}'}"
    if found is None:
        raise wrong(name, expected, "none")
    fits = len(found.shape) == len(shape) and all(n in (-1, m) for n, m in zip(shape, found.shape, strict=True))
    if not fits or (dtype is not None and found.dtype != dtype):
        raise wrong(name, expected, f"{tuple(found.shape)} of {found.dtype}")
    if found.is_floating_point() and found.numel():
        low, high = map(float, torch.aminmax(found.detach()))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise wrong(name, "finite numbers", "NaN or infinity")
        if least is not None and (low < least or (above and low == least)):
            raise wrong(name, f"numbers {'>' if above else '>='} {least:g}", f"{low:.3g}")
    return found


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries below a prefix, without it."""
    return {name[len(prefix) :]: found for name, found in tensors.items() if name.startswith(prefix)}


def record(kind: type[T], entries: Any) -> T:
    """A dataclass, or a named tuple, from a dictionary of its fields, whose names and types must be those declared."""
    name = kind.__name__
    if not isinstance(entries, Mapping):
        raise wrong(name, "a dictionary", _short(entries))
    hints = get_type_hints(kind)
    unknown = [key for key in entries if key not in hints]
    if unknown:
        raise wrong(name, "entries " + ", ".join(hints), _short(unknown[0]))
    for key, value in entries.items():
        if not isinstance(value, Tensor) and not matches(value, hints[key]):
            raise wrong(f"{name}.{key}", _named(hints[key]), _short(value))
    with sound(name):
        return kind(**{str(key): value for key, value in entries.items()})


def optional(kind: type[T], entries: Any) -> T | None:
    """The same, or None where there is none."""
    return None if entries is None else record(kind, entries)


def matches(value: Any, hint: Any) -> bool:
    """Whether a value from JSON is of the type of an annotation; lists stand for tuples, whole numbers for floats."""
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(matches(value, part) for part in args)
    if origin is Literal:
        return any(value == word and type(value) is type(word) for word in args)
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            return False
        if origin is tuple and (len(args) != 2 or args[1] is not Ellipsis):
            return len(value) == len(args) and all(map(matches, value, args))
        return all(matches(part, args[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(matches(k, args[0]) and matches(v, args[1]) for k, v in value.items())
    if hint is float:
        return isinstance(value, float) or matches(value, int)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64
    return isinstance(value, hint)


def _named(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
