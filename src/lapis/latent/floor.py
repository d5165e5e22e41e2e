"""Smallest variances of Gaussians that EM fits: no component, and no state, collapses onto a single row.

The expected log joint of a Gaussian with free covariance S, -n/2 (log |Sigma| + tr Sigma^-1 S), has its maximum under
Sigma >= diag(least) at S with eigenvalues (in units where `least` is 1) raised to 1. So the M-step stays a
maximisation, and the bound still never falls.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lapis.errors import DataError, LapisWarning, users_level

NOBODY = 1e-10
"""A component, or state, with less than this share of a row keeps its place."""


def raised(covariances: Tensor, least: Tensor, *, full: bool) -> Tensor:
    """The nearest covariances with Sigma >= diag(least).

    Args:
        covariances: (..., D, D) if `full`, else variances.
        least: smallest variances, (D,), or 0-d for all directions.
        full: whether covariances are matrices.
    """
    if not full:
        return torch.maximum(covariances, least)
    same = least.dim() == 0
    unit = least.sqrt().expand(covariances.shape[-1]) if not same else least.new_ones(covariances.shape[-1])
    limit = least if same else least.new_ones(())
    scaled = covariances / unit / unit[:, None]
    if bool((torch.linalg.eigvalsh(scaled).amin(-1) >= limit).all()):
        return covariances
    values, vectors = torch.linalg.eigh(scaled)
    found: Tensor = (vectors * torch.maximum(values, limit).unsqueeze(-2)) @ vectors.mT
    return found * unit * unit[:, None]


def constant_columns(rows: Tensor, consequence: str) -> list[int]:
    """Columns of rows (N, D) that have one value only, with a warning; NaN is missing."""
    low, high = rows.aminmax(dim=0)
    if bool(low.isnan().any()):
        missing = rows.isnan()
        low, high = torch.where(missing, torch.inf, rows).amin(0), torch.where(missing, -torch.inf, rows).amax(0)
    never: list[int] = (low > high).nonzero()[:, 0].tolist()
    if never:
        raise DataError(
            f"Columns {never} were never observed", expected="at least one number in each", got="NaN only",
            do="leave them out",
        )  # fmt: skip
    found: list[int] = (low == high).nonzero()[:, 0].tolist() if len(rows) > 1 else []
    if found:
        warnings.warn(f"Columns {found} are constant: {consequence}.", LapisWarning, stacklevel=users_level())
    return found
