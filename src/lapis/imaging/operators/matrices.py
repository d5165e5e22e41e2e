"""Linear maps of any usual form as sparse matrices: arrays, sparse tensors, operators of scipy, functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor

from lapis.errors import OptionError
from lapis.options import UNREADABLE, shown

LINEAR = 1e-4
"""Relative misfit between a function and the matrix of its columns above which it is not linear; float32 has 1e-6."""


def as_sparse(matrix: Any) -> scipy.sparse.csr_matrix:
    """A matrix (measurements, pixels) of numpy, scipy or torch, dense, sparse, or a scipy operator, in float64."""
    if isinstance(matrix, Tensor) and matrix.layout != torch.strided and matrix.device.type == "cpu":
        matrix = _of_sparse_tensor(matrix)
    if isinstance(matrix, scipy.sparse.linalg.LinearOperator):
        matrix = matrix @ np.eye(matrix.shape[1])
    try:
        return scipy.sparse.csr_matrix(matrix, dtype=np.float64)
    except UNREADABLE as error:  # of scipy, numpy, torch
        raise OptionError(
            "This is no matrix",
            expected="numbers (measurements, pixels), dense or sparse, or a linear function of an image",
            got=shown(matrix),
            do="convert it",
        ) from error


def matrix_of(
    function: Callable[[Tensor], Any], image_shape: tuple[int, int]
) -> tuple[scipy.sparse.csr_matrix, tuple[int, ...]]:
    """A function's matrix, from its results for the image of each pixel, and the form of these results.

    OptionError unless it is linear: it must agree with the matrix at a random image.
    """
    height, width = image_shape
    shape = tuple(_result(function, torch.zeros(image_shape, dtype=torch.float64)).shape)
    columns = []
    for pixel in range(height * width):
        unit = torch.zeros(height * width, dtype=torch.float64)
        unit[pixel] = 1.0
        columns.append(scipy.sparse.csc_matrix(_result(function, unit.reshape(image_shape)).reshape(-1, 1).numpy()))
    matrix = scipy.sparse.hstack(columns, format="csr")
    image = torch.randn(image_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    there, by_matrix = _result(function, image).flatten().numpy(), matrix @ image.flatten().numpy()
    apart = float(np.abs(there - by_matrix).max())
    if not apart <= LINEAR * float(np.abs(there).max()):
        raise OptionError(
            "The function is not linear",
            expected="f(x), the same every time, with f(a x + b z) = a f(x) + b f(z)",
            got=f"values up to {apart:.2g} away from the matrix of its columns",
            do="leave out noise, offsets and clipping, and measure the image without them",
        )
    return matrix, shape


def _result(function: Callable[[Tensor], Any], image: Tensor) -> Tensor:
    with torch.no_grad():
        found = function(image)
    try:
        result = found if isinstance(found, Tensor) else torch.from_numpy(np.asarray(found))
    except UNREADABLE:
        result = None
    if result is None or result.is_complex() or result.layout != torch.strided or not result.numel():
        raise OptionError(
            "The function gives no measurements", expected="a tensor or an array of real numbers", got=shown(found),
            do="return such an array; real and imaginary parts side by side",
        )  # fmt: skip
    return result.detach().to("cpu", torch.float64)


def _of_sparse_tensor(matrix: Tensor) -> Any:
    """The same entries for scipy; the tensor itself where it is no real matrix."""
    if matrix.dim() != 2 or matrix.is_complex():
        return matrix
    entries = matrix.detach().to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    row, column = entries.indices().numpy()
    return scipy.sparse.coo_matrix((entries.values().to(torch.float64).numpy(), (row, column)), shape=matrix.shape)
