"""Figures of the tomography experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import scipy.stats
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lapis import plots
from tomo.cells import BINS

METHODS = ("evidence", "evidence + PredCP", "evidence at theta*", "dropout")


def maps(pictures: Mapping[str, Tensor]) -> Figure:
    """Reconstructions above; errors and the error maps of each posterior below."""
    truth = pictures["truth"]
    error = (truth - pictures["DIP"]).abs()
    spreads = [("|error| of the DIP", error), *((name, pictures[name]) for name in METHODS)]
    top = float(torch.quantile(torch.cat([image.flatten() for _, image in spreads]), 0.995))
    above = ("truth", "FBP", "TV", "DIP", "dropout mean")
    with plots.style():
        figure = Figure(figsize=(10.5, 4.6), layout="constrained")
        axes = figure.subplots(2, 5)
        for place, name in zip(axes[0], above, strict=True):
            place.imshow(pictures[name].numpy(), cmap="gray", vmin=0, vmax=1)
            place.set_title(name, fontsize=9)
        for place, (name, image) in zip(axes[1], spreads, strict=True):
            shown = place.imshow(image.numpy(), cmap="inferno", vmin=0, vmax=top)
            place.set_title(name if "error" in name else f"sd, {name}", fontsize=9)
        figure.colorbar(shown, ax=axes[1], shrink=0.8)
        for place in axes.flat:
            place.set_axis_off()
    return figure


def calibration(histograms: Mapping[str, Sequence[int]]) -> Figure:
    """Histogram of normalised errors, and their quantiles against the normal distribution's."""
    middles = (BINS[1:] + BINS[:-1]) / 2
    with plots.style():
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(middles, scipy.stats.norm.pdf(middles), color=plots.GREY, label="normal")
        for name, counts in histograms.items():
            share = np.asarray(counts) / np.sum(counts)
            left.plot(middles, share / np.diff(BINS), drawstyle="steps-mid", linewidth=1, label=name)
            levels = share.cumsum() - share / 2
            keep = (levels > 1e-3) & (levels < 1 - 1e-3)
            right.plot(scipy.stats.norm.ppf(levels[keep]), middles[keep], linewidth=1.2, label=name)
        left.set(xlim=(-5, 5), yscale="log", ylim=(1e-3, 5), xlabel="error / standard deviation", ylabel="density")
        left.legend()
        right.plot([-3.2, 3.2], [-3.2, 3.2], color=plots.GREY, linewidth=0.8)
        right.set(ylim=(-8, 8), xlabel="normal quantile", ylabel="quantile of errors / sd")
    return figure


def priors(samples: Mapping[str, Tensor], shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draws of each prior, a row each, and the blocks' shares of its variance."""
    with plots.style():
        figure = Figure(figsize=(10.5, 4.6), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
        axes = left.subplots(len(samples), 4)
        for row, (name, images) in zip(axes, samples.items(), strict=True):
            for place, image in zip(row, images, strict=True):
                reach = 1.0 if name == "TV" else float(image.abs().max())
                place.imshow(image.numpy(), cmap="gray", vmin=0 if name == "TV" else -reach, vmax=reach)
                place.set_axis_off()
            row[0].set_title(name, fontsize=9)
        bars = right.subplots()
        blocks = list(next(iter(shares.values())))
        for index, (name, share) in enumerate(shares.items()):
            heights = np.arange(len(blocks)) + (index - (len(shares) - 1) / 2) * 0.28
            bars.barh(heights, [share[block] for block in blocks], 0.26, label=name)
        bars.set_yticks(np.arange(len(blocks)), blocks)
        bars.invert_yaxis()
        bars.set(xlabel="share of the prior variance of the measurements", title="Relevance of the blocks")
        bars.legend()
    return figure


def surrogates(samples: Mapping[str, Tensor]) -> Figure:
    """Draws of priors over images, a row each, all in shades from 0 to 1."""
    with plots.style():
        figure = Figure(figsize=(8.4, 4.6), layout="constrained")
        for row, (name, images) in zip(figure.subfigures(len(samples), 1), samples.items(), strict=True):
            row.suptitle(name, fontsize=9, x=0.01, ha="left")
            for place, image in zip(row.subplots(1, len(images)), images, strict=True):
                place.imshow(image.numpy(), cmap="gray", vmin=0, vmax=1)
                place.set_axis_off()
    return figure


def large(pictures: Mapping[str, Mapping[str, Tensor]]) -> Figure:
    """A row for each large image: truth, back-projection, total variation, mean, error, error map."""
    with plots.style():
        figure = Figure(figsize=(12.5, 2.3 * len(pictures)), layout="constrained")
        axes = figure.subplots(len(pictures), 6, squeeze=False)
        for row, (name, found) in zip(axes, pictures.items(), strict=True):
            error = (found["truth"] - found["mean"]).abs()
            top = float(torch.quantile(torch.cat([error.flatten(), found["spread"].flatten()]), 0.995))
            shown = [
                (name, found["truth"], "gray", 1.0), ("back-projection", found["FBP"], "gray", 1.0),
                ("total variation", found["TV"], "gray", 1.0), ("posterior mean", found["mean"], "gray", 1.0),
                ("|error|", error, "inferno", top),
                ("error map (1 sd)", found["spread"], "inferno", top),
            ]  # fmt: skip
            for place, (title, image, colours, high) in zip(row, shown, strict=True):
                drawn = place.imshow(image.numpy(), cmap=colours, vmin=0, vmax=high)
                place.set_title(title, fontsize=9)
                place.set_axis_off()
            figure.colorbar(drawn, ax=row[5], shrink=0.8)
    return figure
