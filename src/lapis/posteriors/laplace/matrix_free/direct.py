"""A^-1 by one Cholesky factorisation, where weights or the data's outputs are few: for `refine` and `calibrate`.

A refinement asks for the covariances of all outputs of the data, under ever new curvature S S^T in f (its scale
included). They follow from A, or from K = J Lambda^-1 J^T:

    J A^-1 J^T = K - K (K + H^-1)^-1 K,  log |A| = log |Lambda| + log |I + S^T K S|,  gamma = sum_n tr(S_n^T V_n S_n),

where H = S S^T, and V_n are the blocks of J A^-1 J^T on its diagonal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.curvature.products.jacobian import Jacobian
from lapis.curvature.products.kernel import KernelCholesky, OutputKernel
from lapis.errors import NotPositiveDefiniteError
from lapis.priors import WeightPrior

MOST_WEIGHTS, MOST_OUTPUTS = 2048, 4096
"""Matrices are factorised up to these sizes: a second of the processor or a few for each round."""

COPIES = 4
"""Matrices of the size of A in memory while it is factorised and used."""


@dataclass(frozen=True, eq=False)
class View:
    """What of the data and the network stays the same under other curvature, prior precisions and noise.

    Args:
        jacobian: J, with its rows kept where these fit.
        kernel: J Lambda^-1 J^T under any prior; None to factorise A itself.
    """

    jacobian: Jacobian
    kernel: OutputKernel | None

    def factorised(self, curvature: ImplicitCurvature, prior: WeightPrior, scale: float) -> Direct:
        """The covariance under these."""
        factors = []
        for batch in range(len(curvature.batches)):
            whole = torch.cat([s for _, s in curvature.factors.pieces(batch)])
            factors.append(whole * scale**0.5)
        if self.kernel is None:
            return FewWeights(self.jacobian, prior, factors)
        return FewOutputs(self.jacobian, prior, factors, self.kernel)


@dataclass(frozen=True, eq=False)
class Direct(ABC):
    """The covariance A^-1, A = sum_n J_n^T S_n S_n^T J_n + Lambda, factorised.

    Args:
        jacobian: J.
        prior: Lambda.
        factors: S (B, T, C, R) of each batch, float64.
    """

    jacobian: Jacobian
    prior: WeightPrior
    factors: list[Tensor]

    @abstractmethod
    def logdet(self) -> Tensor:
        """log |A|, 0-d float64."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """A^-1 v of each vector (k, P), float64."""

    @abstractmethod
    def _spreads(self) -> Iterator[Tensor]:
        """As `covariances`."""

    @cached_property
    def covariances(self) -> list[Tensor]:
        """V (B, T, C, C) of each batch's outputs, float64."""
        return list(self._spreads())

    def gamma(self) -> Tensor:
        """tr(A^-1 (A - Lambda)), 0-d float64."""
        pairs = zip(self.factors, self.covariances, strict=True)
        return torch.stack([(s * (spread @ s)).sum() for s, spread in pairs]).sum()


@dataclass(frozen=True, eq=False)
class FewWeights(Direct):
    """By A (P, P)."""

    def _rows(self) -> Iterator[Tensor]:
        """J of each batch, (B, T, C, P)."""
        for batch in range(len(self.factors)):
            part = self.jacobian.of_batches(batch)
            yield (part if part.keeps_rows else part.with_kept_rows()).rows()[0].double()

    @cached_property
    def _lower(self) -> Tensor:
        """L with L L^T = A."""
        precision = torch.diag(self.prior.vector().detach().double())
        for rows, s in zip(self._rows(), self.factors, strict=True):
            root = (s.mT @ rows).flatten(0, -2)
            precision.addmm_(root.mT, root)
        lower: Tensor
        lower, failed = torch.linalg.cholesky_ex(precision)
        if int(failed):
            raise NotPositiveDefiniteError(
                "The posterior precision cannot be factorised in float64",
                expected=f"a positive definite matrix ({len(precision)}, {len(precision)})",
                got=f"a pivot that is not positive in row {int(failed)}",
                do="use a larger prior precision, or rescale inputs and outputs",
            )
        return lower

    def logdet(self) -> Tensor:
        return 2 * self._lower.diagonal().log().sum()

    def solve(self, vectors: Tensor) -> Tensor:
        return torch.cholesky_solve(vectors.double().mT, self._lower).mT

    def _spreads(self) -> Iterator[Tensor]:
        for rows in self._rows():
            half = torch.linalg.solve_triangular(self._lower, rows.flatten(0, -2).mT, upper=False)
            cells = half.mT.reshape(rows.shape)
            yield cells @ cells.mT


@dataclass(frozen=True, eq=False)
class FewOutputs(Direct):
    """By I + S^T K S."""

    kernel: OutputKernel

    @cached_property
    def _cholesky(self) -> KernelCholesky:
        return KernelCholesky(self.kernel.under(self.prior), self.factors)

    def logdet(self) -> Tensor:
        return self.prior.logdet().detach() + self._cholesky.logdet()

    def solve(self, vectors: Tensor) -> Tensor:
        """A^-1 v = u - Lambda^-1 J^T (K + H^-1)^-1 J u with u = Lambda^-1 v."""
        precision = self.prior.vector().detach().double()
        first = vectors.double() / precision
        seeds = self._cholesky.solve(self.kernel.forward(first).mT).mT
        return first - self.kernel.backward(seeds) / precision

    def _spreads(self) -> Iterator[Tensor]:
        kernel, start = self.kernel.under(self.prior), 0
        half = self._cholesky.half(kernel)
        for f in self.jacobian.outputs:
            stop = start + f.numel()
            places = torch.arange(start, stop, device=f.device).reshape(f.shape)
            cells = half[:, start:stop].mT.reshape(*f.shape, len(half))
            yield kernel[places[..., :, None], places[..., None, :]] - cells @ cells.mT
            start = stop


def view(jacobian: Jacobian, memory_budget: int) -> View | None:
    """What factorisations for these data need; None where neither weights nor outputs are few."""
    weights, outputs = jacobian.size, jacobian.n_outputs
    widest = max(f.numel() for f in jacobian.outputs)
    if weights <= min(MOST_WEIGHTS, outputs) and COPIES * 8 * weights * max(weights, widest) <= memory_budget // 2:
        return View(jacobian, None)
    if outputs <= MOST_OUTPUTS and OutputKernel.bytes_needed(jacobian, 1) <= memory_budget // 2:
        kernel = OutputKernel(jacobian)
        return View(kernel.jacobian, kernel)
    return None
