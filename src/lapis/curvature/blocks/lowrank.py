"""The low-rank structure: the leading eigenpairs of the GGN over all weights, plus the prior.

    A ~ U^T D U + Lambda,    U (r, P) orthonormal rows, D > 0

What is left out are directions whose curvature is small beside the prior: there the prior decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from lapis.batches import all_finite
from lapis.curvature.backward.contributions import Contribution
from lapis.curvature.backward.pairs import between
from lapis.curvature.blocks.block import Block, BlockGaussian, common_group, site_precision
from lapis.curvature.blocks.dense.gram import strips
from lapis.curvature.blocks.dense.matrix import inner_products
from lapis.curvature.blocks.spectrum import Spectrum
from lapis.curvature.outputs import curvature_not_finite
from lapis.curvature.recording.sites import Site
from lapis.errors import LapisWarning, MemoryBudgetError, NotPositiveDefiniteError, StructureError
from lapis.network import Network
from lapis.priors import WeightPrior
from lapis.solvers import Operator, lanczos_eigenpairs

RANK_FRACTION = 0.01
"""An adaptive rank keeps eigenvalues above this fraction of the smallest prior precision: what is left out changes no
variance by more than a hundredth."""

MOST_ADAPTIVE = 1000
"""Largest rank that is chosen automatically."""

TOLERANCE_POWER = 0.75
"""Lanczos' tolerance is eps to this power, relative to the largest eigenvalue: 2e-12 in float64, 6e-6 in float32."""

TINY = 1e-300
"""The smallest threshold for eigenvalues: those of a rank-deficient GGN that are zero are never asked for."""

FEW = 512
"""Up to this many rows or columns of its root S^T J, a GGN in less than float64 is decomposed from that root."""

ROOT_FLOOR = 1e-12
"""Smallest eigenvalue, relative to the largest, that a root with entries exact to float32's eps determines."""

COLUMNS = 2**16
"""Weights of which draws are coloured together: no other copy of a draw is made."""

MARGIN = 1e-6
"""By this fraction an eigenvalue must exceed the smallest kept one to replace it."""


class LowRankBlock(Block):
    """Eigenvalues (r,) and eigenvectors (r, size) of the curvature, in float64. Not a sum over data."""

    kind = "lowrank"
    nonnegative = ("values",)
    orthonormal = ("vectors",)
    takes_rows = True

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites)
        self.values = torch.zeros(0, dtype=torch.float64)
        self.vectors = torch.zeros(0, self.size, dtype=torch.float64)
        self._grams: tuple[object, Tensor] | None = None

    def accumulate(self, contributions: Sequence[Contribution], first: bool) -> None:
        raise StructureError(
            "Eigenvectors of old and of new data do not add up",
            expected="a structure that is a sum over data",
            got='structure="lowrank"',
            do='fit again to all the data, or use structure="kronecker", "diagonal", "dense" or "implicit"',
        )

    @property
    def added(self) -> tuple[str, ...]:
        return ()

    def grams(self, prior: WeightPrior) -> Tensor | None:
        """U_g U_g^T of each prior group, (G, r, r), found once for a grouping; None when every weight is a group."""
        if prior.group_of is None or prior.scales is not None:
            return None
        key = tuple(prior.group_of.items())
        if self._grams is None or self._grams[0] != key:
            total = self.values.new_zeros(len(prior.precision), len(self.values), len(self.values))
            for site, part in zip(self.sites, self.parts(self.vectors), strict=True):
                for slot, piece in zip(site.slots, _columns(site, part), strict=True):
                    total[prior.group_of[slot.name]] += piece @ piece.mT
            self._grams = (key, total)
        return self._grams[1]

    def parts(self, vectors: Tensor) -> list[Tensor]:
        """(n, size) cut by sites: each (n, *site.shape)."""
        pieces = torch.split(vectors, [site.size for site in self.sites], -1)
        return [piece.reshape(len(vectors), *site.shape) for site, piece in zip(self.sites, pieces, strict=True)]

    def gaussian(self, prior: WeightPrior, scale: Tensor) -> LowRankGaussian:
        parts = [site_precision(prior, site).expand(site.shape).reshape(-1) for site in self.sites]
        grams = self.grams(prior)
        small = None if grams is None else (grams / prior.precision[:, None, None]).sum(0)
        return LowRankGaussian(self, torch.cat(parts), scale, small)

    def spectra(self, prior: WeightPrior) -> list[tuple[int | Tensor, Spectrum]] | None:
        group = common_group(prior, self.sites)
        if group is None:
            return None
        zeros = self.values.new_zeros(1).cpu()
        counts = torch.ones(len(self.values) + 1, dtype=torch.float64)
        counts[-1] = self.size - len(self.values)
        return [(group, Spectrum(torch.cat([self.values.cpu(), zeros]), counts))]

    def state(self) -> dict[str, Tensor]:
        return {"values": self.values, "vectors": self.vectors}

    def layout(self) -> dict[str, tuple[int, ...]]:
        return {"values": (-1,), "vectors": (-1, self.size)}

    def load(self, state: dict[str, Tensor]) -> None:
        self.values, self.vectors = state["values"], state["vectors"]
        self._grams = None


