"""Random draws from an explicit generator, which may live on another device than the values."""

from __future__ import annotations

import torch
from torch import Tensor


def normal_like(f: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers in f's shape and dtype: drawn on the generator's device, moved to f's."""
    source = seeded(generator, f.device)
    return torch.randn(f.shape, dtype=f.dtype, device=source.device, generator=source).to(f.device)


def seeded(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The generator; without one, a new one with seed 0."""
    return torch.Generator(device).manual_seed(0) if generator is None else generator
