"""Bayesian logistic regression in two dimensions: the Laplace posterior predictive against the exact one.

    python experiments/logistic_regression.py --out docs/figures/logistic.png

The model is p(y = 1 | x) = sigmoid(w . x + b) with three weights and a Gaussian prior, so the exact predictive is a
ratio of two integrals over three dimensions, done here by the trapezoidal rule in coordinates in which the Laplace
posterior is standard normal. The rule converges exponentially for such smooth integrands: with steps of 0.4 and 0.3 it
gives the same probabilities to 1e-8. The figure shows the exact probabilities, those of `posterior.predict`, and their
difference. What is printed is the largest difference of every way of predicting, which `BOUNDS` promises to keep, and
that of the trained weights alone ("plug-in").
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import lapis

F64 = torch.float64
PRIOR = 1.0
SAMPLES = 20_000
BOUNDS = {"probit": 0.03, "mc": 0.03, "sampled": 0.04}
"""Largest |probability - exact probability| over the plot's square, by way of predicting."""
EVIDENCE_BOUND = 0.06
"""Largest |log evidence - exact log evidence|, in nats."""


@dataclass(frozen=True)
class Problem:
    """Data of two overlapping classes, and the trained model (at the exact mode)."""

    x: Tensor
    y: Tensor
    model: nn.Linear

    def log_joint(self, weights: Tensor) -> Tensor:
        """log p(y, theta | x) for weights (n, 3), with all constants: (n,)."""
        logits = weights[:, :2] @ self.x.T + weights[:, 2:]
        log_likelihood = nn.functional.logsigmoid(torch.where(self.y.bool(), logits, -logits)).sum(1)
        prior = torch.distributions.Normal(0.0, PRIOR**-0.5)
        return log_likelihood + prior.log_prob(weights).sum(1)

    @property
    def mode(self) -> Tensor:
        return torch.cat([self.model.weight.detach().flatten(), self.model.bias.detach()])


