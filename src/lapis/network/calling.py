"""Between inputs and outputs as people have them and one call of a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lapis.batches import Inputs, describe
from lapis.errors import ModelError


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the module."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def output_tensor(output: Any) -> Tensor:
    """The tensor of outputs: what the module returned, or the `logits` in it."""
    if isinstance(output, Mapping):
        output = output.get("logits", output)
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", output)
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise ModelError(
            "The network's output cannot be used",
            expected='one floating tensor, or a dictionary or object with "logits"',
            got=describe(output),
            do="wrap the network so that it returns the tensor that the likelihood takes",
        )
    return output


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
