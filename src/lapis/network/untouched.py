"""Context managers that restore a module after use: modes, buffers, weights that layers rewrite, and hooks.

A posterior concerns the function that a network computes, and its Jacobian. Hooks on gradients change autograd's result
but not the function, so Lapis disables them while it works: those of parameters and of modules' backward passes, and
those that a forward pass registers on its own tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.nn.modules.module as global_hooks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lapis.errors import ModelError
from lapis.network.locking import held
from lapis.network.wrappers import eagerly

Function = TypeVar("Function", bound=Callable[..., Any])

LARGEST_KEPT = 2**25 - 2**16
"""Just below the upper limit of glibc's dynamic mmap threshold (32 MiB)."""


@cache
def keep_freed_memory() -> None:
    """Allocate one large block and free it untouched, so that glibc keeps freed memory for reuse.

    glibc returns freed blocks above a threshold to the system, and the page faults of the next intermediate result cost
    up to a third of a network's time. The threshold grows to the largest block freed so far. Harmless elsewhere.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)


def full_precision(device: torch.device) -> torch.autocast:
    """No automatic casts to half precision: a posterior is about the network as it is, whatever surrounds the call."""
    return torch.autocast(device.type, enabled=False)


@contextmanager
def differentiating(device: torch.device) -> Iterator[None]:
    """Gradients, in full precision, also where a caller has switched them off; ModelError in inference mode."""
    if torch.is_inference_mode_enabled():
        raise ModelError(
            "There are no gradients in inference mode",
            expected="a network that can be differentiated",
            got="a call inside torch.inference_mode()",
            do="use torch.no_grad(), which can be lifted where gradients are needed",
        )
    with torch.enable_grad(), full_precision(device):
        yield


def outside_inference_mode(function: Function) -> Function:
    """Let a public function work as everywhere else when it is called inside `torch.inference_mode()`."""

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return cast(Function, outside)


@contextmanager
def restored_modes(module: nn.Module) -> Iterator[None]:
    """Restore every submodule's training or evaluation mode at the end; other threads wait until then."""
    with held(module):
        modes = [(submodule, submodule.training) for submodule in module.modules()]
        try:
            yield
        finally:
            for submodule, training in modes:
                if submodule.training != training:
                    submodule.training = training


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for all submodules, nothing compiled; restores modes, buffers, and weights that layers rewrite.

    The module must be `held`.
    """
    submodules = list(module.modules())
    buffers = [
        (submodule, name, buffer, buffer.detach().clone())
        for submodule in submodules
        for name, buffer in submodule._buffers.items()
        if buffer is not None
    ]
    rewritten = [  # embeddings with max_norm renormalise their rows in place at every lookup
        (parameter, parameter.detach().clone())
        for submodule in submodules
        # vars, not getattr, which is slow where a module has no such attribute
        if vars(submodule).get("max_norm", getattr(type(submodule), "max_norm", None)) is not None
        for parameter in submodule.parameters(recurse=False)
    ]
    try:
        with restored_modes(module), eagerly:
            if any(submodule.training for submodule in submodules):
                module.eval()
            yield
    finally:
        with torch.no_grad():
            for submodule, name, buffer, saved in buffers:
                submodule._buffers[name] = buffer  # a forward pass may also have assigned another tensor
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)
            for parameter, saved in rewritten:
                parameter.copy_(saved)


@contextmanager
def without_gradient_hooks(module: nn.Module) -> Iterator[None]:
    """Disable hooks on the gradients of parameters and on modules' backward passes; restored at the end.

    Hooks on autograd's own nodes (`tensor.grad_fn.register_hook`) cannot be seen, and count as part of the derivative.
    """
    parameters = [(p, p._backward_hooks) for p in module.parameters() if p._backward_hooks]
    of_each = ((each._backward_hooks, each._backward_pre_hooks) for each in module.modules())
    modules = [(hooks, dict(hooks)) for hooks in chain(*of_each) if hooks]
    try:
        for parameter, _ in parameters:
            parameter._backward_hooks = None
        for hooks, _ in modules:
            hooks.clear()
        with _without_hooks_of_all_modules:
            yield
    finally:
        for parameter, own in parameters:
            parameter._backward_hooks = own
        for hooks, saved in modules:
            hooks.update(saved)


class _WithoutHooksOfAllModules:
    """Disables the hooks that torch calls for every module, while any thread is inside."""

    def __init__(self) -> None:
        self._lock, self._threads = threading.Lock(), 0
        self._saved: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._threads == 0:
                hooks = (global_hooks._global_backward_hooks, global_hooks._global_backward_pre_hooks)
                self._saved = [(each, dict(each)) for each in hooks if each]
                for each, _ in self._saved:
                    each.clear()
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                for each, saved in self._saved:
                    each.update(saved)


_without_hooks_of_all_modules = _WithoutHooksOfAllModules()


class PlainFunctions(TorchFunctionMode):
    """While it is entered, `tensor.register_hook` does nothing, and nothing runs in half precision by autocast."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.casts = False
        """Whether the forward pass has switched autocast on."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.register_hook:
            return RemovableHandle(OrderedDict())
        if torch.is_autocast_enabled(self.device.type):
            self.casts = True
            with full_precision(self.device):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
