"""Where EM for linear dynamics starts from, as far as matrices are not given."""

from __future__ import annotations

import torch
from torch import Tensor

from lapis.latent.dynamics.kalman import Series
from lapis.latent.floor import constant_columns

FLOOR = 1e-10
"""Smallest variance of a noise: of an observed column relative to the column's, of a state to where EM starts."""


def smallest_noise(series: Series) -> Tensor:
    """Smallest variances of R, (D,), with a warning of columns that are constant."""
    constant_columns(series.y.flatten(0, 1), "the noise found there is as small as it may be")
    return FLOOR * _variances(series)


def of_data(series: Series, states: int) -> dict[str, Tensor]:
    """All matrices: principal components of short windows of y are the states, regressions on them the rest."""
    y = torch.where(series.seen, series.y, _mean(series)).nan_to_num()
    lags = min(states // y.shape[2] + 1, y.shape[1])
    windows = torch.stack([y[:, lag : y.shape[1] - lags + 1 + lag] for lag in range(lags)], 2).flatten(2)
    kept = ~series.ended[:, lags - 1 :]
    _, sizes, directions = torch.linalg.svd(windows[kept], full_matrices=False)
    eye = torch.eye(states, dtype=y.dtype, device=y.device)
    found = min(states, len(sizes))
    x = y.new_zeros(*windows.shape[:2], states)
    scale = sizes[:found].clamp_min(1e-8 * float(sizes[0]) + 1e-12) / len(windows[kept]) ** 0.5
    x[..., :found] = windows @ directions[:found].mT / scale
    onward = kept[:, 1:]
    a = _regression(x[:, :-1][onward], x[:, 1:][onward]) if bool(onward.any()) else 0.9 * eye
    c = _regression(x[kept], y[:, : x.shape[1]][kept])
    spread = _variances(series)
    q = 0.1 * eye + _covariance(x[:, 1:][onward] - x[:, :-1][onward] @ a.mT, states)
    r = _covariance(y[:, : x.shape[1]][kept] - x[kept] @ c.mT, y.shape[2]) + 0.1 * spread.diag()
    return {"A": a, "C": c, "Q": q, "R": r, "m": x[:, 0].mean(0), "P": eye}


def of_known_dynamics(series: Series, c: Tensor, noises: int, level: bool) -> dict[str, Tensor]:
    """Noises for known A and C: shares of the variance of changes; a wide start about the mean of y.

    With `level`, the first state is the level of y and starts at its mean; else m = C^+ mean.
    """
    mean, spread = _mean(series), _variances(series)
    both = series.seen[:, 1:] & series.seen[:, :-1]
    squares = torch.where(both, (series.y[:, 1:] - series.y[:, :-1]).nan_to_num(), 0.0).square()
    changes = squares.sum((0, 1)) / both.sum((0, 1)).clamp_min(1)
    changes = torch.where(changes > 0, changes, spread)
    states = c.shape[1]
    m = torch.linalg.pinv(c) @ mean
    if level:
        m = torch.zeros_like(m)
        m[0] = mean[0]
    return {
        "Q": 0.05 * changes.mean() * torch.eye(noises, dtype=c.dtype, device=c.device),
        "R": (0.25 * changes).diag(),
        "m": m,
        "P": 10 * spread.mean() * torch.eye(states, dtype=c.dtype, device=c.device),
    }


def _mean(series: Series) -> Tensor:
    """Of each column of y, (D,)."""
    return series.y.nan_to_num().sum((0, 1)) / series.seen.sum((0, 1)).clamp_min(1)


def _variances(series: Series) -> Tensor:
    """Of each column of y, (D,); 1 where it is constant."""
    gaps = torch.where(series.seen, series.y - _mean(series), 0.0)
    found = gaps.square().sum((0, 1)) / series.seen.sum((0, 1)).clamp_min(1)
    return torch.where(found > 0, found, 1.0)


def _regression(x: Tensor, y: Tensor) -> Tensor:
    """B with y = B x by least squares, a little regularised."""
    gram = x.mT @ x
    ridge = 1e-6 * gram.diagonal().mean().clamp_min(1e-12)
    solved: Tensor = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=x.dtype, device=x.device), x.mT @ y)
    return solved.mT


def _covariance(residuals: Tensor, width: int) -> Tensor:
    if not len(residuals):
        return torch.eye(width, dtype=residuals.dtype, device=residuals.device)
    return residuals.mT @ residuals / len(residuals)
