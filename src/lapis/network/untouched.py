"""Leaving a module as it was found: modes, buffers, rewritten weights, flags and hooks.

A posterior is about the function that a network computes, and its Jacobian. Hooks on gradients change what autograd
returns, not the function; so while Lapis works they are set aside: those of parameters and of modules' backward passes,
and those that a forward pass registers on its own tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

LARGEST_KEPT = 2**25 - 2**16
"""Just below the largest block that glibc's malloc adapts to (32 MiB)."""


@cache
def keep_freed_memory() -> None:
    """Ask the allocator for one large block, and give it back untouched.

    glibc hands freed memory back to the system, to fault it in anew for the next intermediate result, up to a size that
    adapts to the largest block freed so far: up to a third of a network's time. Other allocators do not mind.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for all submodules; modes, buffers, and weights that layers rewrite come back as they were."""
    submodules = list(module.modules())
    modes = [(submodule, submodule.training) for submodule in submodules]
    buffers = [
        (submodule, name, buffer, buffer.detach().clone())
        for submodule in submodules
        for name, buffer in submodule._buffers.items()
        if buffer is not None
    ]
    rewritten = [  # embeddings with max_norm shorten their rows whenever these are looked up
        (parameter, parameter.detach().clone())
        for submodule in submodules
        # not by getattr, which is slow where a module has no such attribute
        if vars(submodule).get("max_norm", getattr(type(submodule), "max_norm", None)) is not None
        for parameter in submodule.parameters(recurse=False)
    ]
    try:
        if any(training for _, training in modes):
            module.eval()
        yield
    finally:
        for submodule, training in modes:
            if submodule.training != training:
                submodule.training = training
        with torch.no_grad():
            for submodule, name, buffer, saved in buffers:
                submodule._buffers[name] = buffer  # a forward pass may also have put another in its place
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)
            for parameter, saved in rewritten:
                parameter.copy_(saved)


@contextmanager
def without_gradient_hooks(module: nn.Module) -> Iterator[None]:
    """Hooks on the gradients of parameters, and on modules' backward passes, set aside and put back."""
    parameters = [(p, p._backward_hooks) for p in module.parameters() if p._backward_hooks]
    modules = [
        (held, dict(held))
        for submodule in module.modules()
        for held in (submodule._backward_hooks, submodule._backward_pre_hooks)
        if held
    ]
    try:
        for parameter, _ in parameters:
            parameter._backward_hooks = None
        for held, _ in modules:
            held.clear()
        yield
    finally:
        for parameter, hooks in parameters:
            parameter._backward_hooks = hooks
        for held, saved in modules:
            held.update(saved)


class IgnoredTensorHooks(TorchFunctionMode):
    """While it is entered, `tensor.register_hook` does nothing; `used` says whether it was called."""

    used = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.register_hook:
            self.used = True
            return RemovableHandle(OrderedDict())
        return func(*args, **(kwargs or {}))
