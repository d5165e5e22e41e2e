"""Chains: networks in which matrix products follow each other with nothing but elementwise functions between them.

So are multilayer perceptrons. Many seeds go back along a chain by one product and one multiplication in place a layer,
which takes half the memory of sending them through autograd together. Whether a network is a chain is read off the
graph of each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapis.curvature.layers import Call

ELEMENTWISE = frozenset(
    f"{name}Backward0"
    for name in (
        "Celu", "Elu", "Gelu", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu", "LogSigmoid", "Mish", "Relu",
        "Sigmoid", "Silu", "Sin", "Softplus", "Tanh",
    )
)  # fmt: skip
"""Autograd's names for functions of one tensor, entry by entry."""

RESHAPES = frozenset(f"{name}Backward0" for name in ("ReshapeAlias", "Squeeze", "Unsqueeze", "UnsafeView", "View"))
"""And for those that keep all entries in their order."""

PRODUCTS = {"AddmmBackward0": 1, "MmBackward0": 0}
"""And for matrix products, with the place of their left factor among what they took."""


class Step(NamedTuple):
    """The output of one product, and what lies between it and the output of the one before."""

    call: int | None
    """Which of the calls it is; None for weights that nobody asks about."""
    matrix: Tensor | None = None
    """The weights (O, I); None where nobody asks about anything before them."""
    slope: Tensor | None = None
    """The derivative of what comes between, (B, I); None where nothing does."""


@torch.no_grad()
def find_chain(f: Tensor, calls: Sequence[Call]) -> list[Step] | None:
    """From the outputs f back to the first of the calls; None where their graph is no chain."""
    places = {call.edge.node: place for place, call in enumerate(calls)}
    node: Any = f.grad_fn
    while node is not None and node.name() in RESHAPES:
        ((node, _),) = node.next_functions
    chain: list[Step] = []
    rows = 0
    while node is not None and node.name() in PRODUCTS:
        call = places.pop(node, None)
        if not places:
            return [*chain, Step(call)]
        others = list(node.next_functions)
        before, _ = others.pop(PRODUCTS[node.name()])
        scaled = getattr(node, "_saved_alpha", 1) != 1
        if before is None or scaled or not all(_is_leaf(other) for other, _ in others):
            return None
        matrix, slope, node = node._saved_mat2.mT, None, before
        rows = rows or f.numel() // matrix.shape[0]
        while node is not None and node.name() in ELEMENTWISE:
            slope = node(f.new_ones(()).expand(rows, matrix.shape[1]) if slope is None else slope)
            ((node, _),) = node.next_functions
        chain.append(Step(call, matrix, slope))
    return None


@torch.no_grad()
def send_back(chain: list[Step], seeds: Tensor) -> list[Tensor]:
    """Gradients of sum(seed * f) at the calls' outputs, seed after seed, in the calls' order. `seeds`: (M, ...)."""
    found: dict[int, Tensor] = {}
    g = seeds
    for call, matrix, slope in chain:
        if call is not None:
            found[call] = g
        if matrix is not None:
            g = g.reshape(-1, matrix.shape[0]) @ matrix
        if slope is not None:
            g.view(-1, *slope.shape).mul_(slope)
    return [found[call] for call in sorted(found)]


def _is_leaf(node: Any) -> bool:
    """Whether no more than a transposition lies between a weight, or a constant, and its use."""
    if node is not None and node.name() == "TBackward0":
        ((node, _),) = node.next_functions
    return node is None or node.name() == "torch::autograd::AccumulateGrad"
