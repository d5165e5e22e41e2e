"""States that emit Gaussian vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.latent.floor import NOBODY, raised
from lapis.latent.markov.emissions import Emissions, Sums, whole_rows_missing
from lapis.latent.sequences import of_moderate_size
from lapis.options import check_arguments, checked_numbers, checked_tensor, shown

CHUNK = 2**16
"""Numbers in the largest temporary array of log densities: it stays in the processor's cache."""


@dataclass(frozen=True)
class GaussianEmissions(Emissions):
    """Vectors with means (K, D) and covariances (K, D, D), or (K, D) if diagonal.

    Diagonal covariances allow single entries of a row to be missing, full ones only whole rows. In EM, covariances keep
    Sigma >= diag(least) (`lapis.latent.floor`).
    """

    means: Tensor
    covariances: Tensor
    least: Tensor | None = field(default=None, repr=False)
    """Smallest variances, (D,)."""
    centre: Tensor | None = field(default=None, repr=False)
    """(D,): sums are over rows minus this, so that squares of large offsets do not drown variances."""

    def __post_init__(self) -> None:
        check_arguments(GaussianEmissions, vars(self))
        shape = checked_tensor("means", self.means).shape
        if len(shape) != 2 or checked_tensor("covariances", self.covariances).shape not in (shape, (*shape, shape[1])):
            raise DataError(
                "Means and covariances do not fit",
                expected="(K, D) and (K, D, D), or (K, D) for diagonal ones",
                got=f"{shown(self.means)} and {shown(self.covariances)}",
                do="give every state a mean and a covariance",
            )
        spread = self.covariances.detach()
        bad = torch.linalg.cholesky_ex(spread).info if spread.dim() == 3 else ~(spread > 0).all(1)
        if bool(bad.any()) or not bool(spread.isfinite().all() & self.means.isfinite().all()):
            raise DataError(
                "A state has no density",
                expected="finite means and positive definite covariances",
                got=f"others for state {int(bad.float().argmax())}",
                do="check the values",
            )
        for name, each, lowest in (("least", self.least, 0.0), ("centre", self.centre, -math.inf)):
            if each is None:
                continue
            if checked_numbers(name, each).shape != shape[1:] or float(each.min()) < lowest:
                words = f"numbers ({shape[1]},)" + (", none below zero" if lowest == 0 else "")
                raise DataError(f"Bad {name}", expected=words, got=shown(each), do="pass such values")

    @property
    def n_states(self) -> int:
        return len(self.means)

    def read(self, rows: Tensor) -> Tensor:
        width = self.means.shape[1]
        rows = read_vectors(rows, self.means.dtype).to(self.means)
        if rows.shape[1] != width:
            raise DataError(
                "Bad observations", expected=f"{width} columns", got=f"{rows.shape[1]}", do="check the data"
            )
        if self.covariances.dim() == 3:
            whole_rows_missing(rows)
        return rows

    def log_densities(self, rows: Tensor) -> Tensor:
        missing = rows.isnan() if bool(rows.sum().isnan()) else None
        if missing is not None:
            rows = rows.nan_to_num()  # gradients of NaN are NaN, also where they are masked
        if self.covariances.dim() == 2:
            gaps = rows[:, None] - self.means
            each = gaps.square() / self.covariances + (2 * math.pi * self.covariances).log()
            return -0.5 * (each if missing is None else torch.where(missing[:, None], 0.0, each)).sum(-1)
        root = torch.linalg.cholesky(self.covariances)
        states, width = self.means.shape
        unit = torch.eye(width, dtype=root.dtype, device=root.device)
        whitening = torch.linalg.solve_triangular(root, unit.expand_as(root), upper=False)
        flat = whitening.flatten(0, 1).mT  # all states at once, about the middle of their means
        middle = self.means.mean(0)
        centre = torch.einsum("kij,kj->ki", whitening, self.means - middle).flatten()[:, None]
        # (K D, part) at a time: states along the rows, where their sums run over whole vectors of observations
        parts = torch.split(rows, max(1, CHUNK // self.means.numel()))
        flat = whitening.flatten(0, 1)
        squared = (
            torch.addmm(centre, flat, (part - middle).mT, beta=-1).square().view(states, width, -1) for part in parts
        )
        if centre.requires_grad or rows.requires_grad:
            squares = torch.cat([gap.sum(1) for gap in squared], 1)
        else:  # the first touch of memory costs as much as the sums: each number gets its place at once
            squares = rows.new_empty(states, len(rows))
            for gap, place in zip(squared, torch.split(squares, len(parts[0]), 1), strict=True):
                torch.sum(gap, 1, out=place)
        size = 2 * root.diagonal(dim1=1, dim2=2).log().sum(1) + rows.shape[1] * math.log(2 * math.pi)
        found = squares.add_(size[:, None]).mul_(-0.5).mT
        return torch.where(missing.all(1)[:, None], 0.0, found) if missing is not None else found

    def statistics(self, rows: Tensor, weights: Tensor) -> dict[str, Tensor]:
        seen = (~rows.isnan()).to(weights)
        x = (rows - self._centre).nan_to_num()
        if self.covariances.dim() == 2:
            return {"n": weights.mT @ seen, "x": weights.mT @ x, "xx": weights.mT @ x.square()}
        weights = weights * seen[:, :1]
        second = torch.einsum("nk,nd,ne->kde", weights, x, x)
        return {"n": weights.sum(0), "x": weights.mT @ x, "xx": (second + second.mT) / 2}

    @property
    def _centre(self) -> Tensor:
        return self.means.new_zeros(self.means.shape[1]) if self.centre is None else self.centre

    def maximised(self, sums: Sums, pseudo_count: float) -> GaussianEmissions:
        n = sums["n"] if self.covariances.dim() == 2 else sums["n"][:, None]
        alive = n > NOBODY
        means = torch.where(alive, sums["x"] / n.clamp_min(NOBODY) + self._centre, self.means)
        moved = replace(self, means=means)
        if self.covariances.dim() == 3:
            n, alive = n[..., None], alive[..., None]
        free = moved._scatter(sums) / n.clamp_min(NOBODY)
        return moved._with_covariances(torch.where(alive, free, self.covariances))

    def _with_covariances(self, covariances: Tensor) -> GaussianEmissions:
        """These, raised to the smallest variances."""
        if self.least is None:
            return replace(self, covariances=covariances)
        return replace(self, covariances=raised(covariances, self.least, full=covariances.dim() == 3))

    def with_least(self, least: Tensor, centre: Tensor) -> GaussianEmissions:
        """For a fit: with these smallest variances, and sums about this centre."""
        return replace(self, least=least, centre=centre)._with_covariances(self.covariances)

    def _scatter(self, sums: Sums) -> Tensor:
        """sum of weights (x - mu)(x - mu)^T, (K, D, D) or (K, D)."""
        mean = self.means - self._centre
        if self.covariances.dim() == 2:
            return sums["xx"] - 2 * sums["x"] * mean + sums["n"] * mean.square()
        cross = sums["x"][:, :, None] * mean[:, None]
        return sums["xx"] - cross - cross.mT + sums["n"][:, None, None] * mean[:, :, None] * mean[:, None]

    def expected(self, sums: Sums, pseudo_count: float) -> Tensor:
        scatter = self._scatter(sums)
        if self.covariances.dim() == 2:
            return -0.5 * (sums["n"] * (2 * math.pi * self.covariances).log() + scatter / self.covariances).sum()
        root = torch.linalg.cholesky(self.covariances)
        size = 2 * root.diagonal(dim1=1, dim2=2).log().sum(1) + self.means.shape[1] * math.log(2 * math.pi)
        traces = torch.cholesky_solve(scatter, root).diagonal(dim1=1, dim2=2).sum(1)
        total: Tensor = -0.5 * (sums["n"] * size + traces).sum()
        return total

    def to(self, dtype: torch.dtype) -> GaussianEmissions:
        return GaussianEmissions(self.means.to(dtype), self.covariances.to(dtype))


def read_vectors(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows (N, D) of numbers or NaN."""
    rows = rows if rows.dim() == 2 else rows[:, None]
    if not bool(rows.detach().sum().isfinite()) and bool(rows.isinf().any()):  # the sum is one pass, and NaN is missing
        raise DataError(
            "An observation is infinite", expected="numbers, or NaN where missing", got="inf", do="check the data"
        )
    return of_moderate_size(rows.to(dtype))
