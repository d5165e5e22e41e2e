"""A gallery of `lapis.plots`: every function once, on small problems; one figure, docs/figures/gallery.png."""

from __future__ import annotations

import math

import torch
from common import arguments, save
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lapis
from lapis import plots

F64 = torch.float64
Pair = tuple[Tensor, Tensor]


def perceptron(inputs: int, outputs: int, units: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    layers = (nn.Linear(inputs, units), nn.Tanh(), nn.Linear(units, units), nn.Tanh(), nn.Linear(units, outputs))
    return nn.Sequential(*layers).to(F64)


def wave(source: torch.Generator) -> Pair:
    x = torch.cat(
        [torch.rand(30, 1, dtype=F64, generator=source) - 2, torch.rand(30, 1, dtype=F64, generator=source) + 1]
    )
    return x, (2 * x).sin() + 0.1 * torch.randn(60, 1, dtype=F64, generator=source)


def moons(source: torch.Generator) -> Pair:
    y = torch.arange(120) % 2
    angle, sign = math.pi * torch.rand(120, dtype=F64, generator=source), 1.0 - 2.0 * y.to(F64)
    x = torch.stack([angle.cos() - 0.5 * sign, sign * angle.sin() - 0.25 * sign], 1)
    return x + 0.15 * torch.randn(120, 2, dtype=F64, generator=source), y


def blobs(source: torch.Generator) -> Pair:
    """Three classes around corners of a triangle."""
    y = torch.arange(90) % 3
    centres = torch.tensor([[0.0, 1.5], [-1.5, -1.0], [1.5, -1.0]], dtype=F64)
    return centres[y] + 0.6 * torch.randn(90, 2, dtype=F64, generator=source), y


def digits(source: torch.Generator) -> tuple[Pair, Pair, Tensor]:
    """Few training digits 0 to 7, test digits, and digits 8 and 9."""
    images, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=F64) / 8 - 1, torch.tensor(classes)
    order = torch.randperm(len(y), generator=source)
    known = order[y[order] < 8]
    return (x[known[:200]], y[known[:200]]), (x[known[200:]], y[known[200:]]), x[y >= 8]


def trained(model: nn.Module, data: Pair, likelihood: str, epochs: int) -> lapis.LaplacePosterior:
    return lapis.train(model, data, likelihood, epochs=epochs, progress=False)  # type: ignore[return-value]


def main() -> None:
    chosen = arguments(__doc__)
    source = torch.Generator().manual_seed(chosen.seed)
    epochs = 60 if chosen.quick else 400
    curve, plane, (few, test, unknown) = wave(source), moons(source), digits(source)
    regression = trained(perceptron(1, 1), curve, "regression", epochs)
    binary = trained(perceptron(2, 2), plane, "classification", epochs)
    images = lapis.laplace(_fitted(perceptron(64, 8, 24), few, epochs), few, "classification", weights="all").tune()
    with plots.style():
        figure = Figure(figsize=(15, 10.5), layout="constrained")
        axes = figure.subplots(3, 4).ravel()
        x = torch.linspace(-3, 3, 200, dtype=F64)[:, None]
        band = regression.predict(x)
        plots.regression_band(axes[0], x, band.mean, band.epistemic_variance, band.variance, data=curve)
        plots.plane_map(axes[1], binary, plane)
        plots.plane_map(axes[2], binary, plane, quantity="mutual_information")
        plots.evidence_curve(axes[3], regression)
        plots.spectrum(axes[4], regression)
        plots.uncertainty_by_layer(axes[5], regression)
        nearest = regression.gaussian_process().kernel(curve[0][curve[0][:, 0].argsort()])
        plots.kernel_matrix(axes[6], nearest)
        plain, doubtful, outside = _digit_predictions(images, test[0], unknown)
        plots.reliability_diagram(axes[7], {"network": plain, "posterior": doubtful.probs}, test[1])
        wrong = (doubtful.probs.argmax(-1) != test[1]).double()
        doubts = {"network": 1 - plain.max(-1).values, "posterior": doubtful.entropy}
        plots.risk_coverage_curve(axes[8], doubts, wrong)
        plots.entropy_histogram(axes[9], doubtful.entropy, outside, limit=math.log(8), labels=("digits 0-7", "8, 9"))
        plots.accuracy_matrix(axes[10], _lifelong(source, 20 if chosen.quick else 200))
        plots.plane_map(
            axes[11],
            trained(perceptron(2, 3), blobs(source), "classification", epochs),
            quantity="entropy",
            limits=(-4, 4, -4, 4),
        )
        titles = {0: "regression_band", 1: "plane_map", 2: "plane_map, mutual information", 3: "evidence_curve",
                  5: "uncertainty_by_layer", 6: "kernel_matrix", 7: "reliability_diagram", 8: "risk_coverage_curve",
                  9: "entropy_histogram", 10: "accuracy_matrix", 11: "plane_map, entropy"}  # fmt: skip
        for number, title in titles.items():
            axes[number].set_title(title)
        axes[4].set_title("spectrum: " + axes[4].get_title(loc="left").replace(" are determined by the data", ""))
        save(figure, "gallery", chosen)


def _fitted(model: nn.Module, data: Pair, steps: int) -> nn.Module:
    """Trained for long by plain Adam: overconfident."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimiser.step()
    return model


def _digit_predictions(posterior: lapis.Posterior, x: Tensor, unknown: Tensor):  # type: ignore[no-untyped-def]
    with torch.no_grad():
        plain = posterior.network.module(x).softmax(-1)
    return plain, posterior.predict(x), posterior.predict(unknown).entropy


def _lifelong(source: torch.Generator, epochs: int) -> Tensor:
    """Fine-tuning on one pair of digits after the other: what is not defended is forgotten."""
    (x, y), (new, classes), _ = digits(source)
    model, pairs = perceptron(64, 2, 12), [(0, 1), (2, 3), (4, 5), (6, 7)]
    found = torch.full((4, 4), torch.nan, dtype=F64)
    for i, pair in enumerate(pairs):
        some = (y == pair[0]) | (y == pair[1])
        _fitted(model, (x[some], y[some] % 2), epochs)
        for j, (one, two) in enumerate(pairs[: i + 1]):
            asked = (classes == one) | (classes == two)
            with torch.no_grad():
                found[i, j] = (model(new[asked]).argmax(-1) == classes[asked] % 2).double().mean()
    return found


if __name__ == "__main__":
    main()
