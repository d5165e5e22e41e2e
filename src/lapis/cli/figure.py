"""The demonstration's figure: calibration, entropies of known and unknown digits, and the least certain images."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from lapis import plots
from lapis.cli.experiment import HELD_OUT, KNOWN, Method, Result, entropy

SHOWN = 4
"""Number of images shown of each kind, known and held out."""


def draw(result: Result, path: Path) -> None:
    """Draw the figure and save it, in the format of the path's suffix."""
    point, laplace = result.methods[:2]
    with plots.style():
        figure = Figure(figsize=(11, 7.2), layout="constrained")
        halves = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.25, 1), hspace=0.04)
        _calibration_and_entropy(halves[0, 0], result, point, laplace)
        _images(halves[1, 0], result, point, laplace)
        figure.savefig(path)


def _calibration_and_entropy(panel: SubFigure, result: Result, point: Method, laplace: Method) -> None:
    grid = panel.add_gridspec(2, 3, width_ratios=(1, 1, 1.05))
    targets = result.digits.test[1]
    panels = (
        ("Test digits", {point.name: point.test, laplace.name: laplace.test}),
        ("Test digits with noisy pixels", {point.name: point.corrupted, laplace.name: laplace.corrupted}),
    )
    for column, (title, probs) in enumerate(panels):
        axes = panel.add_subplot(grid[:, column])
        plots.reliability_diagram(axes, probs, targets)
        axes.set(title=title, xlim=(0, 1.01), ylim=(0, 1.01))
    above: Axes | None = None
    for row, method in enumerate((point, laplace)):
        axes = panel.add_subplot(grid[row, 2], sharex=above)
        names = (f"digits {KNOWN[0]}-{KNOWN[-1]}", f"digits {HELD_OUT[0]}, {HELD_OUT[1]}")
        limit = math.log(len(KNOWN))
        plots.entropy_histogram(axes, entropy(method.test), entropy(method.unknown), limit=limit, labels=names)
        axes.set_title(method.name)
        if above is None:
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)
            above = axes


def _images(panel: SubFigure, result: Result, point: Method, laplace: Method) -> None:
    """The images of highest entropy under the Laplace posterior, with both methods' probabilities below."""
    axes = panel.subplots(2, 2 * SHOWN, height_ratios=(1.3, 1), sharey="row")
    kinds = (
        (result.digits.test, point.test, laplace.test, "labelled"),
        (result.digits.unknown, point.unknown, laplace.unknown, "never seen:"),
    )
    for kind, ((images, labels), of_point, of_laplace, words) in enumerate(kinds):
        for rank, index in enumerate(entropy(of_laplace).argsort(descending=True)[:SHOWN].tolist()):
            column = kind * SHOWN + rank
            picture, bars = axes[0, column], axes[1, column]
            picture.imshow(images[index, 0].numpy(), cmap="gray_r")
            picture.set_axis_off()
            picture.set_title(f"{words} {int(labels[index])}", fontweight="normal", fontsize=9, loc="center")
            _bars(bars, of_point[index], of_laplace[index])
    axes[1, 0].set_ylabel("probability")
    panel.suptitle("Least certain images under the posterior", x=0.012, ha="left", fontsize=10, fontweight="bold")


def _bars(axes: Axes, point: Tensor, laplace: Tensor) -> None:
    width = 0.42
    for shift, probs, colour in ((-width / 2, point, plots.BLUE), (width / 2, laplace, plots.ORANGE)):
        axes.bar([digit + shift for digit in KNOWN], probs.tolist(), width, color=colour)
    axes.set(ylim=(0, 1), yticks=(0, 0.5, 1), xticks=KNOWN)
    axes.tick_params(axis="x", length=0, labelsize=7)
