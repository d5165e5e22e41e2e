"""Gaussians q(z_i) of each datum's latent variables: with parameters of their own, or by a network of the datum."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapis.errors import DataError, ModelError, OptionError
from lapis.options import shown


@dataclass(frozen=True)
class Gaussians:
    """q(z_i) = N(mean_i, S_i S_i^T), S lower triangular."""

    means: Tensor
    """(N, L)"""
    factors: Tensor
    """S, (N, L, L)."""

    @property
    def covariances(self) -> Tensor:
        """(N, L, L)"""
        return self.factors @ self.factors.mT

    def draw(self, noise: Tensor) -> Tensor:
        """mean + S noise, noise (draws, N, L)."""
        self._check("noise", noise)
        return self.means + torch.einsum("nij,snj->sni", self.factors, noise)

    def log_prob(self, z: Tensor) -> Tensor:
        """(draws, N), of z (draws, N, L)."""
        self._check("z", z)
        gaps = (z - self.means)[..., None]
        white = torch.linalg.solve_triangular(self.factors.expand(*gaps.shape[:-2], -1, -1), gaps, upper=False)
        sizes = self.factors.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        total: Tensor = -0.5 * white.square().sum((-1, -2)) - sizes - 0.5 * z.shape[-1] * math.log(2 * math.pi)
        return total

    def _check(self, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.dim() != 3 or value.shape[1:] != self.means.shape:
            raise DataError(
                f"Bad {name}", expected=f"a tensor (draws, {self.means.shape[0]}, {self.means.shape[1]})",
                got=shown(value), do="pass a row for each datum",
            )  # fmt: skip

    def detached(self) -> Gaussians:
        """Without a graph."""
        return Gaussians(self.means.detach(), self.factors.detach())


class Approximation(nn.Module, ABC):
    """q as a module: from rows of the data (their numbers and values) to `Gaussians`."""

    @abstractmethod
    def forward(self, rows: Tensor, data: Any) -> Gaussians:
        """The Gaussians of these rows."""


class PerDatum(Approximation):
    """Parameters for every datum: means, log standard deviations, and factors below the diagonal in units of these."""

    def __init__(self, count: int, latent: int, full: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.means = nn.Parameter(torch.zeros(count, latent, dtype=dtype))
        self.log_deviations = nn.Parameter(torch.zeros(count, latent, dtype=dtype))
        below = torch.zeros(count, latent, latent, dtype=dtype)
        self.below = nn.Parameter(below) if full else None

    def forward(self, rows: Tensor, data: Any) -> Gaussians:
        deviations = self.log_deviations[rows].exp()
        if self.below is None:
            return Gaussians(self.means[rows], torch.diag_embed(deviations))
        unit = self.below[rows].tril(-1) + torch.eye(deviations.shape[-1], dtype=deviations.dtype)
        return Gaussians(self.means[rows], deviations[..., None] * unit)


class Amortised(Approximation):
    """A network of the datum: outputs are L means and L log standard deviations, and for a full q what is below."""

    def __init__(self, network: nn.Module, latent: int) -> None:
        super().__init__()
        self.network, self.latent = network, latent

    def forward(self, rows: Tensor, data: Any) -> Gaussians:
        outputs = self.network(*data) if isinstance(data, tuple) else self.network(data)
        latent, below = self.latent, self.latent * (self.latent - 1) // 2
        shapes = [(len(rows), 2 * latent), (len(rows), 2 * latent + below)]
        if not isinstance(outputs, Tensor) or tuple(outputs.shape) not in shapes:
            raise ModelError(
                "The network of q has outputs of another shape",
                expected=f"{shapes[0]}: means and log standard deviations; or {shapes[1]} for a full covariance",
                got=shown(outputs),
                do="check its last layer, and n_latent",
            )
        means, deviations = outputs[:, :latent], outputs[:, latent : 2 * latent].exp()
        unit = torch.eye(latent, dtype=outputs.dtype).expand(len(rows), latent, latent)
        if outputs.shape[1] > 2 * latent:
            places = torch.tril_indices(latent, latent, -1)
            unit = unit.clone().index_put(
                (torch.arange(len(rows))[:, None], places[0], places[1]), outputs[:, 2 * latent :]
            )
        return Gaussians(means, deviations[..., None] * unit)


def latent_size(q: Any, data: Any) -> int:
    """L, where it was not told: half the outputs of a network."""
    outputs = None
    if isinstance(q, nn.Module):
        with torch.no_grad():
            outputs = q(*data) if isinstance(data, tuple) else q(data)
        if isinstance(outputs, Tensor) and outputs.dim() == 2 and outputs.shape[1] % 2 == 0 and outputs.shape[1]:
            return outputs.shape[1] // 2
    raise OptionError(
        "Nothing says how many latent variables a datum has",
        expected="n_latent, or a network with an even number of outputs",
        got=shown(q if outputs is None else outputs),
        do="pass n_latent",
    )


def approximation(q: Any, count: int, latent: int, dtype: torch.dtype) -> Approximation:
    """q as it was asked for."""
    if isinstance(q, nn.Module):
        return Amortised(q, latent)
    if q not in ("mean_field", "full"):
        raise OptionError(
            "Unknown q", expected='"mean_field", "full" or a network', got=shown(q), do="choose one of these"
        )
    return PerDatum(count, latent, q == "full", dtype)
