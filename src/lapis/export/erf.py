"""The error function by multiplications and exponentials: runtimes of ONNX have none for numbers in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.polynomial import chebyshev
from scipy.special import erfcx
from torch import Tensor

DEGREE = 28
"""Of the polynomial below; its error is that of rounding."""

COEFFICIENTS: tuple[float, ...] = tuple(
    chebyshev.chebinterpolate(lambda u: np.log(erfcx(4 / (u + 1) - 2) * 2 / (u + 1)), DEGREE).tolist()
)


def erf(x: Tensor) -> Tensor:
    """2 / sqrt(pi) times the integral of exp(-s^2) from 0 to x.

    1 - erf(z) = t exp(-z^2 + P(2 t - 1)) for z >= 0 and t = 2 / (2 + z), where P(u) = log(exp(z^2) (1 - erf(z)) / t) is
    smooth on all of its interval, and so a short Chebyshev series.

    >>> x = torch.linspace(-7, 7, 999).double()
    >>> float((erf(x) - x.erf()).abs().max()) < 1e-14
    True
    """
    z = x.abs()
    t = 2 / (2 + z)
    u = 2 * (2 * t - 1)
    one, two = torch.zeros_like(z), torch.zeros_like(z)
    for coefficient in COEFFICIENTS[:0:-1]:  # Clenshaw's recurrence
        one, two = u * one - two + coefficient, one
    rest = t * torch.exp(-z * z + (0.5 * u * one - two + COEFFICIENTS[0]))
    return torch.where(x < 0, rest - 1, 1 - rest)


def gelu(x: Tensor, *, approximate: str = "none") -> Any:
    """x Phi(x), or left to torch's own rule where it is the approximation by tanh."""
    return NotImplemented if approximate != "none" else x * 0.5 * (1 + erf(x / math.sqrt(2)))


def gelu_backward(gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Any:
    """gradient times Phi(x) + x phi(x)."""
    if approximate != "none":
        return NotImplemented
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return gradient * (0.5 * (1 + erf(x / math.sqrt(2))) + x * density)


def in_double(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule for tensors in float64; all others stay as they are."""

    def chosen(*args: Any, **options: Any) -> Any:
        return rule(*args, **options) if args[0].dtype == torch.float64 else NotImplemented

    return chosen


RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.erf.default: in_double(erf),
    torch.ops.aten.gelu.default: in_double(gelu),
    torch.ops.aten.gelu_backward.default: in_double(gelu_backward),
}
