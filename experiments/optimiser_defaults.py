"""Where the defaults of IVON and VOGN come from: options that `learning_rule.py` does not search.

Each combination trains for 20 epochs on 4,000 images with prior precision 20, batches of 64 and a cosine schedule;
VOGN's temperature rises as it does there. Scores are of 2,000 further *training* images, which nothing was fitted to:
no test image is seen. Predictions average 30 drawn networks. Rows are kept in docs/results/optimiser_defaults.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import matplotlib.pyplot as plt
from common import table
from learning_rule import Setting, Trained, lenet, perceptron_of_mnist, trained
from matplotlib.ticker import FixedLocator, NullLocator
from methods import command
from methods.images import Images, small_digits, stored
from methods.rows import NotThere, Row, read
from methods.tables import by_column, mean
from trust.networks import perceptron

from lapis import metrics

PRECISION = 20.0


def held_out(name: str, other: str) -> Callable[[int], Images]:
    return lambda seed: stored(name, other, seed, train=4000, test=0, held=2000)


SETTINGS = {
    "MNIST MLP": Setting(held_out("mnist", "fashion_mnist"), perceptron_of_mnist, 20),
    "Fashion-MNIST LeNet": Setting(held_out("fashion_mnist", "mnist"), lenet, 20),
}
QUICK = {"digits MLP": Setting(small_digits, lambda: perceptron(64, (32,), 8), 20)}

IVON = {
    f"IVON, b2 {beta}, hess_init {start}, lr {rate}": (
        "IVON", rate, {"betas": (0.9, beta), "hess_init": start}
    )
    for beta, start, rate in product((0.999, 0.9999), (0.1, 0.5, 2.0), (0.1, 0.3, 1.0))
}  # fmt: skip
VOGN = {
    f"VOGN, damping {damping}, lr {round(relative * damping, 4)}": (
        "VOGN", round(relative * damping, 4), {"damping": damping}
    )
    for damping, relative in product((0.001, 0.01, 0.03, 0.1, 0.3), (0.1, 0.3, 1.0))
}  # fmt: skip
COLUMNS = {**IVON, **VOGN}


def work(loaded: tuple[Setting, Images, int], column: str) -> Row:
    if column not in COLUMNS:
        raise NotThere
    setting, data, seed = loaded
    kind, rate, options = COLUMNS[column]
    found: Trained = trained(setting.network, data, kind, rate, PRECISION, setting.epochs, seed, **options)
    x, y = data.standardised(data.validation)
    row: Row = {"rate": rate}
    for name, probs in (("", found.probs(x)), ("network_", found.network(x))):
        row[f"{name}accuracy"] = float(metrics.accuracy(probs, y))
        row[f"{name}nll"] = float(metrics.nll(probs, y))
        row[f"{name}ece"] = float(metrics.ece(probs, y))
    return row


def write(chosen: argparse.Namespace, settings: dict[str, Setting]) -> None:
    rows = read(chosen.rows)
    settings = {name: setting for name, setting in settings.items() if any(row["setting"] == name for row in rows)}
    parts = []
    figure, axes = plt.subplots(1, 2 * len(settings), figsize=(4 * 2 * len(settings), 3.4), squeeze=False)
    places = iter(axes[0])
    for name in settings:
        found = by_column(rows, name, COLUMNS)
        order = sorted(found, key=lambda column: mean([row["nll"] for row in found[column]]))
        lines = []
        for column in order:
            means = {
                key: mean([row[key] for row in found[column]]) for key in ("nll", "accuracy", "ece", "network_nll")
            }
            lines.append([column, *(f"{value:.4f}" for value in means.values()), len(found[column])])
        parts.append(f"## {name}\n\n" + table(["options", "NLL", "accuracy", "ECE", "NLL at the mean", "runs"], lines))
        for kind, at in zip((IVON, VOGN), places, strict=False):
            curves: dict[str, list[tuple[float, float]]] = {}
            for column in kind:
                if column in found:
                    label, rate = column.split(", ", 1)[1].rsplit(", lr ", 1)
                    curves.setdefault(label, []).append((float(rate), mean([row["nll"] for row in found[column]])))
            for label, points in curves.items():
                at.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
            at.set(
                title=f"{name}, {next(iter(kind)).split(',')[0]}", xlabel="lr", ylabel="validation NLL", xscale="log"
            )
            at.xaxis.set_major_locator(FixedLocator([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]))
            at.xaxis.set_major_formatter("{x:g}")
            at.xaxis.set_minor_locator(NullLocator())
            low = min((value for points in curves.values() for _, value in points), default=1.0)
            at.set_ylim(0.97 * low, 1.6 * low)
            at.legend(fontsize=6)
    figure.tight_layout()
    about = command.About(
        "Defaults of IVON and VOGN",
        (__doc__ or "").split("\n", 1)[1],
        "Sorted by validation NLL; means over seeds.",
        "Validation NLL by learning rate (cut off above 1.6 times the best)",
    )
    command.write_page(chosen, about, parts, [row for row in rows if row["setting"] in settings], figure)


def main() -> None:
    chosen = command.arguments(
        "optimiser_defaults", __doc__, (SETTINGS, QUICK), (list(COLUMNS), list(COLUMNS)), seeds=1
    )
    settings = QUICK if chosen.quick else SETTINGS
    if not chosen.report:
        command.fill(
            chosen, lambda name, seed: (settings[name], settings[name].images(seed), seed), work, ("nll", "accuracy")
        )
    write(chosen, settings)


if __name__ == "__main__":
    main()
