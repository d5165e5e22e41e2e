"""Training with the evidence in the loop against a weight decay chosen by cross-validation, MNIST and Fashion-MNIST.

The grid trains on 90% of the data for each weight decay, picks the best by the log likelihood of the other 10% (one
fold), and trains again on all of it; evidence training (`lapis.train`) runs once, on all of it, with a prior precision
for each layer. Both have the same networks, first weights, epochs, optimiser and learning rates. Scored on the test
images: the plain network at the weights found (accuracy, mean log likelihood), and the linearised Laplace predictive
(its prior precision is the decay chosen, or what the evidence found). Results are kept as they come, in
docs/results/evidence_training.json: a run that was killed goes on from there.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
from common import COLOURS, RESULTS, arguments, images, report, save, table
from torch import Tensor, nn

import lapis

RATE, BATCH = 1e-3, 128
TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "mlp": "MLP", "cnn": "CNN"}


def network(kind: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    if kind == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)
        )
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 49, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def adam(parameters: list[Tensor], rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=rate, fused=True)


def decayed(kind: str, x: Tensor, y: Tensor, decay: float, epochs: int, seed: int) -> nn.Module:
    """Adam on cross-entropy + decay / (2 N) |theta|^2, with the learning rates of `lapis.train`."""
    model = network(kind, seed)
    optimiser = adam(list(model.parameters()), RATE)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        for group in optimiser.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for part in torch.randperm(len(x), generator=generator).split(BATCH):
            optimiser.zero_grad()
            penalty = sum(p.square().sum() for p in model.parameters()) * decay / (2 * len(x))
            (nn.functional.cross_entropy(model(x[part]), y[part]) + penalty).backward()
            optimiser.step()
    return model


@torch.no_grad()
def score(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy in per cent, and mean log likelihood."""
    logits = torch.cat([model(part) for part in x.split(1000)])
    accuracy = float((logits.argmax(1) == y).double().mean())
    return {"accuracy": 100 * accuracy, "log_likelihood": -float(nn.functional.cross_entropy(logits, y))}


def linearised(posterior: lapis.LaplacePosterior, x: Tensor, y: Tensor) -> float:
    parts = zip(x.split(1000), y.split(1000), strict=True)
    return sum(float(posterior.predict(inputs).log_prob(labels).sum()) for inputs, labels in parts) / len(x)


@dataclass
class Case:
    """One network on one data set: the three pieces of work that are compared."""

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
        return {"held_out": score(model, self.x[:held], self.y[:held]), "test": score(model, self.x_test, self.y_test)}

    def retrained(self, decay: float) -> dict[str, Any]:
        model = decayed(self.kind, self.x, self.y, decay, self.epochs, self.seed)
        posterior = lapis.laplace(
            model, (self.x, self.y), "classification", structure="kronecker", curvature="sampled", prior=decay,
            batch_size=BATCH,
        )  # fmt: skip
        return {
            "test": score(model, self.x_test, self.y_test),
            "linearised": linearised(posterior, self.x_test, self.y_test),
        }

    def by_evidence(self) -> dict[str, Any]:
        model = network(self.kind, self.seed)
        posterior = lapis.train(
            model, (self.x, self.y), "classification", epochs=self.epochs, burn_in=self.epochs // 5,
            every=self.epochs // 10, structure="kronecker", curvature="sampled", optimiser=adam, learning_rate=RATE,
            batch_size=BATCH, seed=self.seed,
        )  # fmt: skip
        record = posterior.training
        assert record is not None
        return {
            "test": score(model, self.x_test, self.y_test),
            "linearised": linearised(posterior, self.x_test, self.y_test),
            "precisions": posterior.weight_prior.precision.tolist(),
            "gamma": float(posterior.effective_parameters()),
            "weights": posterior.n_weights,
            "log_evidence": record.log_evidence,
            "evaluated": record.evaluated,
            "best_epoch": record.best_epoch,
            "held": record.held,
        }


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


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    n, n_test = (2000, 2000) if chosen.quick else (None, None)
    epochs = {"mlp": 20, "cnn": 10}
    grid = [0.1, 10.0, 100.0] if chosen.quick else [1.0, 10.0, 30.0, 100.0]
    settings = {"n": n, "epochs": epochs, "grid": grid, "seed": chosen.seed, "rate": RATE, "batch": BATCH}
    results = Results("evidence_training_quick" if chosen.quick else "evidence_training", settings)
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), layout="constrained")
    rows = []
    pairs = [(kind, data) for kind in ("mlp", "cnn") for data in ("mnist", "fashion_mnist")]
    for axis, (kind, data) in zip(axes, pairs, strict=True):
        case, key = Case(kind, data, n, n_test, epochs[kind], chosen.seed), f"{data} {kind}"
        cells = [results.get(f"{key} decay {decay:g}", case.tried, decay) for decay in grid]
        decay, _ = max(zip(grid, cells, strict=True), key=lambda pair: pair[1]["held_out"]["log_likelihood"])
        again = results.get(f"{key} retrained {decay:g}", case.retrained, decay)
        mine = results.get(f"{key} evidence", case.by_evidence)
        cost = sum(cell["cpu_seconds"] for cell in cells) + again["cpu_seconds"]
        rows.append((
            TITLES[data], TITLES[kind], f"{decay:g}",
            f"{again['test']['accuracy']:.2f}", f"{mine['test']['accuracy']:.2f}",
            f"{again['test']['log_likelihood']:.4f}", f"{mine['test']['log_likelihood']:.4f}",
            f"{again['linearised']:.4f}", f"{mine['linearised']:.4f}",
            ", ".join(f"{p:.3g}" for p in mine["precisions"]), f"{mine['gamma']:,.0f} of {mine['weights']:,}",
            f"{cost:.0f} s", f"{mine['cpu_seconds']:.0f} s",
        ))  # fmt: skip
        blue, red = COLOURS[:2]
        scores = [cell["test"]["log_likelihood"] for cell in cells]
        axis.semilogx(grid, scores, "o-", color=blue, label="grid, 90% of the data")
        axis.plot(decay, again["test"]["log_likelihood"], "*", ms=13, color=blue, label="chosen, all data")
        axis.axhline(mine["test"]["log_likelihood"], color=red, label="by the evidence")
        axis.set(title=f"{TITLES[data]}, {TITLES[kind]}", xlabel="weight decay")
    axes[0].set_ylabel("test log likelihood")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, "evidence_training", chosen)
    head = (
        "data", "network", "decay", "acc, CV", "acc, evidence", "log-lik, CV", "log-lik, evidence", "linearised, CV",
        "linearised, evidence", "precisions found", "gamma", "CPU, CV", "CPU, evidence",
    )  # fmt: skip
    size, decays = "All 60,000" if n is None else f"{n:,}", ", ".join(f"{decay:g}" for decay in grid)
    text = (
        f"{size} training images, {epochs['mlp']} epochs (MLP) and {epochs['cnn']} (CNN), decay grid {decays}.\n\n"
        f"{table(head, rows)}"
    )
    report("evidence_training", text, chosen)


if __name__ == "__main__":
    main()
