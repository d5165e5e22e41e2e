"""A^-1 by one Cholesky factorisation, where the weights or the data's outputs are few: what `refine` works with.

A refinement asks for the covariances of all outputs of the data, under ever new curvature. With S S^T the curvature in
f (its scale included), J all Jacobians, and either A itself or, with K = J Lambda^-1 J^T and B = I + S^T K S,

    J A^-1 J^T = K - K S B^-1 S^T K,    log |A| = log |Lambda| + log |B|,    gamma = sum_n tr(S_n^T V_n S_n),

where V_n are the blocks of J A^-1 J^T on its diagonal. J, or K, does not change from round to round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapis.batches import joined
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.errors import NotPositiveDefiniteError
from lapis.function_space.kernels import DiagonalKernel, assembled
from lapis.function_space.tangent import Tangent
from lapis.priors import WeightPrior

MOST_WEIGHTS, MOST_OUTPUTS = 2048, 4096
"""Matrices are factorised up to these sizes: a second of the processor or a few for each round."""

COPIES = 5
"""Matrices of their size in memory while one is factorised and used."""


@dataclass(frozen=True, eq=False)
class View(ABC):
    """What of the data and the network stays the same under any curvature, prior precision and noise."""

    @abstractmethod
    def factorised(self, curvature: ImplicitCurvature, prior: WeightPrior, scale: float) -> Direct:
        """The factorisation under these."""


@dataclass(frozen=True, eq=False)
class Direct(ABC):
    """The covariance A^-1 with A = scale * GGN + Lambda, factorised."""

    curvature: ImplicitCurvature
    prior: WeightPrior
    scale: float

    @abstractmethod
    def logdet(self) -> Tensor:
        """log |A|, 0-d float64."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """A^-1 v of each vector (k, P), float64."""

    @abstractmethod
    def spreads(self) -> list[Tensor]:
        """Covariances (B, T, C, C) of each batch's outputs, float64."""

    @cached_property
    def covariances(self) -> list[Tensor]:
        return self.spreads()

    def gamma(self) -> Tensor:
        """tr(A^-1 (A - Lambda)), 0-d float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.curvature.network.device)
        for batch, spread in enumerate(self.covariances):
            for some, s in self.curvature.factors.pieces(batch):
                total += (s * (spread[some] @ s)).sum()
        return total.mul_(self.scale)


def factorised(matrix: Tensor) -> Tensor:
    """The lower Cholesky factor of a symmetric matrix, float64."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise NotPositiveDefiniteError(
            "The precision of a refinement is not positive definite",
            expected="a factorisation in float64",
            got=f"a pivot that is not positive at row {int(failed)} of {len(matrix)}",
            do="use a larger prior precision, or rescale inputs and outputs",
        )
    return factor


# few weights ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WeightsView(View):
    """J by its rows."""

    def factorised(self, curvature: ImplicitCurvature, prior: WeightPrior, scale: float) -> Direct:
        return FewWeights(curvature, prior, scale)


@dataclass(frozen=True, eq=False)
class FewWeights(Direct):
    """By A (P, P)."""

    def _rows(self) -> Iterator[Tensor]:
        """J of each batch, (B, T, C, P)."""
        jacobian = self.curvature.jacobian
        for batch in range(len(self.curvature.batches)):
            yield jacobian.of_batches(batch).with_kept_rows().rows()[0]

    @cached_property
    def factor(self) -> Tensor:
        """L with L L^T = A."""
        precision = torch.diag(self.prior.vector().detach().double())
        for batch, rows in enumerate(self._rows()):
            for some, s in self.curvature.factors.pieces(batch):
                root = (s.mT @ rows[some].double()).flatten(0, -2)
                precision.addmm_(root.mT, root, alpha=self.scale)
        return factorised(precision)

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()

    def solve(self, vectors: Tensor) -> Tensor:
        return torch.cholesky_solve(vectors.double().mT, self.factor).mT

    def spreads(self) -> list[Tensor]:
        found = []
        for rows in self._rows():
            half = torch.linalg.solve_triangular(self.factor, rows.double().flatten(0, -2).mT, upper=False)
            cells = half.mT.reshape(rows.shape)
            found.append(cells @ cells.mT)
        return found


