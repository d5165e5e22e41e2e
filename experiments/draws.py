"""Draws of the exact posterior: error of the variances against training epochs spent, by CG and by SGD.

A LeNet (46,678 weights) on 1,000 images of Fashion-MNIST; prior precision 34, two draws together, float32. Variances
are those of the outputs of 20 test images, from the same noise in every method; the error is mean |v / v* - 1|, v* from
draws solved to a residual of 1e-3. Cost: seconds of the processor over those of a training epoch (Adam, minibatches of
128), for each draw, without the Kronecker fit, which is given beside it.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
from common import COLOURS, arguments, images, report, save, table
from matplotlib import pyplot as plt
from torch import Tensor, nn
from trust.networks import lenet

import lapis
from lapis.curvature.products.jacobian import Jacobian
from lapis.posteriors.laplace.matrix_free.drawing import noise
from lapis.solvers import CGProgress

DRAWS, PRECISION, ENOUGH, REFERENCE = 2, 34.0, 0.05, 1e-3


def trained(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> float:
    """Train; returns the processor's seconds of an epoch."""
    optimiser = torch.optim.Adam(model.parameters())
    seconds = []
    for _ in range(epochs):
        began = time.process_time()
        for part in torch.randperm(len(x)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
        seconds.append(time.process_time() - began)
    model.eval()
    return sorted(seconds)[len(seconds) // 2]


class Curve:
    """Errors of the variances after each iteration, and the seconds until then."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.variances, self.seconds = rows, list[Tensor](), list[float]()
        self.spent, self.began = 0.0, time.process_time()

    def __call__(self, now: CGProgress) -> None:
        self.spent += time.process_time() - self.began
        self.note(now.solution)
        self.began = time.process_time()

    def note(self, z: Tensor) -> None:
        self.variances.append((self.rows @ z.mT).square().mean(1))
        self.seconds.append(self.spent)

    def against(self, exact: Tensor) -> list[float]:
        return [float((v / exact - 1).abs().mean()) for v in self.variances]


def curves(model: nn.Module, x: Tensor, y: Tensor, test: Tensor, quick: bool) -> tuple[dict[str, Curve], Tensor, float]:
    """A curve for each method, the exact variances, and the seconds of the Kronecker fit."""
    options: Any = {"prior": PRECISION, "weights": "all"}
    implicit = lapis.laplace(model, (x, y), "classification", structure="implicit", **options)
    began = time.process_time()
    kronecker = lapis.laplace(model, (x, y), "classification", structure="kronecker", **options)
    kronecker.solve(implicit.mean)
    fit = time.process_time() - began
    batch = lapis.batches.Batch(test, torch.zeros(len(test)), 0)
    jacobian = Jacobian(implicit.network, implicit.likelihood.canonical, [batch])
    rows = jacobian.with_kept_rows().rows()[0].flatten(0, 2)
    e, u = noise(implicit, 0, 0, DRAWS)
    found: dict[str, Curve] = {}
    exact = torch.empty(0)
    for name, preconditioner in (("CG, Kronecker", kronecker), ("CG, prior", None)):
        tolerance = REFERENCE if preconditioner is not None else 1e-2
        solved = implicit.with_solver(space="weights", tolerance=tolerance, preconditioner=preconditioner)
        curve = found[name] = Curve(rows)
        z = solved.gaussian.draws(e, u, callback=curve).vectors
        if preconditioner is not None:
            exact = (rows @ z.mT).square().mean(1)
    for epochs in (5,) if quick else (20,):
        curve = found[f"SGD, {epochs} epochs"] = Curve(rows)
        source = torch.Generator().manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = implicit.draw(DRAWS, solver="sgd", epochs=epochs, generator=source)
        curve.spent = time.process_time() - curve.began
        e, u = noise(implicit, drawn.drawing.seed, 0, DRAWS)
        kept = implicit.with_solver(space="weights", tolerance=REFERENCE, preconditioner=kronecker)
        same = (rows @ kept.gaussian.draws(e, u).vectors.mT).square().mean(1)
        curve.note(drawn.deviations)
        curve.variances[-1] = curve.variances[-1] / same * exact  # the error against the same noise
    return found, exact, fit


def main(chosen: argparse.Namespace) -> None:
    torch.manual_seed(chosen.seed)
    table_rows = []
    figure, axes = plt.subplots(figsize=(5.4, 3.6))
    model, (x, y, test, _) = lenet(), images("fashion_mnist", 200 if chosen.quick else 1000, 20, chosen.seed)
    epoch = trained(model, x, y, 8 if chosen.quick else 15)
    found, exact, fit = curves(model, x, y, test, chosen.quick)
    for number, (name, curve) in enumerate(found.items()):
        errors, costs = curve.against(exact), [each / epoch / DRAWS for each in curve.seconds]
        enough = next((i for i, error in enumerate(errors) if max(errors[i:]) <= ENOUGH and error <= ENOUGH), None)
        reached = "not reached" if enough is None else f"{costs[enough]:.1f}"
        products = "" if enough is None or "SGD" in name else enough + 1
        table_rows.append([name, products, reached, f"{errors[-1]:.4f} after {costs[-1]:.1f} epochs"])
        if "SGD" not in name:
            axes.semilogy(costs, errors, color=COLOURS[number], label=name)
        else:
            label = name
            axes.semilogy(costs, errors, "o", color=COLOURS[2], label=label)
    table_rows.append(["Kronecker fit, once", "", f"{fit / epoch:.1f} in all", ""])
    axes.axhline(ENOUGH, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("training epochs a draw")
    axes.set_ylabel("relative error of variances")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "draws", chosen)
    head = ("method", "products", f"training epochs a draw to an error of {ENOUGH}", "at the end")
    report("draws", table(head, table_rows), chosen)


if __name__ == "__main__":
    main(arguments(__doc__))
