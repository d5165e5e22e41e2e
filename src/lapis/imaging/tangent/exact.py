"""The tangent model of a small problem with everything in memory: J once, then a Cholesky factor for each prior.

J enters through Gram matrices J_b (I x D_r) J_b^T of each block and distance, of which the covariance of the
observations is a linear combination. The 0/1 matrices D_r commute with the reflections of a filter; in a basis of even
and odd functions of the two axes they fall into blocks, so that 17 products of J's columns serve all six of 3 x 3 taps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapis.errors import NotPositiveDefiniteError
from lapis.imaging.operators.linear import LinearOperator
from lapis.imaging.tangent.filters import Block, FilterPrior
from lapis.imaging.tangent.linearised import TangentImage
from lapis.progress import track


class ExactModel:
    """y = A (f + J (theta - t)) + noise with J and the Gram matrices of the observations in memory (float64).

    With more measurements than pixels, A = Q R: Q^T y says all about the image, and the rest of y about the noise only.
    Then the matrices have the size of the image, else that of the data.

    Args:
        tangent: the linearised network.
        operator: A.
        data: y (measurements,).
        progress: show a bar.
    """

    def __init__(
        self, tangent: TangentImage, operator: LinearOperator, data: Tensor, progress: bool | None = None
    ) -> None:
        self.tangent, self.operator = tangent, operator
        self.data = data.to(torch.float64)
        matrix = operator.dense()
        self.beyond = max(0, matrix.shape[0] - matrix.shape[1])
        """Measurements beyond as many as there are pixels."""
        self._basis: Tensor | None = None
        self.reduced = matrix
        """R, or A itself, (m, pixels)."""
        if self.beyond:
            self._basis, self.reduced = torch.linalg.qr(matrix)
        residual = self.data - matrix @ self.image
        self.network_misfit = residual.square().sum()
        """|y - A f(t)|^2."""
        self.jacobian = self._rows(progress)
        """J (pixels, P)."""
        self.residual = residual + matrix @ (self.jacobian @ self.weights)
        """y - A (f(t) - J t): what is left to explain by weights of mean zero, (measurements,)."""
        self.target = self.residual if self._basis is None else self._basis.mT @ self.residual
        self.unexplained = (self.residual.square().sum() - self.target.square().sum()).clamp_min(0)
        self.edges, grams = [], []
        first = 0
        for block in track(tangent.blocks, "Gram matrices", len(tangent.blocks), progress):
            in_image = _grams(self.jacobian[:, first : first + block.size], block)
            self.edges.append(_edge_variances(in_image, operator.image_shape))
            grams.append(self.reduced @ in_image @ self.reduced.mT)
            first += block.size
        self.grams = torch.cat(grams)
        """Of all blocks and distances, (.., m, m)."""

    @staticmethod
    def bytes_needed(tangent: TangentImage, operator: LinearOperator) -> int:
        """Of the arrays above, about."""
        distances = sum(len(block.distances) for block in tangent.blocks)
        pixels, side = operator.shape[1], min(operator.shape)
        largest = max(block.size for block in tangent.blocks)
        return 8 * (pixels * (tangent.size + 2 * largest) + distances * side**2 + 14 * pixels**2)

    @property
    def image(self) -> Tensor:
        """f(t) (pixels,), float64."""
        return self.tangent.image.to(torch.float64)

    @property
    def weights(self) -> Tensor:
        return self.tangent.weights.to(torch.float64)

    def push(self, vectors: Tensor) -> Tensor:
        """J v (k, pixels)."""
        return vectors @ self.jacobian.mT

    def at(self, prior: FilterPrior, noise_variance: float) -> ExactPosterior:
        """Conditioned on the data, under a prior and a noise."""
        return ExactPosterior(self, prior, noise_variance)

    def covariance(self, coefficients: Tensor, noise_variance: Tensor | float) -> Tensor:
        """K_yy in the reduced coordinates, (m, m)."""
        combined = (coefficients @ self.grams.flatten(1)).reshape(self.grams.shape[1:])
        combined.diagonal().add_(noise_variance)
        return combined

    def log_evidence(
        self, coefficients: Tensor, noise_variance: float, at_mode: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log N(y; A (f - J t), K_yy) and its gradients in the coefficients and in the noise variance.

        Without `at_mode` only what depends on |K_yy|: the terms of the trained weights are `tuning`'s.
        """
        matrix = self.covariance(coefficients, noise_variance)
        factor, bad = torch.linalg.cholesky_ex(matrix)
        if bad:
            raise NotPositiveDefiniteError(
                "The covariance of the observations is not positive definite",
                expected="variances of data",
                got=f"noise variance {noise_variance:.3g}, prior variances up to {float(coefficients.max()):.3g}",
                do="state a larger noise",
            )
        solved = torch.cholesky_solve(self.target[:, None], factor)[:, 0] if at_mode else torch.zeros_like(self.target)
        unexplained = self.unexplained if at_mode else torch.zeros_like(self.unexplained)
        value = -self.target @ solved / 2 - factor.diagonal().log().sum() - unexplained / (2 * noise_variance)
        value = value - self.beyond / 2 * math.log(noise_variance) - len(self.data) / 2 * math.log(2 * math.pi)
        slope = (torch.outer(solved, solved) - torch.cholesky_inverse(factor)) / 2
        by_noise = slope.trace() + unexplained / (2 * noise_variance**2) - self.beyond / (2 * noise_variance)
        return value, self.grams.flatten(1) @ slope.flatten(), by_noise

    def _rows(self, progress: bool | None) -> Tensor:
        pixels = self.image.numel()
        jacobian = torch.empty(pixels, self.tangent.size, dtype=torch.float64)
        parts = torch.split(torch.arange(pixels), self.tangent.together)
        for part in track(parts, "Jacobian", len(parts), progress):
            seeds = torch.nn.functional.one_hot(part, pixels).to(self.tangent.dtype)
            jacobian[part] = self.tangent.pull(seeds).to(torch.float64)
        return jacobian


