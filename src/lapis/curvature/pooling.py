"""Max pooling as maxima of shifted views: the same values as torch's, about ten times as quick on the processor.

torch's own kernel for contiguous images walks through every window alone, and keeps track of where the maximum was,
which a pass without gradients has no use for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class QuickPooling(TorchFunctionMode):
    """While it is entered, plain max pooling of images that no gradient is recorded of is done by shifted views."""

    used = False
    """Whether there was any."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.max_pool2d:
            pooled = quickly_pooled(*args, **(kwargs or {}))
            if pooled is not None:
                self.used = True
                return pooled
        return func(*args, **(kwargs or {}))


def quickly_pooled(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """The pooled images, or None where a window is not a plain one."""
    plain = _pair(padding) == (0, 0) and _pair(dilation) == (1, 1) and not ceil_mode and not return_indices
    recorded = torch.is_grad_enabled() and input.requires_grad
    if not plain or recorded or type(input) is not Tensor or input.device.type != "cpu" or not input.is_contiguous():
        return None
    for axis, size, step in zip((-2, -1), _pair(kernel_size), _pair(stride or kernel_size), strict=True):
        count = (input.shape[axis] - size) // step + 1
        if count < 1:
            return None
        views = [input.narrow(axis, first, (count - 1) * step + 1) for first in range(size)]
        views = [view[..., ::step, :] if axis == -2 else view[..., ::step] for view in views]
        input = views[0]
        for view in views[1:]:
            input = torch.maximum(input, view)
    return input


def _pair(value: Any) -> tuple[int, int]:
    one, two = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value, value)
    return one, two
