"""Latent variables: the bound of EM, clusters of Old Faithful and of digits, and what a few labels are worth.

The bound: two Gaussians with unit variance and some classes known; the log likelihood as a function of one mean, and
the bound of each round, which touches it and climbs. Old Faithful and digits (10 principal components): the evidence
of variational Bayes against the number of components. Digits: test accuracy of a mixture with one component a class
against the share of labels known, the rest of the training rows being used without their labels, or not at all.
"""

from __future__ import annotations

import warnings
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import COLOURS, arguments, report, save, table
from matplotlib.patches import Ellipse
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

import lapis
from lapis.latent import GaussianMixture, choose_components

Array = np.ndarray[Any, Any]


def bound_picture(axis: Any) -> None:
    """Log likelihood over the second mean, and EM's bound of the first rounds, at fixed first mean and weights."""
    random = np.random.RandomState(0)
    y = np.concatenate([4 + random.randn(20), 6.2 + random.randn(20)])
    low, share = 4.0, 0.5
    grid = np.linspace(4.2, 10.2, 400)

    def joint(mean: Array | float) -> Array:
        means = np.stack([np.full_like(np.atleast_1d(mean), low), np.atleast_1d(mean)], 1)  # (G, 2)
        logs = -0.5 * (y[None, :, None] - means[:, None]) ** 2 - 0.5 * np.log(2 * np.pi)
        return logs + np.log([1 - share, share])

    likelihood = np.logaddexp.reduce(joint(grid), 2).sum(1)
    axis.plot(grid, likelihood, color="black", lw=2, label="log p(y)")
    mean = 9.6
    touched = []
    for number, colour in zip(range(4), ("#c6d8e8", "#8fb4d3", "#4f8bbd", "#1b6ca8"), strict=True):
        now = joint(mean)[0]
        r = np.exp(now - np.logaddexp.reduce(now, 1)[:, None])
        entropy = -(r * np.log(np.clip(r, 1e-300, None))).sum()
        bound = (r * joint(grid)).sum((1, 2)) + entropy
        axis.plot(grid, bound, color=colour, lw=1.6, label=f"bound, round {number + 1}")
        touched.append(np.logaddexp.reduce(now, 1).sum())
        axis.plot(mean, np.logaddexp.reduce(now, 1).sum(), "o", color=colour, ms=7)
        mean = float((r[:, 1] * y).sum() / r[:, 1].sum())
    axis.axvline(mean, color="#999999", lw=0.8, ls=":")
    top, low_end = likelihood.max(), min(touched)
    axis.set(ylim=(low_end - 0.35 * (top - low_end), top + 0.1 * (top - low_end)))
    axis.set(xlabel="mean of the second Gaussian", ylabel="nats", title="the bound touches and climbs")
    axis.legend(frameon=False, fontsize=8, loc="upper right")


def old_faithful() -> Array:
    arrays = lapis.data.stored("old_faithful").values()
    columns = [array.astype(np.float64).reshape(len(array), -1) for array in arrays]
    x: Array = columns[0] if columns[0].shape[1] == 2 else np.column_stack([c for c in columns if c.shape[1] == 1][:2])
    return x


def clusters_picture(axis: Any, x: Array, mixture: Any) -> None:
    place = mixture.predict(x)
    for k, (mean, covariance) in enumerate(zip(mixture.means_, mixture.covariances_, strict=True)):
        colour = COLOURS[k % len(COLOURS)]
        axis.plot(*x[place == k].T, ".", color=colour, ms=5)
        values, vectors = np.linalg.eigh(covariance)
        angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
        for width in (1, 2):
            size = 2 * width * np.sqrt(values[::-1])
            axis.add_patch(Ellipse(mean, *size, angle=angle, fill=False, color=colour, lw=1.2))
    axis.set(title="Old Faithful: components by evidence", xlabel="eruption, minutes", ylabel="waiting, minutes")


