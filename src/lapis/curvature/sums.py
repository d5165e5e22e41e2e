"""The result of passes over data: sums over examples, so that passes over parts of the data add up."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lapis.curvature.blocks.abilities import SharesDecomposition
from lapis.curvature.blocks.block import Block
from lapis.curvature.blocks.partition import to_device
from lapis.curvature.sample import Sample
from lapis.curvature.seen import Seen
from lapis.curvature.tape import Tape
from lapis.ranks import Ranks
from lapis.schema import count, entry, tensor, under

log = logging.getLogger("lapis")

MOST_APART = 8
"""Up to this many outputs with Gaussian noise are kept apart, so that each can have its own."""


@dataclass
class Curvature:
    """Sums over data: curvature blocks, likelihood statistics, number of examples."""

    kind: str
    """Kind of curvature: "ggn", "sampled" or "empirical" (Fisher information), or "hessian"."""
    tape: Tape
    blocks: list[Block]
    statistics: Tensor
    """The sums that the likelihood needs for log p(D)."""
    n_data: int = 0
    fisher_samples: int = 1
    signature: str = ""
    """Shapes and dtypes of the inputs, for error messages."""
    outputs: int = 0
    """Number of network outputs per position."""
    digest: int = 0
    """Fingerprint of the data, independent of order and batching."""
    sites_of: list[list[int]] = field(default_factory=list)
    """For each block, the indices of its sites in the tape's plan."""
    sample: Sample = field(default_factory=Sample)
    """A few of the examples; not written to files."""
    apart: list[list[Block]] | None = None
    """For each output, blocks like `blocks` with J^T J of that output alone; None where the outputs are not kept apart.
    Under noise variances v, `blocks` are their sum with weights 1 / v."""
    positions: int = 1
    """Number of positions of the first example."""
    seen: Seen = field(default_factory=Seen.none)
    """Fingerprints of a few of the examples."""

    def __post_init__(self) -> None:
        index = {id(site): i for i, site in enumerate(self.tape.plan.sites)}
        self.sites_of = [[index[id(site)] for site in block.sites] for block in self.blocks]

    @cached_property
    def forms_jacobian(self) -> bool:
        """Whether some block multiplies gradients by layer inputs, so that several seeds together are faster."""
        return any(block.forms_jacobian for block in self._layer_blocks)

    @cached_property
    def row_length(self) -> int:
        """Number of weights in blocks that form rows of the Jacobian, one per seed, in working memory."""
        return sum(block.size for block in self.blocks if block.takes_rows)

    @cached_property
    def takes_moments(self) -> bool:
        """Whether blocks need layer inputs only through their second moments, position by position."""
        return all(block.takes_moments for block in self._layer_blocks)

    @property
    def _layer_blocks(self) -> list[Block]:
        return [block for block in self.blocks if block.sites[0].kind != "rows"]

    def to_flat(self, parts: Sequence[Tensor]) -> Tensor:
        """A flat vector (..., P) of the weights from one vector (..., size) for each block."""
        return self.fill(parts[0].new_empty(*parts[0].shape[:-1], self.tape.network.size), parts)

    def fill(self, flat: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """Write the blocks' vectors (..., size) to their places in a flat vector (..., P)."""
        for block, part in zip(self.blocks, parts, strict=True):
            pieces = torch.split(part, [site.size for site in block.sites], -1)
            for site, piece in zip(block.sites, pieces, strict=True):
                site.scatter(piece.reshape(*piece.shape[:-1], *site.shape), flat, self.tape.network)
        return flat

    def to_blocks(self, vectors: Tensor) -> list[Tensor]:
        """The inverse of `to_flat`: one vector (..., size) for each block from a flat vector (..., P)."""
        network, axis = self.tape.network, vectors.dim() - 1
        return [
            torch.cat([site.gather(vectors, network).flatten(axis) for site in block.sites], -1)
            for block in self.blocks
        ]

    def preliminary(self) -> Curvature | None:
        """Empty sums that some blocks need before they can begin, in a pass of its own; None where none does."""
        found = [block.preliminary() for block in self.blocks]
        blocks = [block for block in found if block is not None]
        if not blocks:
            return None
        to_device(blocks, self.statistics.device)
        return Curvature(
            self.kind, self.tape, blocks, torch.zeros_like(self.statistics), 0, self.fisher_samples, self.signature,
            self.outputs, positions=self.positions,
        )  # fmt: skip

    def begin(self, found: Curvature) -> None:
        """Give the blocks what they need of the `preliminary` sums, which are freed one by one."""
        for number in reversed(range(len(self.blocks))):
            if found.blocks and found.blocks[-1].sites == self.blocks[number].sites:
                ready = found.blocks.pop()
                for blocks in (self.blocks, *(self.apart or ())):
                    blocks[number].begin(ready)

    def begin_in(self, basis: Curvature) -> None:
        """Give the blocks the bases of other sums for the same sites, which stay as they are."""
        for number, theirs in enumerate(basis.blocks):
            for blocks in (self.blocks, *(self.apart or ())):
                blocks[number].begin(theirs)

    def keep_apart(self, memory: int) -> bool:
        """Keep the outputs apart from now on if the structure can, and they are few and fit in `memory` bytes."""
        each = sum(block.nbytes for block in self.blocks)
        few = 2 <= self.outputs <= MOST_APART and (self.outputs + 1) * each <= memory
        if not few or self.kind != "ggn" or not all(block.summed for block in self.blocks):
            return False
        self.apart = [[block.fresh() for block in self.blocks] for _ in range(self.outputs)]
        for blocks in self.apart:
            to_device(blocks, self.statistics.device)
        return True

    def combine(self, weights: Sequence[float]) -> None:
        """Set `blocks` to the sum of the outputs' own with these weights (C,)."""
        assert self.apart is not None
        for block, parts in zip(self.blocks, zip(*self.apart, strict=True), strict=True):
            block.combine(parts, weights)

    def combined(self, weights: Sequence[float]) -> Curvature:
        """A copy with other weights of the outputs, which shares everything else."""
        same = copy(self)
        same.blocks = [block.fresh() for block in self.blocks]
        same.combine(weights)
        return same

    def cleared(self) -> Curvature:
        """A copy without any sums, to add other data to: see `plus`."""
        same = self.clone()
        for block in chain(same.blocks, *(same.apart or ())):
            block.empty()
        same.statistics, same.n_data, same.digest = torch.zeros_like(self.statistics), 0, 0
        same.sample, same.seen = Sample(), Seen.none()
        return same

    def plus(self, other: Curvature, weight: float) -> Curvature:
        """Both sums together, with weight 1, or with -1 without the other's data; the sample is this one's."""

        def added(mine: Sequence[Block], theirs: Sequence[Block]) -> list[Block]:
            return [one.plus(two, weight) for one, two in zip(mine, theirs, strict=True)]

        same = self.clone()
        same.blocks = added(self.blocks, other.blocks)
        if self.apart is not None and other.apart is not None:
            same.apart = [added(one, two) for one, two in zip(self.apart, other.apart, strict=True)]
        sign = int(weight)
        same.statistics = self.statistics + sign * other.statistics
        same.n_data, same.digest = self.n_data + sign * other.n_data, (self.digest + sign * other.digest) % 2**64
        same.seen = self.seen.plus(other.seen) if sign > 0 else self.seen.minus(other.seen)
        return same

    def running(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The sums in the midst of a pass over the data, as tensors and facts for a checkpoint."""
        groups = {"block": self.blocks} if self.apart is None else {f"output{c}": b for c, b in enumerate(self.apart)}
        tensors = {
            f"{group}.{i}.{name}": tensor for number, (group, blocks) in enumerate(groups.items())
            for i, block in enumerate(blocks) for name, tensor in block.part_state(number == 0).items()
        }  # fmt: skip
        eps = [block.eps() for blocks in groups.values() for block in blocks]
        return tensors | {"statistics": self.statistics}, {"n_data": self.n_data, "digest": self.digest, "eps": eps}

    def resume(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from sums that `running` gave; FileError where they are not of this form."""
        groups = {"block": self.blocks} if self.apart is None else {f"output{c}": b for c, b in enumerate(self.apart)}
        every = [block for blocks in groups.values() for block in blocks]
        for block, eps in zip(every, entry(facts, "eps", list[dict[str, float]]), strict=True):
            block.take_eps(eps)
        for number, (group, blocks) in enumerate(groups.items()):
            for i, block in enumerate(blocks):
                block.load(block.check_state(under(f"{group}.{i}.", dict(tensors)), part=number > 0))
                block.is_hessian = self.kind == "hessian"
        to_device(every, self.tape.network.device)
        self.statistics = tensor(tensors, "statistics", (-1,)).to(self.tape.network.device)
        self.n_data, self.digest = count(facts, "n_data", least=0), count(facts, "digest", least=0)

    def over_ranks(self, ranks: Ranks) -> None:
        """Replace this rank's sums by those over the data of all ranks, the same everywhere."""
        lengths = ranks.numbers(self.statistics.numel() if self.n_data else 0)
        if not self.n_data:  # a rank without examples
            self.statistics = self.statistics.new_zeros(max(lengths))
        digits = [self.digest >> shift & 0xFFFF for shift in range(0, 64, 16)]  # whose sums float64 holds exactly
        facts = self.statistics.new_tensor([self.n_data, *digits])
        self.add_up(ranks, self.statistics, facts)
        self.n_data, *sums = (int(number) for number in facts.tolist())
        self.digest = sum(part << shift for part, shift in zip(sums, range(0, 64, 16), strict=True)) % 2**64
        self.sample.over_ranks(ranks)
        self.seen = self.seen.over_ranks(ranks)

    def add_up(self, ranks: Ranks, *others: Tensor) -> None:
        """Sum the blocks over the ranks, and other tensors with them in the same all-reduce."""
        groups = [self.blocks] if self.apart is None else self.apart  # `blocks` are combined from those apart
        pairs = [(block, block.part_state(c == 0)) for c, blocks in enumerate(groups) for block in blocks]
        summed = [state[name] for block, state in pairs for name in block.added if name in state]
        sent = ranks.add_up([*others, *summed])
        log.info("curvature: %s bytes summed over %d processes", f"{sent:,}", ranks.size)
        for block, state in pairs:
            block.load(state)

    def decompose(self, ranks: Ranks) -> None:
        """Find the blocks' costly decompositions, each on one rank, for all of them."""
        loads = [0.0] * ranks.size
        owners = {}
        shared = [block for block in self.blocks if isinstance(block, SharesDecomposition) and block.decomposing()]
        for block in sorted(shared, key=lambda block: -block.decomposing()):
            owners[id(block)] = rank = loads.index(min(loads))
            loads[rank] += block.decomposing()
        found = {}
        with ranks.together("eigendecompositions"):
            for block in shared:
                found[id(block)] = block.decomposition(like=owners[id(block)] != ranks.rank)
        for block in shared:
            for part in found[id(block)]:
                ranks.share(part, owners[id(block)])
            block.take_decomposition(found[id(block)])

    def emptied(self) -> Curvature:
        """A copy without curvature, in the same bases; it keeps the statistics and the data's fingerprint."""
        same = self.clone()
        same.apart = None
        for block in same.blocks:
            block.empty()
        return same

    def clone(self) -> Curvature:
        """A copy that can be added to independently; it shares the tape."""
        return Curvature(
            self.kind, self.tape, [block.clone() for block in self.blocks], self.statistics.clone(), self.n_data,
            self.fisher_samples, self.signature, self.outputs, self.digest, sample=self.sample.clone(),
            apart=self.apart and [[block.part(c == 0) for block in blocks] for c, blocks in enumerate(self.apart)],
            positions=self.positions, seen=self.seen,
        )  # fmt: skip
