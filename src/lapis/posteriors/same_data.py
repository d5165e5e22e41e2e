"""Checks that data passed again are those of the fit: for the tangent model, and for loading."""

from __future__ import annotations

from typing import Any

from lapis.batches import Batch, batches, digest
from lapis.errors import DataError
from lapis.network import Network


def hold_batches(data: Any, network: Network, batch_size: int | None = None) -> list[Batch]:
    """All batches of `data`, in memory."""
    return list(batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)[0])


def same_batches(data: Any, network: Network, fingerprint: int, n_data: int, batch_size: int | None) -> list[Batch]:
    """The batches of `data`; DataError unless their fingerprint is that of the data of the fit."""
    if data is None:
        raise DataError(
            "The data of the fit are needed again",
            expected="the training data, in any order and batches",
            got="no data",
            do="pass them; only implicit posteriors keep their data",
        )
    held = hold_batches(data, network, batch_size)
    found = sum(digest(batch.inputs, batch.targets) for batch in held) % 2**64
    if found != fingerprint:
        raise DataError(
            "These are not the data that the posterior was fitted to",
            expected=f"{n_data} examples with fingerprint {fingerprint:016x}",
            got=f"{sum(map(len, held))} with {found:016x}",
            do="pass the training data of the fit (without random augmentation)",
        )
    return held
