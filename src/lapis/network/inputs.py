"""Checks of inputs for a network that has been fitted."""

from __future__ import annotations

from typing import Any

from lapis.batches import Inputs, as_inputs, batch_length, check_finite, describe, tensors_in
from lapis.errors import DataError
from lapis.network.network import Network


def check_inputs(inputs: Any, network: Network, signature: str) -> Inputs:
    """Inputs on the network's device; DataError if they are empty, not finite, or of a floating dtype that is neither
    the network's nor one that the fit saw (a float32 mask beside embeddings in float64)."""
    ready = as_inputs(inputs, network.dtype, network.device)
    if not tensors_in(ready) or batch_length(ready) == 0:
        raise nothing(signature, describe(ready))
    for tensor in tensors_in(ready):
        known = tensor.dtype == network.dtype or f" {describe(tensor).split()[-1]}" in signature
        if tensor.is_floating_point() and not known:
            raise DataError(
                "The inputs have another dtype than the network",
                expected=f"{network.dtype}" + (f" (the fit saw {signature})" if signature else ""),
                got=describe(ready),
                do=f"convert the inputs with .to({network.dtype})",
            )
    check_finite(ready, "this batch")
    return ready


def nothing(signature: str, got: str) -> DataError:
    """The error for inputs without examples."""
    return DataError(
        "There is nothing to predict",
        expected=f"inputs like {signature}" if signature else "inputs as in training",
        got=got,
        do="pass some examples, as a tensor or an array",
    )
