"""Maps of a posterior's predictions over a plane: where a network with two inputs is sure, and where it is not."""

from __future__ import annotations

from typing import Literal

import torch
from matplotlib.axes import Axes
from torch import Tensor

from lapis.errors import DataError, OptionError
from lapis.options import check_arguments, checked_numbers
from lapis.plots.appearance import COLOURS, INK, SHADES
from lapis.posteriors import Posterior
from lapis.predictions import ClassificationPrediction, Prediction, RegressionPrediction

MARGIN = 0.3
"""Share of the data's extent that is shown on each side of them."""

Quantity = Literal["confidence", "entropy", "mutual_information", "mean", "std", "epistemic_std"]
LABELS: dict[str, tuple[Quantity, ...]] = {
    "classification": ("confidence", "entropy", "mutual_information"),
    "regression": ("std", "epistemic_std", "mean"),
}
"""What can be shown of each kind of likelihood, the default first."""


def plane_map(
    axes: Axes,
    posterior: Posterior,
    data: tuple[Tensor, Tensor] | None = None,
    *,
    quantity: Quantity | None = None,
    limits: tuple[float, float, float, float] | None = None,
    resolution: int = 80,
) -> Axes:
    """A map of predictions of a network with two inputs and, of a classifier, the boundaries between its classes.

    Args:
        axes: to draw on.
        posterior: of a network that takes inputs (B, 2), and gives classes or one number.
        data: inputs (N, 2) and targets (N,), drawn as points.
        quantity: of classes "confidence" (default; the largest probability), "entropy" or "mutual_information"; of
            numbers "std" (default), "epistemic_std" (without the noise) or "mean".
        limits: left, right, bottom and top end; by default a third beyond the data, which must be given then.
        resolution: points of the grid on each side.
    """
    check_arguments(plane_map, locals(), signed=("limits",))
    points = None if data is None else checked_numbers("data[0]", data[0])
    if points is not None and (points.dim() != 2 or points.shape[1] != 2):
        raise _not_a_plane(f"inputs of shape {tuple(points.shape)}")
    left, right, bottom, top = _limits(points) if limits is None else limits
    if not (left < right and bottom < top):
        raise OptionError(
            "The limits are empty", expected="left < right, bottom < top", got=repr(limits), do="swap the ends"
        )
    across, up = (torch.linspace(*ends, resolution, dtype=torch.float64) for ends in ((left, right), (bottom, top)))
    grid = torch.cartesian_prod(across, up).to(posterior.network.device, posterior.network.dtype)
    chosen = _checked_quantity(posterior, quantity)
    prediction = posterior.predict(grid, progress=False)
    shape = (resolution, resolution)
    values = _values(prediction, chosen).reshape(shape).mT
    sides = (across.numpy(), up.numpy())
    lowest = 0.0 if chosen in ("entropy", "mutual_information") else None
    mesh = axes.pcolormesh(*sides, values.numpy(), cmap=SHADES, vmin=lowest, shading="nearest", rasterized=True)
    axes.figure.colorbar(mesh, ax=axes, label=chosen.replace("_", " "), pad=0.02)
    if isinstance(prediction, ClassificationPrediction) and resolution > 1:
        for margin in _margins(prediction):
            if float(margin.min()) < 0 < float(margin.max()):
                drawn = margin.reshape(shape).mT.numpy()
                axes.contour(*sides, drawn, levels=[0.0], colors=[INK], linewidths=0.9)
    if data is not None and points is not None:
        _draw_points(axes, points, data[1], isinstance(prediction, ClassificationPrediction))
    axes.set(xlim=(left, right), ylim=(bottom, top), xlabel="$x_1$", ylabel="$x_2$")
    return axes


def _limits(points: Tensor | None) -> tuple[float, float, float, float]:
    if points is None:
        raise OptionError(
            "It is not known what part of the plane to show", expected="data or limits", got="neither", do="pass one"
        )
    low, high = points.min(0).values, points.max(0).values
    reach = MARGIN * (high - low).clamp_min(1e-6)
    (left, bottom), (right, top) = (low - reach).tolist(), (high + reach).tolist()
    return left, right, bottom, top


def _checked_quantity(posterior: Posterior, quantity: Quantity | None) -> Quantity:
    kind = posterior.likelihood.kind
    if kind not in LABELS:
        raise _not_a_plane(f"the {posterior.likelihood.name} likelihood")
    if quantity is not None and quantity not in LABELS[kind]:
        raise OptionError(
            f"{quantity} has no meaning for {kind}",
            expected=" or ".join(LABELS[kind]),
            got=quantity,
            do="choose one of these",
        )
    return LABELS[kind][0] if quantity is None else quantity


def _values(prediction: Prediction, quantity: Quantity) -> Tensor:
    """The quantity at every point of the grid, (G,) float64."""
    if isinstance(prediction, ClassificationPrediction):
        probs = _probabilities(prediction)
        entropies = {"entropy": prediction.entropy, "mutual_information": prediction.mutual_information}
        found = probs.max(-1).values if quantity == "confidence" else entropies[quantity]
    else:
        assert isinstance(prediction, RegressionPrediction)
        found = prediction.epistemic_variance.sqrt() if quantity == "epistemic_std" else getattr(prediction, quantity)
    if found.numel() != len(found):
        raise _not_a_plane(f"{found[0].numel()} outputs")
    return found.detach().double().cpu().flatten()


def _probabilities(prediction: ClassificationPrediction) -> Tensor:
    """(G, K): of one yes-or-no label both probabilities."""
    probs = prediction.probs.detach().double().cpu()
    if prediction.likelihood.name == "bernoulli":
        if probs.numel() != len(probs):
            raise _not_a_plane(f"{probs[0].numel()} labels")
        return torch.stack([1 - probs.flatten(), probs.flatten()], -1)
    if probs.dim() != 2:
        raise _not_a_plane(f"probabilities of shape {tuple(probs.shape)}")
    return probs


def _margins(prediction: ClassificationPrediction) -> list[Tensor]:
    """p_c minus the largest other probability, for each class c but, of two, the first; zero at the boundaries."""
    probs = _probabilities(prediction)
    chosen = range(probs.shape[1]) if probs.shape[1] > 2 else range(1, 2)
    others = [torch.cat([probs[:, :c], probs[:, c + 1 :]], 1).max(-1).values for c in chosen]
    return [probs[:, c] - other for c, other in zip(chosen, others, strict=True)]


def _draw_points(axes: Axes, points: Tensor, targets: Tensor, of_classes: bool) -> None:
    y = checked_numbers("data[1]", targets).flatten()
    if len(y) != len(points):
        raise DataError(
            "Inputs and targets differ in length", expected=f"{len(points)} targets", got=str(len(y)), do="pass both"
        )
    groups = torch.unique(y).tolist() if of_classes else [None]
    for order, group in enumerate(groups):
        some = points if group is None else points[y == group]
        colour = INK if group is None else ("white", *COLOURS[1:])[order % 5]
        axes.scatter(some[:, 0].numpy(), some[:, 1].numpy(), s=16, color=colour, edgecolor=INK, linewidth=0.6, zorder=4)


def _not_a_plane(got: str) -> DataError:
    return DataError(
        "A map is drawn of two inputs, and of classes or one number",
        expected="inputs (N, 2), outputs (N, C) of classes, or (N,) or (N, 1) of numbers",
        got=got,
        do="show two inputs of the network, with the others fixed, through a network that does so",
    )
