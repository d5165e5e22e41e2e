"""Bayes against optimisation: where both end on a loss with a sharp and a flat minimum, and on one with a steep wall.

Optimisation minimises loss(theta): gradient descent, which is the rule with a fixed covariance at the mean. Bayes
minimises E_q[loss] - H(q) over Gaussians q: the rule with its expectation by quadrature. Their conditions differ:
grad loss = 0 and H > 0 at a point, or E_q[grad loss] = 0 and E_q[H] = S on average over q.

On the wall, loss = exp(-4 theta) + theta / 2, the ends are known: theta* = log(8) / 4, and q has variance 1/2 and mean
theta* + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from common import arguments, report, save, table
from matplotlib.axes import Axes
from torch import Tensor

from lapis.learning_rule import DiagonalGaussian, FixedGaussian, Run, run
from lapis.plots.appearance import BLUE, GREY, INK, ORANGE, style

SHARP, FLAT, SCALE = -2.0, 2.0, 1.5
NARROW, WIDE = 0.25, 1.5


def wells(theta: Tensor) -> Tensor:
    """A sharp minimum that is deeper, and a flat one, in a wide bowl."""
    x = theta[..., 0]
    sharp = 3.0 * torch.exp(-((x - SHARP) ** 2) / (2 * NARROW**2))
    flat = 2.5 * torch.exp(-((x - FLAT) ** 2) / (2 * WIDE**2))
    return SCALE * (0.08 * x**2 - sharp - flat)


def wall(theta: Tensor) -> Tensor:
    """A wall on the left, a gentle slope on the right."""
    x = theta[..., 0]
    return torch.exp(-4 * x) + x / 2


@dataclass(frozen=True)
class Problem:
    name: str
    loss: Callable[[Tensor], Tensor]
    start: float
    deviation: float
    rate: float
    descent_rate: float
    steps: int
    shown: tuple[int, ...]
    range: tuple[float, float]
    height: tuple[float, float]


PROBLEMS = (
    Problem(
        "A sharp and a flat minimum", wells, -2.5, 1.0, 0.05, 1e-2, 400, (0, 15, 60, 400), (-4.4, 5.4), (-5.2, 1.6)
    ),
    Problem("A steep wall", wall, 2.9, 0.5, 0.2, 0.1, 400, (0, 5, 20, 400), (-0.75, 4.5), (-1.2, 5)),
)
POINTS = 250
"""Of the quadrature: their distance must be below the width of the sharp minimum, or E_q[loss] has false minima."""


def vector(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def both(problem: Problem, deviation: float) -> tuple[Run[FixedGaussian], Run[DiagonalGaussian]]:
    """The runs of optimisation and of Bayes, whose q starts with this standard deviation."""
    descent = run(
        FixedGaussian(vector(problem.start)), problem.loss, problem.descent_rate, batched=True,
        max_iterations=problem.steps, tolerance=1e-12,
    )  # fmt: skip
    bayes = run(
        DiagonalGaussian(vector(problem.start), vector(deviation**-2)), problem.loss, problem.rate, "quadrature",
        points=POINTS, improved=True, batched=True, max_iterations=problem.steps, tolerance=1e-12,
    )  # fmt: skip
    return descent, bayes


def value(problem: Problem, q: DiagonalGaussian) -> float:
    """E_q[loss] - H(q), by a fine grid."""
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64)[:, None]
    weights = (-(z**2) / 2).exp()[:, 0]
    losses = problem.loss(q.mean + z / q.precision.sqrt())
    return float((weights * losses).sum() / weights.sum() - q.entropy())


def draw(axes: Axes, problem: Problem, point: float, q: DiagonalGaussian) -> None:
    """The loss, where optimisation is, and q with its mean."""
    x = torch.linspace(*problem.range, 800, dtype=torch.float64)
    axes.plot(x, problem.loss(x[:, None]), color=GREY, lw=1.2)
    low, high = problem.height
    density = q.log_prob(x[:, None]).exp()
    top = low + 0.55 * (high - low) * density / density.max()
    axes.fill_between(x, low, top, color=BLUE, alpha=0.22, lw=0)
    axes.plot([float(q.mean)] * 2, [low, low + 0.55 * (high - low)], color=BLUE, lw=1.2)
    axes.plot(point, float(problem.loss(vector(point))), "o", color=ORANGE, ms=6, mec="white", mew=0.6, zorder=5)
    axes.set(xlim=problem.range, ylim=problem.height, yticks=[])
    axes.spines["left"].set_visible(False)


def path(axes: Axes, problem: Problem, descent: Run[FixedGaussian], bayes: Run[DiagonalGaussian]) -> None:
    """Iterates from above to below: the mean of q with two standard deviations, and the point of optimisation."""
    means = torch.cat([q.mean for q in bayes.iterates])
    spread = 2 * torch.cat([q.precision for q in bayes.iterates]).rsqrt()
    steps = torch.arange(1, len(means) + 1)
    axes.fill_betweenx(steps, means - spread, means + spread, color=BLUE, alpha=0.22, lw=0)
    axes.plot(means, steps, color=BLUE)
    points = torch.cat([q.mean for q in descent.iterates])
    axes.plot(points, torch.arange(1, len(points) + 1), color=ORANGE)
    axes.plot([float(points[-1])] * 2, [len(points), problem.steps], color=ORANGE)  # it stays where it has converged
    axes.set(xlim=problem.range, ylim=(problem.steps, 1), yscale="log", ylabel="step")


def figure(runs: list[tuple[Problem, Run[FixedGaussian], Run[DiagonalGaussian]]]) -> plt.Figure:
    with style():
        made, grid = plt.subplots(2, 5, figsize=(13, 5.2), layout="constrained")
        for row, (problem, descent, bayes) in zip(grid, runs, strict=True):
            for axes, number in zip(row, problem.shown, strict=False):
                point = descent.iterates[min(number, len(descent.iterates) - 1)]
                q = bayes.iterates[min(number, len(bayes.iterates) - 1)]
                draw(axes, problem, float(point.mean), q)
                axes.set_title(f"step {number}", fontweight="normal")
            path(row[4], problem, descent, bayes)
            row[4].set_title("all steps", fontweight="normal")
            row[0].annotate(problem.name, (0, 1.2), xycoords="axes fraction", fontsize=11, fontweight="bold", color=INK)
            for axes in row:
                axes.set_xlabel("θ", labelpad=1)
        grid[0, 0].plot([], [], "o", color=ORANGE, ms=6, label="optimisation")
        grid[0, 0].fill_between([], [], [], color=BLUE, alpha=0.3, label="Bayes: q and its mean")
        grid[0, 0].plot([], [], color=GREY, label="loss")
        made.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    return made


def main() -> None:
    chosen = arguments(__doc__)
    runs = [(problem, *both(problem, problem.deviation)) for problem in PROBLEMS]
    save(figure(runs), "bayes_against_optimisation", chosen)

    rows = []
    for problem, descent, bayes in runs:
        end = float(descent.q.mean)
        deviation = float(bayes.q.precision.rsqrt())
        there = DiagonalGaussian(descent.q.mean, curvature(problem, descent.q.mean))
        rows.append((
            problem.name, f"{end:.4f}", f"{float(problem.loss(descent.q.mean)):.3f}",
            f"{float(bayes.q.mean):.4f} ± {deviation:.4f}", f"{float(problem.loss(bayes.q.mean)):.3f}",
            f"{value(problem, there):.3f}", f"{value(problem, bayes.q):.3f}",
        ))  # fmt: skip
    head = (
        "loss", "optimisation ends at", "loss there", "Bayes ends at (mean ± sd)", "loss at its mean",
        "E[loss] - H of Laplace at the first", "E[loss] - H of Bayes",
    )  # fmt: skip
    problem = PROBLEMS[0]
    deviations = (0.1, 1.0) if chosen.quick else (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5)
    ends = []
    for deviation in deviations:
        q = both(problem, deviation)[1].q
        where = "sharp" if abs(float(q.mean) - SHARP) < 3 * NARROW else "flat"
        ends.append((f"{deviation:g}", where, f"{float(q.mean):.3f}", f"{value(problem, q):.3f}"))
    theta, bayes = math.log(8) / 4, runs[1][2].q
    error = max(abs(float(bayes.mean) - theta - 1), abs(float(bayes.precision) - 2))
    text = (
        f"{table(head, rows)}\n\nOn the first loss from {problem.start:g}, beside the sharp minimum "
        f"(width {NARROW:g}), by the standard deviation of the first q:\n\n"
        f"{table(('sd at the start', 'minimum', 'mean', 'E[loss] - H'), ends)}\n\n"
        f"On the wall the known solution (mean {theta + 1:.6f}, precision 2) is met to {error:.1e}.\n\n"
        "![Iterates](../figures/bayes_against_optimisation.png)"
    )
    report("bayes_against_optimisation", text, chosen)


def curvature(problem: Problem, at: Tensor) -> Tensor:
    """The second derivative of the loss, (1,)."""
    found: Tensor = torch.autograd.functional.hessian(lambda theta: problem.loss(theta), at)[0]
    return found


if __name__ == "__main__":
    main()
