"""The EKFAC structure: Kronecker eigenvectors with the exact second moments along them (George et al. 2018).

    (Q_G (x) Q_A) diag(s) (Q_G (x) Q_A)^T,    s_oi = sum over examples and seeds of ((Q_G^T J Q_A)_oi)^2

Q_G and Q_A are eigenvectors of the Kronecker factors, J (O, I) is the Jacobian of one seed, summed over positions. So s
is the diagonal of the exact curvature in that basis: the trace is exact, and no other diagonal there is nearer to the
exact curvature in the Frobenius norm, l_G l_A included.

The bases need a pass over the data of their own (`preliminary`), or are those of another block; the sums over data then
refer to them. Bases stay what they are when more data are added: the second moments of old and new data in one basis
add up, eigenvectors would not.

Where factors have repeated eigenvalues, eigenvectors are not unique, and neither is the result: reduced factors have a
null space in which the data still vary if there are fewer examples than layer inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lapis.curvature.backward.contributions import CHUNK_BYTES, Contribution, Outer
from lapis.curvature.blocks.block import Block, common_group
from lapis.curvature.blocks.kronecker.eigenbasis import EigenbasisGaussian, OwnBiasGaussian, rotate
from lapis.curvature.blocks.kronecker.factors import KroneckerBlock, check_shared_precisions, column_precision
from lapis.curvature.blocks.spectrum import Spectrum, spectrum
from lapis.curvature.moments import Moment
from lapis.curvature.recording.sites import Site
from lapis.priors import WeightPrior


class EKFACBlock(Block):
    """Bases Q_G (K, O, O) and Q_A (K, I, I) of one site, none for look-ups, and second moments s (K, O, I) in them.

    A separate bias (`bias="separate"`) is a basis vector of its own, the last.
    """

    kind = "ekfac"
    nonnegative = ("moments",)
    orthonormal = ("outputs", "inputs")
    summed = "moments"

    def __init__(self, sites: Sequence[Site], sharing: str = "expand", bias: str = "joint") -> None:
        super().__init__(sites)
        (self.site,) = self.sites
        self.sharing, self.bias = sharing, bias
        self.separate_bias = bias == "separate" and len(self.site.slots) == 2
        self.outputs = torch.zeros(0, dtype=torch.float64)
        self.inputs = None if self.site.kind == "lookup" else torch.zeros(0, dtype=torch.float64)
        self._moments = Moment(self.site.shape)
        self._casts: dict[torch.dtype, tuple[Tensor, Tensor | None]] = {}
        self._spectra: list[Spectrum] | None = None

    @property
    def moments(self) -> Tensor:
        return self._moments.total

    def preliminary(self) -> KroneckerBlock:
        return KroneckerBlock(self.sites, self.sharing, self.bias)

    def begin(self, found: Block) -> None:
        """Take the eigenvectors of a Kronecker block, or the bases of another EKFAC block."""
        if isinstance(found, EKFACBlock):
            outputs, inputs = found.outputs, found.inputs
        else:
            assert isinstance(found, KroneckerBlock)
            _, outputs, _, inputs = found.eigen()
        self.outputs, self.inputs = outputs.contiguous(), None if inputs is None else inputs.contiguous()

    def _bases(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Q_G and Q_A in the network's dtype, cast once."""
        if dtype not in self._casts:
            self._casts[dtype] = (self.outputs.to(dtype), None if self.inputs is None else self.inputs.to(dtype))
        return self._casts[dtype]

    def accumulate(self, contributions: Sequence[Contribution], first: bool) -> None:
        dtype = contributions[0].dtype
        outputs, inputs = self._bases(dtype)
        total = self._moments.recent(dtype)
        for some in _few_examples(contributions[0]):
            rotate(some, inputs, outputs, self.site.shape).add_square_sum(total)

    def flush(self) -> None:
        self._casts = {}

    def gaussian(self, prior: WeightPrior, scale: Tensor) -> EigenbasisGaussian:
        self.check(prior)
        precision, curvature = column_precision(prior, self.site), scale * self.moments
        if precision.dim() == 0 or self.separate_bias:  # diagonal in the bases
            return EigenbasisGaussian(curvature + precision, self.outputs, self.inputs, self.inputs)
        assert self.inputs is not None
        return OwnBiasGaussian(curvature, precision[0], precision[-1], self.outputs, self.inputs)

    def spectra(self, prior: WeightPrior) -> list[tuple[int | Tensor, Spectrum]] | None:
        group = common_group(prior, self.sites)
        if prior.group_of is None or (group is None and not self.separate_bias):
            return None
        if self._spectra is None:
            parts = self.site.parts(self.moments) if self.separate_bias else [self.moments]
            self._spectra = [spectrum(part) for part in parts]
        slots = self.site.slots[: len(self._spectra)]
        return [(prior.group_of[slot.name], part) for slot, part in zip(slots, self._spectra, strict=True)]

    def check(self, prior: WeightPrior) -> None:
        check_shared_precisions(prior)

    @property
    def added(self) -> tuple[str, ...]:
        return ("moments",)

    def basis(self) -> list[Tensor]:
        return [self.outputs] if self.inputs is None else [self.outputs, self.inputs]

    def state(self) -> dict[str, Tensor]:
        bases = {"outputs": self.outputs} if self.inputs is None else {"outputs": self.outputs, "inputs": self.inputs}
        return {**bases, "moments": self.moments}

    def layout(self) -> dict[str, tuple[int, ...]]:
        groups, outputs, inputs = self.site.shape
        bases = {} if self.inputs is None else {"inputs": (groups, inputs, inputs)}
        return {"outputs": (groups, outputs, outputs), **bases, "moments": self.site.shape}

    def load(self, state: dict[str, Tensor]) -> None:
        self.outputs, self.inputs = state["outputs"], state.get("inputs")
        self._moments = Moment(self.site.shape, state["moments"])
        self._casts, self._spectra = {}, None

    def empty(self) -> None:
        self.load({**self.state(), "moments": torch.zeros_like(self.moments)})  # in the same bases

    def options(self) -> dict[str, str]:
        return {"sharing": self.sharing, "bias": self.bias}


def _few_examples(contribution: Contribution) -> Iterator[Contribution]:
    """The contribution in parts whose Jacobian fits the cache, where it would be formed whole (many positions)."""
    if not isinstance(contribution, Outer) or contribution.g.shape[3] == 1:
        yield contribution
        return
    every, g = contribution.inputs(), contribution.g
    groups, seeds, _, _, outputs = g.shape
    step = max(1, CHUNK_BYTES // (groups * seeds * outputs * (every.shape[-1] + 1) * g.element_size()))
    for some, its in zip(torch.split(every, step, 1), torch.split(g, step, 2), strict=True):
        yield Outer(partial(_same, some), its, contribution.bias)


def _same(inputs: Tensor) -> Tensor:
    return inputs
