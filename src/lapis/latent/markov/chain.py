"""Sums and maxima over all paths of a Markov chain, in log space, for many sequences at once.

    p(y, z) = pi(z_1) b_1(z_1) prod_t A(z_{t-1}, z_t) b_t(z_t)

    alpha_t(j) = p(y_1..t, z_t = j) = b_t(j) sum_i alpha_{t-1}(i) A(i, j)
    beta_t(i)  = p(y_t+1..T | z_t = i) = sum_j A(i, j) b_{t+1}(j) beta_{t+1}(j)

Each step is a matrix product of exp(log alpha - max), with logarithms taken exactly where that underflows. Arrays are
(T, B, K) with the longest sequence first (`Layout`). Expectations under p(z | y) come from probabilities scaled at each
step (`scaled`), several times as fast, and from log space for those sequences on which these would underflow.
Derivatives of log p(y) are such expectations, so the backward pass of autograd is the backward recursion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapis.latent.markov.scaled import scaled_paths
from lapis.latent.sequences import Layout


@dataclass(frozen=True)
class Paths:
    """What the posterior over paths says: expectations of its states and pairs of states."""

    log_likelihoods: Tensor
    """log p(y) of each sequence, (B,)."""
    states: Tensor
    """p(z_t = k | y) of each row, (N, K)."""
    first: Tensor
    """Expected number of sequences that begin in k, (K,)."""
    pairs: Tensor | None
    """Expected number of steps from i to j, (K, K); None if they were not asked for."""


def forward(initial: Tensor, transitions: Tensor, log_densities: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """log alpha less its largest entry at each step, (T, B, K), minus infinity after the ends; and log p(y), (B,).

    What was subtracted is added up in float64: rounding does not grow with the length of a sequence.
    """
    alphas = torch.full_like(log_densities, -math.inf)
    tops = log_densities.new_zeros(log_densities.shape[:2])
    state = initial.log() + log_densities[0]
    for t in range(len(log_densities)):
        n = layout.running[t]
        if t > 0:
            state = log_product(state[:n], transitions) + log_densities[t, :n]
        top = _largest(state)
        state = state - top
        alphas[t, :n], tops[t, :n] = state, top[:, 0]
    total = tops.double().sum(0)[layout.places.to(tops.device)] + layout.last(alphas).double().logsumexp(-1)
    return alphas, total.to(tops.dtype)


def backward(transitions: Tensor, log_densities: Tensor, layout: Layout) -> Tensor:
    """log beta up to a constant at each step, (T, B, K); zero at the ends and after."""
    betas = torch.zeros_like(log_densities)
    transposed = transitions.mT.contiguous()
    for t in range(len(log_densities) - 2, -1, -1):
        n = layout.running[t + 1]
        ahead = log_densities[t + 1, :n] + betas[t + 1, :n]
        betas[t, :n] = log_product(ahead - _largest(ahead), transposed)
    return betas


def _largest(logs: Tensor) -> Tensor:
    """Along the last axis, (n, 1); finite also where all are minus infinity."""
    return logs.amax(-1, keepdim=True).clamp_min(torch.finfo(logs.dtype).min)


def log_product(logs: Tensor, matrix: Tensor) -> Tensor:
    """log sum_i exp(logs_i) M_ij, (n, J), for rows of logs (n, I) whose largest entry is 0."""
    sums = logs.exp() @ matrix
    result = sums.log()
    limits = torch.finfo(sums.dtype)
    least = limits.tiny / limits.eps**2  # terms that underflow are less than rounding beside such a sum
    if not float(sums.amin()) > least:
        rows = ~(sums > least).all(-1)
        result[rows] = (logs[rows, :, None] + matrix.log()).logsumexp(-2)
    return result


def paths(
    initial: Tensor, transitions: Tensor, log_densities: Callable[[], Tensor], layout: Layout, *, pairs: bool = True
) -> Paths:
    """Expectations under p(z | y). Without `pairs` those are not summed.

    `log_densities` makes log b, (T, B, K): the scan uses it up, and where it fails they are asked for again.
    """
    log_z, states, steps, failed = scaled_paths(initial, transitions, log_densities(), layout, pairs=pairs)
    if not bool(failed.any()):
        rows = layout.rows(states)
        return Paths(log_z[layout.places.to(log_z.device)], rows, states[0].sum(0), steps)
    logs = log_densities()
    if bool(failed.all()):
        return paths_in_log_space(initial, transitions, logs, layout, pairs=pairs)
    bad, good = (layout.some(slots) for slots in (failed.cpu(), ~failed.cpu()))
    left = logs[: good.longest, ~failed]
    parts = (
        (bad, paths_in_log_space(initial, transitions, logs[: bad.longest, failed], bad.layout, pairs=pairs)),
        (good, paths(initial, transitions, lambda: left, good.layout, pairs=pairs)),
    )
    log_z, rows = torch.empty_like(log_z), logs.new_empty(len(layout.time), len(initial))
    for part, found in parts:
        log_z[part.sequences.to(log_z.device)] = found.log_likelihoods
        rows[part.rows.to(rows.device)] = found.states
    steps = sum((found.pairs for _, found in parts if found.pairs is not None), torch.zeros_like(transitions))
    return Paths(log_z, rows, parts[0][1].first + parts[1][1].first, steps if pairs else None)


def paths_in_log_space(
    initial: Tensor, transitions: Tensor, log_densities: Tensor, layout: Layout, *, pairs: bool = True
) -> Paths:
    """As `paths`, forward and backward with logarithms throughout."""
    alphas, log_z = forward(initial, transitions, log_densities, layout)
    betas = backward(transitions, log_densities, layout)
    steps = pair_sums(alphas, log_densities + betas, transitions, transitions, layout) if pairs else None
    joint = alphas.add_(betas)  # a softmax in place: torch's own is slow along short axes
    joint.sub_(_largest(joint)).exp_()
    states = layout.rows(joint.div_((joint @ joint.new_ones(joint.shape[-1], 1)).clamp_min_(1.0)))
    return Paths(log_z, states, states[layout.time == 0].sum(0), steps)


def pair_sums(
    alphas: Tensor, ahead: Tensor, transitions: Tensor, matrix: Tensor, layout: Layout, weights: Tensor | None = None
) -> Tensor:
    """sum over steps of w_b M_ij exp(alpha_{t-1}(i) + ahead_t(j)) / p(y), (K, K); weights w (B,) are 1 by default.

    With M = A the expected numbers of steps from i to j. As one product of exp(alpha) and exp(ahead - max), times the
    rest of the exponent; where that is large (the most probable states on either side are not joined by the chain), in
    log space.
    """
    rows, times, slots = layout.later, layout.time[layout.later], layout.slot[layout.later]
    left, right = alphas[times - 1, slots], ahead[times, slots]
    if not len(rows):
        return torch.zeros_like(matrix)
    rest = -(log_product(left, transitions) + right).logsumexp(1, keepdim=True)  # -log p(y), on the scale of each row
    top = _largest(right)
    scale = torch.ones_like(rest) if weights is None else weights[layout.sequence[rows], None]
    far = (rest + top)[:, 0] > 0.4 * math.log(torch.finfo(rest.dtype).max)
    near = ~far
    total = (left[near].exp().mT @ ((right - top + (top + rest))[near].exp() * scale[near])) * matrix
    if bool(far.any()):
        exponents = left[far, :, None] + (right + rest)[far, None, :] + matrix.log()
        total = total + (exponents.exp() * scale[far, :, None]).sum(0)
    return total


class _LogLikelihood(torch.autograd.Function):
    """log p(y) of each sequence, (B,); its gradient in log b is p(z_t | y), in A the expected steps over A."""

    @staticmethod
    def forward(ctx: Any, initial: Tensor, transitions: Tensor, log_densities: Tensor, layout: Layout) -> Tensor:
        alphas, log_z = forward(initial, transitions, log_densities, layout)
        ctx.layout = layout
        ctx.save_for_backward(initial, transitions, log_densities, alphas)
        return log_z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        initial, transitions, log_densities, alphas = ctx.saved_tensors
        layout: Layout = ctx.layout
        betas = backward(transitions, log_densities, layout)
        ahead = log_densities + betas
        pairs = pair_sums(alphas, ahead, transitions, torch.ones_like(transitions), layout, gradient)
        weights = gradient[torch.tensor(layout.order, device=gradient.device), None]
        norm = (initial.log() + ahead[0]).logsumexp(-1, keepdim=True)
        first = ((ahead[0] - norm).exp() * weights).sum(0)
        after_end = alphas.isneginf().all(-1, keepdim=True)
        states = torch.where(after_end, 0.0, (alphas + betas).softmax(-1)) * weights
        return first, pairs, states, None


def log_likelihoods(initial: Tensor, transitions: Tensor, log_densities: Tensor, layout: Layout) -> Tensor:
    """log p(y) of each sequence, (B,), once differentiable in the chain and the densities."""
    found: Tensor = _LogLikelihood.apply(initial, transitions, log_densities, layout)  # type: ignore[no-untyped-call]
    return found


def most_probable(initial: Tensor, transitions: Tensor, log_densities: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Viterbi: the most probable path, as states of rows (N,), and its log p(y, z), (B,).

    delta_t(j) = b_t(j) max_i delta_{t-1}(i) A(i, j); from the last state back along the maximising i.
    """
    logs = transitions.log()
    origins = torch.zeros(log_densities.shape, dtype=torch.long, device=log_densities.device)
    deltas = torch.full_like(log_densities, -math.inf)
    deltas[0] = delta = initial.log() + log_densities[0]
    for t in range(1, len(log_densities)):
        n = layout.running[t]
        best, origins[t, :n] = (delta[:n, :, None] + logs).max(1)
        deltas[t, :n] = delta = best + log_densities[t, :n]
    states = deltas.argmax(-1)  # right at the last step of each sequence
    for t in range(len(log_densities) - 2, -1, -1):
        n = layout.running[t + 1]
        states[t, :n] = origins[t + 1, :n].gather(-1, states[t + 1, :n, None])[:, 0]
    return layout.rows(states), layout.last(deltas).amax(-1)
