"""Pictures: what is drawn is what was computed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, QuadMesh
from matplotlib.figure import Figure
from torch import Tensor, nn

import lapis
from lapis import plots
from lapis.lifelong.scores import Accuracies
from lapis.plots.weights import relative_eigenvalues

F64 = torch.float64


def axes() -> Axes:
    return Figure().subplots()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def posterior(inputs: int, outputs: int, kind: str, **options: object) -> lapis.LaplacePosterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x = normal(20, inputs)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long() if kind == "classification" else x[:, :1].sin()
    found = lapis.laplace(model, (x, y), kind, structure="dense", **options)  # type: ignore[arg-type]
    assert isinstance(found, lapis.LaplacePosterior)
    return found


def test_a_map_shows_the_predictions_of_its_grid_and_the_boundaries_of_classes() -> None:
    own = posterior(2, 3, "classification")
    data = (normal(20, 2), torch.arange(20) % 3)
    drawn = plots.plane_map(axes(), own, data, resolution=7, limits=(-3, 3, -2, 2))
    (mesh,) = (part for part in drawn.collections if isinstance(part, QuadMesh))
    across, up = torch.linspace(-3, 3, 7, dtype=F64), torch.linspace(-2, 2, 7, dtype=F64)
    grid = torch.stack([across.expand(7, 7), up[:, None].expand(7, 7)], -1).reshape(-1, 2)
    expected = own.predict(grid).probs.max(-1).values.reshape(7, 7)  # type: ignore[attr-defined]
    np.testing.assert_allclose(mesh.get_array(), expected.numpy(), rtol=1e-9)
    assert sum(len(part.get_offsets()) for part in drawn.collections if isinstance(part, PathCollection)) == 20
    with pytest.raises(lapis.OptionError, match="no meaning for classification"):
        plots.plane_map(axes(), own, data, quantity="std")
    with pytest.raises(lapis.OptionError, match="data or limits"):
        plots.plane_map(axes(), own)
    with pytest.raises(lapis.DataError, match="two inputs"):
        plots.plane_map(axes(), own, (normal(20, 3), data[1]))


def test_the_boundary_is_where_two_classes_are_equally_probable() -> None:
    model = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    own = lapis.laplace(model, (normal(20, 2), torch.arange(20) % 2), "classification", structure="dense")
    drawn = plots.plane_map(axes(), own, limits=(-1, 2, -1, 1), resolution=31)
    contour = drawn.collections[-1].get_paths()[0].vertices
    assert np.abs(contour[:, 0]).max() < 1e-3
    assert np.ptp(contour[:, 1]) == pytest.approx(2)


def test_the_evidence_curve_is_the_evidence_of_each_precision() -> None:
    own = posterior(2, 1, "regression", prior=lapis.Prior(2.0))
    line, *_ = plots.evidence_curve(axes(), own, decades=1, points=3).lines
    assert line.get_xdata() == pytest.approx([0.2, 2.0, 20.0])
    expected = [float(own.with_prior(alpha).log_evidence()) for alpha in (0.2, 2.0, 20.0)]
    assert line.get_ydata() == pytest.approx(expected, rel=1e-12)
    layers = plots.evidence_curve(axes(), own.with_prior(lapis.Prior(2.0, groups="layer")), decades=1, points=3)
    assert "factor" in layers.get_xlabel()
    assert layers.lines[0].get_ydata() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("groups", ["one", "layer"])
def test_the_spectrum_adds_up_to_the_effective_parameters(groups: str) -> None:
    own = posterior(2, 1, "regression", prior=lapis.Prior(2.0, groups=groups))
    ratios, counts = relative_eigenvalues(own)
    gamma = float(own.effective_parameters())
    assert float((counts * ratios / (1 + ratios)).sum()) == pytest.approx(gamma, rel=1e-9)
    drawn = plots.spectrum(axes(), own)
    heights = drawn.lines[0].get_ydata()
    assert np.all(np.diff(heights) <= 0)
    assert heights[0] == pytest.approx(float(ratios.max()))
    assert drawn.get_title().startswith(f"{gamma:.1f} of 17 weights")


def test_uncertainty_by_layer_shows_the_median_of_each_parameter_and_the_prior() -> None:
    own = posterior(2, 1, "regression", prior=lapis.Prior(4.0))
    drawn = plots.uncertainty_by_layer(axes(), own)
    deviations = own.marginal_variance().sqrt()
    for row, name in enumerate(own.network.names):
        points = {line.get_marker(): line.get_xdata()[0] for line in drawn.lines if list(line.get_ydata()) == [row]}
        median = float(deviations[own.network.span(name)].quantile(0.5))
        assert points == {"o": pytest.approx(median), "|": 0.5}
    assert [label.get_text() for label in drawn.get_yticklabels()] == [
        "0.weight  (8)", "0.bias  (4)", "2.weight  (4)", "2.bias  (1)",
    ]  # fmt: skip


def test_a_kernel_is_drawn_in_the_order_of_its_labels() -> None:
    labels = torch.tensor([1, 0, 1, 0])
    same = (labels[:, None] == labels).double()
    drawn = plots.kernel_matrix(axes(), same.reshape(4, 1, 4, 1), labels)
    expected = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))
    np.testing.assert_array_equal(drawn.images[0].get_array(), expected.numpy())
    assert [line.get_xdata()[0] for line in drawn.lines if line.get_xdata()[0] == line.get_xdata()[1]] == [1.5]
    with pytest.raises(lapis.DataError, match="pick one output"):
        plots.kernel_matrix(axes(), torch.ones(4, 2, 4, 2))
    with pytest.raises(lapis.DataError, match="4 labels"):
        plots.kernel_matrix(axes(), same, labels[:3])


def test_an_accuracy_matrix_writes_what_is_known() -> None:
    matrix = torch.tensor([[0.9, math.nan], [0.5, 1.0]], dtype=F64)
    for given in (matrix, Accuracies(matrix)):
        drawn = plots.accuracy_matrix(axes(), given, ["first", "second"])
        cells = {tuple(text.get_position()): text.get_text() for text in drawn.texts}
        assert cells == {(0, 0): "90", (0, 1): "50", (1, 1): "100"}
    with pytest.raises(lapis.DataError, match="no accuracies"):
        plots.accuracy_matrix(axes(), 100 * matrix)
    with pytest.raises(lapis.DataError, match="name every task"):
        plots.accuracy_matrix(axes(), matrix, ["first"])


def test_risk_coverage_curves_are_those_of_the_metric() -> None:
    doubts, losses = (
        {"knows": torch.tensor([0.1, 0.2, 0.9]), "not": torch.tensor([0.9, 0.2, 0.1])},
        torch.tensor([0, 1, 1]),
    )
    drawn = plots.risk_coverage_curve(axes(), doubts, losses)
    assert drawn.lines[0].get_ydata() == pytest.approx([0, 1 / 2, 2 / 3])
    assert drawn.lines[1].get_ydata() == pytest.approx([1, 1, 2 / 3])
    assert drawn.get_legend_handles_labels()[1][0] == "knows  (area 0.389)"
    with pytest.raises(lapis.DataError, match="no doubt to draw"):
        plots.risk_coverage_curve(axes(), {}, losses)


def test_every_picture_returns_its_axes() -> None:
    own = axes()
    assert plots.reliability_diagram(own, {"one": torch.full((4, 2), 0.5)}, torch.tensor([0, 0, 1, 1])) is own
    assert plots.entropy_histogram(own, torch.rand(3), torch.rand(3)) is own
    assert plots.regression_band(own, torch.arange(3.0), torch.ones(3), torch.ones(3), torch.ones(3)) is own