def _columns(site: Site, part: Tensor) -> list[Tensor]:
    """The pieces (n, entries) of a site's array that belong to its weight and to its bias."""
    if len(site.slots) == 1:
        return [part.flatten(1)]
    return [part[..., :-1].flatten(1), part[..., -1:].flatten(1)]


class LowRankGaussian(BlockGaussian):
    """Precision Lambda + s U^T D U = Lambda^1/2 (I + V^T V) Lambda^1/2, V = (s D)^1/2 U Lambda^-1/2 (r, size).

    Its inverse is Lambda^-1/2 (I - V^T (I + V V^T)^-1 V) Lambda^-1/2: all that is factorised is (r, r).
    """

    def __init__(self, block: LowRankBlock, prior: Tensor, scale: Tensor, small: Tensor | None) -> None:
        """`small`: U Lambda^-1 U^T (r, r) where it is known already."""
        self.block, self.prior, self.scale = block, prior, scale
        if small is None:
            small = (block.vectors / prior) @ block.vectors.mT
        self._small = small

    @cached_property
    def _factor(self) -> Tensor:
        """L (r, r) with L L^T = I + V V^T."""
        root = (self.scale * self.block.values).sqrt()
        inner = root[:, None] * self._small * root
        factor, info = torch.linalg.cholesky_ex(inner + torch.eye(len(inner), dtype=inner.dtype, device=inner.device))
        if int(info) or not all_finite(factor):
            raise NotPositiveDefiniteError(
                "The posterior precision is not positive definite in float64",
                expected="I + V V^T with eigenvalues >= 1",
                got=f"a factorisation that failed, with {float(inner.detach().diagonal().max()):.3g} on the diagonal",
                do="use a larger prior precision or noise, or rescale the inputs",
            )
        found: Tensor = factor
        return found

    def check(self) -> None:
        self._factor  # noqa: B018

    @cached_property
    def _scaled(self) -> Tensor:
        """V Lambda^-1/2 = (s D)^1/2 U Lambda^-1, (r, size)."""
        return ((self.scale * self.block.values).sqrt()[:, None] * self.block.vectors).div_(self.prior)

    def _white(self, vectors: Tensor) -> Tensor:
        """L^-1 vectors for (r, n)."""
        found: Tensor = torch.linalg.solve_triangular(self._factor, vectors, upper=False)
        return found

    def logdet(self) -> Tensor:
        return self.prior.log().sum() + 2 * self._factor.diagonal().log().sum()

    def color(self, noise: Tensor) -> Tensor:
        # Lambda^-1/2 (I + V^T V)^-1/2 e; with V V^T = W l W^T the root is I - V^T W g(l) W^T V and
        # g = (1 - (1 + l)^-1/2) / l = 1 / (r (r + 1)), r = sqrt(1 + l): no division by a vanishing l.
        values, rotation = torch.linalg.eigh(self._factor @ self._factor.mT)
        root = values.clamp(min=1).sqrt()
        spans = list(strips(0, self.block.size, COLUMNS))
        inner = noise.new_zeros(len(noise), len(root), dtype=torch.float64)
        for start, stop in spans:
            some = noise[:, start:stop].double() * self.prior[start:stop].sqrt()
            inner += some @ self._scaled[:, start:stop].mT
        inner = (inner @ rotation / (root * (root + 1))) @ rotation.mT
        draws = noise.new_empty(noise.shape, dtype=torch.float64)
        for start, stop in spans:
            spread = noise[:, start:stop].double() * self.prior[start:stop].rsqrt()
            draws[:, start:stop] = torch.addmm(spread, inner, self._scaled[:, start:stop], alpha=-1)
        return draws

    def multiply(self, vectors: Tensor) -> Tensor:
        u = self.block.vectors
        return vectors * self.prior + (vectors @ u.mT * (self.scale * self.block.values)) @ u

    def solve(self, vectors: Tensor) -> Tensor:
        inner = torch.cholesky_solve(self._scaled @ vectors.mT, self._factor)
        return vectors / self.prior - inner.mT @ self._scaled

    def variance(self) -> Tensor:
        return self.prior.reciprocal() - self._white(self._scaled).square().sum(0)

    def _projected(self, contributions: Sequence[Contribution]) -> tuple[list[Contribution], list[Tensor], Tensor]:
        """Contributions in float64, prior variances by site, and L^-1 V Lambda^-1/2 J^T as (r, B, M)."""
        # in float64: the prior's variance minus what the data take from it would cancel in single precision
        exact = [contribution.double() for contribution in contributions]
        variances = [variance[0] for variance in self.block.parts(self.prior.reciprocal()[None])]
        if not len(self.block.values):  # no eigenvalue above the threshold: nothing to project on
            batch, seeds = exact[0].covariance(variances[0], True).shape
            return exact, variances, self.prior.new_empty(0, batch, seeds)
        parts = [c.project(v) for c, v in zip(exact, self.block.parts(self._scaled), strict=True)]
        total = torch.stack(parts).sum(0)
        white = self._white(total.flatten(0, 1).mT).reshape(-1, *total.shape[:2])
        return exact, variances, white

    def covariance(self, contributions: Sequence[Contribution], diagonal: bool) -> Tensor:
        exact, variances, white = self._projected(contributions)
        total = torch.stack([c.covariance(v, diagonal) for c, v in zip(exact, variances, strict=True)]).sum(0)
        return total - (white.square().sum(0) if diagonal else torch.einsum("rbm,rbn->bmn", white, white))

    def features(self, contributions: Sequence[Contribution]) -> tuple[list[Contribution], Tensor]:
        exact, _, white = self._projected([contribution.settled() for contribution in contributions])
        return exact, white

    def kernel(self, left: tuple[list[Contribution], Tensor], right: tuple[list[Contribution], Tensor]) -> Tensor:
        variances = [variance[0] for variance in self.block.parts(self.prior.reciprocal()[None])]
        parts = [between(a, b, v) for a, b, v in zip(left[0], right[0], variances, strict=True)]
        return torch.stack(parts).sum(0) - inner_products(left[1], right[1])

    def matrix(self) -> Tensor:
        u = self.block.vectors
        return torch.diag(self.prior) + (u.mT * (self.scale * self.block.values)) @ u


