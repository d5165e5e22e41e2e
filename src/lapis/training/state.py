"""The state of a model and of its optimiser as tensors and plain numbers, for checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lapis.batches import Inputs, map_tensors, take
from lapis.checkpoint import Checkpoint
from lapis.errors import DataError, FileError
from lapis.network import Network
from lapis.schema import entry, sound, tensor, under, wrong

PROBED = 16
"""Outputs by which a checkpoint knows a network again."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    return {name: t.detach().clone() for name, t in model.state_dict().items() if isinstance(t, Tensor)}


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy values in place, so that the optimiser and the prior keep seeing the same parameters."""
    state = model.state_dict()
    missing = [
        n
        for n, t in state.items()
        if isinstance(t, Tensor) and (n not in tensors or (tensors[n].shape, tensors[n].dtype) != (t.shape, t.dtype))
    ]
    if missing:
        raise FileError(
            "The checkpoint belongs to another network",
            expected=f"{missing[0]!r} of shape {tuple(state[missing[0]].shape)} and {state[missing[0]].dtype}",
            got="another shape or dtype, or none",
            do="build the network that the run was started with, or delete the checkpoint",
        )
    with torch.no_grad():
        for name, values in state.items():
            if isinstance(values, Tensor):
                values.copy_(tensors[name])


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


def described(optimiser: torch.optim.Optimizer) -> str:
    """Class and options of an optimiser, without its parameters and learning rates."""
    kind = type(optimiser)
    groups = [{k: str(v) for k, v in group.items() if k not in ("params", "lr")} for group in optimiser.param_groups]
    return f"{kind.__module__}.{kind.__qualname__} {json.dumps(groups)}"


def layout_digest(network: Network) -> str:
    """Of names, shapes, dtypes and trainability of all parameters and buffers."""
    parts = [(name, list(t.shape), str(t.dtype), t.requires_grad) for name, t in network.module.named_parameters()]
    parts += [(name, list(t.shape), str(t.dtype), False) for name, t in network.module.named_buffers()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def probe(network: Network, example: Inputs) -> list[float]:
    """A few outputs, at made-up inputs of the example's shapes: other layers between the same weights give others."""

    def made_up(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros_like(tensor)
        return torch.linspace(-1, 1, tensor.numel(), device=tensor.device).reshape(tensor.shape).to(tensor)

    with network.prepared(), torch.no_grad():
        try:
            outputs = network.call(map_tensors(made_up, take(example, 0, 2)))
        except DataError:  # inputs that the network cannot take, such as lengths of nothing
            return []
    found: list[float] = outputs.flatten()[:PROBED].double().tolist()
    return found


def load_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """The inverse of `optimiser_parts`; FileError unless the state is one of this optimiser."""
    state: dict[int, dict[str, Any]] = {}
    with sound("optimiser"):
        for name, value in [*tensors.items(), *entry(facts, "numbers", dict).items()]:
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value
        groups, own = entry(facts, "groups", list), optimiser.state_dict()["param_groups"]
        if [(each.keys(), each["params"]) for each in groups] != [(each.keys(), each["params"]) for each in own]:
            raise wrong("optimiser", "the options and parameters of this one", str(groups)[:80])
        for each, mine in zip(groups, own, strict=True):
            if any(type(value) is not type(json.loads(json.dumps(mine[key]))) for key, value in each.items()):
                raise wrong("optimiser", "options of the types of this one's", str(each)[:80])
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        for index, entries in state.items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    shape = () if value.dim() == 0 else tuple(parameters[index].shape)
                    tensor({key: value}, key, shape, None)
        optimiser.load_state_dict({"state": state, "param_groups": groups})


class KeptEpochs:
    """Epochs of plain training in a checkpoint: model, optimiser, losses and generator, as they are after each epoch.

    Args:
        kept: the checkpoint, which may hold an earlier run's state.
        stage: what is trained for, in a word; a state of another stage is not taken up.
        more: what else belongs to the state, as tensors and facts.
    """

    def __init__(
        self, kept: Checkpoint, stage: str, more: Callable[[], tuple[dict[str, Tensor], dict[str, Any]]]
    ) -> None:
        self.kept, self.stage, self.more = kept, stage, more

    def resume(self, model: nn.Module, optimiser: torch.optim.Optimizer, source: torch.Generator) -> list[float]:
        """Losses of the epochs that an earlier run has done, after which model, optimiser and generator are put."""
        tensors, facts = self.kept.tensors, self.kept.facts
        if facts.get("stage") != self.stage:
            return []
        load_model(model, under("model.", tensors))
        load_optimiser(optimiser, under("optimiser.", tensors), entry(facts, "optimiser", dict))
        with sound("source"):
            source.set_state(tensors["source"])
        losses: list[float] = entry(facts, "losses", list[float])
        return losses

    def after(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        source: torch.Generator,
        losses: list[float],
        last: bool,
    ) -> None:
        """Offer the state after an epoch to the checkpoint; that after the last one is written at once."""
        moments, options = optimiser_parts(optimiser)
        tensors, facts = self.more()
        tensors |= {f"model.{name}": each for name, each in model_tensors(model).items()}
        tensors |= {f"optimiser.{name}": each.clone() for name, each in moments.items()}
        tensors["source"] = source.get_state()
        facts |= {"stage": self.stage, "losses": list(losses), "optimiser": options}
        self.kept.offer(tensors, facts, now=last)
