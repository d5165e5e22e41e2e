"""Draws in loops that cannot be changed: each training pass of a network runs at weights of its own.

A hook before the network's forward pass draws; the end of the backward pass, before anybody clips gradients or takes a
step, brings the mean back. What fails in between leaves a draw only if it is the loss itself: the next pass of the
network, or anything asked of the optimiser, then restores the mean.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lapis.errors import LapisWarning, OptionError, users_level

if TYPE_CHECKING:
    from lapis.optim.sampling import SamplingOptimizer


class Attached:
    """A network whose forward passes in training mode draw their weights within a context.

    Args:
        model: the network.
        optimiser: whose draws they are.
    """

    def __init__(self, model: nn.Module, optimiser: SamplingOptimizer) -> None:
        self._optimiser = optimiser
        self._open: AbstractContextManager[None] | None = None
        self._depth = 0
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Bring the mean back, and leave the network as it was."""
        self.close()
        for handle in self._handles:
            handle.remove()

    def close(self) -> None:
        """Bring the mean back; gradients computed at the draw count for the next step."""
        if self._open is not None:
            context, self._open = self._open, None
            context.__exit__(None, None, None)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:  # a network that calls itself
            return
        if not (module.training and torch.is_grad_enabled()):
            self.close()
        elif self._open is None and not self._optimiser.is_draw:
            context = self._optimiser.sampled()
            context.__enter__()
            self._open = context
            self._optimiser._begun(module, args, kwargs)  # hooks that the context has registered miss this call

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth or self._open is None:
            return
        reached = next((each for each in tensors_of(output) if each.requires_grad), None)
        if reached is None:  # an error, or nothing to differentiate
            self.close()
        else:
            reached.register_hook(self._differentiated)  # type: ignore[no-untyped-call]

    def _differentiated(self, gradient: Tensor) -> None:
        """Close when the backward pass that has come here ends, and all gradients are there."""
        if self._open is not None and not self._optimiser._differentiates():
            torch.autograd.Variable._execution_engine.queue_callback(self.close)


class Sought:
    """Attaches an optimiser to the next module that is called and holds all of its parameters: the network itself.

    Args:
        optimiser: the one that knows its parameters only.
    """

    def __init__(self, optimiser: SamplingOptimizer) -> None:
        self._optimiser = weakref.ref(optimiser)
        self._handle = register_module_forward_pre_hook(self._before)

    def remove(self) -> None:
        """End the search."""
        self._handle.remove()

    def close(self) -> None:
        """Nothing has been drawn."""

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        optimiser = self._optimiser()
        if optimiser is None:
            self.remove()
        elif {id(p) for p in optimiser._trainable()} <= {id(p) for p in module.parameters()}:
            self.remove()
            optimiser.attach(module)._before(module, args, {})  # its own hook misses this call


def attached(model: nn.Module, optimiser: SamplingOptimizer) -> Attached:
    """The network with its hooks; OptionError for optimisers that hooks cannot serve."""
    if not optimiser.attaches:
        raise OptionError(
            f"{type(optimiser).__name__} cannot be attached to a network",
            expected="a loop that calls step(closure), or differentiates within `with optimiser.sampled():`",
            got="attach(model)",
            do="write the loop so, or use IVON",
        )
    return Attached(model, optimiser)


def attached_unasked(model: nn.Module | None, optimiser: SamplingOptimizer) -> Attached | Sought:
    """For a loop that calls `step()` alone: the network, or the search for it, from the next forward pass on."""
    warnings.warn(
        "step() came without a draw of the weights, and left them as they are: from now on every forward pass of the "
        "network in training mode draws, as after optimiser.attach(model). Call that before, and no step is lost.",
        LapisWarning,
        stacklevel=users_level(),
    )
    return Sought(optimiser) if model is None else attached(model, optimiser)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Tensors in an output: a tensor, or tuples, lists and dictionaries (as those of Hugging Face) of such."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each)
