"""Linear algebra without matrices: A is known by its products with blocks of vectors (k, P), one vector per row.

Every solve returns a frozen value with its result and statistics; failure is said, never hidden. Randomness comes from
an explicit generator only.
"""

from __future__ import annotations

from lapis.solvers.block import BlockResult, BlockState, block_conjugate_gradients
from lapis.solvers.cg import CGProgress, CGResult, CGState, conjugate_gradients
from lapis.solvers.descent import SGDResult, SGDSettings, SGDState, sgd, sgd_learning_rate
from lapis.solvers.eigen import Eigenpairs, lanczos_eigenpairs, largest_eigenvalue, subspace_eigenpairs
from lapis.solvers.krylov import LanczosResult, lanczos
from lapis.solvers.operator import Operator
from lapis.solvers.preconditioners import (
    CallablePreconditioner,
    Diagonal,
    Identity,
    LowRankPlusDiagonal,
    Preconditioner,
    preconditioned,
)
from lapis.solvers.probes import Estimate
from lapis.solvers.quadrature import QuadratureEstimate, SpectralQuadrature, logdet, spectral_quadrature
from lapis.solvers.trace import hutch_plus_plus, hutchinson_diagonal, hutchinson_trace, xtrace

__all__ = [
    "BlockResult",
    "BlockState",
    "CGProgress",
    "CGResult",
    "CGState",
    "CallablePreconditioner",
    "Diagonal",
    "Eigenpairs",
    "Estimate",
    "Identity",
    "LanczosResult",
    "LowRankPlusDiagonal",
    "Operator",
    "Preconditioner",
    "QuadratureEstimate",
    "SGDResult",
    "SGDSettings",
    "SGDState",
    "SpectralQuadrature",
    "block_conjugate_gradients",
    "conjugate_gradients",
    "hutch_plus_plus",
    "hutchinson_diagonal",
    "hutchinson_trace",
    "lanczos",
    "lanczos_eigenpairs",
    "largest_eigenvalue",
    "logdet",
    "preconditioned",
    "sgd",
    "sgd_learning_rate",
    "spectral_quadrature",
    "subspace_eigenpairs",
    "xtrace",
]
