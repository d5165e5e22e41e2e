"""Poisson regression of counts with a log link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapis.errors import LikelihoodError
from lapis.likelihoods._draws import seeded
from lapis.likelihoods._targets import per_output, raise_at
from lapis.likelihoods.base import Kind, Separable


class Poisson(Separable):
    """y_c ~ Poisson(exp(f_c)): -log p = sum_c exp(f_c) - y_c f_c + log y_c!.

    Targets are counts 0, 1, 2, ... of any dtype: (B, C), (B,) when C = 1, or laid out as the outputs.
    """

    name: ClassVar[str] = "poisson"
    kind: ClassVar[Kind] = "count"
    is_elementwise: ClassVar[bool] = True

    def check_outputs(self, f: Tensor) -> None:
        super().check_outputs(f)
        limit = math.log(torch.finfo(f.dtype).max)
        if (f > limit).any():
            raise LikelihoodError(
                "The Poisson rate exp(f) overflows",
                expected=f"log rates up to {limit:.1f} in {f.dtype}",
                got=f"{f.max().item():.4g}",
                do="check that the network was trained with a log link, or scale its outputs",
            )

    def targets(self, y: Any, f: Tensor, raw_shape: Sequence[int] | None = None) -> Tensor:
        positions = None if raw_shape is None else self.positions(raw_shape)
        counts = per_output(y, f, width=f.shape[-1], channels=self.channels, positions=positions, what="Counts")
        bad = (counts < 0) | (counts != counts.round())
        if bad.any():
            raise_at(
                counts,
                bad,
                "no counts",
                expected="whole numbers 0, 1, 2, ...",
                do="round the targets, or use the gaussian likelihood for real numbers",
            )
        return counts

    def position_nll(self, f: Tensor, y: Tensor) -> Tensor:
        return (f.exp() - y * f + torch.lgamma(y + 1)).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """exp(f) - y."""
        return f.exp() - y

    def link(self, f: Tensor) -> Tensor:
        return f.exp()

    def root(self, f: Tensor) -> Tensor:
        """exp(f / 2)."""
        return (0.5 * f).exp()

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        rate = f.detach().exp()
        source = seeded(generator, f.device)
        return rate - torch.poisson(rate.to(source.device), generator=source).to(f.device)
