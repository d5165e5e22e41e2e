"""The pathology and its cure: a batch-normalised network in one dimension, and the evidence at t and at theta*.

A network with two hidden layers of 48 units with batch norm (2,593 weights) is trained by least squares, without any
prior, as such networks are. Its weights t are no mode of anything, and their length is arbitrary. The evidence taken at
t then tunes the prior precision to |t|^2, which says nothing about the data, and the error bars are absurd. Taken at
the mode theta* of the tangent linear model it does not care.
"""

from __future__ import annotations

import math
import warnings

import matplotlib.pyplot as plt
import torch
from common import COLOURS, arguments, report, save, table
from torch import Tensor, nn

import lapis

NOISE = 0.1
WIDTH = 48


def sample(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two clusters with a gap between them."""
    left = torch.rand(n // 2, 1, generator=generator)
    right = torch.rand(n - n // 2, 1, generator=generator)
    x = torch.cat([-1.3 + 0.8 * left, 0.4 + 0.9 * right])
    return x, truth(x) + NOISE * torch.randn(n, 1, generator=generator)


def truth(x: Tensor) -> Tensor:
    return torch.sin(3 * x) + 0.4 * x


def trained(data: tuple[Tensor, Tensor], steps: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(1, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1),
    )  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        (model(data[0]) - data[1]).square().mean().backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def main() -> None:
    chosen = arguments(__doc__)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    generator = torch.Generator().manual_seed(chosen.seed)
    data, new = sample(100, generator), sample(1000, generator)
    model = trained(data, 150 if chosen.quick else 1500, chosen.seed)
    posterior = lapis.laplace(model, data, lapis.Gaussian(NOISE), structure="dense")
    at_t = posterior.tune(noise=False)
    at_mode = posterior.at_tangent_mode(data).tune(noise=False)
    cured = posterior.at_tangent_mode(data).tune(groups="normalised", noise=False, method="fixed_point", tolerance=1e-3)

    precisions = [10.0**power for power in range(-4, 7, 2 if chosen.quick else 1)]
    curves: dict[str, list[float]] = {"t": [], "theta*": [], "test": []}
    for precision in precisions:
        fixed = posterior.with_prior(precision)
        curves["t"].append(float(fixed.log_evidence()))
        curves["theta*"].append(float(fixed.at_tangent_mode(data).log_evidence()))
        curves["test"].append(float(fixed.predict(new[0]).log_prob(new[1]).mean()))

    grid = torch.linspace(-2, 2, 301)[:, None]
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.6))
    tuned = {"evidence at t": at_t, "evidence at theta*": at_mode, "theta* and normalised groups": cured}
    rows = []
    gap = torch.linspace(-0.4, 0.3, 50)[:, None]
    for axis, (name, result) in zip(axes[0], tuned.items(), strict=True):
        _draw(axis, result, data, grid, name)
        precision = ", ".join(f"{value:.3g}" for value in result.weight_prior.precision.tolist())
        prediction = result.predict(new[0])
        inside = float(prediction.epistemic_variance.sqrt().mean())
        gamma, evidence = float(result.effective_parameters()), float(result.log_evidence())
        rows.append((name, precision, f"{gamma:.1f}", f"{evidence:.1f}",
                     f"{inside:.3f}", f"{float(result.predict(gap).epistemic_variance.sqrt().mean()):.3f}",
                     f"{float(prediction.log_prob(new[1]).mean()):.3f}"))  # fmt: skip
    for axis, precision in zip(axes[1], (1e-2, 1.0, 1e2), strict=False):
        _draw(axis, posterior.with_prior(precision), data, grid, f"precision {precision:g}")
    last = axes[1][2]
    last.clear()
    for name, colour in (("t", COLOURS[1]), ("theta*", COLOURS[0])):
        last.plot(precisions, curves[name], "o-", ms=4, color=colour, label=f"evidence at {name}")
    last.set(xscale="log", xlabel="prior precision", ylabel="log evidence", title="what each evidence prefers")
    last.set_ylim(max(curves["theta*"]) - 250, max(curves["theta*"]) + 20)
    other = last.twinx()
    other.plot(precisions, curves["test"], "k:", label="test log likelihood")
    other.set_ylabel("test log likelihood (nats per point)")
    handles, labels = (
        a + b for a, b in zip(*(axis.get_legend_handles_labels() for axis in (last, other)), strict=True)
    )
    last.legend(handles, labels, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.4))
    figure.tight_layout()
    save(figure, "pathology", chosen)
    head = (
        "prior tuned by",
        "precision(s)",
        "gamma",
        "log evidence",
        "sd at data",
        "sd in the gap",
        "test log likelihood",
    )
    scan = table(
        ("precision", *(f"{p:g}" for p in precisions)),
        [(name, *(f"{value:.2f}" for value in values)) for name, values in curves.items()],
    )
    best = {name: precisions[max(range(len(precisions)), key=values.__getitem__)] for name, values in curves.items()}
    text = (
        f"{posterior.n_weights} weights, {len(data[0])} data, noise {NOISE} known; "
        f"an honest test log likelihood is near {-math.log(NOISE) - 0.5 * math.log(2 * math.pi) - 0.5:.2f}.\n\n"
        f"{table(head, rows)}\n\nEvidence and test log likelihood for fixed precisions:\n\n{scan}\n\n"
        f"Of these the evidence at t prefers {best['t']:g}, the evidence at theta* {best['theta*']:g}, "
        f"new data {best['test']:g}."
    )
    report("pathology", text, chosen)


def _draw(axis: plt.Axes, result: lapis.LaplacePosterior, data: tuple[Tensor, Tensor], grid: Tensor, name: str) -> None:
    prediction = result.predict(grid)
    mean, sd = prediction.mean[:, 0], prediction.epistemic_variance[:, 0].sqrt()
    axis.fill_between(grid[:, 0], mean - 2 * sd, mean + 2 * sd, color=COLOURS[0], alpha=0.25, lw=0)
    axis.plot(grid[:, 0], mean, color=COLOURS[0])
    axis.plot(grid[:, 0], truth(grid)[:, 0], color="0.6", ls="--", lw=1)
    axis.plot(*(part[:, 0] for part in data), "k.", ms=3)
    axis.set(title=name, ylim=(-4, 4), xlim=(-2, 2))


if __name__ == "__main__":
    main()
