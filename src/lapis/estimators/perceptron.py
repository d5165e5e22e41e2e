"""Multilayer perceptrons as data: an architecture that a file can hold, and the network that it describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lapis.errors import OptionError
from lapis.options import check_choice
from lapis.schema import count, entry, word

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


@dataclass(frozen=True)
class Perceptron:
    """inputs -> hidden layers, each with the activation -> outputs."""

    inputs: int
    hidden: tuple[int, ...]
    outputs: int
    activation: str

    def build(self, seed: int = 0) -> nn.Sequential:
        """The network in float64, its first weights drawn from the seed; torch's global generator is left as it was."""
        sizes = (self.inputs, *self.hidden)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers: list[nn.Module] = []
            for one, two in pairwise(sizes):
                layers += [nn.Linear(one, two, dtype=torch.float64), ACTIVATIONS[self.activation]()]
            return nn.Sequential(*layers, nn.Linear(sizes[-1], self.outputs, dtype=torch.float64))

    def to_config(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_config(config: Any) -> Perceptron:
        """From a file, checked."""
        hidden = tuple(entry(config, "hidden", list[int]))
        for size in hidden:
            count({"hidden": size}, "hidden", most=2**20)
        inputs, outputs = (count(config, name, most=2**20) for name in ("inputs", "outputs"))
        return Perceptron(inputs, hidden, outputs, word(config, "activation", tuple(ACTIVATIONS)))


def checked_hidden(hidden: Any, activation: Any) -> tuple[int, ...]:
    """Sizes of hidden layers: whole numbers, or one of them alone."""
    check_choice("activation", activation, ACTIVATIONS)
    sizes = hidden if isinstance(hidden, Sequence) else (hidden,)
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise OptionError(
            "Bad hidden", expected="sizes of hidden layers, such as (50,)", got=repr(hidden), do="pass whole numbers"
        )
    return tuple(sizes)
