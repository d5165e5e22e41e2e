"""Conjugate gradients with the exact precision A = GGN + prior of a trained CNN, under four preconditioners.

What is solved for are draws, A z = b. The error that counts is 1 - b.z_i / b.z, the squared error of the i-th iterate
in the norm of A relative to z's own: for b a gradient of an output it is the relative error of that output's variance.
The solver itself, which does not know z, stops by the residual.

The network is small enough for A as a matrix, so that iterations are counted on that (checked against products over
the data) and their seconds are those of one product over the data and one application of the preconditioner, measured.
"Set-up" is what a preconditioner costs before the first solve, once for all prior precisions: a diagonal or Kronecker
fit, or the products of Lanczos' method.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from common import COLOURS, arguments, images, report, save, table
from matplotlib import pyplot as plt
from torch import Tensor, nn

import lapis
from lapis.solvers import (
    CallablePreconditioner,
    CGProgress,
    Diagonal,
    LowRankPlusDiagonal,
    Operator,
    Preconditioner,
    conjugate_gradients,
    lanczos_eigenpairs,
)

T = TypeVar("T")
PRECISIONS = (10.0, 1.0, 0.1)
NAMES = ("none", "diagonal", "low rank", "kronecker")
DRAWS = 4
RANK = 100
RESIDUAL = 0.01


def trained(x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=epochs * -(-len(x) // 100))
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
            schedule.step()
    return model.eval().double()


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


@dataclass
class Run:
    """Errors in the norm of A and residuals, the largest over the draws, after each iteration."""

    errors: list[float] = field(default_factory=list)
    residuals: list[float] = field(default_factory=list)

    @staticmethod
    def first(values: list[float], limit: float) -> int | None:
        return next((i + 1 for i, value in enumerate(values) if value <= limit), None)


class Problem:
    """The GGN of some examples as a matrix, its eigenpairs, and what products and preconditioners cost."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, seed: int) -> None:
        def fit(structure: str) -> lapis.LaplacePosterior:
            return lapis.laplace(model, (x, y), "classification", structure=structure, progress=False)

        dense = fit("dense")
        self.size, self.count, self.seed = dense.n_weights, len(x), seed
        self.eye = torch.eye(self.size, dtype=torch.float64)
        self.tuned = float(dense.tune().weight_prior.precision[0])
        covariance = dense.with_prior(1.0).solve(self.eye)
        self.ggn = torch.linalg.inv((covariance + covariance.mT) / 2) - self.eye
        self.ggn = (self.ggn + self.ggn.mT) / 2
        self.values, self.vectors = torch.linalg.eigh(self.ggn)
        self.values.clamp_(min=0)

        self.setup = {"none": 0.0}
        self.diagonal, self.setup["diagonal"] = timed(lambda: fit("diagonal"))
        implicit = lapis.laplace(model, (x, y), "classification", structure="implicit", progress=False)
        v = torch.randn(DRAWS, self.size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        implicit.curvature.product(v[:1])  # the ways to multiply are chosen here, once
        implicit.curvature.product(v)
        product, self.product = timed(lambda: implicit.curvature.product(v))
        self.disagreement = float((product - v @ self.ggn).norm() / product.norm())
        _, one = timed(lambda: implicit.curvature.product(v[:1]))
        self.pairs = lanczos_eigenpairs(
            Operator(lambda u: u @ self.ggn, self.size, property="symmetric"),
            rank=min(RANK, self.size // 4),
            tolerance=1e-2,
            generator=torch.Generator().manual_seed(seed),
        )
        self.setup["low rank"] = self.pairs.products * one

        def kronecker() -> lapis.LaplacePosterior:
            posterior = fit("kronecker")
            posterior.solve(v)
            return posterior

        self.kronecker, self.setup["kronecker"] = timed(kronecker)

    def preconditioner(self, name: str, precision: float) -> Preconditioner | None:
        prior = torch.full((self.size,), precision, dtype=torch.float64)
        if name == "diagonal":
            return Diagonal(1 / self.diagonal.with_prior(precision).marginal_variance().double())
        if name == "low rank":
            return LowRankPlusDiagonal(self.pairs.values.clamp(min=0), self.pairs.vectors, prior)
        if name == "kronecker":
            return CallablePreconditioner(self.kronecker.with_prior(precision).solve)
        return None

    def gamma(self, precision: float) -> float:
        return float((self.values / (self.values + precision)).sum())

    def run(self, name: str, precision: float, limit: int) -> tuple[Run, float]:
        """The solves, and the seconds of one application of the preconditioner."""
        generator = torch.Generator().manual_seed(self.seed)
        white = torch.randn(DRAWS, self.size, dtype=torch.float64, generator=generator)
        b = (white * (self.values + precision).sqrt()) @ self.vectors.mT  # of covariance A, as a draw's is
        energy = white.square().sum(1)  # b . z
        found, scale = Run(), b.norm(dim=1)

        def note(now: CGProgress) -> bool:
            found.errors.append(float((1 - (now.solution * b).sum(1) / energy).max()))
            found.residuals.append(float((now.residual_norms / scale).max()))
            return found.errors[-1] < 1e-3 and found.residuals[-1] < RESIDUAL

        chosen = self.preconditioner(name, precision)
        operator = Operator.from_matrix(self.ggn + precision * self.eye)
        conjugate_gradients(operator, b, preconditioner=chosen, tolerance=1e-10, max_iterations=limit, callback=note)
        if chosen is None:
            return found, 0.0
        return found, min(timed(lambda: chosen.solve(b))[1] for _ in range(3))


def figure(curves: dict[tuple[int, str], Run], counts: tuple[int, ...], precision: float) -> plt.Figure:
    drawn, axes = plt.subplots(1, len(counts), figsize=(8, 3), sharey=True)
    for axis, count in zip(axes, counts, strict=True):
        for name, colour in zip(NAMES, COLOURS, strict=True):
            errors = curves[count, name].errors
            axis.semilogy(range(1, len(errors) + 1), errors, color=colour, label=name)
        axis.set_title(f"{count:,} images, prior precision {precision:g}", fontsize=9)
        axis.set_xlabel("iterations")
        axis.set_xlim(0, 200)
        axis.set_ylim(1e-3, 1)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("error of variances")
    axes[-1].legend(fontsize=8)
    return drawn


def main() -> None:
    chosen = arguments(__doc__)
    trained_on, counts, limit = (1000, (200, 1000), 60) if chosen.quick else (10_000, (1000, 10_000), 500)
    precisions = PRECISIONS[:2] if chosen.quick else PRECISIONS
    x, y, x_test, y_test = images("mnist", trained_on, 2000, chosen.seed)
    model = trained(x, y, 8, chosen.seed)
    with torch.no_grad():
        accuracy = float((model(x_test.double()).argmax(1) == y_test).double().mean())
    lines, curves = [], {}
    head = (
        "prior precision", "gamma", "preconditioner", "error 10 %", "error 1 %", f"residual {RESIDUAL:g}",
        "solve to 1 %, s", "with set-up", "times as fast as none",
    )  # fmt: skip
    for count in counts:
        problem = Problem(model, x[:count].double(), y[:count], chosen.seed)
        rows = []
        for precision in precisions:
            plain: float | None = None
            for name in NAMES:
                run, applied = problem.run(name, precision, limit)
                curves[count, name] = run if precision == 1.0 else curves.get((count, name), run)
                steps = [run.first(run.errors, 0.1), run.first(run.errors, 0.01), run.first(run.residuals, RESIDUAL)]
                spent = (steps[1] or limit) * (problem.product + applied)
                plain = spent if name == "none" else plain
                whole = spent + problem.setup[name]
                assert plain is not None
                rows.append(
                    [
                        f"{precision:g}", f"{problem.gamma(precision):.0f}", name,
                        *(f"> {limit}" if n is None else n for n in steps), f"{spent:.1f}", f"{whole:.1f}",
                        "" if name == "none" or steps[1] is None else f"{plain / whole:.1f}",
                    ]
                )  # fmt: skip
        lines += [
            f"{count:,} examples. Precision tuned by the evidence: {problem.tuned:.1f}. One product with {DRAWS} "
            f"vectors takes {problem.product:.2f} s; set-up: diagonal {problem.setup['diagonal']:.2f} s, kronecker "
            f"{problem.setup['kronecker']:.2f} s, {len(problem.pairs.values)} eigenpairs "
            f"{problem.setup['low rank']:.0f} s ({problem.pairs.products} products with one vector). The matrix agrees "
            f"with products to {problem.disagreement:.0e}.",
            "",
            table(head, rows),
            "",
        ]
    save(figure(curves, counts, 1.0), "preconditioning", chosen)
    text = (
        f"MNIST, CNN with {problem.size:,} weights trained on {trained_on:,} images (test accuracy {accuracy:.3f}); "
        f'{DRAWS} draws, iterations of the slowest, at most {limit}; where plain solves were cut off, "times as fast" '
        "is a lower bound. CPU seconds of one thread.\n\n"
    )
    report("preconditioning", text + "\n".join(lines).rstrip(), chosen)


if __name__ == "__main__":
    main()
