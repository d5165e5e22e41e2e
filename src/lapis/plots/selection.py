"""Risk-coverage curves: how much better are the examples that are left when the most doubtful are handed over?"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from torch import Tensor

from lapis.errors import DataError
from lapis.metrics import risk_coverage
from lapis.options import check_arguments, checked_tensor
from lapis.plots.appearance import GREY


def risk_coverage_curve(axes: Axes, uncertainties: Mapping[str, Tensor], losses: Tensor) -> Axes:
    """Mean loss of the examples kept against their share, for each named uncertainty (N,), with the losses (N,) of all.

    The lower, the better; an uncertainty that knows nothing stays at the mean loss, the dashed line. The legend gives
    the area under each curve.
    """
    check_arguments(risk_coverage_curve, locals())
    if not uncertainties:
        raise DataError(
            "There is no doubt to draw",
            expected="a dictionary of named uncertainties",
            got="an empty one",
            do='pass {"name": uncertainty}',
        )
    for name, uncertainty in uncertainties.items():
        curve = risk_coverage(checked_tensor(f"uncertainties[{name!r}]", uncertainty).detach(), losses)
        label = f"{name}  (area {float(curve.area):.3g})"
        axes.plot(curve.coverage.numpy(), curve.risk.numpy(), label=label)
    axes.axhline(float(losses.double().mean()), color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.set(xlim=(0, 1), xlabel="share of examples kept", ylabel="mean loss")
    axes.legend(loc="best")
    return axes
