"""docs/figures/trust*.png: differences to the network alone, setting by setting."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from trust.table import HIGHER, NAMES, SLACK, Rows

STYLES = {
    "temperature": ("#9a9a9a", "D"),
    "laplace-torch, evidence": ("#edae49", "v"), "laplace-torch, grid": ("#e07b39", "^"),
    "README": ("#1b6ca8", "o"), "refined": ("#d1495b", "s"), "calibrated": ("#2e8b57", "P"),
}  # fmt: skip
LAST = {
    "laplace-torch last layer, evidence": ("#edae49", "v"), "laplace-torch last layer, grid": ("#e07b39", "^"),
    "last layer": ("#1b6ca8", "o"), "last layer, refined": ("#d1495b", "s"), "last layer, calibrated": ("#2e8b57", "P"),
}  # fmt: skip
LINEAR = {"nll": 0.05, "ece": 0.02, "ood_auroc": 0.05, "shifted_nll": 0.1}
"""Differences up to this are drawn to scale, larger ones by their logarithm."""


def dots(axes: Axes, rows: Rows, score: str, styles: dict[str, tuple[str, str]]) -> None:
    """One line a setting, one dot a column."""
    names = rows.classifications()
    shown = [column for column in styles if rows.gains(column, score)]
    for place, column in enumerate(shown):
        gains = rows.gains(column, score)
        colour, marker = styles[column]
        offset = 0.5 * (place / max(len(shown) - 1, 1) - 0.5)
        heights = [names.index(name) + offset for name in gains]
        axes.scatter(
            list(gains.values()), heights, s=26, color=colour, marker=marker, label=column, zorder=3,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
    for line in range(0, len(names), 2):
        axes.axhspan(line - 0.5, line + 0.5, color="#f4f5f7", zorder=0)
    axes.axvline(0, color="#333333", linewidth=1, zorder=1)
    if score in ("nll", "ece"):
        axes.axvline(SLACK, color="#333333", linewidth=0.8, linestyle=":", zorder=1)
    axes.set_xscale("symlog", linthresh=LINEAR[score], linscale=1.0)
    drawn = [gain for column in shown for gain in rows.gains(column, score).values()]
    low, high = (max(sign * gain for gain in [0.0, *drawn]) for sign in (-1, 1))
    ticks = [*[-tick for tick in _ticks(low, LINEAR[score])][::-1], 0.0, *_ticks(high, LINEAR[score])]
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}".replace("0.", ".") if value else "0"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(*(sign * 1.25 * max(end, LINEAR[score]) for sign, end in ((-1, low), (1, high))))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), [rows.settings[name].title for name in names])
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(f"{NAMES[score]} (better →)" if score in HIGHER else f"(← better) {NAMES[score]}", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _ticks(reach: float, linear: float) -> list[float]:
    """The end of the linear part, and the largest round number within reach."""
    larger = [tick for tick in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if 2.5 * linear <= tick <= 1.2 * reach]
    return [linear, *larger[-1:]]


def differences(rows: Rows, *, last_layer: bool) -> Figure:
    """NLL, ECE, OOD-AUROC and NLL on shifted inputs, less those of the network alone."""
    styles = LAST if last_layer else STYLES
    height = 1.6 + 0.42 * len(rows.classifications())
    figure, panels = plt.subplots(1, 4, figsize=(13, height), sharey=True, constrained_layout=True)
    for axes, score in zip(panels, LINEAR, strict=True):
        dots(axes, rows, score, styles)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    which = "last layer" if last_layer else "weights that the README takes"
    figure.suptitle(f"Difference to the network alone, {which} (dotted: the .01 that is allowed)", fontsize=11)
    return figure
