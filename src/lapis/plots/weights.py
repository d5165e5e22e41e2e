"""What the data say about the weights: the spectrum of the curvature, and the uncertainty left in each layer."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter
from torch import Tensor

from lapis.errors import DataError
from lapis.options import check_arguments
from lapis.plots.appearance import BLUE, GREY, INK, ORANGE
from lapis.posteriors import GaussianPosterior, LaplacePosterior

RANGE = (0.05, 0.5, 0.95)
"""Quantiles shown of the weights of a parameter."""


def spectrum(axes: Axes, posterior: LaplacePosterior) -> Axes:
    """Eigenvalues of the data's curvature relative to the prior precision, from the largest down.

    Directions above the line at one are determined by the data, those below by the prior: gamma, in the title, is the
    sum of r / (1 + r) over all ratios r. Directions without any curvature are off the plot.
    """
    check_arguments(spectrum, locals())
    ratios, counts = relative_eigenvalues(posterior)
    order = ratios.argsort(descending=True)
    ratios, counts = ratios[order], counts[order]
    shown = ratios > 1e-12 * ratios.clamp_min(0).max()
    if not bool(shown.any()):
        raise DataError(
            "The data say nothing about the weights",
            expected="curvature that is not zero",
            got="no positive eigenvalue",
            do="fit to more data, or look at posterior.diagnose(data)",
        )
    place = counts[shown].cumsum(0)
    axes.plot(place.numpy(), ratios[shown].numpy(), color=BLUE, drawstyle="steps-pre", zorder=2)
    axes.axhline(1, color=ORANGE, linewidth=1.0, zorder=1, label="the prior's precision")
    gamma = float(posterior.effective_parameters().detach())
    axes.set(yscale="log", xlabel="direction in weight space", ylabel="curvature / prior precision")
    axes.set_title(f"{gamma:.1f} of {posterior.n_weights:,} weights are determined by the data")
    axes.legend(loc="upper right")
    return axes


def relative_eigenvalues(posterior: LaplacePosterior) -> tuple[Tensor, Tensor]:
    """Eigenvalues of Lambda^-1/2 C Lambda^-1/2, C the data's curvature, and how often each occurs; float64."""
    prior, found = posterior.weight_prior, posterior.spectrum()
    if found is not None and prior.scales is None:
        own = prior.precision.detach().cpu()
        precision = own if found.group is None else own[found.group]
        return found.values * float(posterior.scale.detach()) / precision, found.counts
    root = prior.vector().detach().rsqrt()
    relative = posterior.precision() * posterior.width * root[:, None] * root  # 1 + what is asked for
    values = torch.linalg.eigvalsh(relative).detach().cpu() - 1
    return values, torch.ones_like(values)


def uncertainty_by_layer(axes: Axes, posterior: GaussianPosterior) -> Axes:
    """Standard deviations of the weights of each parameter: the median, and the range of nine tenths of them.

    A mark shows the prior's standard deviation where there is a prior: weights that stay there have learnt nothing.
    """
    check_arguments(uncertainty_by_layer, locals())
    deviations = posterior.marginal_variance().detach().double().cpu().clamp_min(0).sqrt()
    prior = getattr(posterior, "weight_prior", None)
    before = None if prior is None else prior.vector().detach().cpu().rsqrt()
    names = posterior.network.names
    for row, name in enumerate(names):
        some = posterior.network.span(name)
        low, middle, high = deviations[some].quantile(torch.tensor(RANGE, dtype=torch.float64)).tolist()
        axes.plot([low, high], [row, row], color=BLUE, linewidth=4, alpha=0.35, solid_capstyle="butt", zorder=2)
        label = "posterior: median, 90 %" if row == 0 else None
        axes.plot([middle], [row], "o", color=BLUE, markeredgecolor="white", markersize=6, label=label, zorder=3)
        if before is not None:
            own = float(before[some].median())
            label = "prior" if row == 0 else None
            axes.plot([own], [row], "|", color=ORANGE, markersize=11, markeredgewidth=1.6, label=label, zorder=4)
    axes.set(xscale="log", xlabel="standard deviation of weights", ylim=(len(names) + 0.4, -0.5))
    axes.set_yticks(range(len(names)), [f"{name}  ({posterior.network.sizes[name]:,})" for name in names])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    for row in range(len(names)):
        axes.axhline(row, color=GREY, linewidth=0.3, zorder=0)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="lower right", ncols=2)
    return axes