@dataclass(frozen=True)
class Leading:
    """The largest eigenvalues (r,) of a GGN and their vectors (r, P), descending; `note` says how many and why."""

    values: Tensor
    vectors: Tensor
    note: str
    converged: bool


class Products(Protocol):
    """A curvature R^T R through its products with vectors (k, P), and those of its root R (rows, P)."""

    @property
    def rows(self) -> int: ...
    def product(self, vectors: Tensor) -> Tensor: ...
    def root(self, vectors: Tensor) -> Tensor: ...
    def root_transposed(self, rows: Tensor) -> Tensor: ...


def load_leading(
    block: Block,
    products: Products,
    network: Network,
    *,
    rank: int | None,
    threshold: float,
    memory_budget: int,
    generator: torch.Generator,
    progress: bool | None,
) -> Leading:
    """Fill the block with the leading eigenpairs of a curvature: see `leading_eigenpairs`."""
    few = min(products.rows, network.size)
    in_memory = 32 * products.rows * network.size <= memory_budget
    if network.dtype != torch.float64 and few <= FEW and in_memory:
        found = _of_root(products, network, rank, threshold, memory_budget)
    else:
        found = leading_eigenpairs(
            Operator(products.product, network.size, network.dtype, network.device, "symmetric"),
            rank=rank,
            threshold=threshold,
            bound=products.rows,
            memory_budget=memory_budget,
            generator=generator,
            progress=progress,
        )
    ordered = torch.cat([site.gather(found.vectors, network).flatten(1) for site in block.sites], 1)
    block.load({"values": found.values, "vectors": ordered})
    if not found.converged:
        warnings.warn(
            f"Not all of the {len(found.values)} leading eigenpairs were found to their tolerance; "
            "use float64, or a smaller rank.",
            LapisWarning,
            stacklevel=5,
        )
    return found


