"""Convolutions whose weight gradient is the sum of the examples' own gradients, where these are computed anyway.

VOGN needs sum_i g_i^2 of a kernel. Gradients g_i one by one cost as much as their sum, so autograd need not compute the
sum again: a hook before a convolution's backward pass leaves it (`offer`), and the backward pass takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from lapis.curvature.recording.functions import RULES, bind
from lapis.curvature.recording.patches import KernelGradients, convolution_options

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


class _Convolution(Function):
    """torch's convolution, with a weight gradient that may be offered from outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.bias, ctx.offered = options, None if bias is None else list(bias.shape), None
        stride, padding, dilation, groups = options
        found: Tensor = torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.options
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        offered, ctx.offered = ctx.offered, None
        if torch.is_grad_enabled():  # the gradient is to be differentiated: an offer has no graph
            offered = None
        mask = [needs_x, needs_weight and offered is None, needs_bias]
        of_x, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient, x, weight, ctx.bias, stride, padding, dilation, False, [0] * len(stride), groups, mask
        )
        return of_x, of_weight if offered is None else offered.reshape(weight.shape), of_bias, None


def with_offers(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """func(*args, **kwargs); a convolution by trainable weights will take a weight gradient that is offered to it."""
    if func in CONVOLUTIONS and torch.is_grad_enabled():
        arguments = bind(RULES[func][0], args, kwargs)
        x, weight, bias = (arguments[name] for name in ("input", "weight", "bias"))
        if _plain(x, weight, bias) and KernelGradients.possible(x, weight, arguments):
            options = (*convolution_options(tuple(weight.shape[2:]), arguments), arguments["groups"])
            return _Convolution.apply(x, weight, bias, options)  # type: ignore[no-untyped-call]
    return func(*args, **kwargs)


def _plain(x: Any, weight: Any, bias: Any) -> bool:
    """Whether torch would compute in the tensors' own precision, on a batch of images."""
    tensors = [each for each in (x, weight, bias) if each is not None]
    return (
        all(isinstance(each, Tensor) and each.dtype == weight.dtype for each in tensors)
        and weight.requires_grad
        and weight.dtype in (torch.float32, torch.float64)
        and x.dim() == weight.dim()
        and not torch.is_autocast_enabled(x.device.type)
    )


def takes_offer(node: Any) -> bool:
    """Whether this is the backward pass of a convolution that waits for its weight gradient."""
    return isinstance(node, _Convolution._backward_cls)


def offer(node: Any, gradient: Tensor) -> None:
    """The weight gradient that the node's next backward pass is to return."""
    node.offered = gradient
