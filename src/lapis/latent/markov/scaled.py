"""Sums over all paths of a Markov chain with probabilities scaled at each step: no logarithms inside the scan.

    alpha_t = p(z_t | y_1..t),   c_t alpha_t(j) = b_t(j) sum_i alpha_{t-1}(i) A(i, j)
    w_t(j)  = b_t(j) beta_t(j) / c_t,   beta_{t-1}(i) = sum_j A(i, j) w_t(j)
    p(z_t = j | y) = alpha_t(j) beta_t(j),   p(z_{t-1} = i, z_t = j | y) = alpha_{t-1}(i) A(i, j) w_t(j)

with b divided by its largest entry at each step. A number that underflows is off by less than `tiny`; this changes a
posterior probability by less than tiny times max(w) / min(c). Sequences with max(w) or 1 / min(c) above
eps / sqrt(tiny) are therefore told apart (`failed`): below it the change is less than eps^2, beyond it the sums belong
in log space.

Arrays are (T, K, B): operations along the short axis of states run over whole vectors of sequences. One such array is
all that is allocated, beside log densities that lie so, or as (K, T, B).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapis.latent.sequences import Layout


def scaled_paths(
    initial: Tensor, transitions: Tensor, log_densities: Tensor, layout: Layout, *, pairs: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """log p(y) (B,); p(z_t | y) (T, B, K), any values after the ends; expected steps from i to j (K, K); failed (B,).

    `log_densities` is (T, B, K), in the order of the layout; so are log p(y) and `failed`. It is used up: the scan
    works in its memory. Where any sequence failed, expected steps mean nothing.
    """
    densities = log_densities.mT if log_densities.stride(1) == 1 else log_densities.mT.contiguous()
    tops = densities.amax(1).clamp_min_(torch.finfo(densities.dtype).min)
    densities.sub_(tops[:, None]).exp_()
    alphas, scales = _forward(initial, transitions, densities, layout)
    counts = _backward(transitions, densities, alphas, scales, layout, pairs)
    limits = torch.finfo(densities.dtype)
    margin = limits.eps / limits.tiny**0.5
    held = (scales.amin(0) > 1 / margin) & (densities.amax((0, 1)) < margin)  # densities are w by now; NaN fails
    log_z = tops.double().sum(0) + scales.double().log_().sum(0)
    return log_z.to(densities.dtype), alphas.mT, counts, ~held


def _forward(initial: Tensor, transitions: Tensor, densities: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """alpha (T, K, B) and c (T, B), which is 1 after the ends."""
    alphas = torch.empty_like(densities)
    scales = densities.new_ones(len(densities), densities.shape[2])
    into = transitions.mT.contiguous()
    before = initial[:, None]
    for t, (alpha, density, scale) in enumerate(_steps(layout, alphas, densities, scales)):
        if t == 0:
            torch.mul(before, density, out=alpha)
        else:
            torch.mm(into, before[:, : len(scale)], out=alpha).mul_(density)
        torch.sum(alpha, 0, out=scale)
        before = alpha.div_(scale)
    return alphas, scales


def _backward(
    transitions: Tensor, densities: Tensor, alphas: Tensor, scales: Tensor, layout: Layout, pairs: bool
) -> Tensor | None:
    """Turn alpha into p(z_t | y) and densities into w, in place; the expected steps from i to j, (K, K).

    Each step divides w by the sum of alpha beta, which is 1 but for rounding: else that would grow with the length.
    """
    densities.div_(scales[:, None])
    counts = torch.zeros_like(transitions)
    beta = torch.ones_like(densities[0])
    steps = _steps(layout, alphas, densities)
    for t in range(len(steps) - 1, -1, -1):
        state, w = steps[t]
        ahead = beta[:, : w.shape[1]]
        w.mul_(ahead).div_(state.mul_(ahead).sum(0))
        if t > 0:
            torch.mm(transitions, w, out=ahead)
            if pairs:
                counts.addmm_(steps[t - 1][0][:, : w.shape[1]], w.mT)
    return counts * transitions if pairs else None


def _steps(layout: Layout, *arrays: Tensor) -> list[tuple[Tensor, ...]]:
    """At each step the running sequences' part of every array (T, ..., B); views, made at once because each costs."""
    steps = list(zip(*(array.unbind() for array in arrays), strict=True))
    if layout.equal:
        return steps
    return [tuple(part[..., :n] for part in step) for n, step in zip(layout.running, steps, strict=True)]