# few outputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OutputsView(View):
    """J Lambda^-1 J^T, (n, n) float64, under one prior; under a multiple of its precisions it is divided by that."""

    kernel: Tensor
    prior: WeightPrior

    def factorised(self, curvature: ImplicitCurvature, prior: WeightPrior, scale: float) -> Direct:
        times = float(prior.precision.detach()[0] / self.prior.precision.detach()[0])
        return FewOutputs(curvature, prior, scale, self.kernel / times)


@dataclass(frozen=True, eq=False)
class FewOutputs(Direct):
    """By B (M, M)."""

    kernel: Tensor
    """K (n, n)."""

    def _whitened(self, matrix: Tensor) -> Tensor:
        """S^T X, (M, k), for X (n, k)."""
        found, start = [], 0
        for batch, f in enumerate(self.curvature.jacobian.outputs):
            cells = matrix[start : start + f.numel()].reshape(*f.shape, -1)
            start += f.numel()
            found += [(s.mT @ cells[some]).flatten(0, -2) for some, s in self.curvature.factors.pieces(batch)]
        return torch.cat(found).mul_(self.scale**0.5)

    @cached_property
    def _halves(self) -> tuple[Tensor, Tensor]:
        """L with L L^T = B, and L^-1 S^T K (M, n)."""
        cross = self._whitened(self.kernel)
        matrix = self._whitened(cross.mT.contiguous())
        matrix.diagonal().add_(1)
        factor = factorised(matrix)
        return factor, torch.linalg.solve_triangular(factor, cross, upper=False)

    def logdet(self) -> Tensor:
        return self.prior.logdet().detach() + 2 * self._halves[0].diagonal().log().sum()

    def solve(self, vectors: Tensor) -> Tensor:
        """A^-1 v = Lambda^-1 (v - G^T B^-1 G Lambda^-1 v), by one product with J and one with its transpose."""
        curvature, precision = self.curvature, self.prior.vector().detach().double()
        rows = curvature.root(vectors.double() / precision).mul_(self.scale**0.5)
        inner = torch.cholesky_solve(rows.mT, self._halves[0]).mT.contiguous()
        pulled = curvature.root_transposed(inner).mul_(self.scale**0.5)
        return (vectors.double() - pulled) / precision

    def spreads(self) -> list[Tensor]:
        found, start, half = [], 0, self._halves[1]
        for f in self.curvature.jacobian.outputs:
            size, width = f.numel(), f.shape[-1]
            places = torch.arange(start, start + size, device=f.device).reshape(*f.shape[:-1], width)
            cells = half[:, start : start + size].mT.reshape(-1, width, len(half))
            own = self.kernel[places[..., :, None], places[..., None, :]]
            found.append(own - (cells @ cells.mT).reshape(own.shape))
            start += size
        return found


def view(curvature: ImplicitCurvature, tangent: Tangent, prior: WeightPrior) -> View | None:
    """What a refinement of these data under this prior needs; None where neither weights nor outputs are few.

    To be called with the network held.
    """
    weights, outputs, budget = curvature.network.size, curvature.n_outputs, tangent.memory_budget
    if weights <= min(MOST_WEIGHTS, outputs) and COPIES * 8 * weights**2 <= budget // 2:
        largest = max(f.numel() for f in curvature.jacobian.outputs)
        if COPIES * 8 * weights * largest <= budget // 2:
            return WeightsView()
    if outputs > MOST_OUTPUTS or COPIES * 8 * outputs**2 > budget // 2:
        return None
    whole = joined(curvature.batches)
    if whole is None:
        return None
    kernel = DiagonalKernel(tangent, 1 / prior.vector().detach(), exact=True)
    with tangent.ready():
        return OutputsView(assembled(kernel, whole.inputs, None), prior)