@dataclass(frozen=True, eq=False)
class ExactPosterior:
    """The image given the data, in closed form."""

    model: ExactModel
    prior: FilterPrior
    noise_variance: float

    @cached_property
    def _factor(self) -> Tensor:
        factor: Tensor = torch.linalg.cholesky(self.model.covariance(self.prior.coefficients(), self.noise_variance))
        return factor

    @cached_property
    def _cross(self) -> Tensor:
        """K_fy of the reduced data, (pixels, m)."""
        return self._prior_covariance @ self.model.reduced.mT

    @cached_property
    def _prior_covariance(self) -> Tensor:
        """K_ff = J Sigma J^T (pixels, pixels)."""
        jacobian = self.model.jacobian
        return torch.cat([self.prior.times(rows) @ jacobian.mT for rows in torch.split(jacobian, 64)])

    @cached_property
    def covariance(self) -> Tensor:
        """K_ff - K_fy K_yy^-1 K_yf (pixels, pixels)."""
        half: Tensor = torch.linalg.solve_triangular(self._factor, self._cross.mT, upper=False)
        found = self._prior_covariance - half.mT @ half
        return (found + found.mT) / 2

    @property
    def variances(self) -> Tensor:
        """Of the pixels, (pixels,)."""
        return self.covariance.diagonal().clamp_min(0)

    @cached_property
    def tangent_mean(self) -> Tensor:
        """The linear model's own mean f - J t + K_fy K_yy^-1 (y - A f + A J t), (pixels,)."""
        model = self.model
        return model.image - model.jacobian @ model.weights + self.response(model.residual[None])[0]

    def noise_left(self) -> float:
        """|y - A m|^2 / (s_y^2 tr K_yy^-1): a noise variance from what the mean m leaves of the data.

        s_y^2 tr K_yy^-1 is the number of measurements less the effective number of weights that m has spent on them.
        """
        model = self.model
        trace = float(torch.cholesky_inverse(self._factor).trace()) + model.beyond / self.noise_variance
        left = model.data - (model.operator @ self.tangent_mean).flatten()
        return float(left.square().sum()) / (self.noise_variance * trace)

    def log_evidence(self) -> Tensor:
        return self.model.log_evidence(self.prior.coefficients(), self.noise_variance)[0]

    def log_normaliser(self) -> Tensor:
        """-1/2 log |2 pi K_yy|: the evidence without what depends on the data."""
        return self.model.log_evidence(self.prior.coefficients(), self.noise_variance, at_mode=False)[0]

    def response(self, data: Tensor) -> Tensor:
        """K_fy K_yy^-1 y (k, pixels) for rows y of (k, measurements)."""
        basis = self.model._basis
        reduced = data if basis is None else data @ basis
        return torch.cholesky_solve(reduced.mT, self._factor).mT @ self._cross.mT

    def patch_covariance(self, pixels: Tensor) -> Tensor:
        """Covariance of these pixels."""
        return self.covariance[pixels[:, None], pixels]


def _grams(jacobian: Tensor, block: Block) -> Tensor:
    """J (I x D_r) J^T (r, rows, rows) of a block's columns (rows, filters * taps)."""
    basis = _even_and_odd(block.side)
    kept = torch.einsum("ap,rab,bq->rpq", basis, block.indicators, basis)
    kept[kept.abs() < 1e-12] = 0
    by_tap = (jacobian.reshape(len(jacobian), -1, block.taps) @ basis).movedim(-1, 0).contiguous()
    found = jacobian.new_zeros(len(block.distances), len(jacobian), len(jacobian))
    for p in range(block.taps):
        for q in range(p + 1):
            shares = kept[:, p, q]
            if shares.any():
                product = by_tap[p] @ by_tap[q].mT
                product = product if p == q else product + product.mT
                for r in shares.nonzero()[:, 0].tolist():
                    found[r].add_(product, alpha=float(shares[r]))
    return found


def _even_and_odd(side: int) -> Tensor:
    """An orthonormal basis (taps, taps), in columns, of products of even and odd functions of the two axes."""
    line = torch.zeros(side, side, dtype=torch.float64)
    for i in range(side // 2):
        line[i, i] = line[side - 1 - i, i] = math.sqrt(0.5)
        line[i, side - 1 - i], line[side - 1 - i, side - 1 - i] = -math.sqrt(0.5), math.sqrt(0.5)
    if side % 2:
        line[side // 2, side // 2] = 1.0
    return torch.kron(line, line)


def _edge_variances(grams: Tensor, shape: tuple[int, int]) -> Tensor:
    """[D G D^T]_ee (r, edges) of matrices G (r, pixels, pixels)."""
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    first = torch.cat([numbers[:-1].flatten(), numbers[:, :-1].flatten()])
    second = torch.cat([numbers[1:].flatten(), numbers[:, 1:].flatten()])
    diagonal = grams.diagonal(dim1=1, dim2=2)
    return diagonal[:, first] + diagonal[:, second] - 2 * grams[:, first, second]
