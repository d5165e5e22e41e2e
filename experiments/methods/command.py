"""The command line of a resumable table, and the loop that fills it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import matplotlib.pyplot as plt
import torch
from common import FIGURES, RESULTS, ROOT
from matplotlib.figure import Figure

from methods.rows import Row, append, cell, measured, read, settled
from methods.tables import failures

LIMIT = 900
"""Seconds of the processor that a column may take; one that takes longer is not tried again under the same limit."""

Loaded = TypeVar("Loaded")


def arguments(
    name: str,
    description: str | None,
    settings: tuple[Collection[str], Collection[str]],
    columns: tuple[Collection[str], Collection[str]],
    seeds: int = 3,
) -> argparse.Namespace:
    """The options; `settings` and `columns` are those of a full run and of a quick one."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)  # --seed is not --seeds
    parser.add_argument("--quick", action="store_true", help="tiny settings, one seed: a few seconds")
    parser.add_argument("--settings", help=f"some of {', '.join(settings[0])}; separated by commas")
    parser.add_argument("--columns", help=f"some of {'; '.join(columns[0])}; separated by semicolons")
    parser.add_argument("--seeds", type=int, default=None, help=f"how many: {seeds}, or 1 with --quick")
    parser.add_argument(
        "--first-seed", "--seed", type=int, default=0, help="to see whether choices hold on other seeds"
    )
    parser.add_argument("--again", action="store_true", help="measure the chosen columns again")
    parser.add_argument("--report", action="store_true", help="table and figures of what is there, no new rows")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of the processor for a column")
    parser.add_argument("--apart", help="a word: rows and page of their own, <name>_<word>, whatever the first seed")
    parser.add_argument("--output", type=Path, help="folder for everything that is written, networks included")
    chosen = parser.parse_args()
    known = settings[chosen.quick]
    chosen.settings = chosen.settings.split(",") if chosen.settings else list(known)
    every = list(columns[chosen.quick])
    chosen.columns = [each.strip() for each in chosen.columns.split(";")] if chosen.columns else every
    for kind, names, allowed in (
        ("setting", chosen.settings, known),
        ("column", chosen.columns, {*columns[0], *columns[1]}),
    ):
        for each in names:
            if each not in allowed:
                parser.error(f"no {kind} {each!r}; there are: {', '.join(allowed)}")
    chosen.seeds = chosen.seeds or (1 if chosen.quick else seeds)
    ending = f"_{chosen.apart}" if chosen.apart else "_other_seeds" if chosen.first_seed else ""
    chosen.name = name + ("_quick" if chosen.quick else "") + ending
    chosen.results, chosen.figures = chosen.output or RESULTS, chosen.output or FIGURES
    chosen.cache = chosen.output / "networks" if chosen.output else ROOT / ".cache" / name
    chosen.rows = chosen.results / f"{chosen.name}.json"
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return chosen


def fill(
    chosen: argparse.Namespace,
    load: Callable[[str, int], Loaded],
    work: Callable[[Loaded, str], Row],
    shown: Sequence[str],
    exists: Callable[[str, int], bool] = lambda setting, seed: True,
) -> None:
    """Measure the cells that are missing; every seed of all settings before the next, so that a part is of use.

    Args:
        load: from a setting's name and a seed, what all its columns share.
        work: from that and a column's name, the scores.
        shown: scores that are printed as they come.
        exists: whether a setting has a seed; all do by default.
    """
    for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
        for name in chosen.settings:
            held = {cell(row): row for row in read(chosen.rows)}
            wanted = [
                column
                for column in chosen.columns
                if chosen.again or not settled(held.get((name, column, seed)), chosen.limit)
            ]
            if not wanted or not exists(name, seed):
                continue
            loaded = load(name, seed)
            for column in wanted:
                row = measured((name, column, seed), partial(work, loaded, column), chosen.limit)
                append(chosen.rows, row)
                short = row.get("error") or {key: _rounded(row[key]) for key in shown if key in row}
                print(f"{name}, seed {seed}, {column}: {short}", flush=True)  # noqa: T201


def _rounded(value: object) -> object:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def write_report(chosen: argparse.Namespace, text: str) -> None:
    """Keep the page beside its rows, and print it."""
    script = chosen.name.removesuffix(f"_{chosen.apart}").removesuffix("_other_seeds").removesuffix("_quick")
    line = f"`python experiments/{script}.py{' --quick' if chosen.quick else ''}`"
    chosen.results.mkdir(parents=True, exist_ok=True)
    (chosen.results / f"{chosen.name}.md").write_text(f"{text}\n\n{line}\n", encoding="utf-8")
    print(text)  # noqa: T201


@dataclass(frozen=True)
class About:
    """The words of a page: its title, what was done, a note on the tables, and the caption of the figure."""

    title: str
    text: str
    note: str
    caption: str


def write_page(
    chosen: argparse.Namespace, about: About, parts: Sequence[str], rows: Sequence[Row], figure: Figure
) -> None:
    """Tables and figure as a page of docs/results/."""
    chosen.figures.mkdir(parents=True, exist_ok=True)
    figure.savefig(chosen.figures / f"{chosen.name}.png", dpi=130)
    plt.close(figure)
    text = "\n\n".join([f"# {about.title}", " ".join(about.text.split()), about.note, *parts]) + failures(rows)
    write_report(chosen, f"{text}\n\n![{about.caption}](../figures/{chosen.name}.png)")
