"""The passes over the data of a fit: read by one process or divided among several, and resumed from a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from lapis.batches import Batch, batches, example_digests
from lapis.checkpoint import Checkpoint
from lapis.curvature.accumulate import Resumable, accumulate
from lapis.curvature.blocks.leading import RANK_FRACTION, load_leading
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.curvature.sums import Curvature
from lapis.curvature.tape import Tape
from lapis.errors import DataError
from lapis.files import tensors_digest
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.priors import WeightPrior
from lapis.ranks import Ranks
from lapis.shards import Distributed, Shard, shard


class DataSource:
    """The data of a fit, which can be read once or more often; of several processes each reads its own examples."""

    def __init__(self, data: Any, network: Network, batch_size: int | None, distributed: Distributed) -> None:
        self.data, self.network, self.batch_size = data, network, batch_size
        self.ranks = Ranks.joined(f"distributed={distributed!r}") if distributed else None
        self.shard: Shard | None = None if self.ranks is None else shard(data, self.ranks, distributed)
        self._begun: tuple[Iterator[Batch], int | None] | None = None

    def first(self) -> Batch:
        """The batch that the plan of a fit is made from, the same on every rank where they divide the same data."""
        if self.shard is None:
            stream, total = self._batches(self.data)
            first = next(stream)
            self._begun = chain([first], stream), total
            return first
        ranks = self.shard.ranks
        with ranks.together("first batch"):
            if self.shard.interleaved and isinstance(self.data, Iterator):
                raise DataError(
                    "An iterator cannot be divided among processes",
                    expected="data that every rank can read: a DataLoader, a Dataset, a pair, or a list of batches",
                    got=type(self.data).__name__,
                    do='pass such data, or distributed="shards" if each rank has batches of its own in a list',
                )
            own = next(self._batches(self.shard.whole, may_be_empty=True)[0], None)
        found = ranks.first_of(own)
        if found is None:
            raise DataError("There is no data", expected="at least one example", got="none on any rank", do="pass some")
        return found

    def read(self) -> tuple[Iterator[Batch], int | None]:
        """The batches of this process, and their number if it is known."""
        begun, self._begun = self._begun, None
        if begun is not None:
            return begun
        if self.shard is None:
            return self._batches(self.data)
        return self.shard.batches(dtype=self.network.dtype, device=self.network.device, batch_size=self.batch_size)

    def _batches(self, data: Any, may_be_empty: bool = False) -> tuple[Iterator[Batch], int | None]:
        network = self.network
        return batches(
            data, dtype=network.dtype, device=network.device, batch_size=self.batch_size, may_be_empty=may_be_empty
        )

    def agree(self, network: Network, structure: str, likelihood: Likelihood, prior: WeightPrior, tape: Tape) -> None:
        """OptionError unless all ranks are about to do the same."""
        if self.ranks is None:
            return
        plan = [site.to_config() for site in tape.plan.sites] if structure != "implicit" else []
        self.ranks.check_same({
            "network": network.fingerprint(),
            "choice of weights": [network.size, list(network.names)],
            "structure": structure,
            "likelihood": likelihood.to_config(),
            "prior": prior.precision.tolist(),
            "layers that the first examples use": plan,
        })  # fmt: skip


def basis_digest(curvature: Curvature) -> str:
    """Fingerprint of the bases that sums refer to; those in equal bases add up."""
    bases = {f"{i}.{j}": each for i, block in enumerate(curvature.blocks) for j, each in enumerate(block.basis())}
    return tensors_digest(bases)


@dataclass(frozen=True)
class Passes:
    """The passes over the data, for each kind of structure."""

    network: Network
    likelihood: Likelihood
    source: DataSource
    prior: WeightPrior
    temperature: float
    memory_budget: int
    progress: bool | None

    def sums(
        self,
        curvature: Curvature,
        generator: torch.Generator,
        checkpoint: str | os.PathLike[str] | None,
        basis: Curvature | None = None,
    ) -> None:
        """Add the data to the blocks; where these need a preliminary pass, and no `basis`, the data are read twice."""
        ranks, chosen = self.source.ranks, None
        if basis is not None:
            curvature.begin_in(basis)
            chosen = basis_digest(curvature)
            if ranks is not None:
                ranks.check_same({"basis": chosen})
        kept = self._checkpoint(curvature, checkpoint, chosen)
        if ranks is not None and ranks.rank:  # targets drawn here must not be those of another rank
            generator = torch.Generator(generator.device).manual_seed(generator.initial_seed() + ranks.rank)
        before = curvature.preliminary() if basis is None else None
        if before is None:
            self._pass(curvature, generator, None if kept is None else Resumable(kept))
        elif kept is not None and Resumable(kept).later:
            self._pass(curvature, generator, Resumable(kept, 1))
        else:
            self._pass(before, generator, None if kept is None else Resumable(kept))
            curvature.begin(before)
            self._pass(curvature, generator, None if kept is None else Resumable(kept, 1))
            if curvature.n_data != before.n_data:
                raise DataError(
                    "The data changed between two passes over them",
                    expected=f"{before.n_data:,} examples, as in the first pass",
                    got=f"{curvature.n_data:,} in the second",
                    do="pass data that can be read again: a DataLoader, a Dataset, a pair, or a list of batches",
                )

    def _pass(self, curvature: Curvature, generator: torch.Generator, kept: Resumable | None) -> None:
        stream, total = self.source.read()
        ranks = self.source.ranks
        accumulate(
            curvature,
            self.network,
            self.likelihood,
            stream,
            total=total,
            generator=generator,
            memory_budget=self.memory_budget,
            progress=self.progress if ranks is None or not ranks.rank else False,
            shard=self.source.shard,
            kept=kept,
        )

    def _checkpoint(
        self, curvature: Curvature, path: str | os.PathLike[str] | None, basis: str | None
    ) -> Checkpoint | None:
        """The file that the sums are kept in; a finished fit leaves it as it was last written."""
        if path is None:
            return None
        ranks = self.source.ranks
        if ranks is not None:
            path = f"{os.fspath(path)}.{ranks.rank}of{ranks.size}"
        same = {
            "network": self.network.fingerprint(),
            "likelihood": self.likelihood.to_config(),
            "curvature": [curvature.kind, curvature.fisher_samples],
            "blocks": [
                [block.kind, block.options(), [s.to_config() for s in block.sites]] for block in curvature.blocks
            ],
            "batch_size": self.source.batch_size,
            "memory_budget": self.memory_budget,
        } | ({} if basis is None else {"basis": basis})
        return Checkpoint(path, "fit", same, self.network.key())

    def implicit(self) -> ImplicitCurvature:
        """The GGN through its products; the data are kept."""
        signature = self.network.signature or ""
        held = list(self.source.read()[0])
        return ImplicitCurvature(
            self.network, self.likelihood, held, signature, self.memory_budget, ranks=self.source.ranks
        )

    def low_rank(self, curvature: Curvature, rank: int | None, generator: torch.Generator) -> str:
        """Fill the block with the leading eigenpairs; returns a note on their number and how it was chosen."""
        products = self.implicit()
        precision = float(self.prior.vector().detach().min())
        (block,) = curvature.blocks
        found = load_leading(
            block,
            products,
            self.network,
            rank=rank,
            threshold=RANK_FRACTION * precision * self.temperature,
            memory_budget=self.memory_budget,
            generator=generator,
            progress=self.progress,
        )
        curvature.statistics, curvature.n_data = products.statistics, products.n_data
        curvature.digest = products.digest
        for batch in products.batches:
            curvature.sample.add(batch)
            curvature.seen = curvature.seen.add(example_digests(batch.inputs, batch.targets))
        if self.source.ranks is not None:
            curvature.sample.over_ranks(self.source.ranks)
            curvature.seen = curvature.seen.over_ranks(self.source.ranks)
        return found.note
