"""MacKay's example: a 1-6-1 network on a noisy sine, with and without Bayesian regularisation, and the choice of width.

Bayesian: `lapis.train` tunes the prior precision of each layer and the noise by the evidence. Without: the same
training with next to no prior. Widths are compared by the evidence on the training data, and by the error on new data.
"""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import torch
from common import COLOURS, arguments, report, save, table
from torch import Tensor, nn

import lapis

NOISE = 0.2


def function(x: Tensor) -> Tensor:
    return torch.sin(1.5 * math.pi * x)


def sample(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, n)[:, None]
    return x, function(x) + NOISE * torch.randn(n, 1, generator=generator)


def network(width: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))


def bayesian(width: int, data: tuple[Tensor, Tensor], epochs: int, seed: int) -> lapis.LaplacePosterior:
    return lapis.train(
        network(width, seed), data, lapis.Gaussian(0.3), epochs=epochs, burn_in=epochs // 2, every=epochs // 50,
        prior=lapis.Prior(0.1, groups="layer"), batch_size=len(data[0]), learning_rate=0.03, structure="dense",
        hyper_steps=10, seed=seed,
    )  # fmt: skip


def plain(width: int, data: tuple[Tensor, Tensor], epochs: int, seed: int) -> nn.Sequential:
    """Least squares with a weight decay of 1e-8: no regularisation to speak of."""
    model = network(width, seed)
    optimiser = torch.optim.Adam(model.parameters(), 0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    for _ in range(epochs):
        optimiser.zero_grad()
        loss = (model(data[0]) - data[1]).square().mean() + 1e-8 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimiser.step()
        schedule.step()
    return model


def main() -> None:
    chosen = arguments(__doc__)
    torch.set_default_dtype(torch.float64)
    epochs, restarts = (400, 1) if chosen.quick else (1500, 2)
    widths = (1, 2, 3, 6) if chosen.quick else (1, 2, 3, 4, 6, 8)
    generator = torch.Generator().manual_seed(chosen.seed)
    data, new = sample(30, generator), sample(2000, generator)

    rows, evidences, errors, posteriors, plain_errors = [], [], [], {}, []
    for width in widths:
        # restarts find different modes; the evidence chooses among these too
        runs = [bayesian(width, data, epochs, seed) for seed in range(restarts)]
        best = max(runs, key=lambda posterior: float(posterior.log_evidence()))
        posteriors[width] = best
        error = float((best.predict(new[0]).mean - new[1]).square().mean().sqrt())
        unregularised = (
            sum(
                float((plain(width, data, epochs, seed)(new[0]) - new[1]).square().mean().sqrt().detach())
                for seed in range(restarts)
            )
            / restarts
        )
        evidences.append(float(best.log_evidence()))
        errors.append(error)
        plain_errors.append(unregularised)
        rows.append((width, best.n_weights, f"{evidences[-1]:.2f}", f"{float(best.effective_parameters()):.2f}",
                     f"{float(best.likelihood.noise):.3f}", f"{error:.4f}", f"{unregularised:.4f}"))  # fmt: skip
    by_evidence = widths[max(range(len(widths)), key=evidences.__getitem__)]
    by_error = widths[min(range(len(widths)), key=errors.__getitem__)]
    chosen_error, least = errors[widths.index(by_evidence)], min(errors)

    grid = torch.linspace(-1.6, 1.6, 300)[:, None]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6))
    free = plain(6, data, epochs, 0)
    for axis, title in zip(axes, ("1-6-1 without regularisation", "1-6-1 tuned by the evidence"), strict=False):
        axis.plot(grid[:, 0], function(grid)[:, 0], color="0.6", lw=1, ls="--", label="truth")
        axis.plot(*(part[:, 0] for part in data), "k.", ms=6, label="30 data")
        axis.set(title=title, xlim=(-1.6, 1.6), ylim=(-2.2, 2.2), xlabel="x")
    axes[0].plot(grid[:, 0], free(grid).detach()[:, 0], color=COLOURS[1])
    prediction = posteriors[6].predict(grid)
    mean, std, inner = prediction.mean[:, 0], prediction.std[:, 0], prediction.epistemic_variance[:, 0].sqrt()
    axes[1].fill_between(
        grid[:, 0], mean - 2 * std, mean + 2 * std, color=COLOURS[0], alpha=0.15, lw=0, label="with noise"
    )
    axes[1].fill_between(
        grid[:, 0], mean - 2 * inner, mean + 2 * inner, color=COLOURS[0], alpha=0.3, lw=0, label="function"
    )
    axes[1].plot(grid[:, 0], mean, color=COLOURS[0])
    axes[1].legend(fontsize=8, loc="lower left")
    axes[2].plot(widths, evidences, "o-", color=COLOURS[0])
    axes[2].set(title="width chosen by evidence", xlabel="hidden units", xticks=widths)
    axes[2].set_ylabel("log evidence", color=COLOURS[0])
    other = axes[2].twinx()
    other.plot(widths, errors, "s--", color=COLOURS[1])
    other.set_ylabel("test error (RMS)", color=COLOURS[1])
    figure.tight_layout()
    save(figure, "mackay", chosen)

    head = ("hidden", "weights", "log evidence", "gamma", "noise", "test RMSE", "unregularised test RMSE")
    text = table(head, rows) + (
        f"\n\nTrue noise {NOISE}. Evidence chooses {by_evidence} hidden units, test error {by_error}; "
        f"the evidence's choice has test RMSE {chosen_error:.4f}, the least is {least:.4f}. "
        f"At 6 hidden units gamma is {float(posteriors[6].effective_parameters()):.1f} of {posteriors[6].n_weights}."
    )
    report("mackay", text, chosen)
    assert chosen.quick or chosen_error < 1.05 * least, "the evidence chose a width that predicts badly"


if __name__ == "__main__":
    main()
