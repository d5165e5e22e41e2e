"""J diag(variance) J'^T between the examples of two batches, from their contributions to one site.

Of a layer that acts once an example J is never formed: its kernel is sum_o g_o g'_o (sum_i v_oi a_i a'_i).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lapis.curvature.backward.contributions import CHUNK_BYTES, Contribution, Lookup, Outer


def between(left: Contribution, right: Contribution, variance: Tensor) -> Tensor:
    """J diag(variance) J'^T, (B, M, B', M'), for a variance of each weight of the site, (*site.shape)."""
    if isinstance(left, Lookup) and isinstance(right, Lookup):
        left, right = left.as_outer(), right.as_outer()
    if not isinstance(left, Outer) or not isinstance(right, Outer):
        return _of_rows(left.rows(), right.rows(), variance)
    if left.g.shape[3] == right.g.shape[3] == 1:
        return _of_vectors(left, right, variance)
    return _of_positions(left, right, variance)


def _of_rows(left: Tensor, right: Tensor, variance: Tensor) -> Tensor:
    """From J (M, B, entries) and J'."""
    one, two = (rows.transpose(0, 1).flatten(0, 1) for rows in (left, right))
    flat = (one * variance.reshape(-1)) @ two.mT
    return flat.reshape(left.shape[1], left.shape[0], right.shape[1], right.shape[0])


def _of_positions(left: Outer, right: Outer, variance: Tensor) -> Tensor:
    """For weights shared by several positions: J is formed, for a few of the layer's outputs at a time."""
    groups, seeds, batch, _, outputs = left.g.shape
    others, examples = right.g.shape[1:3]
    total = left.g.new_zeros(batch * seeds, examples * others)
    step = max(1, CHUNK_BYTES // (left.g.element_size() * max(total.shape) * groups * variance.shape[-1]))
    for o in range(0, outputs, step):
        some = slice(o, o + step)
        down = _rows_of(left, some)
        across = down if right is left else _rows_of(right, some)
        total.addmm_(down * variance[:, some].reshape(-1), across.mT)
    return total.reshape(batch, seeds, examples, others)


def _rows_of(contribution: Outer, outputs: slice) -> Tensor:
    """J of some of the layer's outputs, (B M, K o I)."""
    return replace(contribution, g=contribution.g[..., outputs]).rows().transpose(0, 1).flatten(0, 1)


def _of_vectors(left: Outer, right: Outer, variance: Tensor) -> Tensor:
    """For one position, without forming J."""
    groups, seeds, batch, _, outputs = left.g.shape
    others, examples = right.g.shape[1:3]
    total = left.g.new_zeros(batch, seeds, examples, others)
    step = max(1, CHUNK_BYTES // (left.g.element_size() * batch * examples))
    for group in range(groups):
        a, b = left.inputs()[group, :, 0], right.inputs()[group, :, 0]
        for o in range(0, outputs, step):
            some = slice(o, o + step)
            v = variance[group, some]
            inner = (a * v[:, None, : a.shape[-1]]) @ b.mT
            if left.bias:
                inner += v[:, -1, None, None]
            _add_pairs(total, inner, left.g[group, :, :, 0, some], right.g[group, :, :, 0, some])
    return total


def _add_pairs(total: Tensor, inner: Tensor, left: Tensor, right: Tensor) -> None:
    """Add sum_o inner[o, b, b'] left[m, b, o] right[m', b', o] to `total` (B, M, B', M')."""
    across = right.permute(2, 1, 0)  # (O, B', M')
    step = max(1, CHUNK_BYTES // (across.element_size() * max(1, across.numel())))
    for b in range(0, len(total), step):
        some = slice(b, b + step)
        weighted = inner[:, some].transpose(0, 1)[..., None] * across  # (b, O, B', M')
        total[some] += torch.bmm(left[:, some].transpose(0, 1), weighted.flatten(2)).reshape(total[some].shape)
