"""Inputs of convolutions as matrices: the image patch under each output position, and second moments of all patches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lapis.proofs import close

PATCH_MOMENTS = "moments of patches that share their rows"
GROUPED_GRADIENTS = "gradients of kernels by convolutions of as many groups as examples"

MANY_ROWS = 2
"""Output rows, as a multiple of the kernel's, from which `add_patch_moment` is faster than a product of patches."""


class Axis(NamedTuple):
    """How a kernel moves along one axis of the images."""

    kernel: int
    stride: int
    dilation: int
    before: int
    """Padding with zeros before the axis begins, and (`after`) after it ends."""
    after: int

    def positions(self, length: int) -> int:
        """Output positions along an axis of this length."""
        return (self.before + length + self.after - self.dilation * (self.kernel - 1) - 1) // self.stride + 1


def _axes(kernel: tuple[int, ...], arguments: dict[str, Any]) -> tuple[Axis, ...]:
    given = (arguments[name] for name in ("stride", "padding", "dilation"))
    return _resolved(kernel, *(tuple(each) if isinstance(each, list) else each for each in given))


@cache
def _resolved(kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any) -> tuple[Axis, ...]:
    n = len(kernel)
    stride, dilation = _tuple(stride, n), _tuple(dilation, n)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pads = [(t // 2, t - t // 2) for t in total]
    else:
        widths = (0,) * n if padding == "valid" else _tuple(padding, n)
        pads = [(w, w) for w in widths]
    return tuple(Axis(k, s, d, *pad) for k, s, d, pad in zip(kernel, stride, dilation, pads, strict=True))


def convolution_options(kernel: tuple[int, ...], arguments: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """Stride, padding (before the images) and dilation along each axis."""
    axes = _axes(kernel, arguments)
    return [axis.stride for axis in axes], [axis.before for axis in axes], [axis.dilation for axis in axes]


def patches(x: Tensor, kernel: tuple[int, ...], arguments: dict[str, Any], groups: int) -> Tensor:
    """The patch under each output position, (K, N, T, I) with I = (channels / K) * kernel.

    In memory positions come last and inputs first: sums over examples and positions then run along memory.
    """
    return _unfolded(x, _axes(kernel, arguments), groups).permute(0, 2, 3, 1)


def _unfolded(x: Tensor, axes: Sequence[Axis], groups: int) -> Tensor:
    """The same as (K, I, N, T): one copy of a view in which neighbouring patches share memory."""
    sizes = [axis.positions(length) for axis, length in zip(axes, x.shape[2:], strict=True)]
    if any(axis.before or axis.after for axis in axes):
        x = F.pad(x, [width for axis in reversed(axes) for width in (axis.before, axis.after)])
    image, channel, *steps = x.stride()
    taps = [step * axis.dilation for step, axis in zip(steps, axes, strict=True)]
    moves = [step * axis.stride for step, axis in zip(steps, axes, strict=True)]
    shape = (x.shape[1], *(axis.kernel for axis in axes), x.shape[0], *sizes)
    return x.as_strided(shape, (channel, *taps, image, *moves)).reshape(groups, -1, x.shape[0], count(sizes))


def transposed_patches(x: Tensor, kernel: tuple[int, ...], arguments: dict[str, Any], groups: int) -> Tensor:
    """The same for transposed convolutions: the input value that each weight multiplies at each output position."""
    channels, taps = x.shape[1], count(kernel)
    one_hot = torch.eye(taps, dtype=x.dtype, device=x.device).reshape(taps, *kernel)
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(kernel) - 1]
    spread = function(
        x,
        one_hot.expand(channels, *one_hot.shape),
        None,
        arguments["stride"],
        arguments["padding"],
        arguments["output_padding"],
        channels,
        arguments["dilation"],
    )
    return spread.reshape(x.shape[0], groups, -1, count(spread.shape[2:])).permute(1, 0, 3, 2)


def rows_overlap(x: Tensor, kernel: tuple[int, ...], arguments: dict[str, Any]) -> bool:
    """Whether patches share enough rows (positions along the first axis) for `add_patch_moment` to be faster."""
    first = _axes(kernel, arguments)[0]
    positions = first.positions(x.shape[2])
    return first.kernel > 1 and first.stride == first.dilation == 1 and positions >= MANY_ROWS * first.kernel


def add_patch_moment(total: Tensor, x: Tensor, kernel: tuple[int, ...], arguments: dict[str, Any], groups: int) -> None:
    """Add the sum of a a^T over all patches a to `total` (K, I, I), or (K, I + 1, I + 1) with a bias.

    Patches are made along all axes but the first: U_h for each row h. Taps i and i + d of the first axis meet in the
    sum of U_h U_(h + d)^T over rows h from i on, as many as there are outputs. For one d these sums have all rows in
    common but a few at both ends. That is the work of the patches divided by the kernel's length, twice that for what
    is symmetric there, and as many times less memory.
    """
    first, *others = _axes(kernel, arguments)
    taps, outputs = first.kernel, first.positions(x.shape[2])
    rows = first.before + x.shape[2] + first.after
    laid = x.new_zeros(rows, len(x), x.shape[1], *x.shape[3:])
    laid[first.before : first.before + x.shape[2]] = x.detach().movedim(2, 0)
    u = _unfolded(laid.flatten(0, 1), others, groups)
    u = u.reshape(*u.shape[:2], rows, -1)  # (K, R, rows, examples and positions along the other axes)
    channels = x.shape[1] // groups
    shape = (channels, taps, u.shape[1] // channels)
    width = count(shape)
    blocks = total[:, :width, :width].view(groups, *shape, *shape)

    def product(start: int, stop: int, apart: int) -> Tensor:
        left, right = u[:, :, start:stop].flatten(2), u[:, :, start + apart : stop + apart].flatten(2)
        return torch.mm(left[0], right[0].mT)[None] if groups == 1 else torch.bmm(left, right.mT)  # the same, faster

    for apart in range(taps):
        ends = taps - 1 - apart
        below = [product(ends, outputs, apart)]  # what all have in common, then with more and more rows before it
        for row in reversed(range(ends)):
            below.append(below[-1] + product(row, row + 1, apart))
        above = torch.zeros_like(below[0])
        for tap in range(ends + 1):
            if tap:
                above += product(outputs + tap - 1, outputs + tap, apart)
            found = (below.pop() + above).view(groups, *shape[::2], *shape[::2])
            blocks[:, :, tap, :, :, tap + apart].add_(found)
            if apart:
                blocks[:, :, tap + apart, :, :, tap].add_(found.permute(0, 3, 4, 1, 2))
    if total.shape[-1] > width:
        seen = u.sum(-1).unfold(2, outputs, 1).sum(-1).view(groups, *shape[::2], taps)
        total[:, -1, :width] += seen.transpose(2, 3).flatten(1)
        total[:, -1, -1] += outputs * u.shape[-1]


@dataclass(frozen=True)
class PatchMoment:
    """The sum of a a^T over the patches a of images x (N, channels, ...), without making the patches."""

    x: Tensor
    kernel: tuple[int, ...]
    arguments: dict[str, Any]
    groups: int

    @property
    def saving(self) -> int:
        """By which factor that takes less memory than the patches."""
        return self.kernel[0]

    @property
    def key(self) -> Hashable:
        """What the computation depends on beside the numbers."""
        options = tuple(str(self.arguments[name]) for name in ("stride", "padding", "dilation"))
        return (self.x.shape[1:], self.x.stride(), self.x.dtype, self.kernel, self.groups, options)

    def add(self, total: Tensor) -> None:
        """Add the sum to `total` (K, I, I), or (K, I + 1, I + 1) where the bias has a column."""
        add_patch_moment(total, self.x, self.kernel, self.arguments, self.groups)

    def agrees(self) -> bool:
        """Whether the sum over the first two images is that of their patches."""
        few = self.x[:2]
        a = patches(few, self.kernel, self.arguments, self.groups).flatten(1, 2)
        width = a.shape[-1]
        found = a.new_zeros(self.groups, width + 1, width + 1)
        add_patch_moment(found, few, self.kernel, self.arguments, self.groups)
        ones = a.new_ones(self.groups, 1, 1) * a.shape[1]
        pairs = ((found[:, :width, :width].tril(), (a.mT @ a).tril()), (found[:, -1, :width], a.sum(1)))
        return all(close(*pair) for pair in pairs) and close(found[:, -1:, -1:], ones)


@dataclass(frozen=True)
class KernelGradients:
    """Gradients of a kernel for images x (N, channels, ...), one by one, without making patches.

    Images as the groups of one convolution keep their gradients apart: torch's own kernels then do the work.
    """

    x: Tensor
    weight: Tensor
    arguments: dict[str, Any]
    groups: int

    @staticmethod
    def possible(x: Tensor, weight: Tensor, arguments: dict[str, Any]) -> bool:
        """Whether torch's convolution has these options: as much padding after the images as before them."""
        symmetric = all(axis.before == axis.after for axis in _axes(tuple(weight.shape[2:]), arguments))
        return symmetric and x.is_floating_point() and weight.dtype == x.dtype and len(x) > 0

    @property
    def key(self) -> Hashable:
        """What the computation depends on beside the numbers."""
        options = tuple(str(self.arguments[name]) for name in ("stride", "padding", "dilation"))
        return (self.x.shape[1:], self.x.stride(), self.x.dtype, tuple(self.weight.shape), self.groups, options)

    def of(self, raw: Tensor, examples: slice) -> Tensor:
        """J (b, K, M, O, I) of some examples, from the gradients at the outputs, `raw` (M, N, outputs, ...)."""
        x, rank = self.x.detach()[examples], self.x.dim() - 2
        options = convolution_options(tuple(self.weight.shape[2:]), self.arguments)
        weight = self.weight.new_empty(len(x) * len(self.weight), *self.weight.shape[1:])  # only its shape is used
        found = [
            torch.ops.aten.convolution_backward(
                seed[examples].reshape(1, -1, *raw.shape[3:]),
                x.reshape(1, -1, *x.shape[2:]),
                weight,
                None,
                *options,
                False,
                [0] * rank,
                self.groups * len(x),
                [False, True, False],
            )[1].reshape(len(x), self.groups, self.weight.shape[0] // self.groups, -1)
            for seed in raw
        ]
        return found[0].unsqueeze(2) if len(found) == 1 else torch.stack(found, 2)

    def agrees(self, raw: Tensor) -> bool:
        """Whether the first two examples' gradients, for the first seed, are the products of patches and outputs."""
        few, kernel = slice(0, 2), tuple(self.weight.shape[2:])
        g = raw[0, few].flatten(2)
        g = g.reshape(len(g), self.groups, -1, g.shape[-1])
        plain = g @ patches(self.x.detach()[few], kernel, self.arguments, self.groups).transpose(0, 1)
        return close(self.of(raw[:1], few)[:, :, 0], plain)


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * n
    values = tuple(value)
    return values * n if len(values) == 1 else values


def count(shape: Any) -> int:
    """Entries of a tensor of this shape."""
    return int(torch.Size(tuple(shape)).numel())
