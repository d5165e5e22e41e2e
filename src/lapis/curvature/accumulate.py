"""One pass over data: adds likelihood statistics and curvature, batch by batch, to the sums in `Curvature`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from lapis.batches import Batch, example_digests, naming
from lapis.checkpoint import Checkpoint
from lapis.curvature.backward.record import Record
from lapis.curvature.backward.seeds import curvature_seeds, position_seeds
from lapis.curvature.budget import work_bytes
from lapis.curvature.hessian import add_hessian, twice_differentiable
from lapis.curvature.outputs import FACTOR_COPIES, check_width, curvature_not_finite
from lapis.curvature.sums import Curvature
from lapis.curvature.working_memory import (
    COLLECTED_SEEDS,
    examples_with_all_seeds,
    part_length,
    seeds_at_once,
)
from lapis.errors import DataError
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.progress import track
from lapis.ranks import Ranks
from lapis.schema import count, tensor
from lapis.shards import Shard

SETTLED_BATCHES = 8
"""With a checkpoint, what is buffered is added to the sums after every so many batches: only then can it be written."""


class Resumable:
    """A pass over data that goes on from a checkpoint, bit for bit as if it had not been cut short.

    Args:
        checkpoint: its file.
        passed: number of this pass among those of a fit.
    """

    def __init__(self, checkpoint: Checkpoint, passed: int = 0) -> None:
        self.checkpoint, self.passed = checkpoint, passed

    @property
    def later(self) -> bool:
        """Whether the file is of a later pass: this one was finished."""
        return bool(self.checkpoint.facts) and count(self.checkpoint.facts, "pass", least=0) > self.passed

    def resume(self, curvature: Curvature, generator: torch.Generator) -> int:
        """Load the sums of an earlier run; returns the number of batches in them."""
        tensors, facts = self.checkpoint.tensors, self.checkpoint.facts
        if not facts or facts["pass"] != self.passed:
            return 0
        curvature.resume(tensors, facts)
        generator.set_state(tensor(tensors, "generator", (-1,), torch.uint8))
        return count(facts, "batches")

    def check_same(self, skipped: int, curvature: Curvature) -> None:
        """DataError unless the batches that were skipped are those of the sums."""
        if skipped != curvature.digest:
            raise DataError(
                "The data have changed since the checkpoint was written",
                expected=f"the same {curvature.n_data:,} examples first, in the same order",
                got="others",
                do="pass the same data without shuffling them, or delete the file to start anew",
            )

    def follow(self, curvature: Curvature, generator: torch.Generator, batches: int) -> None:
        """Write the sums when it is time."""
        if batches % SETTLED_BATCHES:
            return
        for block in chain(curvature.blocks, *(curvature.apart or ())):
            block.flush()
        tensors, facts = curvature.running()  # forms the sums, whether they are written or not
        state = {"generator": generator.get_state().clone()}
        self.checkpoint.offer(tensors | state, facts | {"batches": batches, "pass": self.passed})


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
    shard: Shard | None = None,
    kept: Resumable | None = None,
) -> None:
    """Add a pass over a stream of batches, `total` of them if known, to `curvature`.

    With a `shard`, each rank adds batches of its own, and all end with the sums over all of them. With `kept`, a pass
    that was cut short goes on from the file.
    """
    work = work_bytes(memory_budget)
    with network.prepared(), nullcontext() if shard is None else shard.ranks.together("pass over the data"):
        done = 0 if kept is None else kept.resume(curvature, generator)
        skipped, number = 0, -1
        for number, batch in enumerate(track(stream, "curvature", total, progress)):
            curvature.sample.add(batch)
            hashes = example_digests(batch.inputs, batch.targets)
            curvature.seen = curvature.seen.add(hashes)
            own = int(hashes.sum(dtype=np.uint64))
            if number < done:
                skipped = (skipped + own) % 2**64
                continue
            if kept is not None and number == done:
                kept.check_same(skipped, curvature)
            for part in batch.split(min(part_length(curvature, work), _with_factors(curvature, work))):
                _add_batch(curvature, network, likelihood, part, generator, work)
            curvature.digest = (curvature.digest + own) % 2**64
            if kept is not None:
                kept.follow(curvature, generator, number + 1)
        if kept is not None and number < done:
            kept.check_same(skipped, curvature)
        for block in chain(curvature.blocks, *(curvature.apart or ())):
            block.flush()
    if shard is not None:
        shard.check_repeats(curvature.digest, curvature.n_data)
        curvature.over_ranks(shard.ranks)
    if curvature.apart is not None:
        assert likelihood.noise is not None
        curvature.combine((likelihood.noise.detach().double() ** -2).expand(curvature.outputs).tolist())
    for block in curvature.blocks:
        block.flush()
        if not block.is_finite():
            raise curvature_not_finite(network.dtype, [site.label for site in block.sites])
    if shard is not None:
        curvature.decompose(shard.ranks)


def accumulate_factors(
    curvature: Curvature,
    network: Network,
    parts: Sequence[tuple[Batch, Tensor]],
    *,
    memory_budget: int,
    progress: bool | None,
    ranks: Ranks | None = None,
) -> None:
    """Add sum_n J_n^T S_n S_n^T J_n of batches with given factors S (B, T, C, R), instead of the likelihood's own.

    With `ranks`, of the batches that all of them have.
    """
    work = work_bytes(memory_budget)
    with network.prepared():
        for batch, factor in track(parts, "curvature", len(parts), progress):
            start = 0
            for part in batch.split(part_length(curvature, work)):
                own, start = factor[start : start + len(part)].to(network.dtype), start + len(part)
                record = curvature.tape.record(part.inputs)
                groups = position_seeds(own, _collected_seeds(curvature, record, work))
                done = 0
                for group in groups:
                    _add_seeds(curvature, record, group, done)
                    done += len(group)
    for block in curvature.blocks:
        block.flush()
    if ranks is not None:
        curvature.add_up(ranks)


def _add_batch(
    curvature: Curvature,
    network: Network,
    likelihood: Likelihood,
    batch: Batch,
    generator: torch.Generator,
    work: int,
) -> None:
    with naming(batch.where):
        with twice_differentiable() if curvature.kind == "hessian" else nullcontext():
            record = curvature.tape.record(batch.inputs)
        f = record.f.detach()
        check_width(f, curvature.outputs)
        likelihood.check_outputs(f)
        targets = likelihood.targets(batch.targets, f, record.raw_shape)
    curvature.statistics = curvature.statistics + likelihood.statistics(f, targets).to(curvature.statistics.device)
    curvature.n_data += len(batch)
    if curvature.kind == "hessian":
        (block,) = curvature.blocks
        add_hessian(block, network, likelihood, record, targets)
        return
    seeds = curvature_seeds(
        curvature.kind,
        likelihood if curvature.apart is None else likelihood.with_noise(1.0),
        f,
        targets,
        fisher_samples=curvature.fisher_samples,
        generator=generator,
        at_once=_collected_seeds(curvature, record, work),
    )
    done = 0
    for group in seeds:
        _add_seeds(curvature, record, group.detach(), done)  # detached: a noise may require grad
        done += len(group)


def _with_factors(curvature: Curvature, work: int) -> int:
    """For how many examples the likelihood's factors S (B, T, C, C) fit in `work` bytes, or one."""
    if curvature.kind != "ggn":
        return sys.maxsize
    return max(1, work // (FACTOR_COPIES * 8 * curvature.positions * curvature.outputs**2))


def _collected_seeds(curvature: Curvature, record: Record, work: int) -> int:
    """How many seeds are added together; also decides whether the record keeps layer inputs for later seeds."""
    record.keep_inputs = curvature.forms_jacobian
    fitting = seeds_at_once(curvature, len(record), work)
    if record.gradients.batched or curvature.row_length:
        return fitting
    if record.f.shape[1] == 1 and len(record) <= examples_with_all_seeds(curvature, work):
        record.keep_inputs = False
        return curvature.outputs
    return min(fitting, COLLECTED_SEEDS) if curvature.forms_jacobian else 1


def _add_seeds(curvature: Curvature, record: Record, seeds: Tensor, done: int) -> None:
    """Add the contributions of a group of seeds, `done` seeds of the same batch having been added before.

    Blocks nearest to the output go first, and their gradients are freed: little else is then in memory when the first
    layers, usually the largest, are processed. All gradients are freed before the next seeds are backpropagated.
    """
    wanted = [index for sites in curvature.sites_of for index in sites]
    plan = curvature.tape.plan.sites
    contributions = dict(zip(wanted, record.contributions(seeds, [plan[index] for index in wanted]), strict=True))
    for number in reversed(range(len(curvature.blocks))):
        own = [contributions.pop(site) for site in curvature.sites_of[number]]
        if curvature.apart is None:
            curvature.blocks[number].accumulate(own, first=done == 0)
            continue
        for seed in range(len(seeds)):  # one for each output, position after position
            block = curvature.apart[(done + seed) % curvature.outputs][number]
            block.accumulate([each.of_seed(seed) for each in own], first=done + seed == 0)
