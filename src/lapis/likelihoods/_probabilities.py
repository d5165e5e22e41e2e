"""Signs that a network's outputs are probabilities already, where a likelihood takes logits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

SHAPE_NODES = ("View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze", "Transpose", "Permute", "Clone", "Alias")
"""Nodes of autograd's graph that change the layout only, not the values."""

SUM_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
"""How far a sum of float probabilities may be from one; 1e-2 for shorter floats."""

MANY, NEAR = 50, 0.02
"""So many numbers in [0, 1], the lowest and the highest this near to 0 and 1, look like a sigmoid's: logits of unlucky
mean and spread look so in at most 2 of 100 cases."""


def final_function(f: Tensor) -> Literal["softmax", "sigmoid"] | None:
    """The softmax or sigmoid that computed f last, if autograd's graph is at hand and shows one."""
    node = f.grad_fn
    while node is not None:
        name = type(node).__name__.removesuffix("Backward0").removesuffix("Backward1")
        if name in ("Softmax", "Sigmoid"):
            return "softmax" if name == "Softmax" else "sigmoid"
        if name not in SHAPE_NODES:
            return None
        node = node.next_functions[0][0]
    return None


def sum_to_one(f: Tensor) -> bool:
    """Whether every row of f (B, T, C) is non-negative and sums to one within rounding, and not all rows are alike."""
    rows = f.detach().flatten(0, -2)
    if not len(rows) or bool((rows < 0).any()) or bool((rows == rows[:1]).all()):
        return False
    error = (rows.double().sum(-1) - 1).abs().max()
    return bool(error <= SUM_ROUNDING.get(f.dtype, 1e-2))


def fill_unit_interval(f: Tensor) -> bool:
    """Whether f holds many numbers, all in [0, 1], that come near to both ends."""
    if f.numel() < MANY:
        return False
    lowest, highest = map(float, f.detach().aminmax())
    return 0 <= lowest <= NEAR and 1 - NEAR <= highest <= 1
