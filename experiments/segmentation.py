"""Segmentation with doubt for every pixel: digits scattered over textured ground, and objects never seen.

The script makes the images (28 x 28 pixels; 128 for training, 4 for the test): smooth noise and stripes for ground, in
each quarter perhaps a digit 0 to 3. A small U-net (26,749 weights) says for every pixel whether it is ground or which
digit. Half of the test images also hold a digit 4 to 9, which no training image has. Doubt should be large on
boundaries between classes, on these unknown objects, and where the network is wrong. Laplace posteriors have prior
precisions by the evidence (sampled Fisher information; width one), the ensemble three members, dropout and drawn
networks 30 draws. Entropy is the whole doubt, mutual information the part that is about the weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import COLOURS
from methods import command
from methods.fits import DRAWN, Method, dropout, ensemble, laplace, plain
from methods.rows import Row, read
from methods.tables import by_column, failures, mean, scored
from methods.task import Task
from sklearn.datasets import load_digits
from torch import Tensor, nn
from trust.data import Labelled, pixels_of
from trust.networks import Training

import lapis
from lapis import metrics
from lapis.data import blurred

KNOWN = 4
"""Digits 0 to 3 are classes 1 to 4; class 0 is ground."""
KRONECKER = laplace("kronecker", tolerated_loss=None)
COLUMNS = {
    "plain": Method(plain),
    "last layer": Method(laplace("dense", "last_layer", tolerated_loss=None)),
    "Kronecker": Method(KRONECKER),
    "Kronecker, sampled": Method(KRONECKER, DRAWN | {"method": "sampled"}),
    "dropout": Method(dropout, DRAWN),
    "ensemble": Method(ensemble),
}
QUICK_COLUMNS = ("plain", "last layer", "dropout", "ensemble")
COVERAGES = tuple(step / 20 for step in range(10, 21))


# -- data and network ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    size: int
    """Width of the images."""
    digits: Callable[[], Labelled]
    train: int
    test: int
    training: Training


def mnist_digits() -> Labelled:
    """Shrunk to 14 x 14 pixels, of which the outermost are empty: 12 x 12."""
    x, y = pixels_of("mnist", "train")
    return nn.functional.avg_pool2d(x[:20_000], 2)[:, 0, 1:-1, 1:-1], y[:20_000]


def small_digits() -> Labelled:
    """scikit-learn's, 8 x 8 pixels with two empty columns: cut to 7 x 7."""
    found = load_digits()
    return torch.from_numpy(found.images).float()[:, :7, :7] / 16, torch.from_numpy(found.target)


SETTINGS = {"mnist": Setting(28, mnist_digits, 128, 4, Training(75, rate=6e-3, batch=16))}
QUICK = {"digits": Setting(16, small_digits, 64, 4, Training(30, rate=1e-2, batch=16))}