def accuracy(train: Array, classes: Array, test: Array, truth: Array, share: float, seed: int, rest: bool) -> float:
    """Of a mixture with one component a class; with `rest` rows without labels are used, too."""
    random = np.random.RandomState(seed)
    known = np.zeros(len(train), bool)
    for k in range(10):  # at least two rows of each class
        rows = np.flatnonzero(classes == k)
        known[random.permutation(rows)[: max(2, round(share * len(rows)))]] = True
    labels = np.where(known, classes, -1)
    used = slice(None) if rest else known
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)
        mixture = GaussianMixture(10, "tied", floor=1e-3, rounds=100).fit(train[used], labels=labels[used])
    return float((mixture.predict(test) == truth).mean())


def main() -> None:
    chosen = arguments(__doc__)
    torch.manual_seed(chosen.seed)
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    bound_picture(axes[0, 0])
    single, alone = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    bound_picture(alone)
    save(single, "em_bound", chosen)
    digits = load_digits()
    order = np.random.RandomState(chosen.seed).permutation(len(digits.target))
    z = PCA(10).fit_transform(digits.data[order])
    y = digits.target[order]
    train, classes, test, truth = z[:1000], y[:1000], z[1000:], y[1000:]
    parts = []
    x = np.asarray(z[:200, :2]) if chosen.quick else old_faithful()
    numbers = (1, 2, 3) if chosen.quick else (1, 2, 3, 4, 5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)
        best, evidences = choose_components(x, numbers)
        many = (5, 10) if chosen.quick else (2, 5, 8, 10, 12, 15, 20, 25, 30)
        _, digit_evidences = choose_components(
            train[:300] if chosen.quick else train, many, restarts=1 if chosen.quick else 2
        )
    clusters_picture(axes[0, 1], x, best)
    axes[1, 0].plot(list(digit_evidences), list(digit_evidences.values()), "o-", color=COLOURS[0])
    axes[1, 0].set(title="digits: evidence by components", xlabel="components", ylabel="bound of log evidence, nats")
    names = ("digits, 2 components" if chosen.quick else "Old Faithful", "Digits, 10 principal components")
    for name, values in zip(names, (evidences, digit_evidences), strict=True):
        rows = [[number, f"{value:.1f}"] for number, value in values.items()]
        parts.append(f"## {name}\n\n{table(['components', 'bound of log evidence'], rows)}")
    shares = (0.02, 0.2) if chosen.quick else (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    seeds = range(1) if chosen.quick else range(5)
    lines, curves = [], {True: [], False: []}
    for share in shares:
        line = [f"{share:.0%}"]
        for rest in (True, False):
            found = [accuracy(train, classes, test, truth, share, seed, rest) for seed in seeds]
            error = np.std(found, ddof=1) / len(found) ** 0.5 if len(found) > 1 else 0.0
            curves[rest].append((np.mean(found), error))
            line.append(f"{np.mean(found):.3f} ± {error:.3f}")
        lines.append(line)
    for (rest, values), colour in zip(curves.items(), COLOURS, strict=False):
        middle, error = np.array(values).T
        label = "with the rows without labels" if rest else "labelled rows only"
        axes[1, 1].errorbar(shares, middle, error, color=colour, marker="o", label=label, capsize=3)
    axes[1, 1].set(
        title="digits: what labels are worth", xscale="log", xlabel="share of labels known", ylabel="test accuracy"
    )
    axes[1, 1].set_xticks(shares, [f"{share:.0%}" for share in shares])
    axes[1, 1].minorticks_off()
    axes[1, 1].legend(frameon=False)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
    save(figure, "latent", chosen)
    head = ["labels known", "with the rows without labels", "labelled rows only"]
    parts.append(f"## Digits: accuracy against the share of labels\n\n{table(head, lines)}")
    text = "# Latent variables\n\n" + " ".join((__doc__ or "").split()) + "\n\n" + "\n\n".join(parts)
    report("latent", text + "\n\n![Latent variables](../figures/latent.png)", chosen)


if __name__ == "__main__":
    main()
