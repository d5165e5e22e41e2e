"""Linear maps from images to measurements: sparse matrices with adjoints, for torch tensors and numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import scipy.sparse.linalg
import torch
from numpy.typing import NDArray
from torch import Tensor

from lapis.errors import DataError, OptionError
from lapis.imaging.operators.matrices import as_sparse, matrix_of
from lapis.options import UNREADABLE, check_arguments, check_count, checked_device, checked_tensor, shown

Array = TypeVar("Array", Tensor, NDArray[Any])


def numbers(name: str, value: Any) -> Tensor:
    """Real numbers of any usual form (tensor, array, lists) as a dense tensor, or a DataError."""
    try:
        found = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
    except UNREADABLE:
        found = None
    return checked_tensor(name, value if found is None else found)


def plain(value: Any) -> Any:
    """Python's number for a numpy scalar or a 0-d tensor, such as the mean of an image; anything else as it is."""
    if isinstance(value, Tensor) and (value.device.type == "meta" or value.layout != torch.strided):
        return value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray | Tensor) and value.ndim == 0):
        return value.item()
    return value


def checked_sides(size: Any) -> tuple[int, int]:
    """(height, width) of one number for both, or of two; each at least 2."""
    size = plain(size)
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, Sequence) or isinstance(size, str) or len(size) != 2:
        raise OptionError("Bad size", expected="pixels, or (height, width)", got=shown(size), do="pass such a size")
    height, width = map(plain, size)
    for side in (height, width):
        check_count("size", side, least=2)
    return height, width


class LinearOperator:
    """y = A x for images x, as a sparse matrix.

    `A @ image` takes images (..., height, width) and returns measurements (..., *data_shape); flat images
    (..., pixels) return flat measurements (..., measurements). `A.T @ data` goes the other way, by the same rule. Torch
    tensors keep their dtype and device, and gradients flow through; numpy arrays return numpy arrays. Whole numbers
    count as float64.

    Args:
        matrix: (measurements, pixels), dense, or sparse of scipy or torch; pixels in row-major order. Or a linear
            function of one image, a float64 tensor (height, width), which is asked for its result at every pixel.
        image_shape: (height, width), with height * width = pixels.
        data_shape: the form of the measurements; when None (measurements,), or that of the function's results.

    >>> A = LinearOperator(np.array([[1.0, 0.0, 0.0, 1.0]]), (2, 2))
    >>> A @ np.array([[1.0, 2.0], [3.0, 4.0]])
    array([5.])
    >>> A.T @ torch.tensor([2.0])
    tensor([[2., 0.],
            [0., 2.]])
    >>> LinearOperator(lambda image: image.diff(dim=1), (2, 2)) @ torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    tensor([[1.],
            [2.]])
    """

    def __init__(self, matrix: Any, image_shape: Sequence[int], data_shape: Sequence[int] | None = None) -> None:
        height, width = _checked_shape("image_shape", image_shape, 2)
        self.image_shape = (height, width)
        form = None if data_shape is None else _checked_shape("data_shape", data_shape)
        if callable(matrix) and not isinstance(matrix, scipy.sparse.linalg.LinearOperator):
            matrix, results = matrix_of(matrix, self.image_shape)
            form = form or results
        self.matrix = as_sparse(matrix)
        self.matrix.sum_duplicates()
        self.data_shape: tuple[int, ...] = form or (self.matrix.shape[0],)
        expected = (math.prod(self.data_shape), math.prod(self.image_shape))
        if self.matrix.shape != expected or min(expected) < 1:
            raise OptionError(
                "The matrix does not fit these shapes",
                expected=f"{expected}, for data {self.data_shape} of images {self.image_shape}",
                got=str(self.matrix.shape),
                do="give one row for each measurement and one column for each pixel",
            )
        if not np.isfinite(self.matrix.data).all():
            raise OptionError("The matrix is not finite", expected="finite entries", got="inf or nan", do="repair it")
        self._kept: dict[tuple[torch.dtype, torch.device], Any] = {}
        """The matrix in the forms that products have asked for."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(images {self.image_shape} to data {self.data_shape})"

    @property
    def shape(self) -> tuple[int, int]:
        """(measurements, pixels)."""
        return int(self.matrix.shape[0]), int(self.matrix.shape[1])

    @cached_property
    def T(self) -> LinearOperator:
        """The adjoint: <A x, y> = <x, A^T y>."""
        return _Adjoint(self)

    def __matmul__(self, image: Array) -> Array:
        return self._applied(image, self.image_shape, self.data_shape, "image")

    def dense(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
        """The matrix (measurements, pixels) as a dense tensor."""
        check_arguments(LinearOperator.dense, locals())
        _check_floating(dtype)
        return torch.from_numpy(self.matrix.toarray()).to(checked_device(device), dtype)

    def flat(self, data: Any, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
        """Measurements of either form as a finite vector (measurements,)."""
        check_arguments(LinearOperator.flat, locals())
        _check_floating(dtype)
        found = numbers("data", data).to(checked_device(device), dtype)
        if found.shape not in (self.data_shape, (self.shape[0],)):
            raise DataError(
                "The data do not fit the operator",
                expected=f"shape {self.data_shape} or ({self.shape[0]},)",
                got=str(tuple(found.shape)),
                do="pass the measurements of one image",
            )
        if not torch.isfinite(found).all():
            raise DataError(
                "The data are not finite", expected="finite measurements", got="inf or nan", do="repair them"
            )
        return found.detach().reshape(-1)

    def guess(self, data: Tensor) -> Tensor:
        """A rough image (height, width) of one set of measurements, to start from: A^T y, scaled to fit them best."""
        y = self.flat(data).reshape(self.data_shape)
        back = self.T @ y
        there = self @ back
        return back * ((there * y).sum() / there.square().sum().clamp_min(1e-30))

    def _applied(self, value: Array, inward: tuple[int, ...], outward: tuple[int, ...], name: str) -> Array:
        if isinstance(value, np.ndarray) and value.dtype.kind in "buif":
            numbers = value if value.dtype in (np.float32, np.float64) else value.astype(np.float64)
            applied: Array = self._applied(
                torch.from_numpy(np.ascontiguousarray(numbers)), inward, outward, name
            ).numpy()
            return applied
        if not isinstance(value, Tensor) or value.is_complex() or value.layout != torch.strided:
            raise DataError(
                f"Not an {name} of numbers",
                expected="a torch tensor or a numpy array of real numbers",
                got=shown(value),
                do=f"convert the {name}",
            )
        tensor: Tensor = value if value.dtype in (torch.float32, torch.float64) else value.to(torch.float64)
        flat, length = False, math.prod(inward)
        if tuple(tensor.shape[-len(inward) :]) != inward:
            if tensor.dim() == 0 or tensor.shape[-1] != length:
                raise DataError(
                    f"The {name} does not fit the operator",
                    expected=f"shape (..., {', '.join(map(str, inward))}), or flat (..., {length})",
                    got=str(tuple(tensor.shape)),
                    do="check size, angles and detectors, or reshape",
                )
            flat = True
        batch = tensor.shape[:-1] if flat else tensor.shape[: -len(inward)]
        rows = tensor.reshape(-1, length)
        product: Tensor = _Product.apply(rows, self)  # type: ignore[no-untyped-call]
        return product.reshape(*batch, *((product.shape[-1],) if flat else outward))

    def _product(self, rows: Tensor) -> Tensor:
        """A x for each row x; by scipy on the CPU, where torch's own sparse products are slow or need MKL."""
        key = (rows.dtype, rows.device)
        if rows.device.type == "cpu":
            if key not in self._kept:
                self._kept[key] = self.matrix.astype(torch.empty(0, dtype=rows.dtype).numpy().dtype)
            product = self._kept[key] @ rows.detach().numpy().T
            return torch.from_numpy(np.ascontiguousarray(product.T))
        if key not in self._kept:
            entries = self.matrix.tocoo()
            indices = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
            values = torch.from_numpy(entries.data).to(rows.dtype)
            made = torch.sparse_coo_tensor(indices, values, self.matrix.shape, device=rows.device)
            self._kept[key] = made.coalesce()
        found: Tensor = torch.sparse.mm(self._kept[key], rows.mT).mT
        return found


