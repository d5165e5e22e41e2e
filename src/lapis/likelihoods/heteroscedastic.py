"""Regression with Gaussian noise whose variance the network predicts as well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapis.errors import LikelihoodError
from lapis.likelihoods._draws import normal_like
from lapis.likelihoods._targets import per_output
from lapis.likelihoods.base import Kind, Separable


class HeteroscedasticGaussian(Separable):
    """y_d ~ N(m_d, exp(s_d)); the 2 D outputs are f = (m_1 .. m_D, s_1 .. s_D): means, then log variances.

    -log p = sum_d 1/2 (s_d + (y_d - m_d)^2 exp(-s_d) + log 2 pi). It is not convex in f, so the curvature is
    the Fisher information diag(exp(-s), 1/2). Targets are (B, D), (B,) when D = 1, or laid out as the
    outputs.
    """

    name: ClassVar[str] = "heteroscedastic"
    kind: ClassVar[Kind] = "regression"
    is_convex: ClassVar[bool] = False

    def check_outputs(self, f: Tensor) -> None:
        super().check_outputs(f)
        if f.shape[-1] % 2:
            raise LikelihoodError(
                "The heteroscedastic likelihood needs two outputs per target",
                expected="an even C: D means, then D log variances",
                got=f"C = {f.shape[-1]}",
                do="double the width of the last layer, or use the gaussian likelihood",
            )
        limit = math.log(torch.finfo(f.dtype).max)
        log_variance = split(f)[1]
        if (log_variance.abs() > limit).any():
            raise LikelihoodError(
                "A predicted noise variance exp(s) or its inverse overflows",
                expected=f"log variances between -{limit:.1f} and {limit:.1f} in {f.dtype}",
                got=f"{log_variance.min().item():.4g} to {log_variance.max().item():.4g}",
                do="check that the second half of the outputs are log variances",
            )

    def targets(self, y: Any, f: Tensor, raw_shape: Sequence[int] | None = None) -> Tensor:
        """Targets (B, T, D)."""
        positions = None if raw_shape is None else self.positions(raw_shape)
        return per_output(
            y,
            f,
            width=f.shape[-1] // 2,
            channels=self.channels,
            positions=positions,
            what="Regression targets",
        )

    def position_nll(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = split(f)
        scaled = (y - mean) * (-0.5 * log_variance).exp()
        return (0.5 * (log_variance + scaled**2 + math.log(2 * math.pi))).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """((m - y) exp(-s), 1/2 - 1/2 (y - m)^2 exp(-s))."""
        mean, log_variance = split(f)
        scale = (-0.5 * log_variance).exp()
        scaled = (y - mean) * scale
        return torch.cat([-scaled * scale, 0.5 * (1 - scaled**2)], -1)

    def root(self, f: Tensor) -> Tensor:
        """Square root of the Fisher information: exp(-s / 2) for means, 1 / sqrt 2 for log variances s."""
        scale = (-0.5 * split(f)[1]).exp()
        return torch.cat([scale, torch.full_like(scale, math.sqrt(0.5))], -1)

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """With y = m + exp(s / 2) e, e ~ N(0, 1): (-e exp(-s / 2), 1/2 - e^2 / 2)."""
        scale = (-0.5 * split(f.detach())[1]).exp()
        e = normal_like(scale, generator)
        return torch.cat([-e * scale, 0.5 * (1 - e**2)], -1)


def split(f: Tensor) -> tuple[Tensor, Tensor]:
    """Means and log variances, each (B, T, D), of outputs (B, T, 2 D)."""
    half = f.shape[-1] // 2
    return f[..., :half], f[..., half:]
