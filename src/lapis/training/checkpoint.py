"""What training needs to go on after being killed: one file of tensors and JSON, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lapis.errors import FileError


def write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write beside the target, then rename: a checkpoint that exists is whole."""
    partial = path.with_name(path.name + f".{os.getpid()}.partial")
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(held, partial, metadata={"lapis.training": json.dumps(facts)})
        os.replace(partial, path)
    except OSError as error:
        raise FileError(
            f"Cannot write {path}",
            expected="a file that can be replaced",
            got=str(error),
            do="choose a folder that exists and can be written",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts; FileError when the file is no checkpoint."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("lapis.training")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FileError(
            f"{path} is no whole checkpoint",
            expected="a file that lapis.train wrote",
            got=str(error),
            do="delete it to start anew",
        ) from error
    if text is None:
        raise FileError(
            f"{path} is no checkpoint of lapis.train",
            expected="a file that it wrote",
            got="another file",
            do="choose another path",
        )
    facts: dict[str, Any] = json.loads(text)
    return tensors, facts


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries below a prefix, without it."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


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
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *facts["numbers"].items()]:
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimiser.load_state_dict({"state": state, "param_groups": facts["groups"]})
