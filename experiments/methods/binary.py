"""Networks of which all that is learnt can be binary, and a picture of a posterior over them."""

from __future__ import annotations

import argparse

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapis


def binary_network(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Two hidden layers without biases, batch norm without weights: all that is learnt can be binary."""
    layers: list[nn.Module] = [nn.Flatten()]
    for size in (width, width):
        layers += [nn.Linear(inputs, size, bias=False), nn.BatchNorm1d(size, affine=False), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs, affine=False))


def moons(seed: int, count: int = 2000) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    angle = torch.rand(count, generator=source) * torch.pi
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    label = torch.arange(count) % 2
    x = torch.where(label[:, None] == 0, upper, lower) + 0.15 * torch.randn(count, 2, generator=source)
    return (x - x.mean(0)) / x.std(0), label


def binary_picture(chosen: argparse.Namespace) -> str:
    """Two moons: the most probable binary network, the average of drawn ones, and how far these disagree."""
    torch.manual_seed(0)
    x, y = moons(0)
    features = torch.cat([x, torch.ones(len(x), 1)], 1)
    model = binary_network(3, 128, 2)
    optimiser = lapis.optim.BayesBiNN(model.parameters(), lr=1e-3, data_size=len(x), temperature=0.1, start=2.0)
    steps = 200 if chosen.quick else 2000
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(model(features), y)
        loss.backward()
        return loss

    for _ in range(steps):
        optimiser.step(closure)
        schedule.step()
    model.eval()
    posterior = optimiser.posterior(model, "classification")
    axis = torch.linspace(-2.5, 2.5, 80)
    grid = torch.cartesian_prod(axis, axis)
    points = torch.cat([grid, torch.ones(len(grid), 1)], 1)
    drawn = posterior.predict(points, samples=50)
    with torch.no_grad():
        mode = torch.func.functional_call(model, posterior.network.unflatten(posterior.mode), points).softmax(-1)
    shown = {
        "most probable network": mode[:, 1],
        "average of 50 drawn ones": drawn.probs[:, 1],
        "their disagreement (mutual information)": drawn.mutual_information,
    }
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), constrained_layout=True)
    for at, (title, value) in zip(axes, shown.items(), strict=True):
        unsure = title.startswith("their")
        picture = at.imshow(
            value.reshape(80, 80).T, origin="lower", extent=(-2.5, 2.5, -2.5, 2.5), vmin=0,
            vmax=None if unsure else 1, cmap="Greys" if unsure else "RdBu_r",
        )  # fmt: skip
        at.scatter(*x[:200].T, c=y[:200], s=14, cmap="RdBu_r", edgecolors="w", linewidths=0.6)
        at.set_title(title, fontsize=9)
        figure.colorbar(picture, ax=at, shrink=0.8)
    chosen.figures.mkdir(parents=True, exist_ok=True)
    name = f"{chosen.name}_binary.png"
    figure.savefig(chosen.figures / name, dpi=110)
    plt.close(figure)
    return f"![A posterior over binary networks, on two moons](../figures/{name})"
