"""What Lapis says when something is wrong: what was expected, what came, and what to do about it."""

from __future__ import annotations

import sys


class LapisError(Exception):
    """Base of every error that Lapis raises on purpose.

    The message always reads in the same order: what happened, what was expected, what came, the remedy.

    >>> print(LapisError("Cannot fit", expected="at least one example", got="none", do="pass some data"))
    Cannot fit. Expected: at least one example. Got: none. Do: pass some data.
    """

    def __init__(
        self, what: str, *, expected: str | None = None, got: str | None = None, do: str | None = None
    ) -> None:
        parts = [what, *(f"{k}: {v}" for k, v in (("Expected", expected), ("Got", got), ("Do", do)) if v)]
        super().__init__(" ".join(part if part.endswith((".", "!", "?")) else part + "." for part in parts))


class DataError(LapisError):
    """Inputs or targets that cannot be used: wrong shape, dtype, range, not finite, or none at all."""


class ModelError(LapisError):
    """A network that cannot be used as it is: weights not finite, changed since the fit, odd outputs."""


class LikelihoodError(LapisError):
    """A likelihood that does not fit the network's outputs, or cannot do what was asked."""


class PriorError(LapisError):
    """A prior that does not fit the weights, or the structure it is to be used with."""


class StructureError(LapisError):
    """A posterior structure that cannot represent what was asked."""


class MemoryBudgetError(StructureError):
    """Refused before allocating: the work would not fit in the stated memory budget."""


def check_fits(needed: int, memory_budget: int, what: str, *, do: str, made_of: str = "") -> None:
    """MemoryBudgetError that says `what` unless so many bytes are within the budget."""
    if needed > memory_budget:
        raise MemoryBudgetError(
            what,
            expected=f"at most {memory_budget:,} bytes (memory_budget)",
            got=f"{needed:,} bytes {made_of}".rstrip(),
            do=do,
        )


class NotPositiveDefiniteError(StructureError):
    """A precision matrix with a negative eigenvalue (the Hessian away from a minimum, say)."""


class OptionError(LapisError):
    """An argument whose value is unknown, or has no meaning for the case at hand."""


class FileError(LapisError):
    """A file that is not a whole and unchanged Lapis posterior, or belongs to another network."""


class RankError(LapisError):
    """Another process of torch.distributed failed, died, or does not answer: the work of all of them ends."""


class LapisWarning(UserWarning):
    """A choice made on the user's behalf that changes the answer."""


def users_level() -> int:
    """The `stacklevel` with which a warning of the calling function points at the user's line: outside Lapis."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "lapis":
        level, frame = level + 1, frame.f_back
    return level
