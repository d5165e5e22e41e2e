"""Images (N, channels, height, width) in 0..1 as they may come one day: turned, noisy, blurred, faded, moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lapis.errors import DataError
from lapis.options import check_arguments, check_between, checked_tensor, shown

Shift = Callable[[Tensor], Tensor]

DEGREES = tuple(range(0, 181, 15))


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images turned, bilinear, the corners filled with zeros."""
    check_arguments(rotated, locals(), signed=("degrees",))
    _check_images(x)
    turn = math.radians(degrees)
    matrix = torch.tensor([[math.cos(turn), -math.sin(turn), 0.0], [math.sin(turn), math.cos(turn), 0.0]])
    grid = nn.functional.affine_grid(matrix.to(x).expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return nn.functional.grid_sample(x, grid, align_corners=False)


def noisy(x: Tensor, strength: float, *, generator: torch.Generator | None = None) -> Tensor:
    """Gaussian noise of this standard deviation on every pixel; seeded with 0 without a generator."""
    check_arguments(noisy, locals())
    _check_images(x)
    source = generator or torch.Generator().manual_seed(0)
    return (x + strength * torch.randn(x.shape, generator=source)).clamp(0, 1)


def blurred(x: Tensor, deviation: float) -> Tensor:
    """A Gaussian blur, with zeros beyond the edges."""
    check_arguments(blurred, locals())
    _check_images(x)
    reach = round(3 * deviation)
    taps = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / deviation).square()).to(x)
    taps = taps / taps.sum()
    channels = x.shape[1]
    for shape, padding in (((1, 1, -1, 1), (reach, 0)), ((1, 1, 1, -1), (0, reach))):
        kernel = taps.reshape(shape)
        kernel = kernel.expand(channels, 1, *kernel.shape[2:])
        x = nn.functional.conv2d(x, kernel, padding=padding, groups=channels)
    return x


def faded(x: Tensor, kept: float) -> Tensor:
    """Less contrast: differences from the image's mean shrink."""
    check_arguments(faded, locals())
    _check_images(x)
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + kept * (x - mean)


def moved(x: Tensor, share: float) -> Tensor:
    """Moved down and to the right by a share of the width, zeros coming in."""
    check_arguments(moved, locals())
    _check_images(x)
    check_between("share", share, 0, 1)
    by = max(1, round(share * x.shape[-1]))
    return nn.functional.pad(x, (by, 0, by, 0))[..., : x.shape[-2], : x.shape[-1]]


def _check_images(x: Tensor) -> None:
    checked_tensor("x", x)
    if x.dim() != 4 or not x.is_floating_point() or not bool(x.isfinite().all()):
        raise DataError(
            "These are no images",
            expected="finite numbers of floating point (N, channels, height, width)",
            got=shown(x),
            do="add the axes that are missing, or convert the pixels",
        )


STRENGTHS: dict[str, tuple[Callable[[Tensor, float], Tensor], Sequence[float]]] = {
    "noise": (noisy, (0.05, 0.1, 0.2, 0.3, 0.4)),
    "blur": (blurred, (0.5, 0.75, 1.0, 1.5, 2.0)),
    "contrast": (faded, (0.7, 0.5, 0.35, 0.2, 0.1)),
    "shift": (moved, (0.04, 0.08, 0.12, 0.16, 0.2)),
}


def rotations() -> dict[str, Shift]:
    """Turns by 0, 15, ... 180 degrees, by name."""
    return {f"{angle}": partial(rotated, degrees=float(angle)) for angle in DEGREES}


def corruptions() -> dict[str, Shift]:
    """Images as they are ("clean"), and each kind of corruption in five strengths, such as "blur 3".

    >>> len(corruptions())
    21
    """
    found: dict[str, Shift] = {"clean": lambda x: x}
    for kind, (corrupt, levels) in STRENGTHS.items():
        found |= {f"{kind} {level + 1}": partial(_at, corrupt, value) for level, value in enumerate(levels)}
    return found


def _at(corrupt: Callable[[Tensor, float], Tensor], strength: float, x: Tensor) -> Tensor:
    return corrupt(x, strength)
