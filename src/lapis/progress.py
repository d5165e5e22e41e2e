"""A progress bar for long work, silent when nobody watches (piped output, continuous integration)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

Item = TypeVar("Item")


def track(items: Iterable[Item], description: str, total: int | None, show: bool | None = None) -> Iterator[Item]:
    """Yield `items`, showing a bar on standard error; `show=None` shows it on a terminal outside CI only."""
    if not shown(show):
        yield from items
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(items, total=total, description=description)


def announce(text: str, show: bool | None = None) -> None:
    """Say on standard error what is about to be done, where `track` would show a bar."""
    if shown(show):
        Console(stderr=True).print(text, highlight=False, markup=False)


def shown(show: bool | None) -> bool:
    """Whether bars and announcements are to be seen."""
    return sys.stderr.isatty() and not os.environ.get("CI") if show is None else show
