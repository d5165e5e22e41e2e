"""Training with the evidence in the loop against a weight decay chosen by cross-validation, MNIST and Fashion-MNIST.

The grid trains on 90% of the data for each weight decay, picks the best by the log likelihood of the other 10%, and
trains again on all of it; evidence training (`lapis.train`) runs once, on all of it, with a prior precision for each
layer. Both are scored by the plain network at the weights found: test accuracy and mean log likelihood.
"""

from __future__ import annotations

import time
import warnings

import torch
from common import arguments, images, report, table
from torch import Tensor, nn

import lapis


def network(kind: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    if kind == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)
        )
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 49, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def decayed(kind: str, x: Tensor, y: Tensor, decay: float, epochs: int, seed: int) -> nn.Module:
    """Adam on cross-entropy + decay / (2 N) |theta|^2."""
    model = network(kind, seed)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    steps = epochs * -(-len(x) // 128)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for part in torch.randperm(len(x), generator=generator).split(128):
            optimiser.zero_grad()
            penalty = sum(p.square().sum() for p in model.parameters()) * decay / (2 * len(x))
            (nn.functional.cross_entropy(model(x[part]), y[part]) + penalty).backward()
            optimiser.step()
            schedule.step()
    return model


@torch.no_grad()
def score(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Accuracy in per cent, and mean log likelihood."""
    logits = torch.cat([model(part) for part in x.split(1000)])
    accuracy = float((logits.argmax(1) == y).float().mean())
    return 100 * accuracy, -float(nn.functional.cross_entropy(logits, y))


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    n, n_test, epochs = (500, 1000, 12) if chosen.quick else (None, None, 30)
    grid = (0.01, 1.0, 30.0) if chosen.quick else (1e-3, 0.1, 1.0, 10.0, 30.0, 100.0)
    rows = []
    for data in ("mnist", "fashion_mnist"):
        x, y, x_test, y_test = images(data, n, n_test, chosen.seed)
        held = len(x) // 10
        for kind in ("mlp", "cnn"):
            started = time.perf_counter()
            tried = {
                decay: score(decayed(kind, x[held:], y[held:], decay, epochs, chosen.seed), x[:held], y[:held])[1]
                for decay in grid
            }
            best = max(tried, key=tried.__getitem__)
            accuracy, likelihood = score(decayed(kind, x, y, best, epochs, chosen.seed), x_test, y_test)
            middle = time.perf_counter()
            model = network(kind, chosen.seed)
            posterior = lapis.train(
                model, (x, y), "classification", epochs=epochs, burn_in=max(2, epochs // 4), every=max(1, epochs // 10),
                structure="kronecker", curvature="sampled", seed=chosen.seed,
            )  # fmt: skip
            mine = score(model, x_test, y_test)
            bayes = posterior.predict(x_test[:2000]).log_prob(y_test[:2000])
            times = (f"{middle - started:.0f} s", f"{time.perf_counter() - middle:.0f} s")
            found = (f"{likelihood:.4f}", f"{mine[0]:.2f}", f"{mine[1]:.4f}", f"{float(bayes.mean()):.4f}")
            rows.append((data, kind, f"{best:g}", f"{accuracy:.2f}", *found, *times))
            print(rows[-1], flush=True)  # noqa: T201
    head = ("data", "network", "decay (CV)", "CV acc", "CV log-lik", "evidence acc", "evidence log-lik",
            "evidence, linearised log-lik (first 2000)", "CV time", "evidence time")  # fmt: skip
    size, decays = "all" if n is None else n, ", ".join(f"{decay:g}" for decay in grid)
    text = f"{size} training images, {epochs} epochs, decay grid {decays}.\n\n{table(head, rows)}"
    report("evidence_training", text, chosen)


if __name__ == "__main__":
    main()
