"""Draws in loops that cannot be changed: each training pass of a network runs at weights of its own.

A hook before the network's forward pass draws; the end of the backward pass, before anybody clips gradients or takes a
step, brings the mean back. What fails in between leaves a draw only if it is the loss itself: the next pass of the
network, or anything asked of the optimiser, then restores the mean.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lapis.errors import LapisWarning, OptionError, users_level

if TYPE_CHECKING:
    from lapis.optim.sampling import SamplingOptimizer


class AddedToMeanError(OptionError):
    """A closure's gradients were added to others; `loss` is what it returned."""

    def __init__(self, loss: Any) -> None:
        super().__init__(
            "The closure added to gradients that were computed at the mean",
            expected="gradients at drawn weights only",
            got="gradients from outside of sampled() and step(closure), which the closure did not clear",
            do="call optimiser.zero_grad() in the closure, or optimiser.attach(model) to accumulate draws",
        )
        self.loss = loss


class Attached:
    """A network whose forward passes in training mode draw their weights within a context.

    It ends with its optimiser, and with another one's for the same network. Copies of the network, and files of it,
    do not draw: the optimiser knows the weights of the original only.

    Args:
        model: the network.
        optimiser: whose draws they are.
    """

    def __init__(self, model: nn.Module, optimiser: SamplingOptimizer) -> None:
        if model in _ATTACHED:
            _ATTACHED[model].remove()
        _ATTACHED[model] = self
        self._optimiser: Callable[[], SamplingOptimizer | None] = weakref.ref(optimiser, lambda _: self.remove())
        self._open: AbstractContextManager[None] | None = None
        self._depth = 0
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def __reduce__(self) -> tuple[Callable[[], Attached], tuple[()]]:
        return _idle, ()

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
        optimiser = self._optimiser()
        if not (module.training and torch.is_grad_enabled()):
            self.close()
        elif optimiser is not None and self._open is None and not optimiser.is_draw:
            context = optimiser.sampled()
            context.__enter__()
            self._open = context
            optimiser._begun(module, args, kwargs)  # hooks that the context has registered miss this call

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
        optimiser = self._optimiser()
        if self._open is not None and optimiser is not None and not optimiser._differentiates():
            torch.autograd.Variable._execution_engine.queue_callback(self.close)


_ATTACHED: weakref.WeakKeyDictionary[nn.Module, Attached] = weakref.WeakKeyDictionary()


def _idle() -> Attached:
    """What a copy of a network has in place of the original's."""
    same = object.__new__(Attached)
    same._optimiser, same._open, same._depth, same._handles = _nobody, None, 0, []
    return same


def _nobody() -> None:
    return None


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


def attached_unasked(optimiser: SamplingOptimizer) -> bool:
    """For a loop that differentiates at the mean: draw in the network's passes from now on, or in those of the module
    that is searched for; present gradients count as used. False if that cannot be, or was done before."""
    if not optimiser.attaches or optimiser._attached:
        return False
    warnings.warn(
        "step() came with gradients of no draw, and left the weights as they are: from now on each forward pass of the "
        "network in training mode draws, as after optimiser.attach(model). Call that before, and no step is lost.",
        LapisWarning,
        stacklevel=users_level(),
    )
    model = optimiser._network()
    optimiser._attached.append(Sought(optimiser) if model is None else Attached(model, optimiser))
    optimiser._spent = optimiser._marks()
    return True


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
