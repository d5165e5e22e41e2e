"""Draws in loops that cannot be changed: each training pass of a network runs at weights of its own.

A hook before the network's forward pass draws; the end of the backward pass, before anybody clips gradients or takes a
step, brings the mean back. What fails in between leaves a draw only if it is the loss itself: the next pass of the
network, or anything asked of the optimiser, then restores the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
