"""Checks of a network's outputs (B, T, C), and of curvatures, for fits and predictions.

Callers add the batch (`batches.naming`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lapis.batches import all_finite
from lapis.errors import ModelError, check_fits

FACTOR_COPIES = 2
"""Arrays of the factors' size in memory while they are computed."""


def check_finite(f: Tensor) -> None:
    """Raise ModelError on NaN or infinity."""
    if not all_finite(f):
        raise ModelError(
            "The network's outputs are not finite",
            expected="finite outputs",
            got=f"NaN or infinity, first for example {int((~torch.isfinite(f)).flatten(1).any(1).nonzero()[0])}",
            do="check the inputs' scale and the weights",
        )


def check_spread(spread: Tensor) -> None:
    """Raise ModelError on NaN or infinity in the (co)variances of outputs, which have one example a row."""
    if not all_finite(spread):
        example = int((~torch.isfinite(spread)).flatten(1).any(1).nonzero()[0])
        raise ModelError(
            "The variance of the network's outputs is not finite",
            expected=f"derivatives in the weights that are finite, and variances within {spread.dtype}",
            got=f"NaN or infinity, first in row {example}",
            do="leave out inputs at which a root or a norm in the network has no derivative, or rescale the inputs",
        )


def curvature_not_finite(dtype: torch.dtype, labels: Sequence[str]) -> ModelError:
    """The error for a curvature with NaN or infinity for these weights."""
    return ModelError(
        "The curvature is not finite: it overflows, or the network has no derivative at some input",
        expected=f"finite sums over the data in {dtype}",
        got=f"NaN or infinity for {', '.join(map(repr, labels[:3]))}",
        do="rescale the inputs (mean 0, standard deviation 1)"
        + ("" if dtype == torch.float64 else ", use float64: model.double()")
        + ", or leave out inputs at which a root or a norm in the network has no derivative",
    )


def check_width(f: Tensor, outputs: int) -> None:
    """Raise ModelError if the number of outputs C differs from that of the fit; 0 if the fit has not seen any."""
    if outputs and f.shape[-1] != outputs:
        raise ModelError(
            "The network's outputs have another width",
            expected=f"{outputs} outputs",
            got=f"{f.shape[-1]}",
            do="pass inputs of the shape that the posterior was fitted with",
        )


def check_factors(f: Tensor, memory: int, remedy: str) -> None:
    """Raise MemoryBudgetError if factors S (B, T, C, C) of outputs f, in float64, do not fit in `memory` bytes."""
    needed = FACTOR_COPIES * 8 * f.numel() * f.shape[-1]
    check_fits(
        needed,
        memory,
        f"The likelihood's curvature in {f.shape[-1]:,} outputs at {f.shape[:2].numel():,} positions does not fit",
        do=f"use {remedy}, or a larger memory_budget",
    )


def check_outputs(f: Tensor, outputs: int) -> None:
    """`check_finite` and `check_width`, for outputs that do not come from a tape, which checks finiteness itself."""
    check_finite(f)
    check_width(f, outputs)
