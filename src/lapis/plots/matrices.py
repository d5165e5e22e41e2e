"""Matrices as pictures: kernels between examples, and accuracies of tasks learnt one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from torch import Tensor

from lapis.errors import DataError
from lapis.lifelong.scores import Accuracies
from lapis.options import check_arguments, checked_numbers, checked_tensor
from lapis.plots.appearance import GREY, INK, SHADES, SIGNS

SAMPLED = 2**20
"""Entries that decide the range of colours."""


def kernel_matrix(axes: Axes, kernel: Tensor, labels: Tensor | None = None) -> Axes:
    """A kernel between N examples, (N, N) or (N, 1, N, 1); zero is white, negative entries are orange.

    Args:
        axes: to draw on.
        kernel: as from `posterior.gaussian_process().kernel(x)`; of several outputs pick one: kernel[:, c, :, c].
        labels: (N,); examples are ordered by label, with lines between the groups.
    """
    check_arguments(kernel_matrix, locals())
    values = checked_numbers("kernel", kernel)
    size = len(values) if values.dim() else 0
    if values.numel() != size**2 or values.dim() not in (2, 4):
        raise DataError(
            "A kernel matrix is drawn of one output",
            expected="(N, N) or (N, 1, N, 1)",
            got=str(tuple(kernel.shape)),
            do="pick one output: kernel[:, c, :, c]",
        )
    values = values.reshape(size, size)
    if labels is not None:
        groups = checked_tensor("labels", labels).detach().cpu().flatten()
        if len(groups) != size:
            raise DataError(
                "Kernel and labels differ in length", expected=f"{size} labels", got=str(len(groups)), do="pass all"
            )
        order = groups.argsort(stable=True)
        values = values[order][:, order]
        for edge in torch.unique(groups, return_counts=True)[1].cumsum(0)[:-1].tolist():
            axes.axhline(edge - 0.5, color=GREY, linewidth=0.5)
            axes.axvline(edge - 0.5, color=GREY, linewidth=0.5)
    # a few large entries, far from the data, would leave all others white
    reach = float(torch.quantile(values.abs().flatten()[:SAMPLED], 0.98)) or float(values.abs().max()) or 1.0
    image = axes.imshow(values.numpy(), cmap=SIGNS, vmin=-reach, vmax=reach, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="covariance", pad=0.02, extend="both")
    named = "example" if labels is None else "example, by label"
    axes.set(xlabel=named, ylabel=named)
    return axes


def accuracy_matrix(axes: Axes, accuracies: Accuracies | Tensor, tasks: Sequence[str] | None = None) -> Axes:
    """Accuracies a[i, j] on task j after task i was learnt, (T, T), each written in its cell; NaN stays empty.

    Args:
        axes: to draw on.
        accuracies: as from `lapis.lifelong.accuracy_matrix`.
        tasks: names of the tasks; numbers by default.
    """
    check_arguments(accuracy_matrix, locals())
    matrix = checked_tensor("accuracies", accuracies.matrix if isinstance(accuracies, Accuracies) else accuracies)
    matrix = matrix.detach().double().cpu()
    known = matrix[~matrix.isnan()]
    if matrix.dim() != 2 or not len(known) or not bool(((known >= 0) & (known <= 1)).all()):
        raise DataError(
            "These are no accuracies of tasks",
            expected="a matrix of numbers from 0 to 1, NaN where a task had not come yet",
            got=f"shape {tuple(matrix.shape)}" + (f", up to {float(known.max()):g}" if len(known) else ", all NaN"),
            do="pass the result of lapis.lifelong.accuracy_matrix",
        )
    rows, columns = matrix.shape
    names = [str(number + 1) for number in range(max(rows, columns))] if tasks is None else list(tasks)
    if len(names) != max(rows, columns):
        raise DataError(
            "Tasks and accuracies differ in number",
            expected=f"{max(rows, columns)} names",
            got=str(len(names)),
            do="name every task",
        )
    lowest = min(float(known.min()), 0.5)
    axes.imshow(matrix.numpy(), cmap=SHADES, vmin=lowest, vmax=1.0, aspect="auto")
    for i, j in torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).tolist():
        value = float(matrix[i, j])
        if value == value:  # not NaN
            dark = value > lowest + 0.55 * (1 - lowest)
            axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", color="white" if dark else INK, fontsize=8)
    axes.set_xticks(range(columns), names[:columns])
    axes.set_yticks(range(rows), names[:rows])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set(xlabel="accuracy on task (%)", ylabel="after learning task")
    return axes
