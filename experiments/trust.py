"""Do error bars help out of the box? Plain networks against temperature scaling, laplace-torch and Lapis.

Eleven classification settings, unequal noise and counts; three seeds. Every column of every network becomes a row of
docs/results/trust.json as soon as it is there: a run that was killed goes on from there, and columns that failed are
tried again. Networks are kept in .cache/trust/. The report states for every bar whether it is met, and where not.
"""

from __future__ import annotations

import argparse

import matplotlib.pyplot as plt
from methods import command
from methods.rows import Row, read
from torch.nn.attention import SDPBackend, sdpa_kernel
from trust.columns import COLUMNS, Fits
from trust.columns import QUICK as QUICK_COLUMNS
from trust.figure import differences
from trust.scores import score
from trust.settings import CACHE, QUICK, SETTINGS, load_setting
from trust.table import Rows, document


def arguments() -> argparse.Namespace:
    chosen = command.arguments("trust", __doc__, (SETTINGS, QUICK), (COLUMNS, QUICK_COLUMNS))
    if not chosen.output:
        chosen.cache = CACHE
    return chosen


def measure(fits: Fits, column: str) -> Row:
    with sdpa_kernel(SDPBackend.MATH):
        result = COLUMNS[column](fits)
    return {**score(fits.loaded, result.answers), "seconds": round(result.seconds, 2), "note": result.note}


def run(chosen: argparse.Namespace) -> None:
    def load(name: str, seed: int) -> Fits:
        return Fits(load_setting(name, seed, chosen.cache), chosen.cache, chosen.limit)

    command.fill(chosen, load, measure, ("nll", "shifted_nll", "seconds"))


def report(chosen: argparse.Namespace) -> None:
    rows = Rows.of(read(chosen.rows), QUICK if chosen.quick else SETTINGS)
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
    if not chosen.report:
        run(chosen)
    report(chosen)


if __name__ == "__main__":
    main()
