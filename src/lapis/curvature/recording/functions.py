"""The table of torch functions that have a rule, with their signatures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lapis.curvature.recording import layers
from lapis.curvature.recording.layers import Rule

REQUIRED = object()
"""Stands for the default of an argument that has none."""

LINEAR = {"input": REQUIRED, "weight": REQUIRED, "bias": None}
PRODUCT = {"input": REQUIRED, "weight": REQUIRED}
BIASED_PRODUCT = {"bias": REQUIRED, "input": REQUIRED, "weight": REQUIRED}
CONVOLUTION = LINEAR | {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
TRANSPOSED = LINEAR | {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
EMBEDDING = PRODUCT | {
    "padding_idx": None,
    "max_norm": None,
    "norm_type": 2.0,
    "scale_grad_by_freq": False,
    "sparse": False,
}
RUNNING = {"input": REQUIRED, "running_mean": None, "running_var": None, "weight": None, "bias": None}
BATCH_NORM = RUNNING | {"training": False, "momentum": 0.1, "eps": 1e-5}
INSTANCE_NORM = RUNNING | {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5}
GROUP_NORM = {"input": REQUIRED, "num_groups": REQUIRED, "weight": None, "bias": None, "eps": 1e-5}
LAYER_NORM = {"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "bias": None, "eps": 1e-5}
RMS_NORM = {"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "eps": None}
PAIR = {"input": REQUIRED, "other": REQUIRED}
EXPAND = {"input": REQUIRED}

Signature = dict[str, Any]

_ENTRIES: list[tuple[Any, Signature, Rule]] = [
    (F.linear, LINEAR, layers.linear),
    (torch.matmul, PRODUCT, layers.matmul),
    (torch.Tensor.matmul, PRODUCT, layers.matmul),
    (torch.mm, PRODUCT, layers.matmul),
    (torch.addmm, BIASED_PRODUCT, layers.matmul),
    (F.conv1d, CONVOLUTION, layers.convolution),
    (F.conv2d, CONVOLUTION, layers.convolution),
    (F.conv3d, CONVOLUTION, layers.convolution),
    (F.conv_transpose1d, TRANSPOSED, layers.transposed_convolution),
    (F.conv_transpose2d, TRANSPOSED, layers.transposed_convolution),
    (F.conv_transpose3d, TRANSPOSED, layers.transposed_convolution),
    (F.embedding, EMBEDDING, layers.embedding),
    (F.batch_norm, BATCH_NORM, layers.channel_norm),
    (F.instance_norm, INSTANCE_NORM, layers.channel_norm),
    (F.group_norm, GROUP_NORM, layers.channel_norm),
    (F.layer_norm, LAYER_NORM, layers.layer_norm),
    (F.rms_norm, RMS_NORM, layers.layer_norm),
    (torch.add, PAIR, layers.broadcast),
    (torch.Tensor.add, PAIR, layers.broadcast),
    (torch.Tensor.add_, PAIR, layers.broadcast),
    (torch.mul, PAIR, layers.broadcast),
    (torch.Tensor.mul, PAIR, layers.broadcast),
    (torch.Tensor.expand, EXPAND, layers.broadcast),
]

RULES: dict[Any, tuple[Signature, Rule]] = {function: (signature, rule) for function, signature, rule in _ENTRIES}
"""Function -> (its arguments in order with their defaults, the rule)."""


def bind(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with defaults; the operands of products, which torch names in several ways, are renamed."""
    bound = signature | dict(zip(signature, args, strict=False))
    if not kwargs:
        return bound
    renamed = {"other": "weight", "mat2": "weight", "mat1": "input"} if "other" not in signature else {}
    bound.update({renamed.get(name, name): value for name, value in kwargs.items()})
    return bound