def problem(examples: int = 60) -> Problem:
    """Two Gaussian classes, and the weights of largest posterior density found by Newton's method."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(examples) % 2
    centres = torch.tensor([[-1.0, -0.5], [1.0, 0.7]], dtype=F64)
    x = centres[y] + torch.randn(examples, 2, generator=generator, dtype=F64)
    task = Problem(x, y, nn.Linear(2, 1).to(F64))
    weights = torch.zeros(1, 3, dtype=F64)
    for _ in range(30):
        gradient = torch.autograd.functional.jacobian(lambda w: task.log_joint(w)[0], weights)[0]
        hessian = torch.autograd.functional.hessian(lambda w: task.log_joint(w)[0], weights).reshape(3, 3)
        weights = weights - torch.linalg.solve(hessian, gradient)
    with torch.no_grad():
        task.model.weight.copy_(weights[:, :2])
        task.model.bias.copy_(weights[0, 2:])
    return task


def integrate(task: Problem, x: Tensor, step: float = 0.4, reach: float = 8.0) -> tuple[Tensor, float]:
    """Exact p(y = 1 | x, D) at points (n, 2), and the exact log evidence."""
    hessian = torch.autograd.functional.hessian(lambda w: task.log_joint(w)[0], task.mode[None]).reshape(3, 3)
    spread = torch.linalg.inv(torch.linalg.cholesky(-hessian)).T
    axis = torch.arange(-reach, reach + step / 2, step, dtype=F64)
    grid = torch.cartesian_prod(axis, axis, axis)
    weights = task.mode + grid @ spread.T
    log_density = task.log_joint(weights)
    kept = log_density > log_density.max() - 30
    weights, log_density = weights[kept], log_density[kept]
    share = log_density.softmax(0)
    probabilities = torch.cat([share @ (weights[:, :2] @ part.T + weights[:, 2:]).sigmoid() for part in x.split(256)])
    evidence = log_density.logsumexp(0) + torch.linalg.det(spread).abs().log() + 3 * math.log(step)
    return probabilities, float(evidence)


def square(points: int = 41, reach: float = 6.0) -> Tensor:
    """A grid of points (points^2, 2) over the plotted square."""
    axis = torch.linspace(-reach, reach, points, dtype=F64)
    return torch.cartesian_prod(axis, axis).flip(1)


def predictions(task: Problem, x: Tensor) -> tuple[lapis.LaplacePosterior, dict[str, Tensor]]:
    """The Laplace posterior, and its probabilities (n,) at points x (n, 2) by every way of predicting."""
    posterior = lapis.laplace(task.model, (task.x, task.y), "bernoulli", structure="dense", prior=PRIOR)
    return posterior, {
        "plug-in": torch.sigmoid(task.model(x)).detach().flatten(),
        "probit": posterior.predict(x, link="probit").probs.flatten(),
        "mc": posterior.predict(x, link="mc", samples=SAMPLES).probs.flatten(),
        "sampled": posterior.predict(x, method="sampled", samples=2000).probs.flatten(),
    }


def figure(task: Problem, exact: Tensor, found: Tensor, points: int, path: Path) -> None:
    """Exact, linearised and their difference, side by side, with the training data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    reach = 6.0
    difference = found - exact
    limit = float(difference.abs().max())
    panels = [
        ("Exact posterior predictive", exact, "RdBu_r", (0.0, 1.0)),
        ("Laplace, probit link", found, "RdBu_r", (0.0, 1.0)),
        (f"Laplace - exact (at most {limit:.3f})", difference, "PuOr", (-limit, limit)),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(12.5, 3.8), layout="constrained")
    for axis, (title, values, colours, (low, high)) in zip(axes, panels, strict=True):
        image = values.reshape(points, points).numpy()
        extent = (-reach, reach, -reach, reach)
        shown = axis.imshow(image, origin="lower", extent=extent, cmap=colours, vmin=low, vmax=high)
        if high == 1.0:
            lines = axis.contour(image, levels=[0.1, 0.3, 0.5, 0.7, 0.9], extent=extent, colors="k", linewidths=0.6)
            axis.clabel(lines, fontsize=7)
        for label, colour in ((0, "#2166ac"), (1, "#b2182b")):
            chosen = task.x[task.y == label].numpy()
            axis.scatter(*chosen.T, s=18, color=colour, edgecolors="white", linewidths=0.7)
        axis.set(title=title, xlabel="$x_1$", ylabel="$x_2$")
        figure.colorbar(shown, ax=axis, shrink=0.85)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Laplace against exact Bayesian logistic regression.")
    parser.add_argument("--out", type=Path, help="where to save the figure; docs/figures/logistic.png by default")
    parser.add_argument("--points", type=int, help="points along each side of the square; 81 by default")
    parser.add_argument("--quick", action="store_true", help="21 points, to see that it runs")
    options = parser.parse_args()
    options.points = options.points or (21 if options.quick else 81)
    options.out = options.out or Path(f"docs/figures/logistic{'_quick' if options.quick else ''}.png")
    task, x = problem(), square(options.points)
    exact, evidence = integrate(task, x)
    posterior, found = predictions(task, x)
    errors = {name: float((probabilities - exact).abs().max()) for name, probabilities in found.items()}
    lines = [f"{name:10s} largest error {error:.4f}" for name, error in errors.items()]
    difference = float(posterior.log_evidence()) - evidence
    lines.append(f"log evidence {evidence + difference:.4f}, exact {evidence:.4f}")
    figure(task, exact, found["probit"], options.points, options.out)
    lines.append(f"saved {options.out}")
    sys.stdout.write("\n".join(lines) + "\n")
    if any(errors[name] > bound for name, bound in BOUNDS.items()) or abs(difference) > EVIDENCE_BOUND:
        raise SystemExit(f"Further from the exact answer than promised: {BOUNDS}, log evidence {EVIDENCE_BOUND}")


if __name__ == "__main__":
    main()
