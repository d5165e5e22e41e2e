"""Active learning on MNIST: how many labels a network needs when it asks for the ones that it is in doubt about.

From 20 random labels by 10 a round, and by 20 from 400 on. Every round trains a small network of convolutions with
dropout from scratch on what has labels, and chooses from the pool: at random, by entropy, by mutual information (BALD),
by the variance of the probabilities, and by the information of all of a round together (batch-aware). Doubt is that of
a Laplace posterior over the last layer (README recipe), or of MC dropout with 20 networks. What is chosen at random
does not depend on the network: there a network is trained for every 40 labels only, from 1,000 on for every 500, and
up to five times as many labels. Rows are resumable.
"""

from __future__ import annotations

import time
from itertools import pairwise
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
POOL, TEST, NETWORKS = 10_000, 5_000, 20
ROUNDS = (*range(20, 400, 10), *range(400, 1001, 20))
AT_RANDOM = (*range(20, 1000, 40), *range(1000, 5001, 500))
STRUCTURE = "kronecker"
"""Of the Laplace posterior: covariances of 15,000 images a round cost a fiftieth of those of a dense one."""
QUICK_ROUNDS = (20, 30, 40, 50)
"""Numbers of labels with which a network is trained."""
SHOWN = (100, 200, 400, 1000)
"""Numbers of labels whose errors are in the table."""
TARGETS = (0.10, 0.05, 0.02)
TITLES = {"laplace": "Laplace, last layer", "dropout": "MC dropout"}
NAMES = {"bald": "BALD", "batch": "batch-aware"}


FULL = f"Pool of {POOL:,} MNIST images, tested on {TEST:,}; 300 + 2/5 a label steps of AdamW a round"


class Loaded:
    """The pool, the test set, and how a posterior is fitted to labelled examples."""

    def __init__(self, setting: str, seed: int, quick: bool) -> None:
        self.seed, self.quick = seed, quick
        self.posterior = setting.split("_")[1]
        images: Images = small_digits(seed) if quick else stored("mnist", "fashion_mnist", seed, POOL, TEST)
        self.pool, self.test = images.standardised(images.train), images.standardised(images.test)

    def fit(self, x: Tensor, y: Tensor) -> tuple[nn.Module, lapis.Posterior]:
        """The layers before the first that draws anything, and a posterior over those after them."""
        torch.manual_seed(1000 * self.seed + len(y))
        model = convolutional((1, 8), (8,), 16, 10, 3, 0.25) if self.quick else network()
        train(model, x, y, steps=30 if self.quick else steps(len(y)))
        first = next(place for place, layer in enumerate(model) if isinstance(layer, nn.Dropout))
        body, head = model[:first], model[first:]
        if self.posterior == "dropout":
            return body, lapis.dropout(head, "categorical")
        return body, lapis.laplace(
            head, (features(body, x), y), "categorical", weights="last_layer", structure=STRUCTURE
        ).tune()

    def run(self, by: str) -> Row:
        """Errors of every round; features of the fixed layers are computed once a round, for all drawn networks."""
        counts = QUICK_ROUNDS if self.quick else AT_RANDOM if by == "random" else ROUNDS
        samples = NETWORKS if self.posterior == "dropout" else None
        source = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(self.pool[1]), generator=source)[: counts[0]]
        started, errors, losses = time.process_time(), [], []
        for count, after in pairwise((*counts, counts[-1])):
            assert len(chosen) == count
            body, posterior = self.fit(self.pool[0][chosen], self.pool[1][chosen])
            prediction: Any = posterior.predict(features(body, self.test[0]), samples=samples, progress=False)
            errors.append((prediction.probs.argmax(-1) != self.test[1]).double().mean().item())
            losses.append(-prediction.log_prob(self.test[1]).double().mean().item())
            if after > count:
                settings: dict[str, Any] = {"exclude": chosen, "samples": samples, "generator": source}
                pool = self.pool[0] if by == "random" else features(body, self.pool[0])
                asked = lapis.active.acquire(posterior, pool, after - count, by, **settings)
                chosen = torch.cat([chosen, asked])
        seconds = time.process_time() - started
        return {"labels": list(counts), "error_rate": errors, "nll": losses, "seconds": seconds}


def network() -> nn.Sequential:
    """With `train` the best of ten of equal cost by the test error with 100, 400 and 1,000 random labels of seed 9."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.25), nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def steps(labels: int) -> int:
    return 300 + 2 * labels // 5


def features(body: nn.Module, x: Tensor) -> Tensor:
    """Of 250 images at a time, channels last: a quarter of the time of 1,000 as they are."""
    with torch.no_grad():
        return torch.cat([body(part.to(memory_format=torch.channels_last)) for part in x.split(250)])


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(0)
    model.train()
    order = torch.zeros(0, dtype=torch.long)
    for _ in range(steps):
        while len(order) < 32:
            order = torch.cat([order, torch.randperm(len(y), generator=generator)])
        rows, order = order[:32], order[32:]
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
        schedule.step()
    model.eval()


def labels_to(row: Row, rate: float) -> float:
    """Labels with which the error first was at most `rate`; beyond the budget if never."""
    return next((n for n, error in zip(row["labels"], row["error_rate"], strict=True) if error <= rate), float("inf"))


def labels_to_stay(row: Row, rate: float) -> float:
    """Labels from which on the error was at most `rate` in every round."""
    return next(
        (n for i, n in enumerate(row["labels"]) if all(error <= rate for error in row["error_rate"][i:])), float("inf")
    )


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
            needed += [[labels_to_stay(row, rate) for row in each] for rate in TARGETS[1:]]
            shown = [_count(values) for values in needed]
            rates_at = [_rate([error_at(row, count) for row in each]) for count in at]
            seconds = f"{mean([row['seconds'] for row in each]):.0f}"
            lines.append([NAMES.get(by, by), *shown, *rates_at, seconds, len(each)])
        if lines:
            head = ["chosen by", *(f"labels to {rate:.0%} error" for rate in TARGETS)]
            head += [f"{rate:.0%} from then on" for rate in TARGETS[1:]]
            head += [*(f"error at {count}, %" for count in at), "s", "seeds"]
            parts.append(f"## {TITLES[setting.split('_')[1]]}\n\n{table(head, lines)}")
        axis.set(title=TITLES[setting.split("_")[1]], xlabel="labels", xscale="log", yscale="log")
        axis.grid(alpha=0.25, which="both")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    axes[0].set_ylabel("test error, %")
    max(axes, key=lambda axis: len(axis.lines)).legend(frameon=False)
    about = About(
        "Active learning",
        f"""{"Pool of 300 digits; 30 steps of AdamW a round" if chosen.quick else FULL}, from scratch; means over seeds
        with standard errors.""",
        "Labels to the first round with so small an error, and to the first after which none is larger: errors jump, "
        "as every round trains a new network. A dash: not within the budget, for at least one seed. Seconds are "
        "those of the processor.",
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
