"""Training with the evidence in the loop against a weight decay chosen by cross-validation, MNIST and Fashion-MNIST.

The grid has a decay for each decade. It trains on 90% of the data for each, picks the best by the log likelihood of the
other 10% (one fold), and trains again on all of it; evidence training (`lapis.train`) runs once, on all of it, with a
prior precision for each layer. Both have the same networks, first weights, epochs, optimiser and learning rates. Scored
on the test images: the plain network at the weights found (accuracy, mean log likelihood, and the difference of the two
with its paired standard error), and the linearised Laplace predictive (its prior precision is the decay chosen, or what
the evidence found). Networks with a second seed keep the decay that the first one chose. Results are kept as they come,
in docs/results/evidence_training.json: a run that was killed goes on from there.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
from common import COLOURS, RESULTS, arguments, images, report, save, table
from torch import Tensor, nn

import lapis

RATE, BATCH = 1e-3, 128
EVALUATIONS = {"mlp": 15, "cnn": 10}
"""Times that `lapis.train` tunes, evenly through training, from the first of these on."""
TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "mlp": "MLP", "cnn": "CNN"}


def network(kind: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    if kind == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)
        )
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 49, 100), nn.ReLU(), nn.Linear(100, 10),
    )  # fmt: skip


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
    """One network on one data set: the pieces of work that are compared."""

    kind: str
    data: str
    n: int | None
    n_test: int | None
    epochs: int
    seed: int

    def __post_init__(self) -> None:
        self.x, self.y, self.x_test, self.y_test = images(self.data, self.n, self.n_test, self.seed)

    def tried(self, decay: float) -> dict[str, Any]:
        held = len(self.x) // 10
        model = decayed(self.kind, self.x[held:], self.y[held:], decay, self.epochs, self.seed)
        return {
            "held_out": judged(model, self.x[:held], self.y[:held])[0],
            "test": judged(model, self.x_test, self.y_test)[0],
        }

    def final(self, decay: float) -> dict[str, Any]:
        """On all data: with the decay given, by the evidence, and their difference image by image."""
        begun = time.process_time()
        plain = decayed(self.kind, self.x, self.y, decay, self.epochs, self.seed)
        middle = time.process_time()
        mine = network(self.kind, self.seed)
        step = max(1, self.epochs // EVALUATIONS[self.kind])
        tuned = lapis.train(
            mine, (self.x, self.y), "classification", epochs=self.epochs, burn_in=step, every=step,
            structure="kronecker", curvature="sampled", optimiser=adam, learning_rate=RATE, batch_size=BATCH,
            seed=self.seed,
        )  # fmt: skip
        ended = time.process_time()
        fixed = lapis.laplace(
            plain, (self.x, self.y), "classification", structure="kronecker", curvature="sampled", prior=decay,
            batch_size=BATCH,
        )  # fmt: skip
        one, two = (judged(model, self.x_test, self.y_test) for model in (plain, mine))
        record = tuned.training
        assert record is not None
        return {
            "cv": one[0] | {
                "train": judged(plain, self.x, self.y)[0],
                "linearised": linearised(fixed, self.x_test, self.y_test),
                "training_seconds": round(middle - begun, 1),
            },
            "evidence": two[0] | {
                "train": judged(mine, self.x, self.y)[0],
                "linearised": linearised(tuned, self.x_test, self.y_test),
                "training_seconds": round(ended - middle, 1),
                "precisions": tuned.weight_prior.precision.tolist(),
                "gamma": float(tuned.effective_parameters()),
                "weights": tuned.n_weights,
                "log_evidence": record.log_evidence,
                "evaluated": record.evaluated,
                "best_epoch": record.best_epoch,
                "held": record.held,
            },
            "gain": {"accuracy": paired(100 * two[1], 100 * one[1]), "log_likelihood": paired(two[2], one[2])},
        }  # fmt: skip


class Results:
    """Pieces of work by name, each done once, in a file that is rewritten after each."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.path = RESULTS / f"{name}.json"
        self.held: dict[str, Any] = {"settings": settings}
        if self.path.exists():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["settings"] == settings:
                self.held = found

    def get(self, name: str, work: Callable[..., dict[str, Any]], *arguments: float) -> dict[str, Any]:
        if name not in self.held:
            begun = time.process_time()
            self.held[name] = work(*arguments) | {"cpu_seconds": round(time.process_time() - begun, 1)}
            self.path.write_text(json.dumps(self.held, indent=1), encoding="utf-8")
            print(name, self.held[name], flush=True)  # noqa: T201
        found: dict[str, Any] = self.held[name]
        return found