def ground(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Smooth noise and stripes of random direction, about 0 to .6."""
    noise = blurred(torch.randn(count, 1, size, size, generator=generator), 1.0)
    turn, phase, step = torch.rand(3, count, 1, 1, generator=generator)
    down, across = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    wave = torch.sin((0.4 + 0.8 * step) * (down * (6.28 * turn).cos() + across * (6.28 * turn).sin()) + 6.28 * phase)
    return (0.3 + 0.35 * noise + 0.12 * wave[:, None]).clamp(0, 0.6)


def scenes(setting: Setting, count: int, unknown: bool, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images (N, 1, S, S), classes (N, S, S), and where unknown objects are (N, S, S)."""
    generator = torch.Generator().manual_seed(seed)
    digits, labels = setting.digits()
    split = len(digits) // 2  # unknown objects and test digits are of other images than training's
    pool = torch.arange(split, len(digits)) if unknown else torch.arange(split)
    familiar, strange = pool[labels[pool] < KNOWN], pool[labels[pool] >= KNOWN]
    x = ground(count, setting.size, generator)
    y = torch.zeros(count, setting.size, setting.size, dtype=torch.int64)
    novel = torch.zeros_like(y, dtype=torch.bool)
    half, width = setting.size // 2, digits.shape[-1]

    def pick(choices: Tensor) -> int:
        return int(choices[int(torch.randint(len(choices), (), generator=generator))])

    for number in range(count):
        odd = int(torch.randint(4, (), generator=generator)) if unknown and number % 2 else -1
        for quarter in range(4):
            if quarter != odd and float(torch.rand((), generator=generator)) > 0.6:
                continue
            chosen = pick(strange if quarter == odd else familiar)
            corner = torch.tensor([quarter // 2, quarter % 2]) * half
            top, left = (corner + torch.randint(half - width + 1, (2,), generator=generator)).tolist()
            place = (number, slice(top, top + width), slice(left, left + width))
            ink, object_pixels = digits[chosen], digits[chosen] > 0.35
            x[:, 0][place] = x[:, 0][place] * (1 - ink) + ink * (0.75 + 0.25 * torch.rand((), generator=generator))
            if quarter == odd:
                novel[place] |= object_pixels
            else:
                y[place] = torch.where(object_pixels, labels[chosen] + 1, y[place])
    return 4 * (x - 0.35), y, novel


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


class UNet(nn.Module):
    """Three scales; dropout on the coarsest, as before the head (of 8 channels) it kept digits from being learnt."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.fine, self.middle, self.coarse = _convolutions(1, 8), _convolutions(8, 16), _convolutions(16, 32)
        self.up_middle = nn.Sequential(nn.Conv2d(48, 16, 3, padding=1), nn.ReLU())
        self.up_fine = nn.Sequential(nn.Conv2d(24, 8, 3, padding=1), nn.ReLU())
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Conv2d(8, KNOWN + 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        middle = self.middle(nn.functional.max_pool2d(fine, 2))
        coarse = self.drop(self.coarse(nn.functional.max_pool2d(middle, 2)))
        up = self.up_middle(torch.cat([nn.functional.interpolate(coarse, scale_factor=2.0), middle], 1))
        up = self.up_fine(torch.cat([nn.functional.interpolate(up, scale_factor=2.0), fine], 1))
        return self.head(up)


# -- scores -------------------------------------------------------------------------------------------------


@dataclass
class Problem:
    task: Task
    x: Tensor
    y: Tensor
    novel: Tensor


def load(name: str, seed: int, cache: Path) -> Problem:
    setting = (SETTINGS | QUICK)[name]
    x, y, _ = scenes(setting, setting.train, False, seed)
    task = Task(
        name, seed, (x, y), (x, y), lapis.Categorical(channels="first"), UNet, setting.training, cache, members=3
    )  # fmt: skip
    return Problem(task, *scenes(setting, setting.test, True, 10_000 + seed))


def boundaries(y: Tensor) -> Tensor:
    """Pixels with a pixel of another class beside them."""
    edge = torch.zeros_like(y, dtype=torch.bool)
    for axis in (1, 2):
        differ = y.diff(dim=axis) != 0
        first, last = [slice(None)] * 3, [slice(None)] * 3
        first[axis], last[axis] = slice(None, -1), slice(1, None)
        edge[tuple(first)] |= differ
        edge[tuple(last)] |= differ
    return edge


def measure(problem: Problem, column: str) -> Row:
    method = COLUMNS[column]
    started = time.process_time()
    posterior = method.posterior(problem.task)
    fitted = time.process_time()
    prediction = posterior.predict(problem.x, **method.options, progress=False)
    probs = prediction.probs.detach().movedim(1, -1)
    doubts = {"entropy": prediction.entropy.detach(), "mutual": prediction.mutual_information.detach()}
    seconds = {"fit_seconds": fitted - started, "predict_seconds": time.process_time() - fitted}
    known, edge = ~problem.novel, boundaries(problem.y)
    inside = known & ~edge
    objects = inside & (problem.y > 0)
    wrong = (probs.argmax(-1) != problem.y) & known
    scores = {
        "nll": float(metrics.nll(probs[known], problem.y[known])),
        "ece": float(metrics.ece(probs[known], problem.y[known])),
        "accuracy": float(metrics.accuracy(probs[known], problem.y[known])),
        "error_auroc": float(metrics.auroc(doubts["entropy"][known], wrong[known])),
    }
    for name, doubt in doubts.items():
        for region, where in (("ground", inside & (problem.y == 0)), ("digits", objects), ("edges", known & edge)):
            scores[f"{name}_{region}"] = float(doubt[where].mean())
        scores[f"{name}_unknown"] = float(doubt[problem.novel].mean())
        scores[f"{name}_auroc"] = float(metrics.ood_auroc(doubt[objects], doubt[problem.novel]))
    curve = metrics.risk_coverage(doubts["entropy"][known], wrong[known].double())
    risks = [float(curve.risk[max(0, round(share * len(curve.risk)) - 1)]) for share in COVERAGES]
    if problem.task.seed == 0:
        problem.task.cache.mkdir(parents=True, exist_ok=True)
        path = problem.task.cache / f"maps-{column}.npz"
        shown = {"classes": probs.argmax(-1), "x": problem.x, "y": problem.y, "novel": problem.novel, **doubts}
        np.savez(path, **{key: value[:4].numpy() for key, value in shown.items()})
    return {**scores, "risk": risks, **{name: round(value, 1) for name, value in seconds.items()}}


# -- the report ---------------------------------------------------------------------------------------------

TABLES = {
    "Pixels of known classes": {
        "accuracy": "accuracy", "NLL": "nll", "ECE": "ece", "AUROC, errors by entropy": "error_auroc",
    },
    "Mean entropy": {
        "ground": "entropy_ground", "digits": "entropy_digits", "edges": "entropy_edges", "unknown": "entropy_unknown",
    },
    "Mean mutual information": {
        "ground": "mutual_ground", "digits": "mutual_digits", "edges": "mutual_edges", "unknown": "mutual_unknown",
    },
    "AUROC of unknown objects against known ones (pixels off the edges)": {
        "entropy": "entropy_auroc", "mutual information": "mutual_auroc",
    },
}  # fmt: skip
HIGHER = ("accuracy", "AUROC, errors by entropy", "unknown", "edges", "entropy", "mutual information")


def maps(cache: Path) -> plt.Figure | None:
    """Two images, the second with an unknown object: classes, entropy and mutual information by method."""
    held = {column: np.load(cache / f"maps-{column}.npz") for column in COLUMNS if _drawn(cache, column)}
    if not held:
        return None
    methods = [column for column in held if column != "plain"]
    shown = (0, 1)
    drawn, axes = plt.subplots(
        2 * len(shown), 2 + len(methods), figsize=(2.05 * (2 + len(methods)), 4.2 * len(shown)), layout="constrained"
    )
    first = next(iter(held.values()))
    for number in shown:
        upper, lower = axes[2 * number], axes[2 * number + 1]
        truth = np.where(first["novel"][number], KNOWN + 1, first["y"][number])
        panels = [(upper[0], "image", first["x"][number, 0], "gray", None), (upper[1], "truth", truth, "tab10", 9)]
        panels.append((lower[0], "plain: classes", held.get("plain", first)["classes"][number], "tab10", 9))
        entropy = held.get("plain", first)["entropy"][number]
        panels.append((lower[1], "plain: entropy", entropy, "magma", np.log(KNOWN + 1)))
        for place, column in enumerate(methods):
            panels.append((upper[place + 2], f"{column}:\nentropy", held[column]["entropy"][number], "magma", 1.6))
            mutual = held[column]["mutual"][number]
            panels.append((lower[place + 2], "mutual information", mutual, "viridis", max(0.05, float(mutual.max()))))
        for axis, title, values, colours, most in panels:
            axis.imshow(values, cmap=colours, vmin=None if most is None else 0, vmax=most, interpolation="nearest")
            axis.contour(
                first["novel"][number], [0.5], colors="white" if colours != "tab10" else "black", linewidths=0.7
            )
            axis.set_title(title, fontsize=9)
            axis.set(xticks=[], yticks=[])
    return drawn


def _drawn(cache: Path, column: str) -> bool:
    return (cache / f"maps-{column}.npz").exists()


def risks(found: dict[str, list[Row]]) -> plt.Figure:
    """Error of the pixels that are kept, when the most doubtful are left out."""
    drawn, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for number, (column, rows) in enumerate(found.items()):
        values = [mean([row["risk"][place] for row in rows]) for place in range(len(COVERAGES))]
        axis.plot(COVERAGES, values, label=column, lw=1.6, color=("black", *COLOURS, "#7a5195")[number])
    axis.set(xlabel="share of pixels kept (least entropy first)", ylabel="error of these")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    return drawn


def report(chosen: argparse.Namespace) -> None:
    rows = read(chosen.rows)
    found = by_column(rows, next(iter(QUICK if chosen.quick else SETTINGS)), COLUMNS)
    if not found:
        return
    chosen.figures.mkdir(parents=True, exist_ok=True)
    for figure, ending in ((maps(chosen.cache), ""), (risks(found), "_errors")):
        if figure is not None:
            figure.savefig(chosen.figures / f"{chosen.name}{ending}.png", dpi=130)
            plt.close(figure)
    parts = ["# Segmentation\n\n" + " ".join((__doc__ or "").split())]
    for title, scores in TABLES.items():
        chosen_scores = {label: (lambda row, key=key: row[key]) for label, key in scores.items()}
        without = {column: each for column, each in found.items() if "utual" not in title or column != "plain"}
        parts.append(f"## {title}\n\n{scored(without, chosen_scores, HIGHER)}")
    parts += [f"![Doubt of every pixel](../figures/{chosen.name}.png)", "White lines: unknown objects."]
    parts.append(f"![Errors against doubt](../figures/{chosen.name}_errors.png)")
    command.write_report(chosen, "\n\n".join(parts) + failures(rows))


def main() -> None:
    chosen = command.arguments("segmentation", __doc__, (SETTINGS, QUICK), (COLUMNS, QUICK_COLUMNS))
    if not chosen.report:
        command.fill(
            chosen,
            lambda name, seed: load(name, seed, chosen.cache),
            measure,
            ("accuracy", "nll", "error_auroc", "fit_seconds", "predict_seconds"),
        )
    report(chosen)


if __name__ == "__main__":
    main()
