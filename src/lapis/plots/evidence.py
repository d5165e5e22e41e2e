"""The evidence as a function of the prior precision: the curve whose top `tune` finds."""

from __future__ import annotations

from dataclasses import replace

import torch
from matplotlib.axes import Axes

from lapis.options import check_arguments
from lapis.plots.appearance import BLUE, GREY, ORANGE
from lapis.posteriors import LaplacePosterior


def evidence_curve(axes: Axes, posterior: LaplacePosterior, *, decades: float = 3.0, points: int = 61) -> Axes:
    """log p(D) against the prior precision, from 10^-decades to 10^decades times that of the posterior.

    All groups' precisions are multiplied by the same factor, which is the abscissa if there are several groups. The
    noise stays as it is, and the evidence is taken at the trained weights.
    """
    check_arguments(evidence_curve, locals())
    prior = posterior.weight_prior.to_prior()
    own = posterior.weight_prior.precision.detach()
    factors = torch.logspace(-decades, decades, points, dtype=torch.float64)
    with torch.no_grad():
        values = [
            float(posterior.with_prior(replace(prior, precision=own * factor)).log_evidence())
            for factor in factors.tolist()
        ]
        here = float(posterior.with_prior(prior).log_evidence())
    scale, label = (float(own), "prior precision") if len(own) == 1 else (1.0, "factor of all prior precisions")
    axes.plot((scale * factors).numpy(), values, color=BLUE)
    axes.axvline(scale, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.plot(
        [scale], [here], "o", color=ORANGE, markeredgecolor="white", markersize=7, label="the posterior's", zorder=3
    )
    axes.set(xscale="log", xlabel=label, ylabel="log evidence (nats)")
    # a large precision costs thousands of nats: show as much below the top as the flatter side needs, and a half more
    peak, flatter = max(*values, here), max(values[0], values[-1])
    axes.set_ylim(max(min(values), peak - max(1.5 * (peak - flatter), 1.0)), peak + max(0.15 * (peak - flatter), 0.1))
    axes.legend(loc="best")
    return axes
