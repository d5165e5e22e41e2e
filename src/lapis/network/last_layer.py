"""Which weights are the last layer: those that a forward pass uses last, whoever owns them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lapis.batches import tensors_in
from lapis.errors import ModelError


def last_layer(module: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Names of the last layer's parameters, as `module.named_parameters()` has them; `run` runs the network once.

    The last layer is the module with parameters of its own that is entered last, under whatever names its parameters
    are known (a head tied to an embedding). If a matrix of weights is used after that module is left, by a function
    such as `F.linear(x, embedding.weight)`, it is that matrix, with the parameters used after it.
    """
    watch = _Watch(module)
    with watch.watching():
        run()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    free = watch.uses[watch.left :]
    last = max((i for i, use in enumerate(free) if any(parameter.dim() > 1 for parameter in use)), default=None)
    if last is not None:
        chosen = {id(parameter) for use in free[last:] for parameter in use}
    elif watch.entered is not None:
        chosen = {id(parameter) for parameter in watch.entered.parameters()}
    else:
        raise ModelError(
            "There is no last layer",
            expected="a forward pass through modules that own weights",
            got="one that calls none of them",
            do='name the weights, as in weights=["head.weight", "head.bias"]',
        )
    return [name for key, name in names.items() if key in chosen]


class _Watch(TorchFunctionMode):
    """What happens in a forward pass, in order: which parameters functions take, and which module is entered last."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._parameters = {id(parameter): parameter for parameter in module.parameters()}
        self.uses: list[list[Tensor]] = []
        """The parameters that each function took, for functions that took any."""
        self.entered: nn.Module | None = None
        """The module with parameters of its own that was entered last."""
        self.left = 0
        """The number of uses when it was left."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        found = {id(p): p for p in map(self._parameter, tensors_in([args, kwargs or {}])) if p is not None}
        made = [tensor for tensor in tensors_in([output]) if self._parameter(tensor) is None]
        if found and made:  # not a mere view of a parameter
            self.uses.append(list(found.values()))
        return output

    def _parameter(self, tensor: Tensor) -> Tensor | None:
        """The parameter that the tensor is, or is a view of."""
        return self._parameters.get(id(tensor)) if tensor._base is None else self._parameters.get(id(tensor._base))

    @contextmanager
    def watching(self) -> Iterator[None]:
        def enter(module: nn.Module, *_: Any) -> None:
            self.entered, self.left = module, len(self.uses)

        def leave(module: nn.Module, *_: Any) -> None:
            if module is self.entered:
                self.left = len(self.uses)

        owners = [
            module
            for module in self.module.modules()
            if next(module.parameters(recurse=False), None) is not None
            or torch.nn.utils.parametrize.is_parametrized(module)
        ]
        handles = [module.register_forward_pre_hook(enter) for module in owners]
        handles += [module.register_forward_hook(leave) for module in owners]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
