"""Linearised against sampled predictions of the same Kronecker posterior: accuracy, NLL, ECE and OOD-AUROC.

A LeNet for Fashion-MNIST (46,678 weights, 6,000 images; unknown: MNIST) and a convolutional network for CIFAR-10
(43,898 weights, 9,000 images, shifted and mirrored; unknown: CIFAR-100), trained for 20 epochs, after which they fit
training and test images alike. So that there is overconfidence to mend, both once more, with fewer images and more
epochs: the LeNet with 2,000 images and 60 epochs at twice the rate, the other with 4,000 images and 40 epochs,
neither shifted nor mirrored. One Kronecker posterior over all weights, with three choices of its width: by the
evidence alone, by `tune` with its leave-one-out width (the default), and by validation data (`calibrate`). Each
predicts by linearising the network, and by 30 networks drawn from it; 1,000 test images. Published figures are those
of Immer et al. (2021): larger networks, all the data, the prior by cross-validation, SVHN as unknown for CIFAR-10.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from common import COLOURS, table
from methods import command
from methods.fits import DRAWN, KRONECKER, Method, calibrated, laplace, plain
from methods.images import Images, convolutional, small_digits, stored
from methods.rows import Row, read
from methods.tables import by_column, mean, scored
from methods.task import Task
from torch import Tensor, nn
from trust.networks import Training, lenet
from trust.scores import entropy

from lapis import metrics

SAMPLED = DRAWN | {"method": "sampled"}
EVIDENCE, HELD_OUT = laplace("kronecker", tolerated_loss=None), calibrated(KRONECKER)
COLUMNS = {
    "plain": Method(plain),
    "sampled, evidence": Method(EVIDENCE, SAMPLED),
    "linearised, evidence": Method(EVIDENCE),
    "sampled, tuned": Method(KRONECKER, SAMPLED),
    "linearised, tuned": Method(KRONECKER),
    "sampled, calibrated": Method(HELD_OUT, SAMPLED),
    "linearised, calibrated": Method(HELD_OUT),
}
SCORES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "ood_auroc": "OOD-AUROC"}
HIGHER = ("accuracy", "OOD-AUROC")
PUBLISHED = {
    "fashion": {
        "plain": (0.9139, 0.258, 0.017, 0.864),
        "sampled": (0.8442, 0.942, 0.411, 0.945),
        "linearised": (0.9225, 0.244, 0.012, 0.955),
    },
    "cifar": {
        "plain": (0.8092, 0.605, 0.066, 0.792),
        "sampled": (0.2174, 2.114, 0.095, 0.689),
        "linearised": (0.8137, 0.601, 0.084, 0.843),
    },
}
"""Accuracy, NLL, ECE and OOD-AUROC."""


@dataclass(frozen=True)
class Setting:
    title: str
    images: Callable[[int], Images]
    make: Callable[[float], nn.Module]
    training: Training


SETTINGS = {
    "fashion": Setting(
        "Fashion-MNIST, LeNet", lambda seed: stored("fashion_mnist", "mnist", seed, 6000, 1000), lambda _: lenet(),
        Training(20),
    ),
    "fashion_long": Setting(
        "Fashion-MNIST, 2,000 images, LeNet", lambda seed: stored("fashion_mnist", "mnist", seed, 2000, 1000),
        lambda _: lenet(), Training(60, rate=2e-3),
    ),
    "cifar": Setting(
        "CIFAR-10 subset, convolutional", lambda seed: stored("cifar10_small", "cifar100_ood", seed, 9000, 1000),
        lambda _: convolutional((3, 32), (16, 32, 48), 32, 10, 3), Training(20, rate=2e-3, augment=True),
    ),
    "cifar_long": Setting(
        "CIFAR-10, 4,000 images, convolutional",
        lambda seed: stored("cifar10_small", "cifar100_ood", seed, 4000, 1000),
        lambda _: convolutional((3, 32), (16, 32, 48), 32, 10, 3), Training(40, rate=2e-3),
    ),
}  # fmt: skip
QUICK = {
    "digits": Setting(
        "digits", small_digits, lambda _: convolutional((1, 8), (4, 8), 16, 8, 3), Training(15, rate=1e-2, batch=32)
    )
}


@dataclass
class Problem:
    task: Task
    test: Tensor
    classes: Tensor
    unknown: Tensor


def load(name: str, seed: int, cache: Path) -> Problem:
    setting = (SETTINGS | QUICK)[name]
    images = setting.images(seed)
    parts = (images.standardised(part) for part in (images.train, images.validation))
    task = Task(name, seed, *parts, "classification", setting.make, setting.training, cache)
    return Problem(task, *images.standardised(images.test), images.standard(images.ood))


def measure(problem: Problem, column: str) -> Row:
    method = COLUMNS[column]
    started = time.process_time()
    posterior = method.posterior(problem.task)
    both = posterior.predict(torch.cat([problem.test, problem.unknown]), **method.options, progress=False).probs
    probs, strange = both.detach().split([len(problem.test), len(problem.unknown)])
    scores = {name: float(getattr(metrics, name)(probs, problem.classes)) for name in ("accuracy", "nll", "ece")}
    scores["ood_auroc"] = float(metrics.ood_auroc(entropy(probs), entropy(strange)))
    return {**scores, "seconds": round(time.process_time() - started, 2)}


def claims(found: dict[str, list[Row]]) -> list[str]:
    """What is claimed for linearised predictions, judged on the seeds that are there."""

    def of(column: str, score: str) -> float:
        return mean([row[score] for row in found[column]])

    lines = []
    for how in ("evidence", "tuned", "calibrated"):
        linear, drawn = f"linearised, {how}", f"sampled, {how}"
        if not {"plain", linear, drawn} <= set(found):
            continue
        better = {
            "NLL below plain's": of(linear, "nll") < of("plain", "nll"),
            "OOD-AUROC above plain's": of(linear, "ood_auroc") > of("plain", "ood_auroc"),
            "sampled loses more than .05 of accuracy": of(drawn, "accuracy") < of("plain", "accuracy") - 0.05,
            "NLL of sampled above linearised": of(drawn, "nll") > of(linear, "nll"),
        }
        lines.append(f"- {how}: " + "; ".join(f"{text}: {'yes' if holds else 'no'}" for text, holds in better.items()))
    return lines


def setting_report(rows: list[Row], name: str, setting: Setting) -> str:
    found = by_column(rows, name, COLUMNS)
    if not found:
        return ""
    scores: dict[str, Callable[[Row], float]] = {
        label: lambda row, score=score: row[score]  # type: ignore[misc]
        for score, label in SCORES.items()
    }
    text = f"## {setting.title}\n\n{scored(found, scores, HIGHER)}"
    if name in PUBLISHED:
        lines = [[f"{method}, published", *values] for method, values in PUBLISHED[name].items()]
        text += "\n\n" + table(["", *SCORES.values()], lines)
    return "\n\n".join([text, *(["\n".join(claims(found))] if claims(found) else [])])


def figure(rows: list[Row], settings: dict[str, Setting]) -> plt.Figure:
    """A bar for every column, a panel for every score."""
    shown = [name for name in settings if by_column(rows, name, COLUMNS)]
    drawn, axes = plt.subplots(
        len(shown), len(SCORES), figsize=(13, 3 * len(shown)), layout="constrained", squeeze=False, sharey="row"
    )
    tints = {"plain": "#444444", "sampled": COLOURS[1], "linearised": COLOURS[0]}
    for line, name in zip(axes, shown, strict=True):
        found = by_column(rows, name, COLUMNS)
        for axis, (score, label) in zip(line, SCORES.items(), strict=True):
            for place, (column, each) in enumerate(found.items()):
                values = [row[score] for row in each]
                if math.isfinite(mean(values)):
                    axis.barh(-place, mean(values), 0.72, color=tints[column.split(",")[0]])
                    axis.plot(values, [-place] * len(values), "o", ms=2.5, color="black", alpha=0.5)
                    end, text = (max(values), -place), f"{mean(values):.3f}"
                else:  # some class that was the right one had probability zero
                    end, text = (0.0, -place), "infinite"
                axis.annotate(text, end, (5, 0), textcoords="offset points", va="center", size=8)
            axis.set(xticks=[])
            axis.set_title(label, size=10)
            axis.set_yticks([-place for place in range(len(found))], list(found))
            axis.margins(x=0.2)
            axis.spines[["top", "right", "bottom"]].set_visible(False)
        line[0].set_title(f"{settings[name].title}\n", size=12, loc="left", weight="bold")
    return drawn


def report(chosen: argparse.Namespace) -> None:
    rows, settings = read(chosen.rows), QUICK if chosen.quick else SETTINGS
    parts = [part for name, setting in settings.items() if (part := setting_report(rows, name, setting))]
    if not parts:
        return
    note = "Means over seeds ± their standard error; the best in bold."
    about = command.About("Linearised against sampled", __doc__ or "", note, "Linearised against sampled")
    command.write_page(chosen, about, parts, rows, figure(rows, settings))


def main() -> None:
    chosen = command.arguments("linearised", __doc__, (SETTINGS, QUICK), (COLUMNS, COLUMNS))
    if not chosen.report:
        command.fill(chosen, lambda name, seed: load(name, seed, chosen.cache), measure, (*SCORES, "seconds"))
    report(chosen)


if __name__ == "__main__":
    main()