def _of_root(products: Products, network: Network, rank: int | None, threshold: float, memory_budget: int) -> Leading:
    """As `leading_eigenpairs`, from the root R (M, P) of the GGN and in float64: R R^T, or R^T R if that is smaller.

    Products in float32 are exact to eps times the largest eigenvalue, and smaller ones drown; the entries of R are
    exact to eps of themselves.
    """
    by_rows = products.rows <= network.size
    unit = torch.eye(min(products.rows, network.size), dtype=network.dtype, device=network.device)
    step = max(1, memory_budget // (64 * network.size))
    parts = [products.root_transposed(some) if by_rows else products.root(some) for some in torch.split(unit, step)]
    root = torch.cat(parts).double()  # R, or R^T
    if not all_finite(root):
        raise curvature_not_finite(network.dtype, network.names)
    values, vectors = (found.flip(-1) for found in torch.linalg.eigh(root @ root.mT))
    kept = values > max(ROOT_FLOOR * float(values[0]), threshold if rank is None else 0.0, TINY)
    count = min(int(kept.sum()), len(values) if rank is None else rank)
    values, vectors = values[:count], vectors[:, :count].mT
    if by_rows:
        vectors = (vectors @ root) / values.sqrt()[:, None]
    note = f"rank {count}" + (f": eigenvalues of the GGN above {threshold:.3g}" if rank is None else "")
    return Leading(values, vectors, note, True)


def leading_eigenpairs(
    operator: Operator,
    *,
    rank: int | None,
    threshold: float,
    bound: int,
    memory_budget: int,
    generator: torch.Generator,
    progress: bool | None,
) -> Leading:
    """The `rank` largest eigenvalues, or when None all above `threshold`, by Lanczos with deflation.

    One Lanczos run sees a single copy of a repeated eigenvalue (a linear last layer repeats all of them). So what was
    found is projected out and Lanczos runs again, until nothing that is left belongs among the pairs kept.

    Args:
        operator: the GGN, of rank at most `bound`.
        memory_budget: bytes; Lanczos keeps its steps (m, P), the result is (r, P) in float64.
    """
    per_vector = 8 * operator.size
    fits = max(1, memory_budget // (4 * per_vector))
    if rank is not None and rank > fits:
        raise MemoryBudgetError(
            f"{rank:,} eigenvectors of {operator.size:,} weights do not fit",
            expected=f"at most {memory_budget:,} bytes (memory_budget)",
            got=f"{4 * rank * per_vector:,} bytes for the vectors and the search",
            do=f"ask for at most {fits:,}, or raise memory_budget",
        )
    most = min(operator.size, bound, fits, MOST_ADAPTIVE if rank is None else rank)
    values = torch.zeros(0, dtype=torch.float64, device=operator.device)
    vectors = torch.zeros(0, operator.size, dtype=operator.dtype, device=operator.device)
    converged, floor = True, 0.0
    while len(values) < operator.size:
        full = len(values) >= most
        found = lanczos_eigenpairs(
            _deflated(operator, vectors),
            rank=min(most, operator.size - len(values)),
            tolerance=torch.finfo(operator.dtype).eps ** TOLERANCE_POWER,
            threshold=float(values[most - 1]) if full else max(threshold if rank is None else 0.0, TINY),
            max_steps=min(operator.size - len(values), max(4 * most + 40, 1), max(fits, most)),
            generator=generator,
            progress=progress,
        )
        if len(found.values) == 0:
            break
        floor = operator.size * torch.finfo(operator.dtype).eps * float(torch.cat([values, found.values.abs()]).max())
        fresh = found.values > max(floor, float(values[most - 1]) * (1 + MARGIN) if full else 0.0)
        if not bool(fresh.any()):
            break
        converged = converged and bool(found.converged[fresh].all())
        values, order = torch.cat([values, found.values[fresh]]).sort(descending=True)
        vectors = torch.linalg.qr(torch.cat([vectors, found.vectors[fresh]]).mT).Q.mT[order]
    if len(values) < most and floor > 10 * threshold and operator.dtype != torch.float64:
        warnings.warn(
            f"Eigenvalues of the GGN below {floor:.2g} are lost in {operator.dtype}, and were asked for down to "
            f"{threshold:.2g}: variances can be too large. Fit in float64: model.double().",
            LapisWarning,
            stacklevel=6,
        )
    kept = most if rank is not None or len(values) > most else int((values >= threshold).sum())
    values, vectors = values[:kept], vectors[:kept]
    note = f"rank {len(values)}"
    if rank is None:
        note += f": eigenvalues of the GGN above {threshold:.3g}"
        note += f", cut at {most} ({'memory' if most == fits else 'limit'})" if len(values) == most else ""
    return Leading(values, vectors.double(), note, converged)


def _deflated(operator: Operator, vectors: Tensor) -> Operator:
    """(I - U^T U) A (I - U^T U)."""
    if len(vectors) == 0:
        return replace(operator, property="symmetric")

    def without(block: Tensor) -> Tensor:
        return block - (block @ vectors.mT) @ vectors

    return replace(operator, product=lambda block: without(operator(without(block))), property="symmetric")
