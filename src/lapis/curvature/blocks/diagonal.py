"""The diagonal structure: the second derivative of each weight alone, exactly the GGN's diagonal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lapis.curvature.backward.contributions import Contribution
from lapis.curvature.backward.pairs import between
from lapis.curvature.blocks.abilities import Traces
from lapis.curvature.blocks.block import Block, BlockGaussian, site_precision
from lapis.curvature.blocks.spectrum import Spectrum, spectrum
from lapis.curvature.moments import Moment
from lapis.curvature.recording.sites import Site
from lapis.priors import WeightPrior


class DiagonalBlock(Block):
    """sum_n sum_m (S_n^T J_n)[m, p]^2 for each weight p of one site."""

    kind = "diagonal"
    nonnegative = ("curvature",)
    summed = "curvature"

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites)
        (self.site,) = self.sites
        self._curvature = self._moment()
        self._spectra: list[Spectrum] | None = None

    def _moment(self, total: Tensor | None = None) -> Moment:
        return Moment(self.site.shape, total, by_columns=self.site.kind == "outer")

    @property
    def curvature(self) -> Tensor:
        return self._curvature.total

    def accumulate(self, contributions: Sequence[Contribution], first: bool) -> None:
        contributions[0].add_square_sum(self._curvature.recent(contributions[0].dtype))

    def gaussian(self, prior: WeightPrior, scale: Tensor) -> DiagonalGaussian:
        return DiagonalGaussian(scale * self.curvature + site_precision(prior, self.site))

    def spectra(self, prior: WeightPrior) -> list[tuple[int | Tensor, Spectrum]]:
        if prior.group_of is None:
            index = torch.arange(prior.network.size, device=self.curvature.device)
            flat = self.curvature.reshape(-1).cpu()
            return [(self.site.gather(index, prior.network).reshape(-1), Spectrum(flat, torch.ones_like(flat)))]
        if self._spectra is None:
            self._spectra = [spectrum(part) for part in self.site.parts(self.curvature)]
        return [(prior.group_of[slot.name], part) for slot, part in zip(self.site.slots, self._spectra, strict=True)]

    def state(self) -> dict[str, Tensor]:
        return {"curvature": self.curvature}

    def layout(self) -> dict[str, tuple[int, ...]]:
        return {"curvature": self.site.shape}

    def load(self, state: dict[str, Tensor]) -> None:
        self._curvature = self._moment(state["curvature"])
        self._spectra = None


class DiagonalGaussian(BlockGaussian, Traces):
    """Independent weights of the given precision (*site.shape)."""

    def __init__(self, precision: Tensor) -> None:
        self.precision = precision
        self._casts: dict[torch.dtype, Tensor] = {}

    def logdet(self) -> Tensor:
        return self.precision.log().sum()

    def color(self, noise: Tensor) -> Tensor:
        return noise * self.precision.reshape(-1).rsqrt().to(noise.dtype)

    def multiply(self, vectors: Tensor) -> Tensor:
        return vectors * self.precision.reshape(-1)

    def solve(self, vectors: Tensor) -> Tensor:
        return vectors / self.precision.reshape(-1)

    def variance(self) -> Tensor:
        return self.precision.reciprocal().reshape(-1)

    def trace(self, block: Block) -> Tensor:
        assert isinstance(block, DiagonalBlock)
        return (block.curvature / self.precision).sum()

    def _variance(self, dtype: torch.dtype) -> Tensor:
        """(*site.shape) in the precision of what it is multiplied with, cast once."""
        if dtype not in self._casts:
            self._casts[dtype] = self.precision.reciprocal().to(dtype)
        return self._casts[dtype]

    def covariance(self, contributions: Sequence[Contribution], diagonal: bool) -> Tensor:
        return contributions[0].covariance(self._variance(contributions[0].dtype), diagonal)

    def of_features(self, features: Tensor, diagonal: bool) -> Tensor | None:
        variance = features.square() @ self._variance(features.dtype)[0].mT
        return variance if diagonal else torch.diag_embed(variance)

    def spread(self, vectors: Tensor) -> Tensor | None:
        return vectors * self._variance(vectors.dtype).reshape(-1)

    def features(self, contributions: Sequence[Contribution]) -> Contribution:
        return contributions[0].settled()

    def kernel(self, left: Contribution, right: Contribution) -> Tensor:
        return between(left, right, self._variance(left.dtype))

    def matrix(self) -> Tensor:
        return torch.diag(self.precision.reshape(-1))
