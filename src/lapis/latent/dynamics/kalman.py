"""Kalman filter and Rauch-Tung-Striebel smoother in square-root form, for many sequences at once.

    x_1 ~ N(m, P),    x_t = A x_{t-1} + G w_t,  w_t ~ N(0, Q),    y_t = C x_t + N(0, R)

Covariances are carried as factors S, S S^T; every step is a QR decomposition of stacked factors, never a difference of
covariances, so that they stay positive semi-definite in any precision. With M M^T = L L^T, L lower triangular:

    observe:  M = [[R^1/2, C S], [0, S]]          L = [[V^1/2, 0], [K V^1/2, S_filtered]]
    predict:  M = [[A S, G Q^1/2], [S, 0]]        L = [[S_next, 0], [J S_next, S_back]]

V is the covariance of the innovation, K the gain, J the gain of the smoother, and S_back that of x_t given x_{t+1}. To
predict, only the upper rows of M are decomposed, M_1^T = U S_next^T; the lower ones are M_2 U U^T + S_back. (All rows
at once have no derivative where x_{t+1} tells entries of x_t exactly, as those of a season.) A missing entry of y is a
row of C and R^1/2 set to zero, with a one of its own: it says nothing and costs log 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from lapis.errors import DataError, OptionError

NAMES = ("A", "C", "Q", "R", "m", "P")


@dataclass(frozen=True)
class System:
    """Parameters: A (L, L), C (D, L), Q (W, W), R (D, D), m (L,), P (L, L), G (L, W)."""

    A: Tensor
    C: Tensor
    Q: Tensor
    R: Tensor
    m: Tensor
    P: Tensor
    G: Tensor

    @cached_property
    def state_noise(self) -> Tensor:
        """G Q^1/2, (L, W)."""
        return self.G @ root_of("Q", self.Q)

    @cached_property
    def noise(self) -> Tensor:
        """R^1/2, (D, D)."""
        return root_of("R", self.R)

    def to(self, dtype: torch.dtype) -> System:
        """In another precision."""
        return replace(self, **{each.name: getattr(self, each.name).to(dtype) for each in fields(self)})


@dataclass(frozen=True)
class Series:
    """Observations (B, T, D), NaN where missing; after the ends of shorter sequences too."""

    y: Tensor
    lengths: tuple[int, ...]

    @cached_property
    def seen(self) -> Tensor:
        """Entries that are observed, (B, T, D)."""
        return ~self.y.isnan()

    @cached_property
    def ended(self) -> Tensor:
        """Steps after the end, (B, T)."""
        steps = torch.arange(self.y.shape[1], device=self.y.device)
        return steps >= torch.tensor(self.lengths, device=self.y.device)[:, None]

    @cached_property
    def alike(self) -> bool:
        """Nothing is missing: all sequences have the same covariances, which do not depend on y."""
        return bool((self.seen | self.ended[..., None]).all())


@dataclass(frozen=True)
class Filtered:
    """p(x_t | y_1..t) and what the smoother needs. Factors have a batch of 1 where all sequences share them."""

    means: list[Tensor]
    """(B, L) of each step."""
    factors: list[Tensor]
    """(B or 1, L, L) of each step."""
    predicted: list[Tensor]
    """Means of x_t given y_1..t-1, (B, L); one more than steps."""
    gains: list[Tensor]
    """J of each step, (B or 1, L, L)."""
    backward: list[Tensor]
    """Factors of x_t given x_{t+1} and y_1..t."""
    log_likelihoods: Tensor
    """(B,)."""


def root_of(name: str, covariance: Tensor) -> Tensor:
    """A factor of a positive semi-definite matrix: Cholesky's, or of the eigenvalues if singular."""
    root: Tensor
    root, info = torch.linalg.cholesky_ex(covariance)
    if not bool(info):
        return root
    values, vectors = torch.linalg.eigh(covariance)
    if not float(values.min()) >= -1e-6 * max(float(values.max()), 0.0):
        raise OptionError(
            f"{name} is no covariance",
            expected="a positive semi-definite matrix",
            got=f"a smallest eigenvalue of {float(values.min()):.3g}",
            do="check the values",
        )
    root = vectors * values.clamp_min(0.0).sqrt()
    return root


def lower(stacked: Tensor) -> Tensor:
    """L, lower trapezoidal, with L L^T = M M^T; M (..., n, k)."""
    mode = "reduced" if stacked.requires_grad else "r"  # the latter has no derivative
    found: Tensor = torch.linalg.qr(stacked.mT, mode=mode).R
    return found.mT


