"""One pass over data: outputs, likelihood statistics, and curvature, all sums.

`Curvature` is what a fit leaves behind. Because it is a sum, passes over parts of the data add up: `accumulate` into a
clone is how a posterior is updated with new data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lapis.batches import Batch, digest, naming
from lapis.curvature.block import Block
from lapis.curvature.dense import DenseBlock
from lapis.curvature.hessian import add_hessian
from lapis.curvature.kronecker import KroneckerBlock
from lapis.curvature.outputs import check_width
from lapis.curvature.record import Record
from lapis.curvature.tape import Tape
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.progress import track

WORK_BYTES = 64 * 2**20
"""Working memory that one pass aims at, when the budget allows it."""

COLLECTED_SEEDS = 3
"""So many seeds of convolution networks go back along a chain or are multiplied with what layers take in, at a time,"""

TOGETHER_BYTES, TOGETHER = 32 * 2**20, 32
"""unless all seeds of at least so many examples fit in so many bytes: then what layers take in is made once, and one
layer's at a time.
"""


@dataclass
class Curvature:
    """Sums over data: curvature blocks, likelihood statistics, number of examples."""

    kind: str
    tape: Tape
    blocks: list[Block]
    statistics: Tensor
    n_data: int = 0
    fisher_samples: int = 1
    signature: str = ""
    """Shapes and dtypes of the inputs seen, for messages."""
    outputs: int = 0
    digest: int = 0
    """Fingerprint of the data, the same for any order and batching."""
    places: list[list[int]] = field(default_factory=list)
    """For each block, the indices of its sites on the tape."""

    def __post_init__(self) -> None:
        index = {id(site): i for i, site in enumerate(self.tape.sites)}
        self.places = [[index[id(site)] for site in block.sites] for block in self.blocks]

    @cached_property
    def forms_jacobian(self) -> bool:
        return any(block.forms_jacobian for block in self._of_matrices)

    @cached_property
    def rows(self) -> int:
        """Weights of blocks that take all of an example's seeds as rows of J."""
        return sum(block.size for block in self.blocks if block.takes_rows)

    @cached_property
    def sums_moments(self) -> bool:
        """Whether sums need no more of what layers take in than its second moments, position by position."""
        return all(isinstance(block, KroneckerBlock) and block.sharing == "expand" for block in self._of_matrices)

    @property
    def _of_matrices(self) -> list[Block]:
        return [block for block in self.blocks if block.sites[0].kind != "rows"]

    def clone(self) -> Curvature:
        return Curvature(
            self.kind, self.tape, [block.clone() for block in self.blocks], self.statistics.clone(), self.n_data,
            self.fisher_samples, self.signature, self.outputs, self.digest,
        )  # fmt: skip


def accumulate(
    curvature: Curvature,
    network: Network,
    likelihood: Likelihood,
    stream: Iterable[Batch],
    *,
    total: int | None,
    generator: torch.Generator,
    memory_budget: int,
    progress: bool | None,
) -> None:
    """Add a pass over a stream of batches, `total` of them if known, to `curvature`."""
    work = min(WORK_BYTES, memory_budget)
    with network.prepared():
        for batch in track(stream, "curvature", total, progress):
            for part in batch.split(_part(curvature, work)):
                _add(curvature, network, likelihood, part, generator, work)
    for block in curvature.blocks:
        block.settle()


def _add(
    curvature: Curvature,
    network: Network,
    likelihood: Likelihood,
    batch: Batch,
    generator: torch.Generator,
    work: int,
) -> None:
    with naming(batch.where):
        record = curvature.tape.record(batch.inputs)
        f = record.f.detach()
        check_width(f, curvature.outputs)
        likelihood.check_outputs(f)
        targets = likelihood.targets(batch.targets, f, record.raw_shape)
    curvature.statistics = curvature.statistics + likelihood.statistics(f, targets).to(curvature.statistics.device)
    curvature.n_data += len(batch)
    curvature.digest = (curvature.digest + digest(batch.inputs, batch.targets)) % 2**64
    if curvature.kind == "hessian":
        (block,) = curvature.blocks
        assert isinstance(block, DenseBlock)
        add_hessian(block, network, likelihood, record, targets)
        return
    record.keep_inputs = curvature.forms_jacobian
    at_once = seeds_at_once(curvature, len(batch), work)
    if record.way != "together" and not curvature.rows:
        if f.shape[1] == 1 and len(batch) <= _examples_together(curvature, work):
            at_once, record.keep_inputs = curvature.outputs, False
        elif record.way == "along the chain" or curvature.forms_jacobian:
            at_once = min(at_once, COLLECTED_SEEDS)
        else:
            at_once = 1
    for number, seeds in enumerate(_seeds(curvature, likelihood, f, targets, generator, at_once)):
        _accumulate(curvature, record, seeds.detach(), first=number == 0)  # sums have no graph, though a noise may


