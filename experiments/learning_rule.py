"""Optimisers with a posterior against SGD and Adam, and binary networks against the straight-through estimator.

Every optimiser gets the same small grid, the same epochs, batches of 64, and a cosine schedule after a warm-up of a
tenth of the steps. What is not in the grid has the library's defaults; VOGN's temperature rises from .01 to 1 in the
first third. SGD and Adam predict by the trained network, VOGN and IVON by the average of 30 drawn ones. 500 validation
and 2,000 test images (ResNet-20: 1,000); out of distribution: Fashion-MNIST, MNIST, CIFAR-100. Killed runs go on.

First the regime of published comparisons: little weight decay (prior precision 1), training to the end (1,000 images
for 60 epochs; CIFAR-10, without augmentation: 2,000, the ResNet-20, of half the usual width, for 30), and the best
validation accuracy of seed 0 chooses among three learning rates. Then a grid of three learning rates times two prior
precisions (SGD and Adam: as weight decay) on 4,000 images for 20 epochs (CIFAR-10: 2,000, the ResNet-20 for 10),
where the lowest validation NLL of seed 0 chooses.

With 1,000 images draws begin no wider than .03, on CIFAR-10 no wider than .01 (IVON's `hess_init` and VOGN's damping
are 1 / (N width^2)): the defaults are as wide as the weights of these layers.

Binary networks have two hidden layers of 256 units, 4,000 training and 5,000 test images of MNIST, and 20 epochs;
three learning rates each. BayesBiNN predicts by the average of 30 drawn networks, and by the most probable one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from common import table
from matplotlib.ticker import MaxNLocator, NullLocator
from methods import command
from methods.binary import binary_network, binary_picture
from methods.images import Images, small_digits, stored
from methods.rows import NotThere, Row, read
from methods.tables import by_column, mean, scored
from torch import Tensor, nn
from trust.networks import lenet, perceptron, resnet
from trust.scores import entropy

import lapis
from lapis import metrics

BATCH = 64
DRAWS = 30
WARM_UP = 0.1
PRECISIONS = (1.0, 20.0)
NARROW, WIDE = 0.01, 0.03
RATES = {
    "SGD": (0.01, 0.03, 0.1),
    "Adam": (3e-4, 1e-3, 3e-3),
    "VOGN": (0.01, 0.03, 0.1),
    "IVON": (0.1, 0.3, 1.0),
    "BayesBiNN": (3e-5, 1e-4, 3e-4),
    "straight-through": (3e-4, 1e-3, 3e-3),
}
BINARY = ("BayesBiNN", "straight-through")
SCORES: dict[str, Callable[[Row], float]] = {
    "accuracy": lambda row: row["accuracy"],
    "NLL": lambda row: row["nll"],
    "ECE": lambda row: row["ece"],
    "OOD-AUROC": lambda row: row["ood_auroc"],
    "seconds an epoch": lambda row: row["epoch_seconds"],
}


@dataclass(frozen=True)
class Setting:
    images: Callable[[int], Images]
    network: Callable[[], nn.Module]
    epochs: int
    columns: tuple[str, ...] = ("SGD", "Adam", "VOGN", "IVON")
    precisions: tuple[float, ...] = PRECISIONS
    by_accuracy: bool = False
    """The best validation accuracy chooses from the grid, instead of the lowest NLL."""
    width: float | None = None
    """Deviation of the first draws of IVON, and the largest of VOGN; the defaults of the library without it."""

    def options(self, column: str, size: int) -> tuple[float, dict[str, float]]:
        """What the width makes of the options, and a factor of the learning rates in the grid."""
        if self.width is None or column not in ("VOGN", "IVON"):
            return 1.0, {}
        hessian = 1 / (size * self.width**2)
        return (hessian / 0.1, {"damping": hessian}) if column == "VOGN" else (1.0, {"hess_init": hessian})


def lenet_in_colour() -> nn.Sequential:
    """62,006 weights."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def images(name: str, other: str, train: int = 4000, test: int = 2000) -> Callable[[int], Images]:
    return lambda seed: stored(name, other, seed, train, test)


