"""One look for every figure: few lines, quiet axes, and colours that people with any colour vision can tell apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.colors import LinearSegmentedColormap

# Okabe and Ito's palette, ordered so that the first two differ in lightness as well as hue.
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY)
INK, GREY = "#2B2B2B", "#8A8A8A"

SHADES = LinearSegmentedColormap.from_list("lapis", ["white", "#CFE3F1", "#6FB1D8", BLUE])
"""From nothing to much."""
SIGNS = LinearSegmentedColormap.from_list("lapis signs", [ORANGE, "#F4C9A8", "white", "#9CC7E3", BLUE])
"""From negative through zero to positive."""

# Keys are typed as literals by some versions of matplotlib only.
SETTINGS: dict[Any, Any] = {
    "figure.dpi": 150,
    "figure.facecolor": "white",
    "savefig.dpi": 150,
    "savefig.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": INK,
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.edgecolor": GREY,
    "axes.facecolor": "white",
    "axes.grid": False,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.0,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 8.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
    "xtick.color": GREY,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8.0,
    "xtick.major.size": 3.0,
    "xtick.major.width": 0.7,
    "ytick.color": GREY,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8.0,
    "ytick.major.size": 3.0,
    "ytick.major.width": 0.7,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in Lapis' style inside this context; the previous settings are restored afterwards.

    >>> from matplotlib.figure import Figure
    >>> with style():
    ...     axes = Figure().subplots()
    >>> axes.spines["top"].get_visible()
    False
    """
    with mpl.rc_context(SETTINGS):
        yield
