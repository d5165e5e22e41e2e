"""Checks that data passed again are those of the fit: for the tangent model, and for loading."""

from __future__ import annotations

from typing import Any

from lapis.batches import Batch, batches, digest
from lapis.errors import DataError
from lapis.network import Network
from lapis.shards import Shard


def hold_batches(
    data: Any, network: Network, batch_size: int | None = None, shared: Shard | None = None
) -> list[Batch]:
    """All batches of `data`, or of this rank's part of it, in memory."""
    if shared is not None:
        with shared.ranks.together("reading of the data"):
            return list(shared.batches(dtype=network.dtype, device=network.device, batch_size=batch_size)[0])
    return list(batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)[0])


def same_batches(
    data: Any,
    network: Network,
    fingerprint: int,
    n_data: int,
    batch_size: int | None,
    shared: Shard | None = None,
) -> list[Batch]:
    """The batches of `data`, or of this rank's part of it; DataError unless all of them are the data of the fit."""
    if data is None:
        raise DataError(
            "The data of the fit are needed again",
            expected="the training data, in any order and batches",
            got="no data",
            do="pass them; only implicit posteriors keep their data",
        )
    held = hold_batches(data, network, batch_size, shared)
    found, length = sum(digest(batch.inputs, batch.targets) for batch in held) % 2**64, sum(map(len, held))
    if shared is not None:
        found, length = sum(shared.ranks.numbers(found)) % 2**64, sum(shared.ranks.numbers(length))
    if found != fingerprint:
        raise DataError(
            "These are not the data that the posterior was fitted to",
            expected=f"{n_data} examples with fingerprint {fingerprint:016x}",
            got=f"{length} with {found:016x}",
            do="pass the training data of the fit (without random augmentation)",
        )
    return held
