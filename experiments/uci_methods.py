"""Every method on UCI regression, standard and gap splits: log likelihood and RMSE.

Gap splits (Foong et al. 2019): the data are sorted by one feature, and the middle third is held out; one split for each
feature. One hidden layer of 50 ReLU units, trained by Adam on the squared error with weight decay, on nine tenths of
the training part (at most 2,000 rows; 1,000 steps, twice as many of variational inference). The other tenth is for the
noise of methods that have none of their own (plain, dropout, SWAG, ensemble); the others find theirs by evidence or
ELBO. Inputs and targets are standardised by the training part, scores are on the original scale. Linearised, sampled
and refined share a dense Laplace posterior. Rows are kept in docs/results/uci_methods.json: a run that was killed goes
on from there.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import table
from methods import command
from methods.fits import REGRESSIONS
from methods.rows import Row, read
from methods.tables import by_column, mean, scored, standard_error
from methods.task import Task
from torch import Tensor, nn
from trust.networks import Training
from uci import PUBLISHED, Split, standardised, table_of

SETS = ("yacht", "boston", "energy", "concrete", "wine-quality-red", "power-plant", "protein")
KINDS = ("standard", "gap")
SETTINGS = tuple(f"{name}/{kind}" for kind in reversed(KINDS) for name in SETS)
QUICK = tuple(f"waves/{kind}" for kind in KINDS)
QUICK_COLUMNS = ("plain", "linearised", "sampled", "dropout", "SWAG", "ensemble")
CATASTROPHE = 1.0
"""Nats an example by which a split is worse than plain, or than the best method: then it counts as a catastrophe."""
MOST_ROWS, STEPS, WIDTH = 2000, 1000, 50


@dataclass
class Problem:
    task: Task
    x: Tensor
    y: Tensor
    scale: float


def waves() -> dict[str, np.ndarray]:
    """A small data set for quick runs, without files."""
    source = np.random.default_rng(0)
    x = source.uniform(-2, 2, (150, 2))
    return {"X": x, "y": np.sin(2 * x[:, 0]) + x[:, 1] + 0.1 * source.standard_normal(150)}


def exists(setting: str, number: int) -> bool:
    """Whether there is such a split: a set has as many gaps as features."""
    name, kind = setting.split("/")
    if name == "waves":
        return number < 2
    held = table_of(name)
    return number < (held["X"].shape[1] if kind == "gap" else int(held["n_splits"]))


def split(name: str, kind: str, number: int) -> Split:
    """Standard split `number`, or the gap in feature `number`."""
    held = waves() if name == "waves" else table_of(name)
    count = len(held["X"])
    if kind == "standard" and name != "waves":
        train, test = held[f"train_index_{number}"], held[f"test_index_{number}"]
    else:
        order = np.random.default_rng(number).permutation(count)
        if kind == "gap":
            order = order[np.argsort(held["X"][order, number], kind="stable")]
            order = np.concatenate([order[: count // 3], order[2 * count // 3 :], order[count // 3 : 2 * count // 3]])
        cut = count - count // (3 if kind == "gap" else 10)
        train, test = order[:cut], order[cut:]
    return standardised(held["X"], held["y"], train, test)


def load(setting: str, number: int, cache: Path, quick: bool) -> Problem:
    name, kind = setting.split("/")
    x, y, x_test, y_test, scale = split(name, kind, number)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
    held, fitted = order[: len(x) // 10], order[len(x) // 10 :][:MOST_ROWS]
    batch = 128
    epochs = max(1, (300 if quick else STEPS) // -(-len(fitted) // batch))

    def make(dropout: float) -> nn.Module:
        drop = [nn.Dropout(dropout)] if dropout else []
        return nn.Sequential(nn.Linear(x.shape[1], WIDTH), nn.ReLU(), *drop, nn.Linear(WIDTH, 1))

    task = Task(
        setting.replace("/", "-"), number, (x[fitted], y[fitted]), (x[held], y[held]), "regression", make,
        Training(epochs, rate=1e-2, decay=1e-4, batch=batch), cache, dropout=0.05, snapshots=20 if quick else 40,
        variational_steps=200 if quick else 2 * STEPS,
    )  # fmt: skip
    return Problem(task, x_test, y_test, scale)


def measure(problem: Problem, column: str) -> Row:
    method = REGRESSIONS[column]
    started = time.process_time()
    posterior = method.posterior(problem.task)
    prediction = posterior.predict(problem.x, **method.options, progress=False)
    error = (prediction.mean - problem.y).square().mean().sqrt()
    return {
        "log_likelihood": float(prediction.log_prob(problem.y).double().mean()) - math.log(problem.scale),
        "rmse": float(error) * problem.scale,
        "noise": float(posterior.likelihood.noise) * problem.scale,
        "seconds": round(time.process_time() - started, 2),
    }


# -- the report ---------------------------------------------------------------------------------------------


def catastrophes(found: Mapping[str, list[Row]]) -> list[list[object]]:
    """Splits on which a method is far below the best of all, and its worst distance."""
    best: dict[tuple[str, int], float] = {}
    for rows in found.values():
        for row in rows:
            key = row["setting"], row["seed"]
            best[key] = max(best.get(key, -math.inf), row["log_likelihood"])
    lines = []
    for column, rows in found.items():
        behind = [best[row["setting"], row["seed"]] - row["log_likelihood"] for row in rows]
        count = sum(each > CATASTROPHE for each in behind)
        lines.append([column, f"{count} of {len(rows)}", f"{mean(behind):.2f}", f"{max(behind):.2f}"])
    return lines


def kind_report(rows: list[Row], kind: str, settings: tuple[str, ...]) -> str:
    parts = []
    for setting in settings:
        name, own = setting.split("/")
        found = by_column(rows, setting, REGRESSIONS)
        if own != kind or not found:
            continue
        scores = {"log likelihood": lambda row: row["log_likelihood"], "RMSE": lambda row: row["rmse"]}
        title = f"### {name}, {kind} splits"
        if kind == "standard" and name in PUBLISHED:
            rmse, log_likelihood = PUBLISHED[name]
            title += f"\n\nMC dropout as published: log likelihood {log_likelihood:.2f}, RMSE {rmse:.2f}."
        parts.append(f"{title}\n\n{scored(found, scores, ('log likelihood',))}")
    if not parts:
        return ""
    every: dict[str, list[Row]] = {}
    for setting in settings:
        if setting.endswith(kind):
            for column, each in by_column(rows, setting, REGRESSIONS).items():
                every.setdefault(column, []).extend(each)
    head = ["method", f"splits more than {CATASTROPHE:.0f} nat below the best", "mean distance", "largest distance"]
    return "\n\n".join([f"## {kind.capitalize()} splits", table(head, catastrophes(every)), *parts])


def figure(rows: list[Row], settings: tuple[str, ...]) -> plt.Figure:
    """Log likelihood less that of the network alone, for each method and set; one panel a kind of split."""
    kinds = [kind for kind in KINDS if any(row["setting"].endswith(kind) for row in rows)]
    size = (6.5 * len(kinds), 4.2)
    drawn, axes = plt.subplots(1, len(kinds), figsize=size, layout="constrained", sharey=True, squeeze=False)
    methods = [column for column in REGRESSIONS if column != "plain"]
    colours = plt.get_cmap("tab10").colors
    for axis, kind in zip(axes[0], kinds, strict=True):
        names = [each for each in settings if each.endswith(kind) and by_column(rows, each, ["plain"])]
        for place, setting in enumerate(names):
            found = by_column(rows, setting, REGRESSIONS)
            alone = {row["seed"]: row["log_likelihood"] for row in found["plain"]}
            for number, column in enumerate(methods):
                gains = [
                    row["log_likelihood"] - alone[row["seed"]] for row in found.get(column, ()) if row["seed"] in alone
                ]
                if gains:
                    error = standard_error(gains) if len(gains) > 1 else 0.0
                    x = place + 0.1 * (number - (len(methods) - 1) / 2)
                    label = column if not place else None
                    axis.errorbar(x, mean(gains), error, fmt="o", ms=4, color=colours[number], label=label)
        axis.axhline(0, color="black", lw=0.8)
        axis.set_yscale("symlog", linthresh=0.3)
        axis.set_xticks(range(len(names)), [each.split("-")[0].split("/")[0] for each in names])
        axis.set(title=f"{kind} splits", ylabel="log likelihood less plain's" if kind == kinds[0] else "")
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside right center", frameon=False)
    return drawn


def report(chosen: argparse.Namespace) -> None:
    rows, settings = read(chosen.rows), QUICK if chosen.quick else SETTINGS
    parts = [part for kind in KINDS if (part := kind_report(rows, kind, settings))]
    if not parts:
        return
    note = "Means over splits ± their standard error; the best in bold."
    about = command.About("Regression, standard and gap splits", __doc__ or "", note, "Log likelihood by method")
    command.write_page(chosen, about, parts, rows, figure(rows, settings))


def main() -> None:
    chosen = command.arguments("uci_methods", __doc__, (SETTINGS, QUICK), (REGRESSIONS, QUICK_COLUMNS), seeds=3)
    if not chosen.report:
        command.fill(
            chosen,
            lambda setting, number: load(setting, number, chosen.cache, chosen.quick),
            measure,
            ("log_likelihood", "rmse", "seconds"),
            exists,
        )
    report(chosen)


if __name__ == "__main__":
    main()
