"""Figures: small functions that draw on axes you pass, and a restrained style to draw them in.

Nothing here opens a window or chooses a backend: create a `matplotlib.figure.Figure` inside `style()`, pass its
axes, and save it inside the same context. Every function returns the axes that it drew on.
"""

from __future__ import annotations

from lapis.plots.appearance import BLUE, COLOURS, GREY, INK, ORANGE, style
from lapis.plots.calibration import reliability_diagram
from lapis.plots.entropy import entropy_histogram
from lapis.plots.evidence import evidence_curve
from lapis.plots.matrices import accuracy_matrix, kernel_matrix
from lapis.plots.plane import plane_map
from lapis.plots.regression import regression_band
from lapis.plots.selection import risk_coverage_curve
from lapis.plots.weights import spectrum, uncertainty_by_layer

__all__ = [
    "BLUE",
    "COLOURS",
    "GREY",
    "INK",
    "ORANGE",
    "accuracy_matrix",
    "entropy_histogram",
    "evidence_curve",
    "kernel_matrix",
    "plane_map",
    "regression_band",
    "reliability_diagram",
    "risk_coverage_curve",
    "spectrum",
    "style",
    "uncertainty_by_layer",
]
