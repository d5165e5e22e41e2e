"""Sections about single examples: those that the posterior is least sure of, and predictions of numbers with bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lapis.posteriors import Posterior
from lapis.predictions import RegressionPrediction
from lapis.reports.content import BLUE, GREY, Chart, Picture, Section, axis, class_name, faint
from lapis.reports.judged import Example, Judged

SMALLEST = 4
"""Sides of an input that are taken for those of an image."""

LEVEL_Z = 1.959964
"""Standard deviations of a Gaussian's 95 % interval."""


def least_sure(found: Judged, on: str, classes: Sequence[str] | None, image_shape: Sequence[int] | None) -> Section:
    """The examples with the largest doubt, with their pictures where inputs are images."""
    pictures = [
        Picture(f"example {example.index}", _lines(example, classes), as_image(example.inputs, image_shape))
        for example in found.examples
    ]
    lead = (
        f"The {len(pictures)} {on} examples that the posterior is least sure of: worth a look, a new label, or more of "
        "their kind."
    )
    return Section("unsure", "Least certain examples", lead, pictures=pictures)


def _lines(example: Example, classes: Sequence[str] | None) -> list[str]:
    lines = []
    if example.target.numel() == 1:
        of_classes = not example.target.is_floating_point()
        value = example.target.item()
        lines.append(f"target {class_name(int(value), classes) if of_classes else format(value, '.4g')}")
        if of_classes and len(example.answer) > 1:
            top = example.answer.topk(min(3, len(example.answer)))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            lines += [f"{class_name(label, classes)}: {100 * share:.0f} %" for label, share in pairs]
        elif len(example.answer) == 1:
            lines.append(f"yes: {100 * float(example.answer):.0f} %")
        elif len(example.answer) == 2:
            lines.append(f"{float(example.answer[0]):.4g} ± {float(example.answer[1]):.2g}")
    lines.append(f"uncertainty {example.doubt:.3g}")
    if isinstance(example.inputs, Tensor) and example.inputs.numel() <= 6:
        lines.append("inputs " + ", ".join(f"{value:.3g}" for value in example.inputs.flatten().tolist()))
    return lines


def as_image(inputs: Any, image_shape: Sequence[int] | None) -> Tensor | None:
    """An input (1, H, W), (1, 1, H, W) or (1, 3, H, W) as (H, W) or (H, W, 3) from 0 to 1; None for anything else."""
    if not isinstance(inputs, Tensor) or inputs.is_complex():
        return None
    one = inputs[0].double()
    if image_shape is not None and one.numel() == torch.Size(image_shape).numel():
        one = one.reshape(*image_shape)
    if one.dim() == 3 and one.shape[0] in (1, 3):
        one = one[0] if one.shape[0] == 1 else one.movedim(0, -1)
    is_image = one.dim() == 2 or (one.dim() == 3 and one.shape[-1] == 3)
    if not is_image or min(one.shape[:2]) < SMALLEST or not bool(one.isfinite().all()):
        return None
    low, high = one.min(), one.max()
    return (one - low) / (high - low) if high > low else torch.zeros_like(one)


def bands(posterior: Posterior, found: Judged, on: str) -> Section | None:
    """Regression: the band over a single input, or predictions against targets."""
    if not found.points:
        return None
    points = torch.cat(found.points)
    x = torch.cat(found.inputs)[:, 0] if found.inputs else None
    chart = _against(points, on) if x is None else _band(posterior, x, points[:, 2], on)
    lead = "Predictions with their 95 % intervals, and what was observed."
    return Section("bands", "Predictions and their intervals", lead, charts=[chart])


def _band(posterior: Posterior, x: Tensor, y: Tensor, on: str) -> Chart:
    reach = 0.25 * float(x.max() - x.min()) or 1.0
    grid = torch.linspace(float(x.min()) - reach, float(x.max()) + reach, 240, dtype=torch.float64)
    shape = posterior.network.example
    inputs = grid.reshape(-1, *([1] * (shape.dim() - 1 if isinstance(shape, Tensor) else 1)))
    prediction = posterior.predict(inputs.to(posterior.network.device, posterior.network.dtype), progress=False)
    assert isinstance(prediction, RegressionPrediction)
    mean, std, own = (
        value.detach().double().cpu().flatten()
        for value in (prediction.mean, prediction.std, prediction.epistemic_variance.sqrt())
    )
    traces: list[dict[str, Any]] = []
    for width, label, alpha in ((std, "95 % of targets", 0.15), (own, "95 % of the function", 0.3)):
        low, high = mean - LEVEL_Z * width, mean + LEVEL_Z * width
        traces.append(
            {"type": "scatter", "mode": "lines", "x": [*grid.tolist(), *grid.flip(0).tolist()],
             "y": [*high.tolist(), *low.flip(0).tolist()], "fill": "toself", "fillcolor": faint(BLUE, alpha),
             "line": {"width": 0, "color": BLUE}, "name": label, "hoverinfo": "skip"}
        )  # fmt: skip
    traces.append({"type": "scatter", "mode": "lines", "x": grid.tolist(), "y": mean.tolist(), "name": "mean",
                   "line": {"color": BLUE}})  # fmt: skip
    traces.append({"type": "scatter", "mode": "markers", "x": x.tolist(), "y": y.tolist(), "name": f"{on} targets",
                   "marker": {"color": GREY, "size": 5}})  # fmt: skip
    caption = (
        "The dark band is uncertainty about the function, which more data would reduce; the light one adds the noise, "
        "which they would not. Beyond the data the dark band should widen."
    )
    layout = {"xaxis": axis("input"), "yaxis": axis("target")}
    return Chart("band", "The function and its bands", caption, traces, layout, 440)


def _against(points: Tensor, on: str) -> Chart:
    mean, std, target = points.unbind(1)
    low, high = float(points[:, [0, 2]].min()), float(points[:, [0, 2]].max())
    traces = [
        {"type": "scatter", "mode": "lines", "x": [low, high], "y": [low, high], "name": "equal",
         "line": {"color": GREY, "dash": "dash", "width": 1}, "hoverinfo": "skip"},
        {"type": "scatter", "mode": "markers", "x": mean.tolist(), "y": target.tolist(), "name": f"{on} targets",
         "error_x": {"type": "data", "array": (LEVEL_Z * std).tolist(), "thickness": 0.8, "color": faint(BLUE, 0.35)},
         "marker": {"color": BLUE, "size": 5}},
    ]  # fmt: skip
    caption = (
        "Each point is a target at its prediction, with the interval of 95 %; nineteen in twenty should cross the "
        "dashed line."
    )
    layout = {"xaxis": axis("predicted"), "yaxis": axis("observed")}
    return Chart("against", "Predicted and observed", caption, traces, layout, 440)
