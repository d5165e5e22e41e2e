"""Do error bars help out of the box? Plain networks against temperature scaling, laplace-torch and Lapis.

Eleven classification settings, unequal noise and counts; three seeds. Every column of every network becomes a row of
docs/results/trust.json as soon as it is there: a run that was killed goes on from there, and columns that failed are
tried again. Networks are kept in .cache/trust/. The report states for every bar whether it is met, and where not.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from common import FIGURES, RESULTS, ROOT
from torch.nn.attention import SDPBackend, sdpa_kernel
from trust import columns as methods
from trust.columns import COLUMNS, Fits, NotThere, OverTime
from trust.figure import differences
from trust.scores import score
from trust.settings import CACHE, QUICK, SETTINGS, load_setting
from trust.table import Row, Rows, document

import lapis

LIMIT = 900
"""Seconds of the processor that a column may take; one that takes longer is not tried again under the same limit."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two tiny settings, one seed: a few seconds")
    parser.add_argument("--settings", help=f"some of {', '.join(SETTINGS)}; separated by commas")
    parser.add_argument("--columns", help=f"some of {'; '.join(COLUMNS)}; separated by semicolons")
    parser.add_argument("--seeds", type=int, default=None, help="how many: 3, or 1 with --quick")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="to see whether choices made on seeds 0 to 2 hold on others"
    )
    parser.add_argument("--again", action="store_true", help="measure the chosen columns again")
    parser.add_argument("--report", action="store_true", help="table and figures of what is there, no new rows")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of the processor for a column")
    parser.add_argument("--output", type=Path, help="folder for everything that is written, networks included")
    chosen = parser.parse_args()
    known = QUICK if chosen.quick else SETTINGS
    chosen.settings = chosen.settings.split(",") if chosen.settings else list(known)
    every = list(methods.QUICK) if chosen.quick else list(COLUMNS)
    chosen.columns = [name.strip() for name in chosen.columns.split(";")] if chosen.columns else every
    for kind, names, allowed in (("setting", chosen.settings, known), ("column", chosen.columns, COLUMNS)):
        for name in names:
            if name not in allowed:
                parser.error(f"no {kind} {name!r}; there are: {', '.join(allowed)}")
    chosen.seeds = chosen.seeds or (1 if chosen.quick else 3)
    chosen.name = "trust" + ("_quick" if chosen.quick else "") + ("_other_seeds" if chosen.first_seed else "")
    chosen.results, chosen.figures = chosen.output or RESULTS, chosen.output or FIGURES
    chosen.cache = chosen.output / "networks" if chosen.output else CACHE
    return chosen


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
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def measure(fits: Fits, column: str, limit: float) -> Row:
    """One row: scores, or why there are none."""
    row: dict[str, Any] = {"setting": fits.loaded.name, "column": column, "seed": fits.loaded.seed, "commit": commit()}
    started = time.perf_counter()
    try:
        with within(limit), warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore", lapis.LapisWarning)
            result = COLUMNS[column](fits)
        row |= score(fits.loaded, result.answers)
        row |= {"seconds": round(result.seconds, 2), "note": result.note}
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


def run(chosen: argparse.Namespace, path: Path) -> None:
    for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
        for name in chosen.settings:
            held = {cell(row): row for row in read(path)}
            wanted = [
                column
                for column in chosen.columns
                if chosen.again or not settled(held.get((name, column, seed)), chosen.limit)
            ]
            if not wanted:
                continue
            fits = Fits(load_setting(name, seed, chosen.cache), chosen.cache, chosen.limit)
            for column in wanted:
                row = measure(fits, column, chosen.limit)
                append(path, row)
                shown = row.get("error") or {key: round(row[key], 4) for key in ("nll", "shifted_nll", "seconds")}
                print(f"{name}, seed {seed}, {column}: {shown}", flush=True)  # noqa: T201


def report(chosen: argparse.Namespace, path: Path) -> None:
    rows = Rows.of(read(path), QUICK if chosen.quick else SETTINGS)
    if not rows.found:
        return
    text = document(rows) + f"\n\n`python experiments/trust.py{' --quick' if chosen.quick else ''}`\n"
    (chosen.results / f"{chosen.name}.md").write_text(text, encoding="utf-8")
    chosen.figures.mkdir(parents=True, exist_ok=True)
    for last_layer, ending in ((False, ""), (True, "_last_layer")):
        figure = differences(rows, last_layer=last_layer)
        figure.savefig(chosen.figures / f"{chosen.name}{ending}.png", dpi=130)
        plt.close(figure)
    print(text.split("\n## Every setting")[0])  # noqa: T201


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    path = chosen.results / f"{chosen.name}.json"
    if not chosen.report:
        run(chosen, path)
    report(chosen, path)


if __name__ == "__main__":
    main()
