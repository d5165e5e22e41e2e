"""The design matrix Phi (n, d) of a linear model through its products with vectors, however it is given.

    forward:  Phi v, (k, n), for vectors (k, d)          backward:  Phi^T u, (k, d), for vectors (k, n)

All in float64. `parts` are its rows in a few pieces, for minibatches, where rows can be taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from lapis.batches import Inputs, all_finite
from lapis.errors import DataError
from lapis.options import UNREADABLE, checked_tensor, shown

Features = Callable[[Inputs], Any]
"""A function of a batch of inputs: its features (B, d), a tensor, an array or a sparse matrix."""


class Design(ABC):
    """Phi, (n, d)."""

    shape: tuple[int, int]

    @abstractmethod
    def forward(self, vectors: Tensor) -> Tensor:
        """Phi v, (k, n)."""

    @abstractmethod
    def backward(self, rows: Tensor) -> Tensor:
        """Phi^T u, (k, d)."""

    def squares(self, weights: Tensor) -> Tensor | None:
        """sum_n h_n Phi_ni^2 for weights h (n,): (d,); None where entries cannot be seen."""
        return None

    def parts(self, order: Tensor, count: int) -> Sequence[Design] | None:
        """The rows in an order (n,), cut into so many pieces of nearly equal length; None where none can be taken."""
        return None

    def row(self, index: slice) -> Tensor:
        """Some rows, (k, d): by products, unless entries can be seen."""
        start, stop, _ = index.indices(self.shape[0])
        unit = torch.zeros(stop - start, self.shape[0], dtype=torch.float64)
        unit[:, start:stop].fill_diagonal_(1.0)
        return self.backward(unit)


class Matrix(Design):
    """A sparse matrix, in compressed rows."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = sparse.csr_array(matrix, dtype=np.float64)
        self.shape = tuple(self.matrix.shape)
        if not np.isfinite(self.matrix.data.sum()) and not np.isfinite(self.matrix.data).all():
            raise _not_finite()

    def forward(self, vectors: Tensor) -> Tensor:
        # vector by vector: scipy's product with a block takes several times as long
        return torch.from_numpy(np.stack([self.matrix @ vector for vector in vectors.numpy()]))

    def backward(self, rows: Tensor) -> Tensor:
        turned = self.matrix.T
        return torch.from_numpy(np.stack([turned @ row for row in rows.numpy()]))

    def squares(self, weights: Tensor) -> Tensor:
        squared = sparse.csr_array((self.matrix.data**2, self.matrix.indices, self.matrix.indptr), shape=self.shape)
        return torch.from_numpy(squared.T @ weights.numpy())

    def parts(self, order: Tensor, count: int) -> list[Design]:
        return [Matrix(self.matrix[some.numpy()]) for some in torch.tensor_split(order, count)]

    def row(self, index: slice) -> Tensor:
        return torch.from_numpy(self.matrix[index].toarray())


