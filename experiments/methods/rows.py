"""Resumable tables: one row of a JSON file for each cell (setting, column, seed), written as soon as it is measured."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lapis

Row = dict[str, Any]


class NotThere(Exception):
    """A column that this setting does not have."""


class OverTime(Exception):
    """A column took more seconds of the processor than it may."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise OverTime in the main thread after so many seconds of the processor."""

    def stop(*_: object) -> None:
        raise OverTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def read(path: Path) -> list[Row]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def append(path: Path, row: Row) -> None:
    """Put a row in the place of an older one of the same cell; one row a line. Several runs may write at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [held for held in read(path) if cell(held) != cell(row)]
        lines = ",\n".join(json.dumps(held) for held in [*rows, row])
        partial = path.with_suffix(".partial")
        partial.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        partial.replace(path)


def cell(row: Row) -> tuple[str, str, int]:
    return row["setting"], row["column"], row["seed"]


def commit() -> str:
    """The state of the library that a row was measured with."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def measured(key: tuple[str, str, int], work: Callable[[], Row], limit: float) -> Row:
    """One row: what `work` returns, or why there is nothing."""
    setting, column, seed = key
    row: Row = {"setting": setting, "column": column, "seed": seed, "commit": commit()}
    started = time.perf_counter()
    try:
        with within(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore", lapis.LapisWarning)
            row |= work()
    except NotThere as reason:
        row |= {"error": str(reason), "absent": True}
    except OverTime:
        row |= {"error": f"more than {limit:.0f} s of the processor", "over_time": limit}
    except Exception as reason:  # noqa: BLE001 - a column that fails is a result, too: the others go on
        row["error"] = f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"
    row["wall"] = round(time.perf_counter() - started, 1)
    return row


def settled(row: Row | None, limit: float) -> bool:
    """Whether a cell needs no further try: it has scores, or took longer than it may today."""
    return row is not None and ("error" not in row or row.get("over_time", 0.0) >= limit)
