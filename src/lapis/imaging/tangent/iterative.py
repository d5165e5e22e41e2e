"""The tangent model of a large problem through products alone: K_yy v = A J Sigma J^T A^T v + s_y^2 v.

Solves are by preconditioned conjugate gradients, log-determinants by stochastic Lanczos quadrature, gradients of the
evidence by probes z: d log |K| = E[z^T K^-1 dK z].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapis.imaging.operators.linear import LinearOperator
from lapis.imaging.tangent.filters import FilterPrior
from lapis.imaging.tangent.linearised import TangentImage
from lapis.solvers import (
    LowRankPlusDiagonal,
    Operator,
    QuadratureEstimate,
    conjugate_gradients,
    logdet,
)

RANK = 400
"""Of the preconditioner: as many products as solving for a few right-hand sides takes, where there are many to come.
The phantom at 64 x 64 from 40 angles needs 165, 70 and 21 iterations at ranks 100, 200 and 400.
"""
PROBES, STEPS = 8, 40
"""Of log-determinants: random vectors, and Lanczos steps for each."""
TOLERANCE = 1e-4
"""Of solves, relative to the right-hand side."""


class IterativeModel:
    """y = A (f + J (theta - t)) + noise, with J known by its products only; in the tangent's dtype.

    Args:
        tangent: the linearised network.
        operator: A.
        data: y (measurements,).
        generator: of random vectors.
    """

    def __init__(
        self, tangent: TangentImage, operator: LinearOperator, data: Tensor, generator: torch.Generator
    ) -> None:
        self.tangent, self.operator, self.generator = tangent, operator, generator
        self.data = data.to(tangent.dtype)
        residual = self.data - operator @ tangent.image
        self.network_misfit = residual.to(torch.float64).square().sum()
        """|y - A f(t)|^2."""
        self.residual = residual + operator @ tangent.push(tangent.weights[None])[0]
        """y - A (f(t) - J t), (measurements,)."""

    @property
    def image(self) -> Tensor:
        return self.tangent.image.to(torch.float64)

    @property
    def weights(self) -> Tensor:
        return self.tangent.weights.to(torch.float64)

    def push(self, vectors: Tensor) -> Tensor:
        return self.tangent.push(vectors.to(self.tangent.dtype)).to(torch.float64)

    def pull(self, data: Tensor) -> Tensor:
        """J^T A^T u (k, P) for rows u of (k, measurements)."""
        return self.tangent.pull(self.operator.T @ data)

    def covariance(self, prior: FilterPrior, noise_variance: float) -> Operator:
        """K_yy by its products."""

        def product(vectors: Tensor) -> Tensor:
            images = self.tangent.push(prior.times(self.pull(vectors)))
            return self.operator @ images + noise_variance * vectors

        return Operator(product, len(self.data), self.data.dtype)

    def preconditioner(self, prior: FilterPrior, noise_variance: float, rank: int = RANK) -> LowRankPlusDiagonal:
        """A randomised Nystrom approximation: K Omega (Omega^T K Omega)^-1 Omega^T K, plus the noise."""
        size = len(self.data)
        rank = min(rank, size)
        omega = torch.randn(size, rank, generator=self.generator, dtype=torch.float64)
        omega = torch.linalg.qr(omega).Q.mT.to(self.data.dtype)
        signal = self.covariance(prior, 0.0)
        image = signal(omega).to(torch.float64)
        core = image @ omega.to(torch.float64).mT
        values, vectors = torch.linalg.eigh((core + core.mT) / 2)
        keep = values > values.max() * 1e-7
        rows = (vectors[:, keep] / values[keep].sqrt()).mT @ image
        values, vectors = torch.ones(len(rows), dtype=self.data.dtype), rows.to(self.data.dtype)
        return LowRankPlusDiagonal(values, vectors, torch.full((size,), noise_variance, dtype=self.data.dtype))

    def at(self, prior: FilterPrior, noise_variance: float, tolerance: float = TOLERANCE) -> IterativePosterior:
        """Conditioned on the data, under a prior and a noise."""
        return IterativePosterior(self, prior, noise_variance, tolerance)

    def gradients(
        self,
        prior: FilterPrior,
        noise_variance: float,
        probes: Tensor,
        preconditioner: LowRankPlusDiagonal,
        warm: Tensor | None = None,
        tolerance: float = TOLERANCE,
        at_mode: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the log evidence in the prior's coefficients and in the noise variance; and the solutions.

        1/2 (a^T K' a - mean_z z^T K^-1 K' z), a = K^-1 r. Of K' = A J_b (I x D_r) J_b^T A^T only the weights J^T A^T of
        a, of the probes and of their solutions are needed. Without `at_mode` a counts as zero.

        Args:
            probes: signs (k, measurements).
            preconditioner: near K_yy.
            warm: solutions of an earlier call, to start from.
        """
        rhs = torch.cat([self.residual[None], probes])
        solved = conjugate_gradients(
            self.covariance(prior, noise_variance), rhs, tolerance=tolerance, start=warm,
            preconditioner=preconditioner, max_iterations=200,
        ).solution  # fmt: skip
        weights = self.pull(torch.cat([solved, probes])).to(torch.float64)
        fitted, left, right = weights[:1], weights[1 : len(probes) + 1], weights[len(probes) + 1 :]
        parts, first = [], 0
        for block in prior.blocks:
            a, u, z = (
                rows[:, first : first + block.size].reshape(len(rows), -1, block.taps) for rows in (fitted, left, right)
            )
            fit = torch.einsum("kfp,kfq->pq", a, a) * at_mode
            spread = torch.einsum("kfp,kfq->pq", u, z) / len(probes)
            parts.append(torch.einsum("rpq,pq->r", block.indicators, fit - spread) / 2)
            first += block.size
        exact = solved.to(torch.float64)
        by_noise = (exact[0].square().sum() * at_mode - (exact[1:] * probes).sum() / len(probes)) / 2
        return torch.cat(parts), by_noise, solved


