"""Output heads: the outputs that a task uses, and its likelihood as one of all the network's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from lapis.errors import OptionError
from lapis.likelihoods import Likelihood
from lapis.likelihoods.base import Kind
from lapis.options import shown
from lapis.predictions import Latent, LatentGaussian, LatentMixture, LatentSamples

Head: TypeAlias = Any
"""None (all outputs), outputs as a slice or a sequence of their indices, or a name or number that `Heads` knows."""

Columns: TypeAlias = "tuple[int, ...] | None"
"""Indices of outputs, or None for all of them."""


@dataclass(frozen=True)
class Heads:
    """The heads of a network that returns the outputs of all of them side by side.

    Args:
        heads: a mapping from names to outputs (a slice, or indices), or the number of outputs that every head has:
            head k is then outputs k n to (k + 1) n - 1. None: outputs are named by `learn` and `predict` directly.

    >>> Heads({"digits": slice(0, 2)}).columns("digits"), Heads(2).columns(1), Heads(None).columns([3, 4])
    ((0, 1), (2, 3), (3, 4))
    """

    heads: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.heads, Mapping):
            object.__setattr__(self, "heads", {name: _indices(outputs) for name, outputs in self.heads.items()})
        elif self.heads is not None and not _is_count(self.heads, least=1):
            raise OptionError(
                "Bad heads",
                expected="a mapping from names to slices or indices of outputs, or how many outputs every head has",
                got=shown(self.heads),
                do='pass heads={"first": slice(0, 2), ...}, heads=2, or none',
            )

    def columns(self, head: Head) -> Columns:
        """The outputs of a head; OptionError for one that is not known."""
        if head is None:
            return None
        if isinstance(head, Integral) and not isinstance(head, bool):
            head = int(head)  # numpy's too
        if isinstance(self.heads, Mapping) and isinstance(head, (str, int)) and head in self.heads:
            found: tuple[int, ...] = self.heads[head]
            return found
        if isinstance(self.heads, int) and _is_count(head, least=0):
            return tuple(range(self.heads * head, self.heads * (head + 1)))
        if isinstance(head, (str, int)):
            known = ", ".join(map(repr, self.heads)) if isinstance(self.heads, Mapping) else "a number, from 0"
            raise OptionError(
                f"There is no head {head!r}",
                expected="a slice or indices of outputs" if self.heads is None else known,
                got=shown(head),
                do="name the heads when the learner is made: heads={...}" if self.heads is None else "pass one of them",
            )
        return _indices(head)

    def config(self) -> Any:
        """For JSON, whose keys are strings."""
        if isinstance(self.heads, Mapping):
            return [[name, list(outputs)] for name, outputs in self.heads.items()]
        return self.heads

    @staticmethod
    def from_config(config: Any) -> Heads:
        """The inverse of `config`."""
        return Heads(dict(config) if isinstance(config, list) else config)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _indices(outputs: Any) -> tuple[int, ...]:
    """Indices of outputs, each once, from a slice or a sequence."""
    found: Any = outputs
    if isinstance(outputs, slice) and _is_count(outputs.stop, 1) and _is_count(outputs.start or 0, 0):
        found = range(outputs.start or 0, outputs.stop, outputs.step or 1)
    elif isinstance(outputs, Tensor):
        has_values = outputs.layout == torch.strided and outputs.device.type != "meta"
        found = outputs.tolist() if has_values else None
    fits = isinstance(found, Sequence) and not isinstance(found, (str, bytes)) and len(found) > 0
    if not fits or not all(_is_count(each, 0) for each in found) or len(set(found)) < len(found):
        raise OptionError(
            "These are no outputs of a head",
            expected="a slice with an end, or different indices from 0 on",
            got=shown(outputs),
            do="pass, for example, head=slice(0, 2) or head=[0, 1]",
        )
    return tuple(found)


def picked(values: Tensor, columns: Columns, axis: int = -1) -> Tensor:
    """Some outputs along an axis; a view where they lie side by side."""
    if columns is None:
        return values
    first, length = columns[0], len(columns)
    if columns == tuple(range(first, first + length)):
        return values.narrow(axis, first, length)
    return values.index_select(axis, torch.tensor(columns, device=values.device))


class OnHead(Likelihood):
    """The likelihood of some of the outputs, as a likelihood of all: the others have no part in it.

    Sums over data of several heads therefore add up, weight by weight.
    """

    name: ClassVar[str] = "head"
    kind: ClassVar[Kind] = "function"

    def __init__(self, whole: Likelihood, columns: tuple[int, ...]) -> None:
        super().__init__(channels=whole.channels)
        self.whole, self.columns = whole, columns

    def check_outputs(self, f: Tensor) -> None:
        if max(self.columns) >= f.shape[-1]:
            raise OptionError(
                "The head has outputs that the network does not have",
                expected=f"outputs 0 to {f.shape[-1] - 1}",
                got=f"output {max(self.columns)}",
                do="pass another head, or give the network the outputs of all heads",
            )
        self.whole.check_outputs(picked(f, self.columns))

    def suspicion(self, f: Tensor) -> str | None:
        return self.whole.suspicion(picked(f, self.columns))

    def targets(self, y: Any, f: Tensor, raw_shape: Sequence[int] | None = None) -> Tensor:
        own = None if raw_shape is None else head_shape(self, tuple(raw_shape), len(self.columns))
        return self.whole.targets(y, picked(f, self.columns), own)

    def position_nll(self, f: Tensor, y: Tensor) -> Tensor:
        return self.whole.position_nll(picked(f, self.columns), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self._spread_out(self.whole.gradient(picked(f, self.columns), y), f.shape[-1])

    def factor(self, f: Tensor, y: Tensor) -> Tensor:
        s = self.whole.factor(picked(f, self.columns), y)
        return self._spread_out(s.mT, f.shape[-1]).mT

    def curvature_trace(self, f: Tensor, y: Tensor) -> Tensor:
        return self.whole.curvature_trace(picked(f, self.columns), y)

    def link(self, f: Tensor) -> Tensor:
        """Of the head's outputs alone, (B, T, len(columns))."""
        return self.whole.link(picked(f, self.columns))

    def link_slope(self, f: Tensor) -> Tensor:
        """In all outputs, (B, T, len(columns), C)."""
        return self._spread_out(self.whole.link_slope(picked(f, self.columns)), f.shape[-1])

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self._spread_out(self.whole.sampled_gradient(picked(f, self.columns), y, generator), f.shape[-1])

    def statistics(self, f: Tensor, y: Tensor) -> Tensor:
        own = self.whole.statistics(picked(f, self.columns), y)
        if len(own) == 1:
            return own
        return self._spread_out(own.reshape(-1, len(self.columns)), f.shape[-1]).flatten()

    def log_likelihood(self, statistics: Tensor) -> Tensor:
        return self.whole.log_likelihood(statistics)

    def to_config(self) -> dict[str, Any]:
        return {**self.whole.to_config(), "name": self.name, "columns": list(self.columns)}

    def _spread_out(self, own: Tensor, outputs: int) -> Tensor:
        """Values (..., len(columns)) at their places among zeros (..., outputs)."""
        index = torch.tensor(self.columns, device=own.device)
        return own.new_zeros(*own.shape[:-1], outputs).index_copy(-1, index, own)


