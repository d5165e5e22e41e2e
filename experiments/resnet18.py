"""ResNet-18 with 11.2 million weights and 100 outputs: draws, tuning from one draw, predictive variances, and what they
cost beside training.

Data: images and fine labels of CIFAR-100 (cifar100_ood.npz, 2000 images), of which only a few are used here: the work
is linear in their number (measured below), and two cores do no more in ten minutes. Seconds are of the processor.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import ROOT, arguments, report, table
from torch import Tensor, nn

import lapis
from lapis.batches import Batch
from lapis.curvature.implicit import ImplicitCurvature
from lapis.network import Network
from lapis.posteriors.drawing import Descent

sys.path.insert(0, str(ROOT))
from benchmarks.cases import resnet

CLASSES = 100


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    folder = Path(os.environ.get("LAPIS_DATA", ROOT.parent / "shared" / "data"))
    with np.load(folder / "cifar100_ood.npz", allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    x = torch.from_numpy(next(a for a in arrays.values() if a.ndim == 4)).float() / 255
    labels = [a for a in arrays.values() if a.ndim == 1]
    y = torch.from_numpy(labels[0].astype(np.int64))
    x = x if x.shape[1] == 3 else x.permute(0, 3, 1, 2).contiguous()
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count]
    return ((x - x.mean()) / x.std())[chosen], y[chosen] % CLASSES


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def peak(work: Callable[[], object]) -> float:
    """Megabytes that the process grew by at its peak, where Linux lets us reset its mark."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return float("nan")

    def status(name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(name)) / 1024

    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def train(model: nn.Module, x: Tensor, y: Tensor, batch: int, epochs: int) -> None:
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    for _ in range(epochs):
        for start in range(0, len(x), batch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[start : start + batch]), y[start : start + batch]).backward()
            optimiser.step()
    model.eval()


def epoch(posterior: lapis.ImplicitPosterior, batch: int, k: int) -> tuple[float, float]:
    """Seconds and peak megabytes of one epoch of SGD steps for k draws."""
    descent = Descent(posterior, "low_noise", batch, 0, k)
    state = {"y": descent.start.clone(), "v": torch.zeros_like(descent.start), "mean": descent.start.clone()}
    descent.gradient(state["y"], 0)  # the way to multiply is chosen here, once

    def run() -> None:
        for step in range(len(descent.parts)):
            slope = descent.gradient(state["y"], step)
            state["v"].mul_(0.9).add_(slope)
            state["y"].sub_(slope, alpha=1e-6).sub_(state["v"], alpha=9e-7)
            state["mean"].lerp_(state["y"], 1 / (step + 1))

    found: list[float] = []
    memory = peak(lambda: found.append(seconds(run)))
    held = 4 * sum(t.numel() for t in (*state.values(), descent.target)) / 2**20
    return found[0], memory + held


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    torch.manual_seed(chosen.seed)
    widths = (8, 16, 32, 64) if chosen.quick else (64, 128, 256, 512)
    count, batch, epochs = (16, 8, 40) if chosen.quick else (32, 16, 25)
    x, y = data(count + 16, chosen.seed)
    x_test, x, y = x[count:], x[:count], y[:count]
    model = resnet(widths, blocks=2, outputs=CLASSES)
    train(model, x, y, batch, epochs)
    training = min(seconds(lambda: train(model, x, y, batch, 1)) for _ in range(2))
    with torch.no_grad():
        accuracy = float((model(x).argmax(1) == y).float().mean())
    posterior = lapis.laplace(model, (x, y), "classification", structure="implicit", prior=1.0, batch_size=batch)
    size = posterior.n_weights
    block = 4 * size / 2**20
    lines = [
        f"{size:,} weights, {CLASSES} outputs, {count} images, minibatches of {batch}; training accuracy "
        f"{accuracy:.2f}, one training epoch {training:.2f} s. One weight vector takes {block:.1f} MB.",
        "",
    ]
    rows = []
    for k in (1, 8):
        time_, memory = epoch(posterior, batch, k)
        target = 3.0 if k == 1 else 2.0
        rows.append(
            (k, f"{time_:.2f}", f"{time_ / training / k:.2f}", target, f"{memory:.0f}", f"{memory / (k * block):.1f}")
        )
    head = ("draws", "s an epoch", "training epochs a draw", "target", "peak MB", "of K P 4 bytes")
    lines += ["One epoch of SGD on the low-noise objective:", "", table(head, rows), ""]

    rows = []
    for images in (count // 4, count // 2, count):
        part = ImplicitCurvature(
            posterior.network, posterior.likelihood, [Batch(x[:images], y[:images], 0)], posterior.signature, 2**32
        )
        v = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
        part.product(v)
        rows.append((f"N = {images}", f"{seconds(lambda part=part, v=v: part.product(v)) / images * 1e3:.1f}"))
    few = [Batch(x[: count // 4], y[: count // 4], 0)]
    for factor in (4, 2, 1):
        smaller = resnet(tuple(width // factor for width in widths), blocks=2, outputs=CLASSES).eval()
        part = ImplicitCurvature(Network(smaller), posterior.likelihood, few, posterior.signature, 2**32)
        v = torch.randn(1, part.network.size, generator=torch.Generator().manual_seed(0))
        part.product(v)
        spent = seconds(lambda part=part, v=v: part.product(v)) / (count // 4) * 1e3
        rows.append(
            (f"P = {part.network.size:,}", f"{spent:.1f} ({spent / part.network.size * 1e6:.1f} a million weights)")
        )
    lines += ["One product with the GGN:", "", table(("size", "ms an image"), rows), ""]

    loose = posterior.with_solver(space="weights", tolerance=0.01, max_iterations=60 if chosen.quick else 30)
    start = time.process_time()
    tuned = loose.tune(draws=1, rounds=2 if chosen.quick else 3, tolerance=0.05)
    spent = time.process_time() - start
    path = ", ".join(f"{values[0]:.3g}" for values in tuned.tuning.path)
    lines += [
        f"Tuning from one draw, at t, solved in the space of {loose.space} to {loose.solver.tolerance:g} or "
        f"{loose.solver.max_iterations} iterations: prior precision 1 -> {path}; gamma {tuned.tuning.gamma[0]:.1f}; "
        f"{spent:.0f} s = {spent / training:.0f} training epochs.",
        "",
    ]
    start = time.process_time()
    drawn = tuned.draw(1)
    residuals = max(drawn.drawing.residuals)
    spent = time.process_time() - start
    noise = torch.randn(x_test.shape, generator=torch.Generator().manual_seed(1))
    rows = [
        (name, f"{float(drawn.functional_variance(images, diagonal=True).mean()):.3g}")
        for name, images in (("training images", x[:16]), ("other images", x_test), ("white noise", noise))
    ]
    lines += [
        f"One draw under that prior by CG: {spent:.0f} s, relative residual {residuals:.2g}. "
        "Mean predictive variance of a logit:",
        "",
        table(("inputs", "variance"), rows),
    ]
    report("resnet18", "\n".join(lines), chosen)


if __name__ == "__main__":
    main()