def _accumulate(curvature: Curvature, record: Record, seeds: Tensor, first: bool) -> None:
    """What some seeds add; their gradients are gone when the next ones are asked for.

    The layers nearest to the output come first: the largest, which are mostly the first ones, then work alone.
    """
    contributions = dict(enumerate(record.contributions(seeds)))
    for block, places in zip(reversed(curvature.blocks), reversed(curvature.places), strict=True):
        block.accumulate([contributions.pop(place) for place in places], first=first)


def _part(curvature: Curvature, work: int) -> int:
    """How many examples of a batch to take at once."""
    most = examples_at_once(curvature, 1, work, summing=True)
    together = _examples_together(curvature, work)
    return min(most, together) if curvature.tape.way != "together" and together >= TOGETHER else most


def _examples_together(curvature: Curvature, work: int) -> int:
    """Of how many examples all seeds can be collected, if no layer's inputs are kept; 0 where that does not pay."""
    if curvature.kind != "ggn" or not curvature.forms_jacobian or curvature.rows:
        return 0
    fixed, each = _bytes(curvature, summing=True, kept=False)
    return min(work, TOGETHER_BYTES) // max(1, fixed + curvature.outputs * each)


def _bytes(curvature: Curvature, summing: bool, kept: bool = True) -> tuple[int, int]:
    """Working memory for an example: independent of seeds, and for each seed.

    `kept`: what layers take in is kept for more seeds, if seeds are multiplied with it.
    """
    sizes = curvature.tape.example_bytes
    inputs = sizes.summed if summing and curvature.sums_moments else sizes.most
    if kept and curvature.forms_jacobian:
        inputs = sizes.inputs
    # outputs of layers, before and after what follows them, are about as large as gradients
    return 2 * (inputs + sizes.gradients), sizes.gradients + curvature.rows * curvature.tape.network.dtype.itemsize


def examples_at_once(curvature: Curvature, seeds: int, work: int, *, summing: bool = False) -> int:
    """How many examples fit in `work` bytes when that many seeds go together; `summing`: to add to the sums."""
    fixed, each = _bytes(curvature, summing)
    return max(1, work // max(1, fixed + seeds * each))


def seeds_at_once(curvature: Curvature, examples: int, work: int) -> int:
    """How many seeds of a batch fit in `work` bytes, when they are added to the sums."""
    fixed, each = _bytes(curvature, summing=True)
    return max(1, (work - examples * fixed) // max(1, examples * each))


def _seeds(
    curvature: Curvature,
    likelihood: Likelihood,
    f: Tensor,
    y: Tensor,
    generator: torch.Generator,
    at_once: int,
) -> Iterator[Tensor]:
    """Seeds (m, B, T, C), a few at a time, whose outer products sum to the curvature in f."""
    if curvature.kind == "empirical":
        yield likelihood.gradient(f, y)[None]
    elif curvature.kind == "sampled":
        weight = curvature.fisher_samples**-0.5
        for _ in range(curvature.fisher_samples):
            yield weight * likelihood.sampled_gradient(f, y, generator)[None]
    else:
        yield from position_seeds(likelihood.factor(f, y), at_once)


def position_seeds(factor: Tensor, at_once: int) -> Iterator[Tensor]:
    """The columns of S (B, T, C, R) as seeds (m, B, T, C): one position at a time, the others zero."""
    batch, positions, outputs, _ = factor.shape
    for position in range(positions):
        columns = factor[:, position].permute(2, 0, 1)
        for start in range(0, len(columns), at_once):
            chosen = columns[start : start + at_once]
            if positions == 1:
                yield chosen[:, :, None]
            else:
                seeds = factor.new_zeros(len(chosen), batch, positions, outputs)
                seeds[:, :, position] = chosen
                yield seeds
