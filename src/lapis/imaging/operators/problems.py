"""Other linear inverse problems as operators: deblurring, inpainting, super-resolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from lapis.errors import OptionError
from lapis.imaging.operators.linear import LinearOperator, checked_sides
from lapis.options import UNREADABLE, check_arguments


def blur(size: int | Sequence[int], width: float = 1.0) -> LinearOperator:
    """A Gaussian blur of standard deviation `width` pixels; images are reflected at their edges.

    >>> A = blur(5)
    >>> bool(np.allclose(A @ np.ones((5, 5)), 1))
    True
    """
    check_arguments(blur, locals(), apart=("size",))
    height, across = checked_sides(size)
    return LinearOperator(
        scipy.sparse.kron(_smoothing(height, width), _smoothing(across, width)), (height, across), (height, across)
    )


def inpainting(known: Any) -> LinearOperator:
    """The known pixels (measurements,) of an image; `known` is a mask (height, width) of booleans."""
    mask = known.numpy() if isinstance(known, Tensor) and known.dtype == torch.bool else _as_array(known)
    if mask.ndim != 2 or mask.dtype != np.bool_ or not mask.any():
        raise OptionError(
            "Bad mask",
            expected="booleans (height, width), some of them True",
            got=f"{mask.dtype} {mask.shape}",
            do="pass True for every known pixel",
        )
    return LinearOperator(scipy.sparse.identity(mask.size, format="csr")[mask.ravel()], mask.shape)


def downsampling(size: int | Sequence[int], factor: int = 2) -> LinearOperator:
    """Means of factor x factor pixels: what super-resolution undoes. `size` is that of the fine image."""
    check_arguments(downsampling, locals(), apart=("size",))
    height, width = checked_sides(size)
    if height % factor or width % factor:
        raise OptionError(
            "The factor does not divide the size",
            expected=f"a divisor of {height} and {width}",
            got=str(factor),
            do="choose another factor, or crop the image",
        )
    parts = [
        scipy.sparse.kron(scipy.sparse.identity(side // factor), np.full((1, factor), 1 / factor))
        for side in (height, width)
    ]
    return LinearOperator(scipy.sparse.kron(*parts), (height, width), (height // factor, width // factor))


def _as_array(known: Any) -> NDArray[Any]:
    try:
        return np.asarray(known)
    except UNREADABLE:  # of no shape, or tensors that numpy cannot read
        return np.empty(0)


def _smoothing(side: int, width: float) -> NDArray[np.float64]:
    """Gaussian weights along one axis, (side, side); what falls outside is reflected, so that rows add up to one."""
    reach = math.ceil(4 * width)
    weights = np.exp(-((np.arange(-reach, reach + 1) / width) ** 2) / 2)
    matrix = np.zeros((side, side))
    for row in range(side):
        place = np.arange(row - reach, row + reach + 1) % (2 * side)
        np.add.at(matrix[row], np.where(place < side, place, 2 * side - 1 - place), weights / weights.sum())
    return matrix
