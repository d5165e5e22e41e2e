"""Random draws from an explicit generator, which may live on another device than the values."""

from __future__ import annotations

import torch
from torch import Tensor


def normal_like(f: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers in f's shape and dtype: drawn on the generator's device, moved to f's."""
    device = f.device if generator is None else generator.device
    return torch.randn(f.shape, dtype=f.dtype, device=device, generator=generator).to(f.device)


def on_generator(values: Tensor, generator: torch.Generator | None) -> Tensor:
    """Parameters of a draw, moved to the generator's device."""
    return values if generator is None else values.to(generator.device)