@dataclass(frozen=True, eq=False)
class IterativePosterior:
    """The image given the data, by solves."""

    model: IterativeModel
    prior: FilterPrior
    noise_variance: float
    tolerance: float

    @cached_property
    def _preconditioner(self) -> LowRankPlusDiagonal:
        return self.model.preconditioner(self.prior, self.noise_variance)

    @cached_property
    def tangent_mean(self) -> Tensor:
        model = self.model
        return model.image - model.push(model.weights[None])[0] + self.response(model.residual[None])[0]

    def noise_left(self) -> float:
        """As of the exact posterior, |y - A m|^2 / (s_y^2 tr K_yy^-1); the trace by random signs, always the same."""
        model, source = self.model, torch.Generator().manual_seed(0)
        signs = 2 * torch.randint(2, (PROBES, len(model.data)), generator=source).to(torch.float64) - 1
        trace = float((self.solve(signs).to(torch.float64) * signs).sum()) / PROBES
        left = model.data.to(torch.float64) - model.operator @ self.tangent_mean
        return float(left.square().sum()) / (self.noise_variance * trace)

    def solve(self, data: Tensor) -> Tensor:
        """K_yy^-1 y (k, measurements) for rows y."""
        rhs = data.to(self.model.data.dtype)
        operator = self.model.covariance(self.prior, self.noise_variance)
        found = conjugate_gradients(operator, rhs, preconditioner=self._preconditioner, tolerance=self.tolerance)
        return found.solution

    def response(self, data: Tensor) -> Tensor:
        """K_fy K_yy^-1 y (k, pixels) for rows y of (k, measurements)."""
        return self.model.push(self.prior.times(self.model.pull(self.solve(data))))

    @cached_property
    def _logdet(self) -> QuadratureEstimate:
        operator = self.model.covariance(self.prior, self.noise_variance)
        return logdet(
            operator, preconditioner=self._preconditioner, probes=PROBES, steps=STEPS, generator=self.model.generator
        )

    @property
    def log_evidence_error(self) -> float:
        """Standard error of `log_evidence`, from its probes."""
        return float(self._logdet.standard_error) / 2

    def log_evidence(self) -> Tensor:
        """log N(y; A (f - J t), K_yy), its determinant by Lanczos quadrature."""
        solved = self.solve(self.model.residual[None])[0]
        return self.log_normaliser() - (self.model.residual.to(torch.float64) * solved).sum() / 2

    def log_normaliser(self) -> Tensor:
        """-1/2 log |2 pi K_yy|: the evidence without what depends on the data."""
        found: Tensor = -(self._logdet.value + len(self.model.data) * math.log(2 * math.pi)) / 2
        return found

    def patch_covariance(self, pixels: Tensor) -> Tensor:
        """Covariance of these pixels: E K E^T - E K_fy K_yy^-1 K_yf E^T, a solve for each pixel."""
        model = self.model
        seeds = torch.nn.functional.one_hot(pixels, model.image.numel()).to(model.data.dtype)
        images = model.tangent.push(self.prior.times(model.tangent.pull(seeds)))
        data = model.operator @ images
        found = (images[:, pixels] - data @ self.solve(data).mT).to(torch.float64)
        return (found + found.mT) / 2