class Dense(Design):
    """A matrix in memory."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix.detach().double()
        self.shape = (len(matrix), matrix.shape[1])
        if not all_finite(self.matrix):
            raise _not_finite()

    def forward(self, vectors: Tensor) -> Tensor:
        return vectors @ self.matrix.mT

    def backward(self, rows: Tensor) -> Tensor:
        return rows @ self.matrix

    def squares(self, weights: Tensor) -> Tensor:
        pairs = zip(torch.split(weights, 4096), torch.split(self.matrix, 4096), strict=True)
        return torch.stack([h @ rows.square() for h, rows in pairs]).sum(0)

    def parts(self, order: Tensor, count: int) -> list[Design]:
        return [Dense(self.matrix[some]) for some in torch.tensor_split(order, count)]

    def row(self, index: slice) -> Tensor:
        return self.matrix[index]


class Streamed(Design):
    """Features of batches of inputs, computed anew for every product: n and d may be of any size."""

    def __init__(self, features: Features, batches: Sequence[Inputs], lengths: Sequence[int], width: int) -> None:
        self.features, self.batches, self.lengths = features, batches, lengths
        self.shape = (sum(lengths), width)

    def _rows(self, index: int) -> Tensor:
        return as_rows(self.features(self.batches[index]), self.lengths[index], self.shape[1])

    def forward(self, vectors: Tensor) -> Tensor:
        return torch.cat([vectors @ self._rows(i).mT for i in range(len(self.batches))], 1)

    def backward(self, rows: Tensor) -> Tensor:
        total = rows.new_zeros(len(rows), self.shape[1])
        for i, some in enumerate(torch.split(rows, list(self.lengths), 1)):
            total += some @ self._rows(i)
        return total

    def squares(self, weights: Tensor) -> Tensor:
        parts = torch.split(weights, list(self.lengths))
        return torch.stack([h @ self._rows(i).square() for i, h in enumerate(parts)]).sum(0)


class Products(Design):
    """A SciPy LinearOperator, or any object with a shape, `@` and a transpose."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.shape = (int(operator.shape[0]), int(operator.shape[1]))
        self.numpy = isinstance(operator, LinearOperator)

    def forward(self, vectors: Tensor) -> Tensor:
        return self._applied(self.operator.matmat if self.numpy else self.operator.__matmul__, vectors, self.shape[0])

    def backward(self, rows: Tensor) -> Tensor:
        if self.numpy:
            return self._applied(self.operator.rmatmat, rows, self.shape[1])
        other = self.operator.mT if hasattr(self.operator, "mT") else self.operator.T
        return self._applied(other.__matmul__, rows, self.shape[1])

    def _applied(self, product: Callable[[Any], Any], vectors: Tensor, length: int) -> Tensor:
        columns = vectors.mT.contiguous()
        found = torch.as_tensor(product(columns.numpy() if self.numpy else columns), dtype=torch.float64).mT
        if found.shape != (len(vectors), length) or not all_finite(found):
            raise DataError(
                "The operator's product cannot be used",
                expected=f"finite numbers ({length}, {len(vectors)})",
                got=f"{tuple(found.mT.shape)}" + ("" if all_finite(found) else " with NaN or infinity"),
                do="correct its products with blocks of vectors, and with those of its transpose",
            )
        return found.contiguous()


def as_rows(found: Any, length: int | None = None, width: int | None = None) -> Tensor:
    """Features of a batch as a dense float64 matrix (B, d); DataError unless they have the shape expected."""
    try:
        given = torch.as_tensor(found.toarray() if sparse.issparse(found) else found)
    except UNREADABLE as error:
        raise DataError(
            "The features of a batch are no numbers", expected="numbers (B, d)", got=shown(found), do="convert them"
        ) from error
    rows = checked_tensor("features", given).detach().double()
    fits = rows.dim() == 2 and length in (None, len(rows)) and width in (None, rows.shape[1])
    if not fits or not all_finite(rows):
        raise DataError(
            "The features of a batch cannot be used",
            expected=f"finite numbers ({'B' if length is None else length}, {'d' if width is None else width})",
            got=f"{tuple(rows.shape)}" + (" with NaN or infinity" if fits else ""),
            do="return one row of features for each example",
        )
    return rows


def as_design(features: Any) -> Design:
    """A matrix or an operator as a design."""
    if isinstance(features, Tensor) and features.layout != torch.strided:
        coordinates = features.detach().cpu().to_sparse(layout=torch.sparse_coo).coalesce()
        values, index = coordinates.values().double().numpy(), coordinates.indices().numpy()
        return Matrix(sparse.coo_array((values, (index[0], index[1])), shape=tuple(features.shape)))
    if sparse.issparse(features):
        return Matrix(features)
    if isinstance(features, (Tensor, np.ndarray)):
        return Dense(as_rows(features))
    if isinstance(features, LinearOperator) or _multiplies(features):
        return Products(features)
    raise DataError(
        "These are no features",
        expected="a function of inputs, a matrix (dense or sparse), or an operator with a shape, @ and a transpose",
        got=type(features).__name__,
        do="pass one of these",
    )


def _multiplies(features: Any) -> bool:
    turned = hasattr(features, "mT") or hasattr(features, "T")
    return turned and hasattr(features, "__matmul__") and len(getattr(features, "shape", ())) == 2


def _not_finite() -> DataError:
    return DataError("The features are not finite", expected="finite numbers", got="NaN or infinity", do="clean them")
