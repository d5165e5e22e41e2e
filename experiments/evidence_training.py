"""Training with the evidence in the loop against a weight decay chosen by cross-validation, MNIST and Fashion-MNIST.

The grid has a decay for each decade: 10, 100, and on while the best is at an end. It trains on 90% of the data for
each, picks the best by the log likelihood of the other 10% (one fold), and trains again on all of it; evidence training
(`lapis.train`) runs once, on all of it, with a prior precision for each layer (in one case also with one for all). All
have the same networks, first weights, epochs, optimiser and learning rates. A small MLP, a wide one with four hidden
layers and a CNN on all 60,000 images (on Fashion-MNIST a deeper CNN, too, once more with more epochs and once with
twice the width), the small MLP and the CNN on 10,000. Scored on the test images: the plain network at the weights found
(accuracy, mean log likelihood, and the gain over the grid's choice with its paired standard error), and the linearised
Laplace predictive (its prior precision is the decay chosen, or what the evidence found). Results are kept as they come,
in docs/results/evidence_training.json: a run that was killed goes on from there.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
from common import COLOURS, RESULTS, ROOT, arguments, images, report, save, table
from torch import Tensor, nn

import lapis

RATE, BATCH = 1e-3, 128
SCRATCH = ROOT / "build" / "evidence_training"
"""Scores image by image, until their differences are taken."""
ALL, SOME = 60_000, 10_000
SCHEDULES = {
    ("mlp", ALL): (60, 4), ("wide", ALL): (20, 2), ("cnn", ALL): (15, 2), ("deep", ALL): (15, 2),
    ("full", ALL): (15, 2), ("mlp", SOME): (100, 5), ("cnn", SOME): (40, 2),
}  # fmt: skip
"""Epochs, and how many of them lie between two times that `lapis.train` tunes, by network and number of images."""
LONGER = ("deep", "fashion_mnist", ALL, 0), (40, 4)
"""A case that is trained once more, for longer, to see what the number of epochs changes."""
CASES = [
    *((kind, data, ALL, 0) for data in ("fashion_mnist", "mnist") for kind in ("mlp", "wide", "cnn")),
    *((kind, data, SOME, 0) for data in ("fashion_mnist", "mnist") for kind in ("mlp", "cnn")),
    ("mlp", "fashion_mnist", SOME, 1),
    ("deep", "fashion_mnist", ALL, 0),
    ("full", "fashion_mnist", ALL, 0),
    ("cnn", "fashion_mnist", ALL, 1),
]  # fmt: skip
"""Network, data, number of images, and what is added to the seed (of the images chosen, the first weights and the
order)."""
GROUPS: dict[Literal["layer", "one"], str] = {"layer": "by layer", "one": "one precision"}
ONE = ("mlp", "fashion_mnist", ALL)
"""The case that is tuned with one precision too."""
TITLES = {
    "mnist": "MNIST", "fashion_mnist": "Fashion-MNIST",
    "mlp": "MLP", "wide": "wide MLP", "cnn": "CNN", "deep": "deep CNN",
    "full": "wide CNN",
}  # fmt: skip
CHANNELS = {"deep": ((32, 48, 64), (256, 128)), "full": ((64, 96, 128), (512, 256))}
"""Of three convolutions, and the widths of two hidden layers; the wider network is the published one, from memory."""
WIDTHS = {"mlp": (784, 100, 50, 10), "wide": (784, 1024, 512, 256, 128, 10)}


loaded = lru_cache(maxsize=1)(images)


def network(kind: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    if kind in WIDTHS:
        layers = [nn.Linear(*ends) for ends in pairwise(WIDTHS[kind])]
        hidden = [module for layer in layers[:-1] for module in (layer, nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, layers[-1])
    if kind in CHANNELS:
        (one, two, three), (wide, narrow) = CHANNELS[kind]
        return nn.Sequential(
            nn.Conv2d(1, one, 5), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(one, two, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(two, three, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(),
            nn.Linear(three * 9, wide), nn.ReLU(), nn.Linear(wide, narrow), nn.ReLU(), nn.Linear(narrow, 10),
        ).to(memory_format=torch.channels_last)  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 49, 100), nn.ReLU(), nn.Linear(100, 10),
    ).to(memory_format=torch.channels_last)  # fmt: skip


def adam(parameters: list[Tensor], rate: float, decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=rate, weight_decay=decay, fused=True)


def decayed(kind: str, x: Tensor, y: Tensor, decay: float, epochs: int, seed: int) -> nn.Module:
    """Adam on cross-entropy + decay / (2 N) |theta|^2, with the learning rates of `lapis.train`."""
    model = network(kind, seed)
    optimiser = adam(list(model.parameters()), RATE, decay / len(x))
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        for group in optimiser.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for part in torch.randperm(len(x), generator=generator).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
    return model


@torch.no_grad()
def judged(model: nn.Module, x: Tensor, y: Tensor) -> tuple[dict[str, float], Tensor, Tensor]:
    """Accuracy in per cent and mean log likelihood; and for each image whether it was right, and its log likelihood."""
    logits = torch.cat([model(part) for part in x.split(1000)])
    right, log_likelihood = (logits.argmax(1) == y).double(), -nn.functional.cross_entropy(logits, y, reduction="none")
    mean = {"accuracy": 100 * float(right.mean()), "log_likelihood": float(log_likelihood.mean())}
    return mean, right, log_likelihood


def linearised(posterior: lapis.LaplacePosterior, x: Tensor, y: Tensor) -> dict[str, float]:
    """Mean log likelihood of the Laplace predictive under each link."""
    links: tuple[Literal["probit", "mc"], ...] = ("probit", "mc")
    totals = dict.fromkeys(links, 0.0)
    for inputs, labels in zip(x.split(1000), y.split(1000), strict=True):
        for link in links:
            totals[link] += float(posterior.predict(inputs, link=link).log_prob(labels).sum()) / len(x)
    return {str(link): total for link, total in totals.items()}


def paired(first: Tensor, second: Tensor) -> dict[str, float]:
    """Mean difference, and its standard error over images."""
    difference = (first - second).double()
    return {"mean": float(difference.mean()), "se": float(difference.std() / math.sqrt(len(difference)))}


@dataclass
class Case:
    """One network on so many images of one data set: the pieces of work that are compared."""

    kind: str
    data: str
    n: int
    seed: int
    epochs: int
    every: int
    n_test: int | None = None

    @property
    def _images(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return loaded(self.data, self.n, self.n_test, self.seed)

    @property
    def key(self) -> str:
        return f"{self.data} {self.kind}, {self.n} images, {self.epochs} epochs, seed {self.seed}:"

    @property
    def title(self) -> str:
        return f"{TITLES[self.data]}, {TITLES[self.kind]}"

    @property
    def size(self) -> str:
        """Images, and what is unusual about the case."""
        longer = f", {self.epochs} epochs" if (self.epochs, self.every) == LONGER[1] else ""
        return f"{self.n:,}{longer}"

    @property
    def priors(self) -> dict[Literal["layer", "one"], str]:
        """Ways of grouping that the evidence tunes, with their titles."""
        more = (self.kind, self.data, self.n) == ONE and self.seed == 0
        return {groups: name for groups, name in GROUPS.items() if groups == "layer" or more}

    def tried(self, decay: float) -> dict[str, Any]:
        x, y, *test = self._images
        held = len(x) // 10
        model = decayed(self.kind, x[held:], y[held:], decay, self.epochs, self.seed)
        return {"held_out": judged(model, x[:held], y[:held])[0], "test": judged(model, *test)[0]}

    def retrained(self, decay: float) -> dict[str, Any]:
        """On all data, with the decay given."""
        x, y, *_ = self._images
        begun = time.process_time()
        model = decayed(self.kind, x, y, decay, self.epochs, self.seed)
        seconds = time.process_time() - begun
        posterior = lapis.laplace(
            model, (x, y), "classification", structure="kronecker", curvature="sampled", prior=decay,
            batch_size=BATCH,
        )  # fmt: skip
        return self._scored(model, posterior, f"cv {decay:g}", seconds)

    def by_evidence(self, groups: Literal["one", "layer"]) -> dict[str, Any]:
        x, y, *_ = self._images
        begun = time.process_time()
        model = network(self.kind, self.seed)
        posterior = lapis.train(
            model, (x, y), "classification", epochs=self.epochs, burn_in=self.every, every=self.every,
            prior=lapis.Prior(1.0, groups=groups), structure="kronecker", curvature="sampled", optimiser=adam,
            learning_rate=RATE, batch_size=BATCH, seed=self.seed,
        )  # fmt: skip
        seconds = time.process_time() - begun
        record = posterior.training
        assert record is not None
        return self._scored(model, posterior, groups, seconds) | {
            "precisions": posterior.weight_prior.precision.tolist(),
            "gamma": float(posterior.effective_parameters()),
            "weights": posterior.n_weights,
            "log_evidence": record.log_evidence,
            "evaluated": record.evaluated,
            "best_epoch": record.best_epoch,
            "held": record.held,
        }

    def _scored(self, model: nn.Module, posterior: lapis.LaplacePosterior, name: str, seconds: float) -> dict[str, Any]:
        x, y, *test = self._images
        mean, right, log_likelihood = judged(model, *test)
        SCRATCH.mkdir(parents=True, exist_ok=True)
        torch.save((right, log_likelihood), self._scores(name))
        return mean | {
            "train": judged(model, x, y)[0],
            "linearised": linearised(posterior, *test),
            "training_seconds": round(seconds, 1),
        }

    def _scores(self, name: str) -> Path:
        return SCRATCH / f"{self.data} {self.kind} {self.seed} {self.n} {self.epochs} {name}.pt"

    def gain(self, decay: float, groups: str) -> dict[str, Any]:
        """Evidence - CV on the test images, with standard errors of the mean of paired differences."""
        mine, cv = (torch.load(self._scores(name)) for name in (groups, f"cv {decay:g}"))
        return {"accuracy": paired(100 * mine[0], 100 * cv[0]), "log_likelihood": paired(mine[1], cv[1])}


class Results:
    """Pieces of work by name, each done once, in a file that is rewritten after each."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.path = RESULTS / f"{name}.json"
        self.held: dict[str, Any] = {"settings": settings}
        if self.path.exists():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["settings"] == settings:
                self.held = found

    def decays(self, case: Case) -> list[float]:
        """Those that were tried already."""
        start = f"{case.key} decay "
        return [float(name.removeprefix(start)) for name in self.held if name.startswith(start)]

    def get(self, name: str, work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        if name not in self.held:
            begun = time.process_time()
            self.held[name] = work(*arguments) | {"cpu_seconds": round(time.process_time() - begun, 1)}
            self.path.write_text(json.dumps(self.held, indent=1), encoding="utf-8")
            print(name, self.held[name], flush=True)  # noqa: T201
        found: dict[str, Any] = self.held[name]
        return found


def rows(case: Case, decay: float, searched: float, results: Results) -> list[tuple[str, ...]]:
    """CV and evidence with one precision and with one for each layer, a row each."""
    key = case.key
    cv = results.get(f"{key} cv {decay:g}", case.retrained, decay)
    found = [(f"CV, decay {decay:g}", cv, None, searched + cv["training_seconds"])]
    for groups, name in case.priors.items():
        mine = results.get(f"{key} {groups}", case.by_evidence, groups)
        gain = results.get(f"{key} gain {groups} over {decay:g}", case.gain, decay, groups)
        found.append((f"evidence, {name}", mine, gain, mine["training_seconds"]))
    lines = []
    for name, scores, gain, seconds in found:
        cells = [case.size + (f", seed {case.seed}" if case.seed else ""), case.title, name]
        for score, digits in (("accuracy", 2), ("log_likelihood", 4)):
            cells.append(f"{scores[score]:.{digits}f}")
            cells.append("" if gain is None else f"{gain[score]['mean']:+.{digits}f} ± {gain[score]['se']:.{digits}f}")
        cells += [f"{scores['linearised'][link]:.4f}" for link in ("mc", "probit")]
        cells.append(f"{scores['train']['log_likelihood']:.4f}")
        cells.append(", ".join(f"{p:.3g}" for p in scores.get("precisions", [decay])))
        cells.append(f"{scores['gamma']:,.0f}" if "gamma" in scores else "")
        lines.append((*cells, f"{seconds:.0f} s"))
    return lines


def search(results: Results, case: Case) -> tuple[dict[float, dict[str, Any]], float]:
    """Held-out scores by decay, in order, and the best; the grid grows by a decade while its best is at an end."""
    cells: dict[float, dict[str, Any]] = {}
    todo = [10.0, 100.0, *results.decays(case)]
    while todo:
        cells |= {decay: results.get(f"{case.key} decay {decay:g}", case.tried, decay) for decay in todo}
        best = max(cells, key=lambda decay: cells[decay]["held_out"]["log_likelihood"])
        todo = [best * 10] if best == max(cells) else [best / 10] if best == min(cells) else []
    return dict(sorted(cells.items())), best


HEAD = (
    "images", "data, network", "prior", "accuracy", "gain", "log-lik", "gain", "Laplace, mc", "Laplace, probit",
    "train log-lik", "precisions", "gamma", "CPU",
)  # fmt: skip


def cases(seed: int, quick: bool) -> list[Case]:
    found = [Case(kind, data, n, seed + more, *SCHEDULES[kind, n]) for kind, data, n, more in CASES]
    if quick:
        return [
            replace(case, n=2000, n_test=2000)
            for case in found
            if case.n == ALL and case.seed == seed and case.kind not in CHANNELS
        ]
    (kind, data, n, more), schedule = LONGER
    return [*found, Case(kind, data, n, seed + more, *schedule)]


def draw(axis: plt.Axes, case: Case, cells: dict[float, dict[str, Any]], decay: float, results: Results) -> None:
    """Test log likelihood by weight decay, with the level that the evidence reaches."""
    scores = [cell["test"]["log_likelihood"] for cell in cells.values()]
    axis.semilogx(list(cells), scores, "o-", color=COLOURS[0], label="grid, 90% of the data")
    retrained = results.held[f"{case.key} cv {decay:g}"]["log_likelihood"]
    axis.plot(decay, retrained, "*", ms=13, color=COLOURS[0], label="chosen, all data")
    for (groups, name), colour in zip(case.priors.items(), COLOURS[1:], strict=False):
        axis.axhline(results.held[f"{case.key} {groups}"]["log_likelihood"], color=colour, label=f"evidence, {name}")
    axis.autoscale(axis="y")
    axis.margins(y=0.12)
    axis.set_title(f"{case.title}, {case.size}", fontsize="small")


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    settings = {"rate": RATE, "batch": BATCH}
    results = Results("evidence_training_quick" if chosen.quick else "evidence_training", settings)
    todo = cases(chosen.seed, chosen.quick)
    shown = [case for case in todo if case.seed == chosen.seed]
    across = 3 if chosen.quick else 5
    down = math.ceil(len(shown) / across)
    figure, axes = plt.subplots(down, across, figsize=(3 * across, 2.8 * down), layout="constrained")
    panels = iter(axes.flat)
    lines: list[tuple[str, ...]] = []
    for case in todo:
        cells, decay = search(results, case)
        lines += rows(case, decay, sum(cell["cpu_seconds"] for cell in cells.values()), results)
        if case in shown:
            draw(next(panels), case, cells, decay, results)
    for axis in panels:  # left over
        axis.axis("off")
    for column in axes.T:
        [axis for axis in column if axis.axison][-1].set_xlabel("weight decay")
    for axis in axes[:, 0]:
        axis.set_ylabel("test log likelihood")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, "evidence_training", chosen)
    trained = {f"{TITLES[case.kind]}, {case.n:,} images: {case.epochs}" for case in todo}
    text = (
        f"Epochs: {'; '.join(sorted(trained))}. One decay a decade. "
        f"Gains are evidence - CV, ± one standard error over test images, paired.\n\n{table(HEAD, lines)}"
    )
    report("evidence_training", text, chosen)


if __name__ == "__main__":
    main()
