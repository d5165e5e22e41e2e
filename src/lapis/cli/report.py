"""The demonstration's report, text and a table, for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lapis.cli.experiment import HELD_OUT, KNOWN, PIXEL_NOISE, Result, Setting

HIGHER_IS_BETTER = {"Accuracy", "OOD-AUROC"}
LAST_KNOWN, (FIRST, SECOND) = KNOWN[-1], HELD_OUT


def show(console: Console, setting: Setting, results: Sequence[Result]) -> None:
    """Print the data, the table of scores, and facts about the posterior."""
    digits, fitted, tuned = results[0].digits, results[0].fitted, results[0].tuned
    known = f"{len(digits.train[1])} images to train on, {len(digits.test[1])} to test"
    noise = f"{100 * setting.label_noise:g} % of the labels of both drawn anew at random" if setting.label_noise else ""
    console.print(
        f"\n[bold]Data[/]  Digits 0-{LAST_KNOWN}: {known}, {noise or 'all labels clean'}. "
        f"Not expected: digits {FIRST} and {SECOND} ({len(digits.unknown[1])} images), and the "
        f"test digits with noisy pixels (deviation {PIXEL_NOISE:g}). Weights and prior are fitted to the training "
        "images alone.\n"
    )
    console.print(table(results))
    spread = f"Mean ± deviation over {len(results)} splits and trainings. " if len(results) > 1 else ""
    console.print(
        f"{spread}OOD-AUROC: telling digits {FIRST} and {SECOND} (above) or noisy digits (below) from test digits by "
        "predictive entropy.",
        style="dim",
    )
    before, after = (float(posterior.weight_prior.precision) for posterior in (fitted, tuned))
    low, high = (float(posterior.log_evidence()) for posterior in (fitted, tuned))
    console.print(
        f"\n[bold]Posterior[/]  (first split) {tuned.structure}, {tuned.n_weights:,} weights of which the data "
        f"determine {float(tuned.effective_parameters()):.0f}. Tuning took the prior precision from {before:.3g} "
        f"to {after:.3g} and the log evidence from {low:.0f} to {high:.0f}; leave-one-out predictions allow "
        f"{tuned.width:.2g} of the covariance."
    )
    if not setting.label_noise:
        console.print(
            "Clean digits: the network alone is calibrated already, and the posterior leaves it so while it tells the "
            "unknown better. Try --label-noise 0.2: there the network is overconfident.",
            style="dim",
        )


SETS = {"Test digits": False, "With noisy pixels": True}
"""Sets that methods are scored on, and whether they are the corrupted ones."""


def scores(results: Sequence[Result]) -> dict[str, dict[str, dict[str, float]]]:
    """Means over results: of each set and method, by the name of the score."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for title, corrupted in SETS.items():
        found[title] = {}
        for row, method in enumerate(results[0].methods):
            runs = [result.methods[row].scores(result.digits.test[1], corrupted=corrupted) for result in results]
            found[title][method.name] = {name: mean(run[name] for run in runs) for name in runs[0]}
    return found


def table(results: Sequence[Result]) -> Table:
    """A section for each test set: means over results, with their deviations, the best of each column in bold."""
    methods = [method.name for method in results[0].methods]
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("", no_wrap=True)
    for title, corrupted in SETS.items():
        runs = [
            [method.scores(result.digits.test[1], corrupted=corrupted) for method in result.methods]
            for result in results
        ]
        if not corrupted:
            for name in runs[0][0]:
                grid.add_column(name, justify="right", no_wrap=True)
        columns = {name: [[run[row][name] for run in runs] for row in range(len(methods))] for name in runs[0][0]}
        grid.add_row(f"[bold]{title}[/]")
        cells = [_column(values, name in HIGHER_IS_BETTER) for name, values in columns.items()]
        for row, method in enumerate(methods):
            grid.add_row(method, *(column[row] for column in cells))
        if not corrupted:
            grid.add_row()
    return grid


def _column(values: Sequence[Sequence[float]], higher: bool) -> list[str]:
    """A cell for each method from its values over runs."""
    means = [round(mean(runs), 3) for runs in values]
    best = max(means) if higher else min(means)
    cells = []
    for centre, runs in zip(means, values, strict=True):
        shown = f"[bold]{centre:.3f}[/]" if centre == best else f"{centre:.3f}"
        deviation = f"[dim]±{f'{stdev(runs):.3f}'.removeprefix('0')}[/]" if len(runs) > 1 else ""
        cells.append(shown + deviation)
    return cells