def perceptron_of_mnist() -> nn.Module:
    return perceptron(784, (256, 256), 10)


def weakly(of: Setting, epochs: int = 60, **changed: Any) -> Setting:
    """As published: little weight decay, training to the end, and the accuracy chooses."""
    return replace(of, epochs=epochs, precisions=(1.0,), by_accuracy=True, **changed)


half_resnet = partial(resnet, 3, (8, 16, 32), 3, 1)
cifar = partial(images, "cifar10_small", "cifar100_ood", train=2000)
USUAL = {
    "MNIST MLP": Setting(images("mnist", "fashion_mnist"), perceptron_of_mnist, 20),
    "Fashion-MNIST MLP": Setting(images("fashion_mnist", "mnist"), perceptron_of_mnist, 20),
    "MNIST LeNet": Setting(images("mnist", "fashion_mnist"), lenet, 20),
    "Fashion-MNIST LeNet": Setting(images("fashion_mnist", "mnist"), lenet, 20),
    "CIFAR-10 LeNet": Setting(cifar(), lenet_in_colour, 20, width=NARROW),
    "CIFAR-10 ResNet-20": Setting(cifar(test=1000), half_resnet, 10, width=NARROW),
}
FEW = {"MNIST": images("mnist", "fashion_mnist", 1000), "Fashion-MNIST": images("fashion_mnist", "mnist", 1000)}
SETTINGS = {
    **{
        f"{name} as published": weakly(setting, images=FEW[name.split()[0]], width=WIDE)
        for name, setting in USUAL.items()
        if name.split()[0] in FEW
    },
    "CIFAR-10 LeNet as published": weakly(USUAL["CIFAR-10 LeNet"]),
    "CIFAR-10 ResNet-20 as published": weakly(USUAL["CIFAR-10 ResNet-20"], 30),
    **USUAL,
    "MNIST binary MLP": Setting(
        images("mnist", "fashion_mnist", test=5000), lambda: binary_network(784, 256, 10), 20, BINARY
    ),
}
QUICK = {
    "digits MLP": Setting(small_digits, lambda: perceptron(64, (32,), 8), 20),
    "digits binary MLP": Setting(small_digits, lambda: binary_network(64, 64, 8), 20, BINARY),
}


# -- training -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Probabilities of inputs, the validation NLL after each epoch at the mean weights, and seconds of an epoch."""

    probs: Callable[[Tensor], Tensor]
    network: Callable[[Tensor], Tensor]
    """Probabilities by one network: at the mean of the weights, or by their most probable signs."""
    curve: list[float]
    seconds: float


