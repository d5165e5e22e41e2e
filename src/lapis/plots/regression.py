"""Plot of a one-dimensional regression, with separate bands for epistemic uncertainty and noise."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from torch import Tensor

from lapis.errors import DataError
from lapis.options import check_arguments, check_between, checked_numbers
from lapis.plots.appearance import BLUE, GREY, INK


def regression_band(
    axes: Axes,
    x: Tensor,
    mean: Tensor,
    epistemic_variance: Tensor,
    variance: Tensor,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    level: float = 0.95,
    colour: str = BLUE,
) -> Axes:
    """Mean, the epistemic band (dark) inside the total band (light), and the data. All tensors are (B,) or (B, 1).

    Bands are mean +- z sqrt(variance) with z = sqrt(2) erfinv(level). Points may come in any order.

    >>> from matplotlib.figure import Figure
    >>> x = torch.linspace(-1, 1, 5)
    >>> regression_band(Figure().subplots(), x, x.sin(), 0.1 * x**2, 0.1 * x**2 + 0.01).get_xlabel()
    'x'
    """
    check_arguments(regression_band, locals())
    check_between("level", level, 0, 1)
    named = {"x": x, "mean": mean, "epistemic_variance": epistemic_variance, "variance": variance}
    columns = [_flat(name, value) for name, value in named.items()]
    if len({len(column) for column in columns}) != 1:
        raise DataError(
            "A band needs one input and one output",
            expected="x, mean and both variances of one length",
            got=", ".join(str(len(column)) for column in columns),
            do="pick one output: prediction.mean[:, 0], and so on",
        )
    order = columns[0].argsort()
    inputs, centre, epistemic, total = (column[order] for column in columns)
    z = 2**0.5 * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
    for spread, alpha, label in ((total, 0.14, "with noise"), (epistemic, 0.30, "of the function")):
        width = z * spread.sqrt()
        band = ((centre - width).numpy(), (centre + width).numpy())
        name = f"{100 * level:g} % {label}"
        axes.fill_between(inputs.numpy(), *band, color=colour, alpha=alpha, linewidth=0, label=name, zorder=1)
    axes.plot(inputs.numpy(), centre.numpy(), color=colour, label="mean", zorder=3)
    if data is not None:
        observed, targets = (_flat("data", value).numpy() for value in data)
        axes.scatter(observed, targets, s=9, color=INK, edgecolor="white", linewidth=0.4, label="data", zorder=4)
    axes.axhline(0, color=GREY, linewidth=0.4, zorder=0)
    axes.set(xlabel="x", ylabel="y", xlim=(float(inputs[0]), float(inputs[-1])))
    axes.legend(loc="best")
    return axes


def _flat(name: str, value: Tensor) -> Tensor:
    return checked_numbers(name, value).detach().flatten()
