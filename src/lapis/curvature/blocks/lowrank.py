"""The low-rank structure: the leading eigenpairs of the GGN over all weights, plus the prior.

    A ~ U^T D U + Lambda,    U (r, P) orthonormal rows, D > 0

What is left out are directions whose curvature is small beside the prior: there the prior decides. Sums of two such
matrices are of this form, with their ranks together; what either of them left out stays left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from lapis.batches import all_finite
from lapis.curvature.backward.contributions import Contribution
from lapis.curvature.backward.pairs import between
from lapis.curvature.blocks.block import Block, BlockGaussian, common_group, site_precision
from lapis.curvature.blocks.dense.gram import strips
from lapis.curvature.blocks.dense.matrix import inner_products
from lapis.curvature.blocks.spectrum import Spectrum
from lapis.curvature.recording.sites import Site
from lapis.errors import LapisWarning, NotPositiveDefiniteError, StructureError, users_level
from lapis.priors import WeightPrior

MOST_ADAPTIVE = 1000
"""Largest rank that is chosen automatically, or that a sum has."""

ROUNDING = 1e-14
"""Eigenvalues of a sum below this fraction of its largest, for each of them, are those of a matrix of lower rank."""

COLUMNS = 2**16
"""Weights of which draws are coloured together: no other copy of a draw is made."""


class LowRankBlock(Block):
    """Eigenvalues (r,) and eigenvectors (r, size) of the curvature, in float64; others up to `omitted` are left out."""

    kind = "lowrank"
    nonnegative = ("values", "omitted")
    orthonormal = ("vectors",)
    takes_rows = True

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites)
        self.values = torch.zeros(0, dtype=torch.float64)
        self.vectors = torch.zeros(0, self.size, dtype=torch.float64)
        self.omitted = torch.zeros((), dtype=torch.float64)
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

    def plus(self, other: Block, weight: float) -> LowRankBlock:
        """The sum U^T D U + weight V^T E V from a QR decomposition of both vectors, and eigenvalues in its small basis.

        Of a difference the negative eigenvalues are dropped: they come from what `other` kept and this one did not.
        """
        assert isinstance(other, LowRankBlock)
        values = torch.cat([self.values, weight * other.values])
        basis, factor = torch.linalg.qr(torch.cat([self.vectors, other.vectors]).mT)
        found, rotation = (part.flip(-1) for part in torch.linalg.eigh((factor * values) @ factor.mT))
        least = ROUNDING * len(values) * float(values.abs().max()) if len(values) else 0.0
        count = min(int((found > least).sum()), MOST_ADAPTIVE)
        omitted = (self.omitted + other.omitted).clamp(max=torch.finfo(torch.float64).max)
        if count < len(found) and float(found[count]) > least:
            omitted = omitted + found[count]
            warnings.warn(
                f"A sum of low-rank curvatures was cut at rank {count:,}: its eigenvalues up to {float(omitted):.3g} "
                "are left out.",
                LapisWarning,
                stacklevel=users_level(),
            )
        total = LowRankBlock(self.sites)
        total.load({"values": found[:count], "vectors": (basis @ rotation[:, :count]).mT, "omitted": omitted})
        return total

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
        return {"values": self.values, "vectors": self.vectors, "omitted": self.omitted}

    def layout(self) -> dict[str, tuple[int, ...]]:
        return {"values": (-1,), "vectors": (-1, self.size), "omitted": ()}

    def check_state(self, state: dict[str, Tensor], part: bool = False) -> dict[str, Tensor]:
        unknown = {"omitted": torch.full((), torch.finfo(torch.float64).max, dtype=torch.float64)}
        return super().check_state(unknown | state, part)  # files that are older than the bound

    def load(self, state: dict[str, Tensor]) -> None:
        self.values, self.vectors = state["values"], state["vectors"]
        self.omitted = state.get("omitted", self.omitted)
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
