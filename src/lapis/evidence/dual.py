"""The tangent model's mode in the outputs' space: Newton's method in M unknowns (examples x outputs), with exact steps.

Any minimum is theta = m + Lambda^-1 J^T a, with outputs f = g + K a, where g = f_t - J (t - m) are the outputs at the
prior's mean and K = J Lambda^-1 J^T. The loss is sum_n l(f_n, y_n) / T + 1/2 a^T K a, its gradient in theta J^T r with
r = l'(f) / T + a, and Newton's step with the curvature l''/T = S S^T at f is

    a <- a + s,    s = -(I + S S^T K)^-1 r = -r + S (I + S^T K S)^-1 S^T K r,

at the cost of one Cholesky factor; -1/2 r^T K s is the predicted decrease. The optimal a is -l'(f) / T, which depends
little on the prior: the a of one prior is a good start under another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.curvature.products.kernel import KernelCholesky, OutputKernel
from lapis.likelihoods import Likelihood
from lapis.priors import WeightPrior

SHORTER = tuple(0.5**k for k in range(12))
"""Multiples of a given start that are tried: with a prior wider by a factor k, its outputs are k times as large."""


@dataclass(frozen=True)
class DualMode:
    """a, the likelihood's statistics of the linear model there, and how the search ended."""

    dual: Tensor
    statistics: Tensor
    converged: bool
    remaining: float
    iterations: int
    reason: str


class DualModel:
    """The tangent model of a data set, represented by the kernel between its outputs."""

    def __init__(self, kernel: OutputKernel, targets: Sequence[Tensor], centre: Tensor) -> None:
        self.kernel, self.targets, self.centre = kernel, targets, centre
        self.shapes = [f.shape for f in kernel.jacobian.outputs]
        self.at_centre = torch.cat([f.flatten() for f in kernel.jacobian.outputs])
        self._at_mean: tuple[Tensor, Tensor] | None = None

    def split(self, flat: Tensor) -> list[Tensor]:
        """(M,) as outputs (B, T, C) of each batch."""
        parts = torch.split(flat, [shape.numel() for shape in self.shapes])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def at_mean(self, prior: WeightPrior) -> Tensor:
        """g, the linear model's outputs at the prior's mean."""
        if self._at_mean is None or self._at_mean[0] is not prior.mean:
            self._at_mean = (prior.mean, self.at_centre - self.kernel.forward(self.centre - prior.mean))
        return self._at_mean[1]

    def weights(self, dual: Tensor, prior: WeightPrior) -> Tensor:
        """theta = m + Lambda^-1 J^T a, (P,)."""
        return prior.mean + self.kernel.backward(dual) / prior.vector()

    def dual_at(self, weights: Tensor, likelihood: Likelihood, temperature: float) -> Tensor:
        """-l'(f) / T (M,) at the linear model's outputs for given weights; if these are a mode, this is their a."""
        f = self.at_centre + self.kernel.forward(weights - self.centre)
        pairs = zip(self.split(f), self.targets, strict=True)
        return -torch.cat([likelihood.gradient(part, y).flatten() for part, y in pairs]) / temperature

    def minimise(
        self,
        likelihood: Likelihood,
        prior: WeightPrior,
        temperature: float,
        tolerance: float,
        start: Tensor | None = None,
        max_iterations: int = 50,
    ) -> DualMode:
        """Newton steps until the predicted decrease is at most `tolerance` nats (times the loss, if above one).

        Starts from the best multiple of `start`, or from the prior's mean if that is better.
        """
        kernel, g = self.kernel.under(prior), self.at_mean(prior)

        def value(f: Tensor, penalty: float) -> float:
            pairs = zip(self.split(f), self.targets, strict=True)
            return sum(float(likelihood.nll(part, y).sum()) for part, y in pairs) / temperature + penalty

        a = torch.zeros_like(g) if start is None else start
        pushed = kernel @ a
        penalty = 0.5 * float(a @ pushed)
        scores = {c: value(g + c * pushed, c * c * penalty) for c in (0.0, *(SHORTER if penalty else ()))}
        best = min(scores, key=scores.__getitem__)
        a, pushed, now = best * a, best * pushed, scores[best]
        remaining, reason, iteration = float("inf"), f"{max_iterations} Newton steps were not enough", 0
        for iteration in range(max_iterations + 1):
            outputs = self.split(g + pushed)
            pairs = list(zip(outputs, self.targets, strict=True))
            residual = torch.cat([likelihood.gradient(f, y).flatten() for f, y in pairs]) / temperature + a
            factors = [likelihood.factor(f, y) / temperature**0.5 for f, y in pairs]
            spread = kernel @ residual
            step = KernelCholesky(kernel, factors).solve(spread[:, None])[:, 0] - residual
            remaining = max(0.0, -0.5 * float(spread @ step))
            nats = tolerance * max(1.0, abs(now))
            if remaining <= nats:
                reason = f"at most {remaining:.1e} nats above the minimum"
                break
            if iteration == max_iterations:
                break
            change = kernel @ step
            length, moved = 1.0, None
            for _ in range(40):
                trial = a + length * step
                after = value(g + pushed + length * change, 0.5 * float(trial @ (pushed + length * change)))
                if after <= now - 2e-4 * length * remaining + 1e-14 * abs(now):
                    moved = trial
                    break
                length /= 2
            if moved is None:
                reason = f"no step lowers the loss, {remaining:.1e} nats above the minimum"
                break
            a, pushed, now = moved, pushed + length * change, after
        pairs = list(zip(self.split(g + pushed), self.targets, strict=True))
        statistics = torch.stack([likelihood.statistics(f, y) for f, y in pairs]).sum(0)
        return DualMode(a, statistics, remaining <= nats, remaining, iteration, reason)
