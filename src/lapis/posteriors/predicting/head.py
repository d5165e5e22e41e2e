"""The head of a network: the part that must run again when the chosen weights change, as between drawn networks.

If only the last layer's weights are chosen, everything before that layer runs once for all draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapis.batches import Inputs, tensors_in
from lapis.network import Network


@dataclass
class Head:
    """A module that contains all chosen weights, and one recorded call of it."""

    module: nn.Module
    name: str
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    """Positional and keyword arguments."""
    written: list[int]
    """Version counters of the tensors in `inputs` before the call."""
    output: Any = None

    @property
    def repeatable(self) -> bool:
        """Whether the arguments do not depend on the chosen weights, and the call has not modified them."""
        tensors = tensors_in(self.inputs)
        return not any(tensor.requires_grad for tensor in tensors) and self.written == _writes(self.inputs)

    def call(self) -> Tensor:
        """The network's output with the module's current parameters."""
        args, kwargs = self.inputs
        output: Tensor = self.module(*args, **kwargs)
        return output


def find_head(network: Network, inputs: Inputs) -> Head | None:
    """The smallest module that contains all chosen weights and whose output is the network's; None if there is none.

    Must run inside `network.prepared()`, where `requires_grad` shows which tensors depend on the chosen weights.
    """
    calls: list[Head] = []
    handles = []
    for end, letter in enumerate(network.names[0]):
        name = network.names[0][:end]
        if letter == "." and all(other.startswith(f"{name}.") for other in network.names):
            module = network.module.get_submodule(name)
            if not module._forward_hooks and not module._forward_pre_hooks:  # hooks would be applied a second time
                handles += _watched(module, name, calls)
    if not handles:
        return None
    try:
        output = network.call(inputs)
    finally:
        for handle in handles:
            handle.remove()
    names = [call.name for call in calls]
    heads = [call for call in calls if call.output is output and call.repeatable and names.count(call.name) == 1]
    return heads[-1] if heads else None


def _watched(module: nn.Module, name: str, calls: list[Head]) -> list[torch.utils.hooks.RemovableHandle]:
    """Record every call of a module in `calls`, until the returned handles are removed."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Head(module, name, (args, kwargs), _writes((args, kwargs))))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        [call for call in calls if call.name == name][-1].output = output

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def _writes(inputs: Inputs) -> list[int]:
    """Version counters of the tensors in `inputs`."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors_in(inputs)]
