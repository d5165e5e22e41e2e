"""ResNet-18 with 11.2 million weights and 100 outputs: draws, tuning from one draw, predictive variances, and what they
cost beside training.

Data: images and fine labels of CIFAR-100 (cifar100_ood.npz, 2000 images), of which only a few are used here: the work
is linear in their number (measured below), and two cores do no more in ten minutes. Seconds are of the processor.
"""

from __future__ import annotations

import copy
import gc
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
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.network import Network
from lapis.posteriors.laplace.matrix_free.descending import Descent

sys.path.insert(0, str(ROOT))
from benchmarks.cases import resnet

CLASSES = 100
DRAWS = 4


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    arrays = lapis.data.stored("cifar100_ood")
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


def settle(model: nn.Module, x: Tensor) -> None:
    """Batch norm's running statistics as those of all of `x`: a few steps leave them far off, and gradients huge."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    kept = [module.momentum for module in norms]
    for module in norms:
        module.momentum = 1.0
    with torch.no_grad():
        model.train()(x)
    for module, momentum in zip(norms, kept, strict=True):
        module.momentum = momentum
    model.eval()


def train(model: nn.Module, x: Tensor, y: Tensor, batch: int, epochs: int, loss: float = 0.0) -> float:
    """Epochs of SGD, until the loss in evaluation mode is below `loss`; that loss. Not to 0: saturated outputs have no
    curvature, and a posterior would learn nothing from them.
    """
    optimiser = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    now = float("inf")
    for _ in range(epochs):
        model.train()
        for start in range(0, len(x), batch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[start : start + batch]), y[start : start + batch]).backward()
            optimiser.step()
        model.eval()
        if loss > 0:
            settle(model, x)
            with torch.no_grad():
                now = float(nn.functional.cross_entropy(model(x), y))
            if now < loss:
                break
    return now


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


def costs(model: nn.Module, x: Tensor, y: Tensor, batch: int, widths: tuple[int, ...]) -> list[str]:
    """An epoch of draws beside one of training, its memory, and how a product grows."""
    scratch = copy.deepcopy(model)
    training = min(seconds(lambda: train(scratch, x, y, batch, 1)) for _ in range(2))
    posterior = lapis.laplace(model, (x, y), "classification", structure="implicit", prior=1.0, batch_size=batch)
    size, count = posterior.n_weights, len(x)
    block = 4 * size / 2**20
    rows = []
    for k in (1, 8):
        time_, memory = epoch(posterior, batch, k)
        target = 3.0 if k == 1 else 2.0
        rows.append(
            (k, f"{time_:.2f}", f"{time_ / training / k:.2f}", target, f"{memory:.0f}", f"{memory / (k * block):.1f}")
        )
    head = ("draws", "s an epoch", "training epochs a draw", "target", "peak MB", "of K P 4 bytes")
    lines = [
        f"One epoch of SGD on the low-noise objective over {count} images in minibatches of {batch} (a training epoch: "
        f"{training:.2f} s; one weight vector: {block:.1f} MB):",
        "",
        table(head, rows),
        "",
    ]
    rows = []
    for images in (count // 4, count // 2, count):
        part = ImplicitCurvature(
            posterior.network,
            posterior.likelihood,
            [Batch(x[:images], y[:images], 0)],
            posterior.facts.signature,
            2**32,
        )
        v = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
        part.product(v)
        rows.append((f"N = {images}", f"{seconds(lambda part=part, v=v: part.product(v)) / images * 1e3:.1f}"))
    few = [Batch(x[: count // 4], y[: count // 4], 0)]
    for factor in (4, 2, 1):
        smaller = resnet(tuple(width // factor for width in widths), blocks=2, outputs=CLASSES).eval()
        part = ImplicitCurvature(Network(smaller), posterior.likelihood, few, posterior.facts.signature, 2**32)
        v = torch.randn(1, part.network.size, generator=torch.Generator().manual_seed(0))
        part.product(v)
        spent = seconds(lambda part=part, v=v: part.product(v)) / (count // 4) * 1e3
        rows.append(
            (f"P = {part.network.size:,}", f"{spent:.1f} ({spent / part.network.size * 1e6:.1f} a million weights)")
        )
    return [*lines, "One product with the GGN:", "", table(("size", "ms an image"), rows), ""]


def tuned_at(posterior: lapis.ImplicitPosterior, rounds: int) -> tuple[lapis.ImplicitPosterior, str]:
    """The posterior tuned from one draw, and how that went."""
    start = time.process_time()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tuned = posterior.at_tangent_mode(tolerance=1e-3, max_products=60).tune(
            samples=1, max_iterations=rounds, tolerance=0.1
        )
    spent = time.process_time() - start
    tuning, tangent, mode = tuned.tuning, tuned.tangent, posterior.mean.double()
    assert tuning is not None
    assert tangent is not None
    path = ", ".join(f"{values[0]:.3g}" for values in tuning.path)
    unsolved = sum("relative residual" in str(w.message) for w in said)
    text = (
        f"Tuning from one draw at theta*, solved in the space of {posterior.space} to a residual of "
        f"{posterior.solver.tolerance:g} ({'reached in every round' if not unsolved else f'missed {unsolved} times'}): "
        f"prior precision {float(posterior.weight_prior.precision[0]):g} -> {path} "
        f"({'converged' if tuning.converged else 'not converged'}: {tuning.reason}); gamma {tuning.gamma[0]:.1f}; "
        f"|theta*|^2 = {float(tangent.weights.square().sum()):.3g} where |t|^2 = {float(mode @ mode):.3g}; theta* is "
        f"{tangent.reason}; {spent:.0f} s."
    )
    return tuned, text


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    torch.manual_seed(chosen.seed)
    widths = (8, 16, 32, 64) if chosen.quick else (64, 128, 256, 512)
    few, count, batch, rounds = (16, 16, 8, 8) if chosen.quick else (16, 32, 16, 6)
    x, y = data(count + 16, chosen.seed)
    x_test, x, y = x[count:], x[:count], y[:count]
    model = resnet(widths, blocks=2, outputs=CLASSES)
    loss = train(model, x[:few], y[:few], batch, 100, 0.3)
    with torch.no_grad():
        accuracy = float((model(x[:few]).argmax(1) == y[:few]).float().mean())
    data_ = (x[:few], y[:few])
    posterior = lapis.laplace(model, data_, "classification", structure="implicit", prior=1000.0, batch_size=batch)
    lines = [
        f"{posterior.n_weights:,} weights, {CLASSES} outputs, trained on {few} images to a loss of {loss:.2f} "
        f"(accuracy {accuracy:.2f}).",
        "",
    ]
    sys.stderr.write(lines[0] + "\n")
    tuned, text = tuned_at(posterior.with_solver(tolerance=0.02, max_iterations=300), rounds)
    sys.stderr.write(text + "\n")
    start = time.process_time()
    drawn = tuned.draw(DRAWS)
    spent = time.process_time() - start
    noise = torch.randn(x_test.shape, generator=torch.Generator().manual_seed(1))
    rows = []
    for name, images in (("training images", x[:few]), ("other images", x_test), ("white noise", noise)):
        variance = float(drawn.functional_variance(images, diagonal=True).mean())
        with torch.no_grad():
            point = float(model(images).softmax(-1).amax(-1).mean())
        probs = drawn.predict(images).probs
        rows.append((name, f"{variance:.3g}", f"{point:.2f}", f"{float(probs.amax(-1).mean()):.2f}"))
    lines += [
        text,
        "",
        f"{DRAWS} draws under that prior by CG: {spent:.0f} s, {max(drawn.drawing.iterations)} iterations, relative "
        f"residual {max(drawn.drawing.residuals):.2g}. Mean over inputs and logits:",
        "",
        table(("inputs", "variance of a logit", "largest probability at t", "and predicted"), rows),
        "",
    ]
    sys.stderr.write("\n".join(lines) + "\n")
    lines += costs(model, x, y, batch, widths)
    report("resnet18", "\n".join(lines).rstrip(), chosen)


if __name__ == "__main__":
    main()
