"""Draws of the exact posterior: error of the variances against training epochs spent, by every solver.

"lenet": 46,678 weights, 1,000 images of MNIST. "resnet": ResNet-20 whose first convolution has stride 2, 128 images of
CIFAR-10. Prior precision 34, four draws together, float32. Variances are those of the outputs of 20 test
images, from the same white noise in every method; the error is the mean of |v / v* - 1|, v* from block conjugate
gradients run far longer. Cost: seconds of the processor over those of a training epoch (Adam, minibatches of 128), a
draw. Each method is a process of its own (--method) that keeps its curve
in --folder; without it those that are missing run, and the table is made.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import COLOURS, images, report, save, table
from matplotlib import pyplot as plt
from torch import Tensor, nn
from trust.networks import lenet, resnet

import lapis
from lapis.curvature.products.jacobian import Jacobian
from lapis.posteriors.laplace.matrix_free.noise import noise
from lapis.solvers import BlockState, CGProgress, Diagonal, block_conjugate_gradients

PRECISION, ENOUGH, DRAWS = 34.0, 0.05, 4
METHODS = ("reference", "eight", "cg", "kronecker", "sgd", "low_noise", "auto")
NAMES = {
    "reference": "block CG, 4 draws", "eight": "block CG, 8 draws", "cg": "CG, prior (as before)",
    "kronecker": "CG, Kronecker (as before)", "sgd": "SGD, dual, 20 epochs",
    "low_noise": "SGD, low noise, 20 epochs (as before)", "auto": "draw(4) by itself",
}  # fmt: skip
ITERATIONS = {"lenet": (45, 60), "resnet": (36, 40)}
"""Of block CG, and of CG."""


def problem(name: str, quick: bool) -> tuple[nn.Module, Tensor, Tensor, Tensor, float]:
    """The trained network, its data, test images, and the processor's seconds of a training epoch."""
    torch.manual_seed(0)
    if name == "lenet":
        model, (x, y, test, _) = lenet(), images("mnist", 100 if quick else 1000, 20, 0)
    else:
        model = resnet(3, (16, 32, 64), 1 if quick else 3, 2)
        x, y = lapis.data.images("cifar10_small", "train")
        x = (x - x.mean()) / x.std()
        test, x, y = x[-20:], x[: 32 if quick else 128], y[: 32 if quick else 128]
    optimiser = torch.optim.Adam(model.parameters())
    seconds = []
    for _ in range(15):
        began = time.process_time()
        for part in torch.randperm(len(x)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
        seconds.append(time.process_time() - began)
    return model.eval(), x, y, test, sorted(seconds)[len(seconds) // 2]


class Curve:
    """Outputs J z of the test images after each iteration, and the processor's seconds until then."""

    def __init__(self, rows: Tensor, start: Tensor | float = 0.0) -> None:
        self.rows, self.start, self.outputs, self.seconds = rows, start, list[Tensor](), list[float]()
        self.spent, self.began = 0.0, time.process_time()

    def __call__(self, now: CGProgress | BlockState) -> None:
        self.note(now.solution)

    def note(self, z: Tensor) -> None:
        self.spent += time.process_time() - self.began
        self.outputs.append(self.rows @ (z + self.start).mT)
        self.seconds.append(self.spent)
        self.began = time.process_time()


def run(network: str, method: str, quick: bool) -> dict[str, Any]:
    """One method's curve."""
    model, x, y, test, epoch = problem(network, quick)
    options: Any = {"prior": PRECISION, "weights": "all"}
    made: Any = lapis.laplace(model, (x, y), "classification", structure="implicit", **options)
    made = made.with_solver(space="weights")
    batch = lapis.batches.Batch(test, torch.zeros(len(test)), 0)
    rows = Jacobian(made.network, made.likelihood.canonical, [batch]).with_kept_rows().rows()[0].flatten(0, 2)
    seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(0)))  # that of `draw`
    draws = 2 * DRAWS if method == "eight" else DRAWS
    longest = (6, 6) if quick else ITERATIONS[network]
    curve = Curve(rows)
    warnings.simplefilter("ignore")
    if method in ("sgd", "low_noise", "auto"):
        how: Any = {} if method == "auto" else {"solver": "sgd"}
        if method == "low_noise":
            how["objective"] = "low_noise"
        curve.note(made.draw(DRAWS, **how).deviations)
    else:
        e, u = noise(made, seed, 0, draws)
        gaussian = made.gaussian
        if method == "kronecker":
            kronecker = lapis.laplace(model, (x, y), "classification", structure="kronecker", **options)
            gaussian = made.with_solver(preconditioner=kronecker).gaussian
        if method in ("cg", "kronecker"):
            replace(gaussian, max_iterations=longest[1]).draws(e, u, callback=curve)
        else:
            target = made.curvature.root_transposed(u) + gaussian.precision.sqrt() * e
            curve.start = e / gaussian.precision.sqrt()
            residual = target - gaussian.multiply(curve.start)
            block_conjugate_gradients(
                gaussian.operator(), residual, preconditioner=Diagonal(gaussian.precision), callback=curve,
                max_iterations=longest[0],
            )  # fmt: skip
    return {"outputs": torch.stack(curve.outputs), "seconds": curve.seconds, "epoch": epoch, "draws": draws}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=tuple(ITERATIONS), default="lenet")
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--folder", type=Path, default=Path("build/draws"))
    parser.add_argument("--report", action="store_true", help="the table of the methods that have run")
    parser.add_argument("--quick", action="store_true", help="less work, to see that it runs")
    chosen = parser.parse_args()
    chosen.seed, chosen.started = 0, time.perf_counter()
    torch.set_num_threads(1)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for method in (chosen.method,) if chosen.method else METHODS:
        path = chosen.folder / f"{chosen.network}_{method}{'_quick' if chosen.quick else ''}.pt"
        if chosen.method or not (path.exists() or chosen.report):
            torch.save(run(chosen.network, method, chosen.quick), path)
    if chosen.method is None:
        written(chosen)


