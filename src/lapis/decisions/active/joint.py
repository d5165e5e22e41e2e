"""Batch-aware choices: examples that say much *together*, where the best one by one would say the same thing twice.

Two forms of joint information about the weights, both greedy, which is within 1 - 1/e of the best set:

- Gaussian outputs: sum over the chosen of 1/2 log |I + S^T K S|, with K the covariance of the candidates' outputs given
  those chosen before. Conditioning on a chosen example i takes K - K_i S_i (I + S_i^T K_ii S_i)^-1 S_i^T K_i^T.
- Sampled classes: H(y_1, ..., y_n) - sum_i E[H(y_i | weights)], with the joint entropy over all configurations of
  classes while they are few, and over drawn ones afterwards (BatchBALD).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapis.decisions.active.criteria import gains

CONFIGURATIONS = 2_000
"""Joint outcomes of the chosen examples' classes that are enumerated; beyond, as many are drawn."""


def greedy_gaussian(joint: Tensor, roots: Tensor, n: int, by_variance: bool) -> list[int]:
    """n of B candidates, in the order chosen, for outputs with covariance `joint` (B T C, B T C), float64.

    Args:
        joint: it is overwritten.
        roots: S of each candidate's positions, (B, T, C, R).
        n: how many.
        by_variance: choose the largest remaining variance of outputs instead of the largest gain of information.
    """
    count, positions, outputs, rank = roots.shape
    width = positions * outputs
    wide = torch.zeros(count, positions, outputs, positions, rank, dtype=roots.dtype, device=roots.device)
    index = torch.arange(positions)
    wide[:, index, :, index, :] = roots.transpose(0, 1)
    root = wide.reshape(count, width, positions * rank)  # of all positions of an example at once
    eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    rows = torch.arange(count)
    left = torch.ones(count, dtype=torch.bool)
    chosen: list[int] = []
    for _ in range(n):
        blocks = joint.view(count, width, count, width)[rows, :, rows, :]
        values = blocks.diagonal(dim1=-2, dim2=-1).sum(-1) if by_variance else gains(blocks, root)
        best = int(torch.where(left.to(values.device), values, -torch.inf).argmax())
        chosen.append(best)
        left[best] = False
        seen = joint[:, best * width : (best + 1) * width] @ root[best]  # (B T C, R')
        inner = eye + root[best].mT @ seen[best * width : (best + 1) * width]
        joint.sub_(seen @ torch.linalg.solve(inner, seen.mT))
    return chosen


def greedy_classes(probs: Tensor, n: int, generator: torch.Generator) -> list[int]:
    """n of B candidates, in the order chosen, from class probabilities (S, B, C) of S equally likely networks."""
    networks, count, classes = probs.shape
    probs = probs.double()
    expected = -torch.xlogy(probs, probs).sum(-1).mean(0)  # E[H(y | weights)], (B,)
    configurations = probs.new_ones(1, networks)  # p(outcome of those chosen | network), one outcome a row
    weights = probs.new_ones(1)  # importance of each outcome: 1 where all are enumerated
    left = torch.ones(count, dtype=torch.bool)
    chosen: list[int] = []
    for _ in range(n):
        entropies = torch.stack(
            [
                _joint_entropy(configurations, weights, probs[:, i]) if left[i] else probs.new_tensor(-torch.inf)
                for i in range(count)
            ]
        )
        best = int((entropies - expected).argmax())
        chosen.append(best)
        left[best] = False
        grown = torch.einsum("ms,sc->mcs", configurations, probs[:, best]).reshape(-1, networks)
        if len(grown) <= CONFIGURATIONS:
            configurations, weights = grown, weights.repeat_interleave(classes)
            continue
        # outcomes drawn by their probability r_m = w_m p(outcome m); each then stands for its share of the mass
        mass = weights.repeat_interleave(classes) * grown.mean(1)
        picks = torch.multinomial(mass, CONFIGURATIONS, replacement=True, generator=generator)
        configurations = grown[picks]
        weights = mass.sum() / (CONFIGURATIONS * configurations.mean(1))
    return chosen


def _joint_entropy(configurations: Tensor, weights: Tensor, probs: Tensor) -> Tensor:
    """H of the outcomes of those chosen and of one more candidate, whose probabilities are (S, C)."""
    joint = configurations @ probs / probs.shape[0]  # p(outcome, class), (M, C)
    return -(weights[:, None] * torch.xlogy(joint, joint)).sum()
