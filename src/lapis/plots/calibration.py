"""Reliability diagrams: is a prediction with confidence 0.8 right four times out of five?"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from torch import Tensor

from lapis.errors import DataError
from lapis.metrics import reliability
from lapis.options import check_arguments, checked_tensor
from lapis.plots.appearance import GREY


def reliability_diagram(axes: Axes, probs: Mapping[str, Tensor], targets: Tensor, *, bins: int = 10) -> Axes:
    """Accuracy against confidence of the predicted class for each named (B, C) prediction of the same (B,) targets.

    Bins hold about equally many examples, so that all points are equally reliable; error bars are one binomial standard
    error sqrt(a (1 - a) / n) of the accuracy a. Points below the diagonal are overconfident. The legend gives the ECE
    over 15 bins of equal width, the default of `lapis.metrics.ece`.
    """
    check_arguments(reliability_diagram, locals())
    if not probs:
        raise DataError(
            "There are no predictions to draw",
            expected="a dictionary of named predictions",
            got="an empty one",
            do='pass {"name": probs}',
        )
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    smallest = 1.0
    for order, (name, prediction) in enumerate(probs.items()):
        checked_tensor(f"probs[{name!r}]", prediction)
        binned = reliability(prediction.detach(), targets, bins=bins, adaptive=True)
        used = binned.count > 0
        confidence, accuracy = binned.confidence[used], binned.accuracy[used]
        error = (accuracy * (1 - accuracy) / binned.count[used]).sqrt()
        smallest = min(smallest, float(confidence.min()), float((accuracy - error).min()))
        axes.errorbar(
            confidence.numpy(),
            accuracy.numpy(),
            yerr=error.numpy(),
            marker="os^Dv"[order % 5],
            markeredgecolor="white",
            markeredgewidth=0.6,
            markersize=6,
            elinewidth=0.9,
            label=f"{name}  (ECE {float(reliability(prediction.detach(), targets).ece):.3f})",
            zorder=2 + order,
        )
    low = max(0.0, smallest - 0.05)
    axes.set(xlim=(low, 1.01), ylim=(low, 1.01), xlabel="confidence", ylabel="accuracy")
    axes.set_aspect("equal", adjustable="box")
    axes.legend(loc="upper left")
    return axes
