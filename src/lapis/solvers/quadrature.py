"""Stochastic Lanczos quadrature: tr f(A) and log |A| from products with A alone.

tr f(A) = E[z^T f(A) z], and with Lanczos from z, z^T f(A) z ~ |z|^2 e_1^T f(T) e_1 = |z|^2 sum_j w_j f(t_j): Gauss
quadrature of f over A's spectrum, weighted by z. One quadrature serves any number of functions, and so any shift of A:
log |A + a I| is the trace of f(t) = log(t + a).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.errors import NotPositiveDefiniteError, OptionError
from lapis.options import check_arguments, check_count
from lapis.progress import track
from lapis.solvers.krylov import lanczos_coefficients, tridiagonal
from lapis.solvers.operator import Operator, dots, require
from lapis.solvers.preconditioners import Preconditioner, preconditioned
from lapis.solvers.probes import Estimate, Kind, mean_estimate, probe_blocks


@dataclass(frozen=True)
class QuadratureEstimate(Estimate):
    """An `Estimate` whose samples are quadratures. `truncation`: how far the value moved over the second half of the
    Lanczos steps, a measure of the bias that more steps would remove and that the standard error does not see.
    """

    truncation: Tensor


@dataclass(frozen=True)
class SpectralQuadrature:
    """Quadrature rules of A's spectrum for n probes: T's diagonal (n, m), off-diagonal (n, m - 1), and |z|^2 (n,)."""

    diagonal: Tensor
    off_diagonal: Tensor
    squared_norms: Tensor

    def rule(self, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """Nodes and weights (n, m) after `steps` Lanczos steps (all when None); each row of weights sums to |z|^2."""
        check_arguments(SpectralQuadrature.rule, locals())
        m = self.diagonal.shape[1] if steps is None else steps
        nodes, vectors = torch.linalg.eigh(tridiagonal(self.diagonal[:, :m], self.off_diagonal[:, : m - 1]))
        return nodes, self.squared_norms[:, None] * vectors[:, 0].square()

    def trace(self, function: Callable[[Tensor], Tensor]) -> QuadratureEstimate:
        """tr f(A), f elementwise on float64 eigenvalues. NotPositiveDefiniteError where f is not finite."""
        check_arguments(SpectralQuadrature.trace, locals())
        steps = self.diagonal.shape[1]
        estimate = mean_estimate(self._samples(function, steps), self.diagonal.numel())
        earlier = self._samples(function, max(1, steps // 2)).mean(0)
        truncation = (estimate.value - earlier).abs()
        return QuadratureEstimate(
            estimate.value, estimate.standard_error, estimate.samples, estimate.products, truncation
        )

    def _samples(self, function: Callable[[Tensor], Tensor], steps: int) -> Tensor:
        nodes, weights = self.rule(steps)
        values = function(nodes)
        if values.shape != nodes.shape:
            raise OptionError(
                "Not a function of eigenvalues",
                expected=f"one value for each: shape {tuple(nodes.shape)}",
                got=str(tuple(values.shape)),
                do="pass a function that works element by element, as torch.log does",
            )
        if not torch.isfinite(values).all():
            worst = nodes[~torch.isfinite(values)]
            raise NotPositiveDefiniteError(
                "The function has no finite value at an eigenvalue estimate",
                expected="eigenvalues inside its domain (> 0 for a log-determinant)",
                got=f"one near {float(worst.min()):.3g}",
                do="add a larger prior precision, or use float64",
            )
        return (weights * values).sum(1)


def spectral_quadrature(
    operator: Operator,
    *,
    probes: int = 16,
    steps: int = 32,
    generator: torch.Generator,
    kind: Kind = "rademacher",
    block: int = 4,
    reorthogonalise: bool = True,
    progress: bool | None = False,
) -> SpectralQuadrature:
    """Lanczos from `probes` random vectors: probes * steps products (steps at most P), `block` vectors at a time.

    Memory (block, steps, P); without reorthogonalisation 4 blocks of (block, P), at some more steps for equal accuracy.
    """
    check_arguments(spectral_quadrature, locals())
    require(operator, "symmetric", "Lanczos quadrature")
    check_count("steps", steps)
    steps = min(steps, operator.size)
    parts = []
    blocks = probe_blocks(operator, probes, generator, kind, block)
    for z in track(blocks, "Lanczos quadrature", -(-probes // block), progress):
        parts.append((*lanczos_coefficients(operator, z, steps, reorthogonalise=reorthogonalise), dots(z, z)))
    diagonal, off_diagonal, squared_norms = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return SpectralQuadrature(diagonal, off_diagonal, squared_norms)


def logdet(
    operator: Operator,
    *,
    preconditioner: Preconditioner | None = None,
    probes: int = 16,
    steps: int = 32,
    generator: torch.Generator,
    kind: Kind = "rademacher",
    block: int = 4,
    reorthogonalise: bool = True,
    progress: bool | None = False,
) -> QuadratureEstimate:
    """log |A| = log |M| + tr log(L^T A L), M^-1 = L L^T, by stochastic Lanczos quadrature.

    A preconditioner reduces both errors: only the part of the spectrum that M misses is sampled (variance), and it is
    narrow (fewer steps). The Gauss rule errs upwards for the logarithm: `truncation` says by about how much.
    """
    check_arguments(logdet, locals())
    require(operator, "positive_definite", "A log-determinant")
    known = torch.zeros((), dtype=torch.float64, device=operator.device)
    if preconditioner is not None:
        known = preconditioner.logdet().to(operator.device)
        operator = preconditioned(operator, preconditioner)
    quadrature = spectral_quadrature(
        operator,
        probes=probes,
        steps=steps,
        generator=generator,
        kind=kind,
        block=block,
        reorthogonalise=reorthogonalise,
        progress=progress,
    )
    found = quadrature.trace(torch.log)
    return QuadratureEstimate(
        known + found.value, found.standard_error, found.samples, found.products, found.truncation
    )