def row(case: Case, decay: float, found: dict[str, Any], searched: float) -> tuple[str, ...]:
    cv, mine, gain = found["cv"], found["evidence"], found["gain"]
    cells = [TITLES[case.data], TITLES[case.kind], f"{case.seed}", f"{decay:g}"]
    for name, digits in (("accuracy", 2), ("log_likelihood", 4)):
        cells += [f"{cv[name]:.{digits}f}", f"{mine[name]:.{digits}f}"]
        cells += [f"{gain[name]['mean']:+.{digits}f} ± {gain[name]['se']:.{digits}f}"]
    for link in ("mc", "probit"):
        cells += [f"{cv['linearised'][link]:.4f}, {mine['linearised'][link]:.4f}"]
    cells += [", ".join(f"{p:.3g}" for p in mine["precisions"]), f"{mine['gamma']:,.0f} of {mine['weights']:,}"]
    return (*cells, f"{searched + cv['training_seconds']:.0f} s", f"{mine['training_seconds']:.0f} s")


HEAD = (
    "data", "network", "seed", "decay", "acc, CV", "acc, evidence", "gain", "log-lik, CV", "log-lik, evidence", "gain",
    "Laplace, mc: CV, evidence", "Laplace, probit: CV, evidence", "precisions found", "gamma", "CPU, CV",
    "CPU, evidence",
)  # fmt: skip


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    n, n_test = (2000, 2000) if chosen.quick else (None, None)
    epochs = {"mlp": 60, "cnn": 20}
    seeds = {"mlp": 1 if chosen.quick else 2, "cnn": 1}
    grid = [10.0, 100.0] if chosen.quick else [1.0, 10.0, 100.0]
    settings = {"n": n, "epochs": epochs, "seed": chosen.seed, "rate": RATE, "batch": BATCH}
    results = Results("evidence_training_quick" if chosen.quick else "evidence_training", settings)
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), layout="constrained")
    rows, chosen_before = [], {}
    pairs = [(kind, data) for kind in ("mlp", "cnn") for data in ("fashion_mnist", "mnist")]
    for axis, (kind, data) in zip(axes, pairs, strict=True):
        case, key = Case(kind, data, n, n_test, epochs[kind], chosen.seed), f"{data} {kind}"
        cells = [results.get(f"{key} decay {decay:g}", case.tried, decay) for decay in grid]
        decay, _ = max(zip(grid, cells, strict=True), key=lambda pair: pair[1]["held_out"]["log_likelihood"])
        searched = sum(cell["cpu_seconds"] for cell in cells)
        found = results.get(f"{key} final {decay:g}", case.final, decay)
        rows.append(row(case, decay, found, searched))
        blue, red = COLOURS[:2]
        scores = [cell["test"]["log_likelihood"] for cell in cells]
        axis.semilogx(grid, scores, "o-", color=blue, label="grid, 90% of the data")
        axis.plot(decay, found["cv"]["log_likelihood"], "*", ms=13, color=blue, label="chosen, all data")
        axis.axhline(found["evidence"]["log_likelihood"], color=red, label="by the evidence")
        axis.set(title=f"{TITLES[data]}, {TITLES[kind]}", xlabel="weight decay")
        chosen_before[kind, data] = decay, searched
    for (kind, data), (decay, searched) in chosen_before.items():
        for seed in range(chosen.seed + 1, chosen.seed + seeds[kind]):
            case = Case(kind, data, n, n_test, epochs[kind], seed)
            found = results.get(f"{data} {kind} final {decay:g} seed {seed}", case.final, decay)
            rows.append(row(case, decay, found, searched))
    axes[0].set_ylabel("test log likelihood")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, "evidence_training", chosen)
    size, decays = "All 60,000" if n is None else f"{n:,}", ", ".join(f"{decay:g}" for decay in grid)
    text = (
        f"{size} training images, {epochs['mlp']} epochs (MLP) and {epochs['cnn']} (CNN), decay grid {decays}. "
        f"Gains are evidence - CV, ± one standard error over test images, paired.\n\n{table(HEAD, rows)}"
    )
    report("evidence_training", text, chosen)


if __name__ == "__main__":
    main()