def _checked_shape(name: str, shape: Any, sides: int | None = None) -> tuple[int, ...]:
    """Sides of an array, each at least 1."""
    parts = [plain(side) for side in shape] if isinstance(shape, Sequence) and not isinstance(shape, str) else []
    fits = parts and all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in parts)
    if not fits or (sides is not None and len(parts) != sides):
        words = "whole numbers, at least 1" if sides is None else f"{sides} whole numbers, at least 1"
        raise OptionError(f"Bad {name}", expected=words, got=shown(shape), do="pass the sides of the array")
    return tuple(parts)


def _check_floating(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise OptionError("Bad dtype", expected="one of floating point", got=str(dtype), do="pass such a dtype")


class _Product(torch.autograd.Function):
    """Rows times A^T; the gradient goes back through A."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, operator: LinearOperator) -> Tensor:
        ctx.operator = operator
        return operator._product(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Product.apply(gradient, ctx.operator.T), None  # type: ignore[no-untyped-call]


class _Adjoint(LinearOperator):
    """A^T as an operator from measurements to images."""

    def __init__(self, operator: LinearOperator) -> None:
        self.matrix = operator.matrix.T.tocsr()
        self.operator = operator
        self.image_shape, self.data_shape = operator.data_shape, operator.image_shape  # type: ignore[assignment]
        self._kept = {}

    @property
    def T(self) -> LinearOperator:
        return self.operator

    def __matmul__(self, data: Array) -> Array:
        return self._applied(data, self.image_shape, self.data_shape, "array of measurements")