def kalman_filter(system: System, series: Series) -> Filtered:
    """Run over time; sequences that have ended go on without effect."""
    seen = torch.ones_like(series.seen[:1]) if series.alike else series.seen
    y = series.y.nan_to_num()
    batch, states = len(y), len(system.m)
    mean = system.m.expand(batch, states)
    factor = root_of("P", system.P).expand(len(seen), states, states)
    means, factors, predicted, gains, backward = [], [], [mean], [], []
    total = mean.new_zeros(batch)
    for t in range(y.shape[1]):
        mean, factor, logs = _observe(system, mean, factor, y[:, t], seen[:, t])
        total = total + torch.where(series.ended[:, t], torch.zeros_like(logs), logs)
        means.append(mean)
        factors.append(factor)
        factor, gain, back = predict(system, factor)
        mean = mean @ system.A.mT
        predicted.append(mean)
        gains.append(gain)
        backward.append(back)
    return Filtered(means, factors, predicted, gains, backward, total)


def _observe(system: System, mean: Tensor, factor: Tensor, y: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and factor given y (B, D) as well, and log p(y | before), (B,)."""
    width, states = system.C.shape
    rows = seen.to(y.dtype)[..., None]
    top = [rows * system.noise, rows * (system.C @ factor)]
    below = [factor.new_zeros(len(factor), states, width), factor]
    if not bool(seen.all()):
        top.append(torch.diag_embed((~seen).to(y.dtype)))
        below.append(below[0])
    found = lower(torch.cat([torch.cat(top, 2), torch.cat(below, 2)], 1))
    root, gain = found[:, :width, :width], found[:, width:, :width]
    sizes = root.diagonal(dim1=1, dim2=2).abs()
    if not bool((sizes > 0).all()):
        raise DataError(
            "An observation has no variance",
            expected="R, or the states' part C P C^T, of full rank",
            got="a singular covariance of an observation",
            do="give R a positive diagonal",
        )
    gap = torch.where(seen, y - mean @ system.C.mT, 0.0)
    white = torch.linalg.solve_triangular(root, gap[..., None], upper=False)
    counts = rows[..., 0].sum(-1)
    logs = -0.5 * (white.square().sum((1, 2)) + counts * math.log(2 * math.pi)) - sizes.log().sum(-1)
    return mean + (gain @ white)[..., 0], found[:, width:, width:], logs


def predict(system: System, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factor of the next state, the smoother's gain, and the factor of this state given the next."""
    states, noises = system.state_noise.shape
    noise = system.state_noise.expand(len(factor), states, noises)
    turn, root = torch.linalg.qr(torch.cat([system.A @ factor, noise], 2).mT)
    ahead = root.mT
    here = torch.cat([factor, torch.zeros_like(noise)], 2)  # M's lower rows: their part along the upper, and the rest
    both = here @ turn
    back = here - both @ turn.mT
    sizes = ahead.detach().diagonal(dim1=1, dim2=2).abs()
    if bool((sizes.amin(1) > 10 * torch.finfo(sizes.dtype).eps * sizes.amax(1)).all()):
        return ahead, torch.linalg.solve_triangular(ahead, both, upper=False, left=False), back
    gain = both @ torch.linalg.pinv(ahead)  # some direction of the next state is known: it says nothing new there
    return ahead, gain, torch.cat([back, both - gain @ ahead], 2)


def smoother(filtered: Filtered, series: Series) -> tuple[Tensor, Tensor]:
    """p(x_t | y_1..T): means (T, B, L) and factors (T, B or 1, L, L)."""
    mean, factor = filtered.means[-1], filtered.factors[-1]
    uneven = bool(series.ended.any())
    if uneven:
        factor = factor.expand(len(mean), *factor.shape[1:])
    means, factors = [mean], [factor]
    for t in range(len(filtered.means) - 2, -1, -1):
        gain = filtered.gains[t]
        mean = filtered.means[t] + (gain @ (mean - filtered.predicted[t + 1])[..., None])[..., 0]
        carried = gain @ factor
        back = filtered.backward[t].expand(len(carried), *filtered.backward[t].shape[1:])
        factor = lower(torch.cat([back, carried], 2))
        if uneven:
            last = series.ended[:, t + 1]
            mean = torch.where(last[:, None], filtered.means[t], mean)
            factor = torch.where(last[:, None, None], filtered.factors[t], factor)
        means.append(mean)
        factors.append(factor)
    return torch.stack(means[::-1]), torch.stack(factors[::-1])
