"""Structures: which weights are correlated in the posterior. A structure cuts the sites into blocks.

* dense: one block over all weights.
* diagonal: every weight is independent; one block for each site.
* kronecker: one Kronecker block for each weight matrix (with its bias); a parameter without such a form gets a dense
  block if it is small, else a diagonal one.
* ekfac: the same, with eigenvalues that are exact in the basis of each Kronecker block.
* lowrank: one block over all weights, given by the leading eigenpairs of its curvature.
* implicit: no blocks at all, but products with the curvature, each a pass over the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lapis.curvature.blocks.block import Block
from lapis.curvature.blocks.dense.matrix import DenseBlock
from lapis.curvature.blocks.dense.packed import PackedBlock, packed_bytes
from lapis.curvature.blocks.diagonal import DiagonalBlock
from lapis.curvature.blocks.kronecker.ekfac import EKFACBlock
from lapis.curvature.blocks.kronecker.factors import KroneckerBlock, kronecker_bytes
from lapis.curvature.blocks.lowrank import LowRankBlock
from lapis.curvature.blocks.spectrum import GroupedSpectrum, Spectrum
from lapis.curvature.recording.sites import Site
from lapis.errors import MemoryBudgetError, OptionError, check_fits
from lapis.priors import WeightPrior

Structure = Literal["dense", "diagonal", "kronecker", "ekfac", "lowrank", "implicit"]

NAMES: dict[str, Structure] = {
    "dense": "dense",
    "full": "dense",
    "diagonal": "diagonal",
    "diag": "diagonal",
    "kronecker": "kronecker",
    "kron": "kronecker",
    "kfac": "kronecker",
    "ekfac": "ekfac",
    "lowrank": "lowrank",
    "low_rank": "lowrank",
    "implicit": "implicit",
    "matrix_free": "implicit",
}

AUTO_DENSE = 2500
"""Up to this many weights "auto" is dense: its matrix is small and its factorisation takes about a second."""

SMALL_BLOCK = 512
"""Parameters without a Kronecker form get a dense block up to this size."""

DENSE_COPIES = 3
"""Matrices (weights, weights) in memory at the peak of a dense fit and factorisation."""

PACKED = 10_000
"""From this many weights on dense blocks store triangles: a third of the memory, but no eigenvalues for tuning."""


def is_packed(weights: int) -> bool:
    """Whether a dense block over so many weights stores triangles."""
    return weights >= PACKED


def dense_bytes(weights: int) -> int:
    """Memory at the peak of a dense fit and factorisation."""
    return packed_bytes(weights) if is_packed(weights) else DENSE_COPIES * 8 * weights**2


def resolve_structure(name: str, weights: int, memory_budget: int) -> tuple[Structure, str]:
    """The structure meant, and how it was chosen; refused here when it cannot fit in memory."""
    if name == "auto":
        fits = dense_bytes(weights) <= memory_budget
        if weights <= AUTO_DENSE and fits:
            return "dense", f"dense, chosen for {weights:,} weights (at most {AUTO_DENSE:,})"
        reason = f"more than {AUTO_DENSE:,}" if fits or weights > AUTO_DENSE else "too many for dense in memory_budget"
        return "kronecker", f"kronecker, chosen for {weights:,} weights ({reason})"
    if name not in NAMES:
        raise OptionError(
            "Unknown structure",
            expected='"auto", "dense" ("full"), "diagonal" ("diag"), "kronecker" ("kfac"), "ekfac", "lowrank" or '
            '"implicit"',
            got=repr(name),
            do="choose one of these",
        )
    structure = NAMES[name]
    if structure == "dense":
        check_fits(
            dense_bytes(weights),
            memory_budget,
            f"A dense posterior over {weights:,} weights does not fit",
            made_of=f"for the curvature of {weights:,} x {weights:,} weights and its factor in float64",
            do='choose fewer weights, structure="kronecker", "diagonal" or "implicit", or a larger memory_budget',
        )
    return structure, structure


@dataclass(frozen=True)
class BlockOptions:
    """What blocks are made with, beside their sites: `sharing` and `bias` are for Kronecker and EKFAC blocks."""

    sharing: str
    bias: str
    memory_budget: int


def _dense(sites: Sequence[Site], options: BlockOptions) -> list[Block]:
    return [PackedBlock(sites) if is_packed(sum(site.size for site in sites)) else DenseBlock(sites)]


def _diagonal(sites: Sequence[Site], options: BlockOptions) -> list[Block]:
    return [DiagonalBlock([site]) for site in sites]


def _low_rank(sites: Sequence[Site], options: BlockOptions) -> list[Block]:
    return [LowRankBlock(sites)]


def _kronecker(sites: Sequence[Site], options: BlockOptions) -> list[Block]:
    return _matrices(sites, options, KroneckerBlock, _kronecker_bytes)


def _ekfac(sites: Sequence[Site], options: BlockOptions) -> list[Block]:
    return _matrices(sites, options, EKFACBlock, lambda site: _kronecker_bytes(site) + 8 * site.size)


def _matrices(
    sites: Sequence[Site],
    options: BlockOptions,
    kind: type[KroneckerBlock | EKFACBlock],
    size: Callable[[Site], int],
) -> list[Block]:
    """Blocks of a kind for weight matrices, of `size` bytes, and small dense or diagonal ones for other weights."""
    needed = sum(size(site) for site in sites if site.kind != "rows")
    if needed > options.memory_budget:
        largest = max((site for site in sites if site.kind != "rows"), key=size)
        raise MemoryBudgetError(
            "The Kronecker factors do not fit",
            expected=f"at most {options.memory_budget:,} bytes (memory_budget)",
            got=f"{needed:,} bytes, most of it for {largest.label!r}",
            do='use structure="diagonal", choose fewer weights, or a larger memory_budget',
        )
    return [_small(site) if site.kind == "rows" else kind([site], options.sharing, options.bias) for site in sites]


def _small(site: Site) -> Block:
    return DenseBlock([site]) if site.size <= SMALL_BLOCK else DiagonalBlock([site])


def _kronecker_bytes(site: Site) -> int:
    """Factors and their eigenvectors in float64."""
    return 2 * kronecker_bytes(site)


BUILDERS: dict[Structure, Callable[[Sequence[Site], BlockOptions], list[Block]]] = {
    "dense": _dense,
    "diagonal": _diagonal,
    "kronecker": _kronecker,
    "ekfac": _ekfac,
    "lowrank": _low_rank,
}
"""Structure -> the function that cuts the sites into its blocks. The implicit structure has none."""


def build_blocks(
    structure: Structure, sites: Sequence[Site], sharing: str, bias: str, memory_budget: int
) -> list[Block]:
    """Empty blocks that partition the sites."""
    return BUILDERS[structure](sites, BlockOptions(sharing, bias, memory_budget))


def grouped_spectrum(blocks: Sequence[Block], prior: WeightPrior) -> GroupedSpectrum | None:
    """Eigenvalues of all blocks by prior group; None where some block has none to give, or the prior has scales."""
    if prior.scales is not None:
        return None
    parts: list[tuple[int | Tensor, Spectrum]] = []
    for block in blocks:
        found = block.spectra(prior)
        if found is None:
            return None
        parts += found
    return GroupedSpectrum(parts, len(prior.precision))


def to_device(blocks: Sequence[Block], device: torch.device) -> None:
    """Move new blocks, which are made on the processor and take no memory there before the first batch."""
    if device.type == "cpu":
        return
    for block in blocks:
        block.load({name: tensor.to(device) for name, tensor in block.state().items()})
