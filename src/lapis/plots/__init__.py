"""Figures: small functions that draw on axes you pass, and a restrained style to draw them in.

Nothing here opens a window or chooses a backend: create a `matplotlib.figure.Figure` inside `style()`, pass its
axes, and save it inside the same context.
"""

from __future__ import annotations

from lapis.plots.appearance import BLUE, COLOURS, GREY, INK, ORANGE, style
from lapis.plots.calibration import reliability_diagram
from lapis.plots.entropy import entropy_histogram
from lapis.plots.regression import regression_band

__all__ = [
    "BLUE",
    "COLOURS",
    "GREY",
    "INK",
    "ORANGE",
    "entropy_histogram",
    "regression_band",
    "reliability_diagram",
    "style",
]
