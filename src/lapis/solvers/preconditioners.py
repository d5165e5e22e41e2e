"""Preconditioners: M near A whose inverse is cheap. Each is used through a factor L with L L^T = M^-1.

Conjugate gradients need M^-1 = L L^T; log-determinants and traces use L^T A L (whose spectrum is that of M^-1 A)
together with log |M|. Blocks are (k, P), one vector per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.errors import DataError, NotPositiveDefiniteError, OptionError
from lapis.options import check_arguments
from lapis.solvers.operator import Operator, describe, require

Map = Callable[[Tensor], Tensor]


class Preconditioner(ABC):
    """A symmetric positive definite M, given by its inverse. `form`: a vector (P,) like those it takes; None: any."""

    form: Tensor | None = None

    def check(self, operator: Operator) -> None:
        """DataError unless M acts on the operator's vectors."""
        row = torch.empty(operator.size, dtype=operator.dtype, device=operator.device)
        if self.form is not None and describe(self.form) != describe(row):
            raise DataError(
                "The preconditioner does not fit the operator",
                expected=f"one over {describe(row)}",
                got=f"one over {describe(self.form)}",
                do="build it in the operator's size and dtype, and on its device",
            )

    def solve(self, vectors: Tensor) -> Tensor:
        """M^-1 v. As L (L^T v) it stays positive definite in floating point, whatever the rounding of L."""
        return self.root(self.root_transposed(vectors))

    @abstractmethod
    def root(self, vectors: Tensor) -> Tensor:
        """L v with L L^T = M^-1: white noise becomes draws of N(0, M^-1)."""

    @abstractmethod
    def root_transposed(self, vectors: Tensor) -> Tensor:
        """L^T v."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """log |M|, 0-d float64."""


class Identity(Preconditioner):
    """M = I: no preconditioning."""

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors

    def root(self, vectors: Tensor) -> Tensor:
        return vectors

    def root_transposed(self, vectors: Tensor) -> Tensor:
        return vectors

    def logdet(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64)


class Diagonal(Preconditioner):
    """M = diag(d), d (P,) positive."""

    def __init__(self, diagonal: Tensor) -> None:
        check_arguments(Diagonal, locals())
        self.form = self.diagonal = _positive_vector(diagonal)
        self._root = self.diagonal.rsqrt()

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / self.diagonal

    def root(self, vectors: Tensor) -> Tensor:
        return vectors * self._root

    def root_transposed(self, vectors: Tensor) -> Tensor:
        return vectors * self._root

    def logdet(self) -> Tensor:
        return self.diagonal.to(torch.float64).log().sum()


class LowRankPlusDiagonal(Preconditioner):
    """M = diag(d) + sum_i s_i u_i u_i^T, with vectors u (r, P), values s (r,) >= 0 and d (P,) > 0.

    With V = diag(s)^1/2 U diag(d)^-1/2 (r, P), M = d^1/2 (I + V^T V) d^1/2 and
    L = d^-1/2 (I + V^T V)^-1/2 = d^-1/2 (I - V^T W g(l) W^T V), where V V^T = W l W^T (r x r) and
    g(l) = (1 - (1 + l)^-1/2) / l = 1 / (r (r + 1)), r = sqrt(1 + l): no division by a vanishing l. Neither the u_i
    need be orthogonal nor d constant.
    """

    def __init__(self, values: Tensor, vectors: Tensor, diagonal: Tensor) -> None:
        check_arguments(LowRankPlusDiagonal, locals())
        self.form = self.diagonal = _positive_vector(diagonal)
        fits = values.dim() == 1 and values.is_floating_point() and not values.is_meta
        if not fits or vectors.shape != (len(values), len(diagonal)) or vectors.dtype != diagonal.dtype:
            raise DataError(
                "Eigenpairs do not fit the diagonal",
                expected=f"real values (r,) and vectors (r, {len(diagonal)}) {diagonal.dtype}, one per row",
                got=f"values {tuple(values.shape)} {values.dtype}, vectors {tuple(vectors.shape)} {vectors.dtype}",
                do="take both from the same operator, eigenvectors as rows",
            )
        if not bool((torch.isfinite(values) & (values >= 0)).all()):
            raise NotPositiveDefiniteError(
                "A negative eigenvalue in a preconditioner",
                expected="values >= 0",
                got=f"{float(values.min()):.3g}",
                do="drop these pairs",
            )
        self._inverse_root = self.diagonal.rsqrt()
        scaled = values.detach().to(vectors.dtype).sqrt()[:, None] * vectors.detach() * self._inverse_root
        gram = scaled.to(torch.float64) @ scaled.to(torch.float64).mT
        spectrum, rotation = torch.linalg.eigh(gram)
        spectrum = spectrum.clamp(min=0)
        root = (1 + spectrum).sqrt()
        self._factor = rotation.mT.to(scaled.dtype) @ scaled
        self._gain = (1 / (root * (root + 1))).to(scaled.dtype)
        self._logdet = torch.log1p(spectrum).sum() + self.diagonal.to(torch.float64).log().sum()

    def _shrink(self, vectors: Tensor) -> Tensor:
        """(I + V^T V)^-1/2 v."""
        return torch.addmm(vectors, self._gain * (vectors @ self._factor.mT), self._factor, alpha=-1)

    def root(self, vectors: Tensor) -> Tensor:
        return self._inverse_root * self._shrink(vectors)

    def root_transposed(self, vectors: Tensor) -> Tensor:
        return self._shrink(self._inverse_root * vectors)

    def logdet(self) -> Tensor:
        return self._logdet


@dataclass(frozen=True)
class CallablePreconditioner(Preconditioner):
    """Any other M: functions on blocks (k, P). `inverse` suffices for solves; log-determinants need the rest too."""

    inverse: Map
    factor: Map | None = None
    factor_transposed: Map | None = None
    log_determinant: Tensor | float | None = None

    def __post_init__(self) -> None:
        check_arguments(CallablePreconditioner, vars(self), signed=("log_determinant",))
        known = self.log_determinant
        if isinstance(known, Tensor) and (known.numel() != 1 or known.is_meta or not bool(torch.isfinite(known).all())):
            raise DataError(
                "No log-determinant",
                expected="one finite number",
                got=f"a tensor {tuple(known.shape)}" + (" that is not finite" if known.numel() == 1 else ""),
                do="pass log |M|, or leave log_determinant out",
            )

    def solve(self, vectors: Tensor) -> Tensor:
        return self._applied(self.inverse, "inverse", vectors)

    def root(self, vectors: Tensor) -> Tensor:
        return self._applied(self.factor, "factor", vectors)

    def root_transposed(self, vectors: Tensor) -> Tensor:
        return self._applied(self.factor_transposed, "factor_transposed", vectors)

    def logdet(self) -> Tensor:
        if self.log_determinant is None:
            raise _missing("log_determinant")
        return torch.as_tensor(self.log_determinant, dtype=torch.float64).detach()

    @staticmethod
    def _applied(function: Map | None, name: str, vectors: Tensor) -> Tensor:
        if function is None:
            raise _missing(name)
        image = function(vectors).detach()
        if describe(image) != describe(vectors):
            raise DataError(
                f"The preconditioner's {name} changed the form of its block",
                expected=describe(vectors),
                got=describe(image),
                do="return one result for each vector, of the same shape and dtype",
            )
        return image


def preconditioned(operator: Operator, preconditioner: Preconditioner) -> Operator:
    """L^T A L, whose eigenvalues are those of M^-1 A; log |A| = log |M| + log |L^T A L|."""
    check_arguments(preconditioned, locals())
    require(operator, "symmetric", "Preconditioning")
    preconditioner.check(operator)

    def product(vectors: Tensor) -> Tensor:
        return preconditioner.root_transposed(operator(preconditioner.root(vectors)))

    return Operator(product, operator.size, operator.dtype, operator.device, operator.property)


def _positive_vector(diagonal: Tensor) -> Tensor:
    if diagonal.dim() != 1 or not len(diagonal) or not diagonal.is_floating_point() or diagonal.is_meta:
        raise DataError(
            "No diagonal of a matrix",
            expected="real floating-point numbers (P,)",
            got=f"{tuple(diagonal.shape)} of {diagonal.dtype} on {diagonal.device}",
            do="pass matrix.diagonal()",
        )
    if not bool((torch.isfinite(diagonal) & (diagonal > 0)).all()):
        raise NotPositiveDefiniteError(
            "A preconditioner's diagonal is not positive",
            expected="finite entries > 0",
            got=f"a smallest entry of {float(diagonal.min()):.3g}",
            do="add the prior precision to the curvature's diagonal",
        )
    return diagonal.detach()


def _missing(name: str) -> OptionError:
    return OptionError(
        "This preconditioner can only solve",
        expected=f"CallablePreconditioner(..., {name}=...)",
        got="None",
        do=f"pass {name}, or leave the preconditioner out of the log-determinant",
    )
