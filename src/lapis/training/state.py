"""The state of a model and of its optimiser as tensors and plain numbers, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lapis.errors import FileError


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    return {name: t.detach().clone() for name, t in model.state_dict().items() if isinstance(t, Tensor)}


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy values in place, so that the optimiser and the prior keep seeing the same parameters."""
    state = model.state_dict()
    missing = [
        n for n, t in state.items() if isinstance(t, Tensor) and (n not in tensors or tensors[n].shape != t.shape)
    ]
    if missing:
        raise FileError(
            "The checkpoint belongs to another network",
            expected=f"{missing[0]!r} of shape {tuple(state[missing[0]].shape)}",
            got="another shape, or none",
            do="build the network that the run was started with, or delete the checkpoint",
        )
    with torch.no_grad():
        for name, tensor in state.items():
            if isinstance(tensor, Tensor):
                tensor.copy_(tensors[name])


def optimiser_parts(optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state as tensors, and as plain numbers for JSON."""
    state = optimiser.state_dict()
    tensors, numbers = {}, {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            name = f"{index}.{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                numbers[name] = value
    return tensors, {"numbers": numbers, "groups": state["param_groups"]}


def load_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """The inverse of `optimiser_parts`."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *facts["numbers"].items()]:
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimiser.load_state_dict({"state": state, "param_groups": facts["groups"]})
