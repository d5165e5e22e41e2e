"""Rules for layers: how a weight's gradient follows from the layer's input and the gradient at its output.

Torch functions are recorded, not modules, so a rule holds however a weight is used: through its module, through
`F.linear(x, layer.weight)`, tied, or packed in attention. A rule turns a recorded call into `Use`s; each use knows its
slots, and turns raw gradients at the output, (M, *output), into the arrays of `contributions`. A rule that cannot
interpret a call returns no uses; the weights concerned then take the general per-example rule, slower and exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapis.curvature.recording.batch_axis import BatchAxis
from lapis.curvature.recording.patches import (
    KernelGradients,
    PatchMoment,
    count,
    patches,
    rows_overlap,
    transposed_patches,
)
from lapis.curvature.recording.sites import Slot


@dataclass(frozen=True)
class Call:
    """A recorded function call with a chosen weight among its arguments."""

    function: Callable[..., Any]
    rule: Rule
    arguments: dict[str, Any]
    slots: dict[str, Slot]
    """Argument name -> the slot of the chosen weights that it holds."""
    output_shape: torch.Size
    edge: Any
    """Autograd's edge at the output: gradients can be taken with respect to it even after in-place changes."""
    probe: Tensor
    """The input (or output) along one of whose axes the examples lie; which, is found by comparing two batch sizes."""

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The function and the weights it took; the same in every batch."""
        return (self.function, tuple((name, slot.rows) for name, slot in self.slots.items()))


@dataclass(frozen=True)
class OuterUse:
    """A linear map: `inputs()` gives (K, B, T, I), `gradient(raw)` gives (K, M, B, T, O)."""

    weight: Slot | None
    bias: Slot | None
    inputs: Callable[[], Tensor]
    gradient: Callable[[Tensor], Tensor]
    moment: PatchMoment | None = None
    """The sum of a a^T over the inputs a, where it is faster without forming them."""
    kernels: KernelGradients | None = None
    """Gradients of the weight for each example, where they are faster without forming the inputs."""


@dataclass(frozen=True)
class LookupUse:
    """An embedding: `index` (B, T) into `entries` rows; `gradient(raw)` gives (M, B, O, T)."""

    weight: Slot
    index: Tensor
    gradient: Callable[[Tensor], Tensor]
    entries: int
    padding: int | None
    bias: Slot | None = None


@dataclass(frozen=True)
class RowsUse:
    """`rows(raw)` gives (M, B, entries)."""

    weight: Slot
    rows: Callable[[Tensor], Tensor]
    bias: Slot | None = None


Use = OuterUse | LookupUse | RowsUse
Rule = Callable[[Call, BatchAxis], list[Use]]


@cache
def vector_slot(slot: Slot) -> Slot:
    """A slot as a column of outputs: (groups, outputs) flattened to (1, outputs, 1)."""
    return replace(slot, view=(slot.size,), axes=(0,), shape=(1, slot.size, 1))


# linear maps ---------------------------------------------------------------------------------------


def _positions(tensor: Tensor, axis: BatchAxis, lead: int) -> Tensor:
    """(*lead, ..., features) -> (*lead, B, T, features)."""
    fronted = axis.front(tensor, lead)
    return fronted.flatten(lead + 1, -2) if fronted.dim() > lead + 2 else fronted.unsqueeze(lead + 1)


def _linear_map(x: Tensor, weight: Slot | None, bias: Slot | None, axis: BatchAxis) -> list[Use]:
    return [
        OuterUse(
            weight,
            None if bias is None else vector_slot(bias),
            lambda: _positions(x, axis, 0)[None],
            lambda raw: _positions(raw, axis, 1)[None],
        )
    ]


@cache
def _matrix(slot: Slot, shape: torch.Size, transposed: bool) -> Slot:
    """A two-dimensional weight as (1, outputs, inputs); `transposed` when it is stored (inputs, outputs)."""
    rows, columns = shape
    if transposed:
        return replace(slot, view=(rows, columns), axes=(1, 0), shape=(1, columns, rows))
    return replace(slot, view=(rows, columns), axes=(0, 1), shape=(1, rows, columns))


def linear(call: Call, axis: BatchAxis) -> list[Use]:
    weight = call.slots.get("weight")
    if weight is not None:
        weight = _matrix(weight, call.arguments["weight"].shape, transposed=False)
    return _linear_map(call.arguments["input"], weight, call.slots.get("bias"), axis)


def matmul(call: Call, axis: BatchAxis) -> list[Use]:
    """x @ W with a weight on the right, and addmm(bias, x, W)."""
    x, weight = call.arguments["input"], call.arguments["weight"]
    slot = call.slots.get("weight")
    if "input" in call.slots or x.dim() < 2 or weight.dim() != 2 or call.arguments.get("beta", 1) != 1:
        return []
    bias = call.slots.get("bias")
    if bias is not None and call.arguments["bias"].shape != (weight.shape[1],):
        return []
    if slot is not None:
        slot = _matrix(slot, weight.shape, transposed=True)
    return _linear_map(x, slot, bias, axis)


# convolutions --------------------------------------------------------------------------------------


def _convolution(call: Call, axis: BatchAxis, transposed: bool) -> list[Use]:
    x, weight, groups = call.arguments["input"], call.arguments["weight"], call.arguments["groups"]
    if axis.dim != 0 or x.dim() != weight.dim():
        return []
    kernel = tuple(weight.shape[2:])
    slot = call.slots.get("weight")
    if slot is not None and (slot.start, slot.stop) != (0, weight.shape[0]):
        return []
    if transposed:
        per_group, outputs = weight.shape[0] // groups, weight.shape[1]
        view, axes = (groups, per_group, outputs, count(kernel)), (0, 2, 1, 3)
    else:
        per_group, outputs = weight.shape[1], weight.shape[0] // groups
        view, axes = (groups, outputs, per_group, count(kernel)), (0, 1, 2, 3)
    if slot is not None:
        slot = replace(slot, view=view, axes=axes, shape=(groups, outputs, per_group * count(kernel)))
    bias = call.slots.get("bias")
    if bias is not None:
        bias = replace(bias, view=(groups, outputs, 1), axes=(0, 1, 2), shape=(groups, outputs, 1))
    unfold = transposed_patches if transposed else patches
    overlapping = not transposed and rows_overlap(x, kernel, call.arguments)

    def inputs() -> Tensor:
        a = unfold(x, kernel, call.arguments, groups)
        return a if axis.trivial else axis.unfold(a, 1).flatten(2, 4)  # frames of an example are positions too

    def gradient(raw: Tensor) -> Tensor:
        g = raw.reshape(*raw.shape[:2], groups, outputs, -1).permute(2, 0, 1, 4, 3)
        return g if axis.trivial else axis.unfold(g, 2).flatten(3, 5)

    moment = PatchMoment(x, kernel, call.arguments, groups) if overlapping else None
    direct = not transposed and axis.trivial and KernelGradients.possible(x, weight, call.arguments)
    kernels = KernelGradients(x, weight, call.arguments, groups) if direct else None
    return [OuterUse(slot, bias, inputs, gradient, moment, kernels)]


def convolution(call: Call, axis: BatchAxis) -> list[Use]:
    return _convolution(call, axis, transposed=False)


def transposed_convolution(call: Call, axis: BatchAxis) -> list[Use]:
    return _convolution(call, axis, transposed=True)


# look-ups, norms, broadcasts -----------------------------------------------------------------------


def embedding(call: Call, axis: BatchAxis) -> list[Use]:
    arguments = call.arguments
    if arguments["max_norm"] is not None or arguments["scale_grad_by_freq"] or "weight" not in call.slots:
        return []
    entries = arguments["weight"].shape[0]
    padding = arguments["padding_idx"]
    index = axis.front(arguments["input"])
    slot = _matrix(call.slots["weight"], arguments["weight"].shape, transposed=True)
    index = index.flatten(1) if index.dim() > 1 else index[:, None]
    return [
        LookupUse(
            slot,
            index,
            lambda raw: _positions(raw, axis, 1).mT,
            entries,
            None if padding is None else padding % entries,
        )
    ]


def _broadcast_rows(slot: Slot, shape: torch.Size, axis: BatchAxis, factor: Callable[[], Tensor] | None) -> RowsUse:
    """A parameter of `shape`, broadcast against the output and multiplied there by `factor` (or one)."""

    def rows(raw: Tensor) -> Tensor:
        product = raw if factor is None else raw * factor()
        aligned = (1,) * (product.dim() - 1 - len(shape)) + tuple(shape)
        kept = (*aligned[: axis.dim], 1, 1, *aligned[axis.dim + 1 :])
        summed = [2 + dim for dim, length in enumerate(kept) if length == 1]
        return axis.unfold(product, 1).sum(summed).reshape(*product.shape[:1], -1, count(shape))

    entries = count(shape)
    return RowsUse(replace(slot, view=(entries,), axes=(0,), shape=(entries,)), rows)


_PRODUCTS = (torch.mul, torch.Tensor.mul)


def broadcast(call: Call, axis: BatchAxis) -> list[Use]:
    """x + w, x * w and w.expand(...), w broadcast over the examples."""
    uses: list[Use] = []
    if call.arguments.get("alpha", 1) != 1 or call.probe.shape != call.output_shape:
        return []
    for name, slot in call.slots.items():
        shape = call.arguments[name].shape
        own_dim = axis.dim - (len(call.output_shape) - len(shape))  # the parameter's axis along the examples
        if own_dim >= 0 and shape[own_dim] != 1:
            return []
        uses.append(_broadcast_rows(slot, shape, axis, call.probe.detach if call.function in _PRODUCTS else None))
    return uses if len(uses) == 1 else []


def _norm(call: Call, axis: BatchAxis, trailing: int) -> list[Use]:
    """Weights multiply the normalised input; `trailing` axes of length one follow them."""
    statistics = _batch_statistics(call)

    @cache
    def normalised() -> Tensor:
        bare: dict[str, Any] = {name: None for name in ("weight", "bias") if name in call.arguments}
        if statistics is not None:
            mean, inverse = statistics
            variance = inverse**-2 - call.arguments["eps"]
            bare |= {"training": False, "running_mean": mean, "running_var": variance}
        elif call.arguments.get("training") or call.arguments.get("use_input_stats"):
            bare |= {"running_mean": None, "running_var": None}  # statistics of the batch; running ones are not moved
        with torch.no_grad():
            found: Tensor = call.function(**{**call.arguments, **bare})
        return found

    uses: list[Use] = []
    for name, slot in call.slots.items():
        shape = torch.Size((*call.arguments[name].shape, *(1,) * trailing))
        use = _broadcast_rows(slot, shape, axis, normalised if name == "weight" else None)
        if name == "weight" and statistics is not None and axis.trivial and trailing:
            use = replace(use, rows=partial(_channel_rows, call, statistics, use.rows))
        uses.append(use)
    return uses


def _batch_statistics(call: Call) -> tuple[Tensor, Tensor] | None:
    """The mean and 1 / deviation of each channel that batch norm has normalised by; None for other norms."""
    arguments, node = call.arguments, call.edge.node
    if call.function is not F.batch_norm:
        return None
    if not arguments["training"]:
        return arguments["running_mean"], (arguments["running_var"] + arguments["eps"]).rsqrt()
    if type(node).__name__ != "NativeBatchNormBackward0":
        return None
    try:
        return node._saved_result1, node._saved_result2
    except RuntimeError:  # the graph has been freed
        return None


def _channel_rows(
    call: Call, statistics: tuple[Tensor, Tensor], plain: Callable[[Tensor], Tensor], raw: Tensor
) -> Tensor:
    """sum over positions of g (x - mean) / deviation, (M, B, C), by torch's own pass over g and x.

    To batch norm with one example of B x C channels these are the weight's gradients; nothing as large as x is written.
    """
    x = call.arguments["input"].detach()
    if raw.requires_grad or raw.dtype != x.dtype or x.dtype not in (torch.float32, torch.float64):
        return plain(raw)
    batch, channels = x.shape[:2]
    mean, inverse = (each.to(x.dtype).repeat(batch) for each in statistics)
    flat = (1, batch * channels, *x.shape[2:])
    found = [
        torch.ops.aten.native_batch_norm_backward(
            seed.reshape(flat), x.reshape(flat), None, None, None, mean, inverse, True, call.arguments["eps"],
            [False, True, False],
        )[1].view(batch, channels)
        for seed in raw
    ]  # fmt: skip
    return torch.stack(found)


def channel_norm(call: Call, axis: BatchAxis) -> list[Use]:
    """Batch, group and instance norm: weights along axis 1."""
    return _norm(call, axis, call.probe.dim() - 2) if axis.dim == 0 else []


def layer_norm(call: Call, axis: BatchAxis) -> list[Use]:
    """Layer and root-mean-square norm: weights over the last axes."""
    return _norm(call, axis, 0)