def written(chosen: argparse.Namespace) -> None:
    """The table and the figure from all curves."""
    lines = []
    figure, axes = plt.subplots(figsize=(5.4, 3.6))
    exact: dict[int, Tensor] = {}
    for number, method in enumerate(METHODS):
        path = chosen.folder / f"{chosen.network}_{method}{'_quick' if chosen.quick else ''}.pt"
        if not path.exists():
            continue
        found = torch.load(path)
        outputs, count = found["outputs"], found["draws"]
        if method in ("reference", "eight"):
            exact[count] = outputs[-1].square().mean(1)
        errors = [float((f.square().mean(1) / exact[count] - 1).abs().mean()) for f in outputs]
        costs = [seconds / found["epoch"] / count for seconds in found["seconds"]]
        enough = next((i for i in range(len(errors)) if max(errors[i:]) <= ENOUGH), None)
        reached = "not reached" if enough is None else f"{costs[enough]:.1f}"
        iterations = "" if len(errors) == 1 or enough is None else enough + 1
        last = -1 if method not in ("reference", "eight") else len(errors) // 2
        lines.append([NAMES[method], iterations, reached, f"{errors[last]:.3f} after {costs[last]:.1f}"])
        style = "o" if len(errors) == 1 else "-"
        axes.semilogy(
            costs,
            errors,
            style,
            color=(*COLOURS, "black", "tab:orange", "tab:purple")[number],
            linewidth=1,
            label=NAMES[method],
        )
    axes.axhline(ENOUGH, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("training epochs a draw")
    axes.set_ylabel("relative error of variances")
    axes.legend(frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, f"draws_{chosen.network}", chosen)
    head = ("method", "iterations", f"epochs a draw to an error of {ENOUGH}", "error after epochs a draw")
    report(f"draws_{chosen.network}", table(head, lines), chosen)


if __name__ == "__main__":
    main()