def on_head(likelihood: Likelihood, columns: Columns) -> Likelihood:
    """The likelihood of a task with this head."""
    return likelihood if columns is None else OnHead(likelihood, columns)


def head_shape(likelihood: Likelihood, raw_shape: tuple[int, ...], outputs: int) -> tuple[int, ...]:
    """The shape of the network's own output, if it had `outputs` of them."""
    if len(raw_shape) == 1:
        return raw_shape
    if likelihood.channels == "first":
        return (raw_shape[0], outputs, *raw_shape[2:])
    return (*raw_shape[:-1], outputs)


def latent_of_head(latent: Latent, columns: Columns, likelihood: Likelihood) -> Latent:
    """The distribution of a head's outputs."""
    if columns is None:
        return latent
    if isinstance(latent, LatentMixture):
        parts = [latent_of_head(part, columns, likelihood) for part in latent.parts]
        return LatentMixture(tuple(parts), latent.weights)  # type: ignore[arg-type]
    shape = head_shape(likelihood, latent.raw_shape, len(columns))
    if isinstance(latent, LatentSamples):
        return LatentSamples(picked(latent.values, columns), latent.joint, shape)
    covariance = latent.covariance
    if covariance is not None:
        covariance = picked(picked(covariance, columns), columns, -2)
    return LatentGaussian(picked(latent.mean, columns), picked(latent.variance, columns), covariance, None, shape)
