"""Histograms of predictive entropy: is the network less certain about out-of-distribution examples?"""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from torch import Tensor

from lapis.options import check_arguments, checked_numbers
from lapis.plots.appearance import GREY, PURPLE


def entropy_histogram(
    axes: Axes,
    inside: Tensor,
    outside: Tensor,
    *,
    limit: float | None = None,
    bins: int = 24,
    labels: tuple[str, str] = ("known", "unknown"),
) -> Axes:
    """Two normalised histograms of predictive entropy on one axis, for examples like the training data and others.

    `limit` is the largest possible entropy, log C for C classes; by default the largest in the data.
    """
    check_arguments(entropy_histogram, locals())
    known, unknown = (
        checked_numbers(*named).detach().flatten() for named in (("inside", inside), ("outside", outside))
    )
    top = limit if limit is not None else float(torch.cat([known, unknown]).max())
    edges = torch.linspace(0, max(top, 1e-12), bins + 1).tolist()
    for flat, colour, label in ((known, GREY, labels[0]), (unknown, PURPLE, labels[1])):
        # The share of examples per bin, not a density, can be read without knowing the bin's width.
        weights = torch.full_like(flat, 1 / len(flat)).numpy()
        clipped = flat.clamp(0, edges[-1]).numpy()
        axes.hist(clipped, edges, weights=weights, color=colour, alpha=0.25, zorder=1)
        axes.hist(clipped, edges, weights=weights, histtype="step", color=colour, linewidth=1.3, label=label, zorder=2)
    axes.set(xlim=(0, edges[-1]), xlabel="predictive entropy (nats)", ylabel="share of examples")
    axes.legend(loc="best")
    return axes
