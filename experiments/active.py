"""Active learning on MNIST: how many labels a network needs when it asks for the ones that it is in doubt about.

From 20 random labels by 10 a round. Every round trains a small network of convolutions with dropout from scratch on
what has labels (images of 14 x 14 pixels), and chooses from the pool: at random, by entropy, by mutual information
(BALD), by the variance of the probabilities, and by the information of all ten together (batch-aware). Doubt is that
of a Laplace posterior over the last layer (README recipe), or of MC dropout. What is chosen at random does not depend
on the network: there a network is trained for every 40 labels only, and up to twice as many labels. Rows are
resumable.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import torch
from common import COLOURS, table
from methods.command import About, arguments, fill, write_page
from methods.images import Images, convolutional, small_digits, stored
from methods.rows import Row, read
from methods.tables import by_column, mean, standard_error
from torch import Tensor, nn

import lapis

SETTINGS = ("mnist_laplace", "mnist_dropout")
QUICK = ("digits_laplace", "digits_dropout")
COLUMNS = ("random", "entropy", "bald", "variance", "batch")
POOL, TEST, BUDGET, STEPS = 4_000, 2_000, 400, 200
EACH, EACH_AT_RANDOM = 10, 40
SHOWN = (100, 200, 400)
"""Numbers of labels whose errors are in the table."""
TARGETS = (0.10, 0.05, 0.02)
TITLES = {"laplace": "Laplace, last layer", "dropout": "MC dropout"}
NAMES = {"bald": "BALD", "batch": "batch-aware"}


class Loaded:
    """The pool, the test set, and how a posterior is fitted to labelled examples."""

    def __init__(self, setting: str, seed: int, quick: bool) -> None:
        self.seed, self.quick = seed, quick
        self.posterior = setting.split("_")[1]
        images: Images = small_digits(seed) if quick else stored("mnist", "fashion_mnist", seed, POOL, TEST)
        self.pool, self.test = images.standardised(images.train), images.standardised(images.test)

    def fit(self, data: tuple[Tensor, Tensor]) -> lapis.Posterior:
        torch.manual_seed(1000 * self.seed + len(data[1]))
        model = convolutional((1, 8), (8,), 16, 10, 3, 0.25) if self.quick else pooled()
        train(model, *data, steps=30 if self.quick else STEPS)
        if self.posterior == "dropout":
            return lapis.dropout(model, "categorical")
        return lapis.laplace(model, data, "categorical").tune()

    def run(self, by: str) -> Row:
        at_random = by == "random" and not self.quick
        budget = 50 if self.quick else 20 + 2 * BUDGET if at_random else BUDGET
        settings: dict[str, Any] = {"start": 20, "each": EACH_AT_RANDOM if at_random else EACH, "test": self.test}
        generator = torch.Generator().manual_seed(self.seed)
        history = lapis.active.learn(self.fit, self.pool, budget, by=by, generator=generator, **settings)
        return {
            "labels": [done.labels for done in history.rounds],
            "error_rate": [done.scores["error"] for done in history.rounds],
            "nll": [done.scores["nll"] for done in history.rounds],
            "seconds": sum(done.seconds for done in history.rounds),
        }


def pooled() -> nn.Sequential:
    """Of the three that were tried, of equal cost, the one with the least error on 100 and 400 random labels."""
    return nn.Sequential(
        nn.AvgPool2d(2), nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(1152, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(y), (32,), generator=generator)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
        schedule.step()
    model.eval()


def labels_to(row: Row, rate: float) -> float:
    """Labels with which the error first was at most `rate`; beyond the budget if never."""
    return next((n for n, error in zip(row["labels"], row["error_rate"], strict=True) if error <= rate), float("inf"))


def error_at(row: Row, labels: int) -> float:
    """The error, in per cent, with that many labels: between two rounds on the line through both."""
    known, rates = torch.tensor(row["labels"], dtype=torch.float64), torch.tensor(row["error_rate"])
    after = min(int(torch.searchsorted(known, float(labels))), len(known) - 1)
    before = max(after - 1, 0)
    gap = float(known[after] - known[before]) or 1.0
    share = min(1.0, max(0.0, (labels - float(known[before])) / gap))
    return 100 * float(rates[before] + share * (rates[after] - rates[before]))


def page(chosen: Any, rows: list[Row]) -> None:
    settings = QUICK if chosen.quick else SETTINGS
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    parts, at = [], (30, 50) if chosen.quick else SHOWN
    colours = dict(zip(COLUMNS, ("#888888", *COLOURS), strict=True))
    for axis, setting in zip(axes, settings, strict=True):
        found = by_column(rows, setting, COLUMNS)
        lines = []
        for by, each in found.items():
            rates = torch.tensor([row["error_rate"] for row in each])
            labels, centre = each[0]["labels"], rates.mean(0)
            axis.plot(labels, 100 * centre, label=NAMES.get(by, by), color=colours[by], lw=1.8)
            if len(each) > 1:
                spread = rates.std(0) / len(each) ** 0.5
                low, high = 100 * (centre - spread), 100 * (centre + spread)
                axis.fill_between(labels, low, high, color=colours[by], alpha=0.15)
            needed = [[labels_to(row, rate) for row in each] for rate in TARGETS]
            shown = [_count(values) for values in needed]
            rates_at = [_rate([error_at(row, count) for row in each]) for count in at]
            seconds = f"{mean([row['seconds'] for row in each]):.0f}"
            lines.append([NAMES.get(by, by), *shown, *rates_at, seconds, len(each)])
        if lines:
            head = ["chosen by", *(f"labels to {rate:.0%} error" for rate in TARGETS)]
            head += [*(f"error at {count}, %" for count in at), "s", "seeds"]
            parts.append(f"## {TITLES[setting.split('_')[1]]}\n\n{table(head, lines)}")
        axis.set(title=TITLES[setting.split("_")[1]], xlabel="labels", yscale="log")
        axis.grid(alpha=0.25, which="both")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    axes[0].set_ylabel("test error, %")
    max(axes, key=lambda axis: len(axis.lines)).legend(frameon=False)
    about = About(
        "Active learning",
        f"""Pool of {"300 digits" if chosen.quick else f"{POOL:,} MNIST images"}, tested on {TEST:,}; {STEPS} steps of
        AdamW a round, from scratch; means over seeds with standard errors.""",
        "A dash: never within the budget, for at least one seed. Seconds are those of all rounds' fits and tests.",
        "Test error against labels",
    )
    write_page(chosen, about, parts, rows, figure)


def _count(values: list[float]) -> str:
    if not all(value < float("inf") for value in values):
        return "-"
    return f"{mean(values):.0f}" + (f" ± {standard_error(values):.0f}" if len(values) > 1 else "")


def _rate(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {standard_error(values):.1f}" if len(values) > 1 else "")


def main() -> None:
    chosen = arguments("active", __doc__, (SETTINGS, QUICK), (COLUMNS, ("random", "bald", "batch")))
    if not chosen.report:
        fill(
            chosen,
            lambda setting, seed: Loaded(setting, seed, chosen.quick),
            lambda loaded, by: loaded.run(by),
            ("seconds",),
        )
    page(chosen, read(chosen.rows))


if __name__ == "__main__":
    main()
