"""Which weights of a module are uncertain: all, the last layer's, some parameters by name, or single weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lapis.errors import ModelError, OptionError

Weights: TypeAlias = str | Sequence[str] | Callable[[str, Tensor], bool] | Mapping[str, Tensor] | Tensor
"""The user's choice of weights: "all", "last_layer", name patterns or module names, or a function of (name, parameter).
Single weights: a mapping from parameter names to masks (of the parameter's shape) or flat indices, or one mask or index
tensor over the flat vector of all trainable weights.
"""

Choice: TypeAlias = "dict[str, Tensor | None]"
"""Chosen parameters in the module's order: flat indices (n,) of the chosen entries, or None for the whole parameter."""


def choose(
    module: nn.Module, weights: Weights, trainable: Mapping[str, Tensor], last_layer: Callable[[], Sequence[str]]
) -> Choice:
    """Resolve the user's choice; `last_layer` runs a forward pass for the names of the parameters used last."""
    if isinstance(weights, Tensor):
        weights = _by_parameter(weights, trainable)
    if isinstance(weights, Mapping):
        return _single(weights, trainable)
    if callable(weights) and not isinstance(weights, nn.Module):
        chosen = [name for name, parameter in trainable.items() if weights(name, parameter)]
    elif isinstance(weights, str) and weights == "all":
        chosen = list(trainable)
    elif isinstance(weights, str) and weights == "last_layer":
        found = last_layer()
        chosen = [name for name in trainable if name in found]
    else:
        chosen = _by_name(module, _patterns(weights), trainable)
    if not chosen:
        raise ModelError(
            "No weights were chosen",
            expected="at least one trainable parameter",
            got=f"{'a function' if callable(weights) else repr(weights)} that selects none (frozen do not count)",
            do="widen the selection, or unfreeze the weights",
        )
    return dict.fromkeys(chosen)


def _by_name(module: nn.Module, patterns: Sequence[str], trainable: Mapping[str, Tensor]) -> list[str]:
    for pattern in patterns:
        if not any(_matches(name, pattern) for name, _ in module.named_parameters()):
            raise OptionError(
                f"No weight is called {pattern!r}",
                expected='"all", "last_layer", or patterns and module names among the network\'s parameters',
                got=repr(pattern),
                do="choose among: " + ", ".join(list(trainable)[:12]) + (" ..." if len(trainable) > 12 else ""),
            )
    return [name for name in trainable if any(_matches(name, pattern) for pattern in patterns)]


def _by_parameter(chosen: Tensor, trainable: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flat indices by parameter name, from one mask or index tensor over the flat vector of all trainable weights."""
    total = sum(parameter.numel() for parameter in trainable.values())
    index = _indices("the flat vector of weights", chosen, (total,))
    indices, start = {}, 0
    for name, parameter in trainable.items():
        own = index[(index >= start) & (index < start + parameter.numel())] - start
        if len(own):
            indices[name] = own
        start += parameter.numel()
    return indices


def _single(chosen: Mapping[str, Tensor], trainable: Mapping[str, Tensor]) -> Choice:
    """A choice of single weights, from a mask or flat indices for each parameter."""
    unknown = [name for name in chosen if name not in trainable]
    if unknown:
        raise OptionError(
            f"No trainable weight is called {unknown[0]!r}",
            expected="names of trainable parameters",
            got=", ".join(map(repr, unknown)),
            do="choose among: " + ", ".join(list(trainable)[:12]) + (" ..." if len(trainable) > 12 else ""),
        )
    choice: Choice = {}
    for name, parameter in trainable.items():
        if name in chosen:
            index = _indices(name, chosen[name], tuple(parameter.shape))
            if len(index):
                choice[name] = None if len(index) == parameter.numel() else index.to(parameter.device)
    if not choice:
        raise ModelError(
            "No weights were chosen",
            expected="at least one weight",
            got="an empty index set",
            do="choose some weights",
        )
    return choice


def _indices(what: str, chosen: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Flat indices in ascending order, from a mask of `shape` or from flat indices; errors call the weights `what`."""
    size = int(torch.Size(shape).numel())
    if not isinstance(chosen, Tensor) or chosen.is_floating_point() or chosen.is_complex():
        raise OptionError(
            f"Which weights of {what} is not clear",
            expected=f"a boolean mask of shape {shape}, or flat indices below {size:,}",
            got=f"{tuple(chosen.shape)} {chosen.dtype}" if isinstance(chosen, Tensor) else type(chosen).__name__,
            do="pass a mask or indices, as a tensor",
        )
    if chosen.dtype == torch.bool:
        if tuple(chosen.shape) != shape and tuple(chosen.shape) != (size,):
            raise OptionError(
                f"The mask does not fit {what}",
                expected=f"shape {shape}",
                got=str(tuple(chosen.shape)),
                do="make a mask of the parameter's own shape",
            )
        return chosen.reshape(-1).nonzero()[:, 0]
    index = chosen.reshape(-1).long()
    unique: Tensor = torch.unique(index)
    if len(index) and (int(unique[0]) < 0 or int(unique[-1]) >= size or len(unique) < len(index)):
        raise OptionError(
            f"The indices do not fit {what}",
            expected=f"each at most once, from 0 to {size - 1:,}",
            got=f"from {int(unique[0])} to {int(unique[-1])}, {len(index) - len(unique)} repeated",
            do="pass flat indices of the chosen weights",
        )
    return unique


def _matches(name: str, pattern: str) -> bool:
    """Whether `pattern` is a glob that matches the parameter's name, or the name of a module that contains it."""
    return fnmatchcase(name, pattern) or name.startswith(pattern + ".")


def _patterns(weights: Any) -> list[str]:
    """Name patterns as a list; OptionError if `weights` are of no known form."""
    listed = [weights] if isinstance(weights, str) else weights
    if not isinstance(listed, Sequence) or not all(isinstance(pattern, str) for pattern in listed):
        raise OptionError(
            "Which weights is not clear",
            expected='"all", "last_layer", name patterns or module names, a function of (name, parameter), or masks',
            got=f"a module ({type(weights).__name__})" if isinstance(weights, nn.Module) else repr(weights),
            do='name them, as in weights="head" or weights=["head.*", "*.bias"]',
        )
    return list(listed)
