"""Inputs of the cases: recipes that draw n examples, and functions over inputs of any form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cases.likelihoods import F64


def randn(*shape: int) -> Callable[[torch.Generator, int], Tensor]:
    return lambda generator, n: torch.randn(n, *shape, generator=generator, dtype=F64)


def tokens(length: int, vocabulary: int) -> Callable[[torch.Generator, int], Tensor]:
    return lambda generator, n: torch.randint(vocabulary, (n, length), generator=generator)


def two_sequences(*shapes: tuple[int, int]) -> Callable[[torch.Generator, int], tuple[Tensor, ...]]:
    return lambda g, n: tuple(torch.randn(n, *shape, generator=g, dtype=F64) for shape in shapes)


def padded_sequences(length: int, width: int) -> Callable[[torch.Generator, int], dict[str, Tensor]]:
    """Examples of different lengths; the first position is never padded."""

    def draw(generator: torch.Generator, n: int) -> dict[str, Tensor]:
        lengths = torch.randint(1, length + 1, (n, 1), generator=generator)
        x = torch.randn(n, length, width, generator=generator, dtype=F64)
        return {"x": x, "padded": torch.arange(length) >= lengths}

    return draw


def words_and_table(generator: torch.Generator, n: int) -> dict[str, Tensor]:
    lengths = torch.randint(1, 5, (n, 1), generator=generator)
    return {
        "words": torch.randint(6, (n, 4), generator=generator),
        "mask": (torch.arange(4) < lengths).to(F64),
        "table": torch.randn(n, 2, generator=generator, dtype=F64),
    }


def to_dtype(x: Any, dtype: torch.dtype) -> Any:
    return over(x, lambda t: t.to(dtype) if t.is_floating_point() else t)


def take(x: Any, index: Any) -> Any:
    """The examples at `index` of a tensor, tuple or dictionary."""
    return over(x, lambda t: t[index])


def over(x: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(x, tuple):
        return tuple(function(t) for t in x)
    if isinstance(x, dict):
        return {key: function(t) for key, t in x.items()}
    return function(x)


def call(model: nn.Module, x: Any) -> Tensor:
    out = model(*x) if isinstance(x, tuple) else model(**x) if isinstance(x, dict) else model(x)
    return getattr(out, "logits", out)
