"""Test images in closed form: the Shepp-Logan phantom, and discs with their analytic ray transform."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lapis.errors import DataError
from lapis.imaging.operators.linear import numbers
from lapis.options import check_arguments, check_count, checked_numbers, shown

# Density, half axes (across, along), centre (to the right, upwards), rotation in degrees; the square is [-1, 1]^2.
# Shepp and Logan, "The Fourier reconstruction of a head section", 1974, with the densities of Toft's thesis (1996),
# whose contrast can be seen.
ELLIPSES = (
    (1.0, 0.69, 0.92, 0.0, 0.0, 0.0),
    (-0.8, 0.6624, 0.874, 0.0, -0.0184, 0.0),
    (-0.2, 0.11, 0.31, 0.22, 0.0, -18.0),
    (-0.2, 0.16, 0.41, -0.22, 0.0, 18.0),
    (0.1, 0.21, 0.25, 0.0, 0.35, 0.0),
    (0.1, 0.046, 0.046, 0.0, 0.1, 0.0),
    (0.1, 0.046, 0.046, 0.0, -0.1, 0.0),
    (0.1, 0.046, 0.023, -0.08, -0.605, 0.0),
    (0.1, 0.023, 0.023, 0.0, -0.606, 0.0),
    (0.1, 0.023, 0.046, 0.06, -0.605, 0.0),
)


def shepp_logan(size: int = 128, supersampling: int = 4) -> Tensor:
    """The Shepp-Logan phantom (size, size), float64 in [0, 1]; pixels are means over supersampling^2 points."""
    check_arguments(shepp_logan, locals())
    check_count("size", size, least=2)
    axis = (np.arange(size * supersampling) + 0.5) / (size * supersampling) * 2 - 1
    x, y = axis[None, :], -axis[:, None]
    image = np.zeros((size * supersampling,) * 2)
    for density, across, along, right, up, degrees in ELLIPSES:
        turn = np.deg2rad(degrees)
        u = (x - right) * np.cos(turn) + (y - up) * np.sin(turn)
        v = (y - up) * np.cos(turn) - (x - right) * np.sin(turn)
        image[(u / across) ** 2 + (v / along) ** 2 <= 1] += density
    means = image.reshape(size, supersampling, size, supersampling).mean((1, 3))
    return torch.from_numpy(means.clip(0, 1))


def disc(size: int, radius: float, centre: tuple[float, float] = (0.0, 0.0), supersampling: int = 16) -> Tensor:
    """A disc of density 1, (size, size) float64; `radius` and `centre` (rows down, columns right) in pixels from the
    image's centre."""
    check_arguments(disc, locals(), signed=("centre",))
    axis = (np.arange(size * supersampling) + 0.5) / supersampling - size / 2
    inside = (axis[:, None] - centre[0]) ** 2 + (axis[None, :] - centre[1]) ** 2 <= radius**2
    return torch.from_numpy(inside.reshape(size, supersampling, size, supersampling).mean((1, 3)))


def disc_sinogram(
    angles: NDArray[np.float64], positions: NDArray[np.float64], radius: float, centre: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    """The disc's exact ray transform (angles, positions): 2 sqrt(radius^2 - (s - c)^2), c its centre's shadow."""
    check_arguments(disc_sinogram, locals(), signed=("centre",))
    turns, places = (_row(name, value) for name, value in (("angles", angles), ("positions", positions)))
    shadow = centre[1] * turns.cos() - centre[0] * turns.sin()
    squares = radius**2 - (places - shadow[:, None]).square()
    return 2 * squares.clamp_min(0).sqrt()


def _row(name: str, value: Any) -> Tensor:
    """Finite numbers (n,), float64."""
    found = checked_numbers(name, numbers(name, value))
    if found.dim() != 1:
        raise DataError(f"Bad {name}", expected="numbers (n,)", got=shown(found), do="pass them in a row")
    return found
