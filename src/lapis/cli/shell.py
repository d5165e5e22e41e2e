"""What commands share: errors in one line, warnings as notes, results as text or as JSON."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lapis.errors import LapisError, LapisWarning

P = ParamSpec("P")
R = TypeVar("R")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output, and nothing else.")]


def readable(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose errors are one line on standard error and exit code 1, and whose warnings are notes there."""

    @functools.wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> R:
        try:
            with _notes():
                return command(*args, **options)
        except BrokenPipeError:  # whoever read the output, `head` for one, has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
            raise typer.Exit(0) from None
        except (LapisError, OSError, MemoryError) as error:
            words = " ".join(str(error).split()) or type(error).__name__
            _to_stderr(f"[bold red]Error:[/] {escape(words)}")
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            _to_stderr("Interrupted.")
            raise typer.Exit(130) from error

    return run


@contextmanager
def _notes() -> Iterator[None]:
    """Print warnings meant for users as notes, at once; others (deprecations, for one) as they are."""
    plain = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, UserWarning):
            _to_stderr(f"[yellow]Note:[/] {escape(' '.join(str(message).split()))}")
        else:
            plain(message, category, *rest)

    with warnings.catch_warnings():
        warnings.simplefilter("always", LapisWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _to_stderr(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)


def say(text: str) -> None:
    """A line of the result, for people."""
    Console(highlight=False, soft_wrap=True).print(text)


LONGEST_WORD = 20
"""Letters of a name that is not broken in a narrow terminal; paths may be longer."""


def grid(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table; columns of words are set to the left, those with numbers to the right, names in whole words."""
    console = Console(highlight=False)
    fits = sum(2 + max(len(str(row[number])) for row in [head, *rows]) for number in range(len(head))) <= console.width
    longest = max((len(word) for row in rows for word in str(row[0]).split()), default=0)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(head):
        words = all(isinstance(row[number], str) for row in rows)
        width = longest if words and not (number or fits or longest > LONGEST_WORD) else None
        side: Literal["left", "right"] = "left" if words else "right"
        table.add_column(escape(name), justify=side, no_wrap=not words, overflow="fold", width=width)
    for row in rows:
        table.add_row(*(escape(cell if isinstance(cell, str) else shown(cell)) for cell in row))
    console.print(table)


def facts(pairs: Mapping[str, Any]) -> None:
    """Names and values, one pair a line."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        table.add_row(escape(name), escape(value if isinstance(value, str) else shown(value)))
    Console(highlight=False).print(table)


def shown(value: Any) -> str:
    """A number for people; of many things in a list, the first.

    >>> shown(1234567), shown(0.123456), shown(123.456), shown(-3.0)
    ('1,234,567', '0.1235', '123.5', '-3')
    """
    if isinstance(value, list):
        return ", ".join(map(str, value[:12])) + (f", ... ({len(value)})" if len(value) > 12 else "")
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def counted(number: int, thing: str) -> str:
    """A number of things.

    >>> counted(1, "row"), counted(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def as_json(result: Any) -> None:
    """The result as JSON on standard output; what is not finite is null."""
    sys.stdout.write(json.dumps(_finite(result), indent=2, ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread: faster for arrays this small, especially on busy cores, and sums are reproducible."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
