"""Every method under shift: turned digits, and garments with noise, blur, less contrast, and moved.

The networks see upright, clean images only: 2,000 of MNIST or Fashion-MNIST, for 25 epochs. 250 test images are
turned by 0 to 180 degrees (steps of 15), or corrupted at five strengths. Convolutions of stride 2 with 8 and 16
channels and 32 hidden units, 28,874 weights. Laplace methods are tuned by the evidence on the training data, without
validation data; subnetworks have 1,000 weights, of largest variance under a diagonal Laplace posterior or under SWAG;
five members; columns "evidence" keep the evidence's width, whatever training data lose by it (the subnetwork is
SWAG's); 30 drawn networks; variational inference takes 800 steps from the trained weights. A third setting has 10,000
images of MNIST for 10 epochs, subnetworks of 4,000 weights, and 2,000 steps of variational inference. Rows are kept in
docs/results/shift.json: a run that was killed goes on from there. Networks are kept in .cache/shift/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from methods import command
from methods.fits import CLASSIFIERS, Method, laplace, subnetwork, swag
from methods.images import (
    Images,
    convolutional,
    small_digits,
    stored,
)
from methods.rows import Row, read
from methods.tables import by_column, mean, scored
from methods.task import Task
from torch import Tensor, nn
from trust.networks import Training

from lapis import metrics
from lapis.data.shifts import DEGREES, STRENGTHS, Shift, corruptions, rotations

COLUMNS = CLASSIFIERS | {
    "Kronecker, evidence": Method(laplace("kronecker", tolerated_loss=None)),
    "subnetwork, evidence": Method(subnetwork(swag, tolerated_loss=None)),
}
"""The last two have the evidence's width: `tune` without a limit to the loss on training data."""
SCORES = {"nll": "NLL", "ece": "ECE", "accuracy": "accuracy"}


@dataclass(frozen=True)
class Setting:
    title: str
    images: Callable[[int], Images]
    shifts: dict[str, Shift]
    """By name; the first is none."""
    make: Callable[[float], nn.Module]
    training: Training
    variational_steps: int
    subnetwork: int = 1000


def _network(dropout: float) -> nn.Module:
    return convolutional((1, 28), (8, 16), 32, 10, 5, dropout)


def _small_network(dropout: float) -> nn.Module:
    return convolutional((1, 8), (4, 8), 16, 8, 3, dropout)


SETTINGS = {
    "rotated_mnist": Setting(
        "MNIST, turned", lambda seed: stored("mnist", "fashion_mnist", seed, 2000, 250), rotations(), _network,
        Training(25), 800,
    ),
    "corrupted_fashion": Setting(
        "Fashion-MNIST, corrupted", lambda seed: stored("fashion_mnist", "mnist", seed, 2000, 250), corruptions(),
        _network, Training(25), 800,
    ),
    "rotated_mnist_10k": Setting(
        "10,000 of MNIST, turned", lambda seed: stored("mnist", "fashion_mnist", seed, 10_000, 250),
        rotations(), _network, Training(10), 2000, 4000,
    ),
}  # fmt: skip
_BRIEF = Training(15, rate=1e-2, batch=32)
QUICK = {
    "rotated_digits": Setting("digits, turned", small_digits, rotations(), _small_network, _BRIEF, 60, 50),
    "corrupted_digits": Setting("digits, corrupted", small_digits, corruptions(), _small_network, _BRIEF, 60, 50),
}
QUICK_COLUMNS = ("plain", "last layer", "subnetwork, by SWAG", "SWAG", "dropout", "ensemble")


@dataclass
class Problem:
    """A task, and its shifted test inputs by the shift's name."""

    task: Task
    inputs: dict[str, Tensor]
    classes: Tensor


def load(name: str, seed: int, cache: Path) -> Problem:
    setting = (SETTINGS | QUICK)[name]
    images = setting.images(seed)
    task = Task(
        name, seed, images.standardised(images.train), images.standardised(images.validation), "classification",
        setting.make, setting.training, cache, variational_steps=setting.variational_steps,
        subnetwork=setting.subnetwork,
    )  # fmt: skip
    pixels, classes = images.test
    return Problem(task, {key: images.standard(shift(pixels)) for key, shift in setting.shifts.items()}, classes)


def measure(problem: Problem, column: str) -> Row:
    """Scores for every shift, in their order."""
    method = COLUMNS[column]
    started = time.process_time()
    posterior = method.posterior(problem.task)
    fitted = time.process_time()
    probs = posterior.predict(torch.cat(list(problem.inputs.values())), **method.options, progress=False).probs
    parts = probs.detach().split(len(problem.classes))
    spent = {"fit_seconds": fitted - started, "predict_seconds": time.process_time() - fitted}
    scores = {name: [float(getattr(metrics, name)(part, problem.classes)) for part in parts] for name in SCORES}
    return {**scores, **{name: round(value, 2) for name, value in spent.items()}}


