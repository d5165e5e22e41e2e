"""How many draws does tuning need? The prior precision from 1, 2, 4, 8 and 16 draws against the exact fixed point.

A classifier of MNIST digits in 7 x 7 pixels, small enough for a dense matrix. For each number of draws the tuning is
repeated with independent noise; beside the spread stands what theory says: gamma's relative standard deviation is
sqrt(2 sum_i r_i^2 / K) / sum_i r_i with r_i = l_i / (l_i + alpha), and alpha, which gamma follows back, has
1 + sum_i r_i (1 - r_i) / gamma times less.
"""

from __future__ import annotations

import math
import warnings

import matplotlib.pyplot as plt
import torch
from common import COLOURS, arguments, images, report, save, table
from torch import Tensor, nn

import lapis

DRAWS = (1, 2, 4, 8, 16)


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y, _, _ = images("mnist", count, 1, seed)
    return nn.functional.avg_pool2d(x, 4).flatten(1).double(), y


def network(x: Tensor, y: Tensor, width: int, steps: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(x.shape[1], width), nn.Tanh(), nn.Linear(width, 10)).double()
    optimiser = torch.optim.Adam(model.parameters(), 0.01, weight_decay=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    torch.manual_seed(chosen.seed)
    x, y = digits(60 if chosen.quick else 200, chosen.seed)
    model = network(x, y, 6 if chosen.quick else 16, 300)
    repeats = 5 if chosen.quick else 16
    exact = lapis.laplace(model, (x, y), "classification", structure="dense").tune(method="fixed_point")
    best = float(exact.weight_prior.precision)
    gamma = float(exact.effective_parameters())
    # r of each eigenvalue: what the theory of the spread needs
    values = torch.linalg.eigvalsh(exact.precision() - best * torch.eye(exact.n_weights, dtype=torch.float64))
    shares = values.clamp(min=0) / (values.clamp(min=0) + best)
    posterior = lapis.laplace(model, (x, y), "classification", structure="implicit").with_solver(tolerance=1e-5)
    rows, found = [], []
    for k in DRAWS:
        runs = [
            posterior.tune(samples=k, max_iterations=20, tolerance=5e-3, generator=torch.Generator().manual_seed(seed))
            for seed in range(repeats)
        ]
        ratios = torch.tensor([float(run.weight_prior.precision) / best for run in runs], dtype=torch.float64)
        spread = float(ratios.log().std())
        theory = math.sqrt(2 * float(shares.square().sum()) / k) / (gamma + float((shares * (1 - shares)).sum()))
        rounds = sum(run.tuning.iterations for run in runs) / repeats
        rows.append((k, f"{float(ratios.mean()):.3f}", f"{spread:.3f}", f"{theory:.3f}", f"{rounds:.1f}"))
        found.append(ratios)
    figure, axes = plt.subplots(figsize=(5.4, 3.4))
    for place, ratios in enumerate(found):
        jitter = torch.linspace(-0.16, 0.16, len(ratios))
        axes.plot(place + jitter, ratios, "o", ms=3.5, color=COLOURS[0], alpha=0.7, mew=0)
    axes.axhline(1, color=COLOURS[1], lw=1.2)
    axes.text(len(DRAWS) - 0.45, 1.0, "exact", color=COLOURS[1], va="center")
    axes.set_xticks(range(len(DRAWS)), DRAWS)
    axes.set_xlim(-0.5, len(DRAWS) - 0.5)
    axes.set_xlabel("draws")
    axes.set_ylabel("prior precision / exact")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "draws_for_tuning", chosen)
    head = ("draws", "mean of precision / exact", "spread of its logarithm", "theory", "rounds")
    text = (
        f"{exact.n_weights:,} weights, {len(x)} digits; exact: prior precision {best:.4g}, gamma {gamma:.1f}. "
        f"{repeats} repetitions.\n\n" + table(head, rows)
    )
    report("draws_for_tuning", text, chosen)


if __name__ == "__main__":
    main()