class StraightThrough:
    """Adam on latent weights whose signs the network uses; the gradient at the signs moves the latent weights."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float) -> None:
        self.params = list(params)
        self.adam = torch.optim.Adam(self.params, lr=lr)

    @contextmanager
    def binary(self) -> Iterator[None]:
        latent = [p.detach().clone() for p in self.params]
        with torch.no_grad():
            for p in self.params:
                p.copy_(torch.where(p >= 0, 1.0, -1.0))
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(self.params, latent, strict=True):
                    p.copy_(value)

    def step(self, closure: Callable[[], Tensor]) -> None:
        with self.binary():
            closure()
        self.adam.step()
        with torch.no_grad():
            for p in self.params:
                p.clamp_(-1, 1)


def optimiser_of(
    column: str, model: nn.Module, rate: float, precision: float, size: int, seed: int, **options: Any
) -> Any:
    source = torch.Generator().manual_seed(seed)
    decay = precision / size
    if column == "SGD":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
    if column == "Adam":
        return torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay)
    if column == "straight-through":
        return StraightThrough(model.parameters(), rate)
    if column == "BayesBiNN":
        return lapis.optim.BayesBiNN(model.parameters(), lr=rate, data_size=size, generator=source)
    common = {"lr": rate, "data_size": size, "prior_precision": precision, "generator": source, **options}
    if column == "VOGN":
        return lapis.optim.VOGN(model, **common)
    return lapis.optim.IVON(model.parameters(), **common)


def share_of_rate(step: int, steps: int) -> float:
    """A linear warm-up over the first tenth of the steps, and a cosine to zero over all."""
    return min(1.0, (step + 1) / (WARM_UP * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def trained(
    make: Callable[[], nn.Module],
    data: Images,
    column: str,
    rate: float,
    precision: float,
    epochs: int,
    seed: int,
    **options: Any,
) -> Trained:
    torch.manual_seed(seed)
    model = make()
    (x, y), (x_held, y_held) = data.standardised(data.train), data.standardised(data.validation)
    optimiser = optimiser_of(column, model, rate, precision, len(x), seed, **options)
    steps = epochs * -(-len(x) // BATCH)
    inner = optimiser.adam if isinstance(optimiser, StraightThrough) else optimiser
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, partial(share_of_rate, steps=steps))
    source = torch.Generator().manual_seed(seed)
    curve, done, started = [], 0, time.process_time()
    for _ in range(epochs):
        model.train()
        for part in torch.randperm(len(x), generator=source).split(BATCH):
            if len(part) < 2:  # batch norm
                continue

            def closure(part: Tensor = part) -> Tensor:
                inner.zero_grad()
                loss = F.cross_entropy(model(x[part]), y[part])
                loss.backward()
                return loss

            if column == "VOGN":  # published: from .01 to 1
                optimiser.param_groups[0]["temperature"] = min(1.0, 0.01 + 3 * done / steps)
            optimiser.step(closure)
            schedule.step()
            done += 1
        model.eval()
        with torch.no_grad(), optimiser.binary() if isinstance(optimiser, StraightThrough) else torch.no_grad():
            curve.append(float(F.cross_entropy(model(x_held), y_held)))
    seconds = (time.process_time() - started) / epochs
    if isinstance(optimiser, StraightThrough):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.where(p >= 0, 1.0, -1.0))
    alone = partial(_alone, model)
    if not hasattr(optimiser, "posterior"):
        return Trained(alone, alone, curve, seconds)
    posterior = optimiser.posterior(model, "classification")
    if column == "BayesBiNN":
        alone = partial(_alone, model, posterior.network.unflatten(posterior.mode))
    return Trained(
        lambda inputs: posterior.predict(inputs, method="sampled", samples=DRAWS).probs, alone, curve, seconds
    )


@torch.no_grad()
def _alone(model: nn.Module, *rest: Any) -> Tensor:
    *weights, inputs = rest
    found: Tensor = torch.func.functional_call(model, weights[0] if weights else {}, inputs)
    return found.softmax(-1)


# -- rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    setting: Setting
    data: Images
    seed: int
    quick: bool
    chosen: dict[str, tuple[float, float]]
    """Learning rate and prior precision of each column, by an earlier seed."""


def work(loaded: Loaded, column: str) -> Row:
    """The best of the grid by the validation images, on the test images."""
    setting, data = loaded.setting, loaded.data
    if column not in setting.columns:
        raise NotThere
    factor, options = setting.options(column, len(data.train[1]))
    precisions = (1.0,) if column in BINARY else setting.precisions
    grid = [(factor * rate, precision) for rate, precision in product(RATES[column], precisions)]
    if loaded.quick:
        grid = grid[2:3]
    if column in loaded.chosen:
        grid = [loaded.chosen[column]]
    x_held, y_held = data.standardised(data.validation)
    best: tuple[float, Trained, float, float] | None = None
    tried = []
    for rate, precision in grid:
        found = trained(setting.network, data, column, rate, precision, setting.epochs, loaded.seed, **options)
        held = found.probs(x_held)
        nll, accuracy = float(metrics.nll(held, y_held)), float(metrics.accuracy(held, y_held))
        tried.append([rate, precision, nll, accuracy])
        score = accuracy if setting.by_accuracy else -nll
        if best is None or score > best[0]:
            best = (score, found, rate, precision)
    assert best is not None
    _, found, rate, precision = best
    x, y = data.standardised(data.test)
    inside, outside = found.probs(x), found.probs(data.standard(data.ood))
    return {
        "accuracy": float(metrics.accuracy(inside, y)),
        "nll": float(metrics.nll(inside, y)),
        "ece": float(metrics.ece(inside, y)),
        "ood_auroc": float(metrics.ood_auroc(entropy(inside), entropy(outside))),
        "network_accuracy": float(metrics.accuracy(found.network(x), y)),
        "network_ece": float(metrics.ece(found.network(x), y)),
        "epoch_seconds": found.seconds,
        "rate": rate,
        "precision": precision,
        "grid": tried,
        "curve": found.curve,
    }


# -- the page -----------------------------------------------------------------------------------------------


def by_prior(rows: list[Row]) -> str:
    """The best validation NLL of the three rates for each prior precision alone."""
    lines = []
    for name in dict.fromkeys(row["setting"] for row in rows):
        found = {row["column"]: row["grid"] for row in rows if row["setting"] == name and len(row.get("grid", ())) == 6}
        for precision in PRECISIONS:
            best = {column: min(point[2] for point in grid if point[1] == precision) for column, grid in found.items()}
            if best:
                cells = [f"{best[column]:.3f}" if column in best else "" for column in ("SGD", "Adam", "VOGN", "IVON")]
                lines.append([name, f"{precision:g}", *cells])
    if not lines:
        return ""
    text = "Validation NLL of seed 0, the best of three learning rates for each prior precision alone."
    return f"## What the prior does\n\n{text}\n\n" + table(
        ["setting", "prior precision", "SGD", "Adam", "VOGN", "IVON"], lines
    )


def write(chosen: argparse.Namespace, settings: dict[str, Setting]) -> None:
    known = {(name, column) for name, setting in settings.items() for column in setting.columns}
    rows = [row for row in read(chosen.rows) if (row["setting"], row["column"]) in known]
    there = [name for name in settings if any(row["setting"] == name and "error" not in row for row in rows)]
    parts = []
    across = min(5, max(1, len(there)))
    down = -(-max(1, len(there)) // across)
    figure, axes = plt.subplots(down, across, figsize=(3.4 * across, 3 * down), squeeze=False)
    for name, at in zip(there, axes.flat, strict=False):
        found = by_column(rows, name, RATES)
        parts.append(f"## {name}\n\n" + scored(found, SCORES, higher=("accuracy", "OOD-AUROC")))
        for column, each in found.items():
            curves = [row["curve"] for row in each]
            means = [mean(values) for values in zip(*curves, strict=True)]
            at.plot(range(1, len(means) + 1), means, label=column, color=f"C{list(RATES).index(column)}")
        at.set(title=fill(name, 32), xlabel="epoch", yscale="log")
        at.xaxis.set_major_locator(MaxNLocator(integer=True))
        at.yaxis.set_major_locator(MaxNLocator(5))
        at.yaxis.set_major_formatter("{x:.2g}")
        at.yaxis.set_minor_locator(NullLocator())
        at.legend(fontsize=7)
    for unused in axes.flat[len(there) :]:
        unused.axis("off")
    for row in axes:
        row[0].set_ylabel("validation NLL at the mean")
    figure.tight_layout()
    parts.append(by_prior(rows))
    parts.append(binary_picture(chosen))
    about = command.About(
        "Optimisers that leave a posterior behind",
        __doc__.split("\n", 1)[1],
        "Means over seeds, with their standard errors. Learning rates and prior precisions chosen are in the JSON.",
        "Convergence: validation NLL of the network at the mean weights, after each epoch",
    )
    command.write_page(chosen, about, parts, rows, figure)


def main() -> None:
    columns = (list(RATES), list(RATES))
    chosen = command.arguments("learning_rule", __doc__, (SETTINGS, QUICK), columns)
    settings = QUICK if chosen.quick else SETTINGS

    def load(name: str, seed: int) -> Loaded:
        best = {
            row["column"]: (row["rate"], row["precision"])
            for row in read(chosen.rows)
            if row["setting"] == name and row["seed"] < seed and len(row.get("grid", ())) > 1
        }
        return Loaded(settings[name], settings[name].images(seed), seed, chosen.quick, best)

    if not chosen.report:
        command.fill(chosen, load, work, ("accuracy", "nll", "ece", "ood_auroc", "rate", "precision"))
    write(chosen, settings)


if __name__ == "__main__":
    main()