# -- the report ---------------------------------------------------------------------------------------------


def kinds(setting: Setting) -> dict[str, list[int]]:
    """Groups of shifts by their place: corruptions by kind, angles as one; each group has its shifts in order."""
    names = list(setting.shifts)
    if names[0] == "0":
        return {"turned": list(range(1, len(names)))}
    return {kind: [place for place, name in enumerate(names) if name.startswith(kind)] for kind in STRENGTHS}


def setting_report(rows: list[Row], name: str, setting: Setting) -> str:
    found = by_column(rows, name, COLUMNS)
    if not found:
        return ""
    shifted = range(1, len(setting.shifts))

    def over(score: str, places: list[int] | range) -> Callable[[Row], float]:
        return lambda row: mean([row[score][place] for place in places])

    summary = {}
    for score, label in SCORES.items():
        summary |= {label: over(score, [0]), f"{label}, shifted": over(score, shifted)}
    higher = {"accuracy", "accuracy, shifted"}
    text = f"## {setting.title}\n\n{scored(found, summary, higher)}\n\n"
    groups = kinds(setting)
    if len(groups) > 1:
        detail = {f"NLL, {kind}": over("nll", places) for kind, places in groups.items()}
    else:
        wanted = {str(angle) for angle in (30, 60, 90, 120, 150, 180)}
        places = {key: place for place, key in enumerate(setting.shifts) if key in wanted}
        detail = {f"NLL, {key}°": over("nll", [place]) for key, place in places.items()}
    order = sorted(found, key=lambda column: mean([over("nll", shifted)(row) for row in found[column]]))
    first = {column.split(",")[0] for column in order[:2]} == {"subnetwork", "ensemble"}
    return (
        f"{text}{scored(found, detail)}\n\nBy the mean NLL under shift, best first: {'; '.join(order)}. Subnetwork and "
        f"ensemble first: {'yes' if first else 'no'}."
    )


def figure(rows: list[Row], settings: dict[str, Setting]) -> plt.Figure:
    """Scores against the angle, or against the strength (mean over kinds of corruption)."""
    shown = [name for name in settings if by_column(rows, name, COLUMNS)]
    drawn, axes = plt.subplots(
        len(shown), 3, figsize=(12.5, 3.5 * len(shown)), layout="constrained", squeeze=False, sharex="row"
    )
    others = [column for column in CLASSIFIERS if column != "plain"]
    colours = {"plain": "black", **dict(zip(others, (*plt.get_cmap("tab10").colors, "#1b3a4b"), strict=True))}
    colours |= {"Kronecker, evidence": colours["Kronecker"], "subnetwork, evidence": colours["subnetwork, by SWAG"]}
    handles: dict[str, object] = {}
    for line, name in zip(axes, shown, strict=True):
        setting, groups = settings[name], list(kinds(settings[name]).values())
        turned = len(groups) == 1
        x = DEGREES if turned else range(len(groups[0]) + 1)
        for axis, (score, label) in zip(line, SCORES.items(), strict=True):
            for column, each in by_column(rows, name, COLUMNS).items():
                values = [mean([row[score][place] for row in each]) for place in range(len(setting.shifts))]
                steps = range(len(groups[0]))
                y = [values[0], *(mean([values[places[step]] for places in groups]) for step in steps)]
                style = {"lw": 2.4, "ls": "--"} if column == "plain" else {"lw": 1.6}
                if column.endswith("evidence"):
                    style["ls"] = ":"
                (handles[column],) = axis.plot(x, y, color=colours[column], label=column, **style)
            axis.set(title=f"{setting.title}: {label}", xlabel="degrees" if turned else "strength")
            axis.set_xticks(range(0, 181, 45) if turned else x)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
    drawn.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
    return drawn


def report(chosen: argparse.Namespace) -> None:
    rows, settings = read(chosen.rows), QUICK if chosen.quick else SETTINGS
    parts = [part for name, setting in settings.items() if (part := setting_report(rows, name, setting))]
    if not parts:
        return
    note = "Means over seeds ± their standard error; shifted: the mean over all shifts; the best in bold."
    about = command.About("Under shift", __doc__ or "", note, "Scores under shift")
    command.write_page(chosen, about, parts, rows, figure(rows, settings))


def main() -> None:
    chosen = command.arguments("shift", __doc__, (SETTINGS, QUICK), (COLUMNS, QUICK_COLUMNS))
    if not chosen.report:
        command.fill(
            chosen, lambda name, seed: load(name, seed, chosen.cache), measure, ("fit_seconds", "predict_seconds")
        )
    report(chosen)


if __name__ == "__main__":
    main()
