"""A square matrix known only by its products with vectors. A vector is a row: blocks of k vectors are (k, P)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from lapis.errors import DataError, NotPositiveDefiniteError, OptionError, StructureError
from lapis.options import check_arguments

Property = Literal["general", "symmetric", "positive_definite"]


@dataclass(frozen=True)
class Operator:
    """The linear map that sends each row v of a block (k, P) to A v.

    Args:
        product: the map itself; gets (k, size) and returns (k, size), any k >= 1.
        size: P, the length of a vector.
        dtype: float32 or float64, of what goes in and comes out.
        device: where both live.
        property: what is declared about A. Each property includes the ones before it: "general", "symmetric",
            "positive_definite". Solvers refuse an operator that declares less than they need; `verify` tests it.

    >>> A = Operator.from_matrix(torch.diag(torch.tensor([1.0, 2.0])))
    >>> A(torch.ones(1, 2))
    tensor([[1., 2.]])
    """

    product: Callable[[Tensor], Tensor] = field(repr=False)
    size: int
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    property: Property = "positive_definite"

    def __post_init__(self) -> None:
        check_arguments(Operator, vars(self))
        # With its index ("cuda" is "cuda:0"), as tensors say it.
        object.__setattr__(self, "device", torch.empty(0, device=self.device).device)
        if self.dtype not in (torch.float32, torch.float64):
            raise OptionError(
                "The operator's dtype cannot be used",
                expected="float32 or float64",
                got=str(self.dtype),
                do="convert the matrix or its product",
            )

    @staticmethod
    def from_matrix(matrix: Tensor, property: Property = "positive_definite") -> Operator:
        """The operator of a matrix (P, P) held in memory."""
        check_arguments(Operator.from_matrix, locals())
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
            raise DataError(
                "Not a square matrix",
                expected="shape (P, P)",
                got=str(tuple(matrix.shape)),
                do="pass a symmetric matrix",
            )
        return Operator(lambda v: v @ matrix.mT, len(matrix), matrix.dtype, matrix.device, property)

    def __call__(self, vectors: Tensor) -> Tensor:
        """A v for each row of `vectors` (k, P), or of one vector (P,). What comes back must have their form."""
        if vectors.dim() == 1:
            return self(vectors[None])[0]
        if vectors.dim() != 2 or vectors.shape[1] != self.size:
            raise DataError(
                "These vectors do not fit the operator",
                expected=f"(k, {self.size}) or ({self.size},)",
                got=describe(vectors),
                do="pass one vector per row",
            )
        found = self.product(vectors).detach()
        if found.shape != vectors.shape or found.dtype != self.dtype or found.device != vectors.device:
            raise StructureError(
                "The operator changed the form of its block",
                expected=f"{describe(vectors)} in and out",
                got=describe(found),
                do="return one product A v per row",
            )
        if not torch.isfinite(found).all():
            raise StructureError(
                "The operator returned values that are not finite",
                expected="finite products for finite vectors",
                got=f"{int((~torch.isfinite(found)).sum())} of {found.numel()} entries inf or nan",
                do="look for overflow in it, or use float64",
            )
        return found

    def verify(self, generator: torch.Generator) -> None:
        """Test linearity and the declared property once, on random vectors: three products.

        Linear: A(x + 2 y) = A x + 2 A y, the sum in a block of its own, so that rows must not mix either. Symmetric:
        y^T A x = x^T A y. Positive definite: x^T A x > 0. A failure is certain; passing is evidence, not proof (a few
        small negative eigenvalues stay unseen).
        """
        check_arguments(Operator.verify, locals())
        x, y = normal_block(self, 2, generator)
        image_x, image_y = self(torch.stack([x, y]))
        image_sum = self((x + 2 * y)[None])[0]
        # Products of length-P sums in floating point: errors grow like eps, the square root leaves a wide margin.
        slack = torch.finfo(self.dtype).eps ** 0.5
        scale = image_x.norm() + 2 * image_y.norm()
        gap = (image_sum - image_x - 2 * image_y).norm()
        if gap > slack * scale:
            raise StructureError(
                "The operator is not linear",
                expected="A(x + 2y) = A x + 2 A y",
                got=f"a difference of {float(gap / scale):.1e} relative to the products",
                do="freeze whatever changes between calls (dropout, batch statistics, fresh minibatches)",
            )
        if self.property == "general":
            return
        gap, scale = (y @ image_x - x @ image_y).abs(), x.norm() * image_y.norm() + y.norm() * image_x.norm()
        if gap > slack * scale:
            raise StructureError(
                f"The operator is declared {self.property} and is not symmetric",
                expected="y^T A x = x^T A y",
                got=f"{float(y @ image_x):.6g} and {float(x @ image_y):.6g}",
                do='correct the product, or declare property="general" (traces take it)',
            )
        smallest = torch.minimum(x @ image_x / (x @ x), y @ image_y / (y @ y))
        if self.property == "positive_definite" and smallest <= 0:
            raise NotPositiveDefiniteError(
                "The operator is declared positive definite and is not",
                expected="x^T A x > 0",
                got=f"x^T A x / x^T x = {float(smallest):.3g} for a random x",
                do='add a larger prior precision, or declare property="symmetric"',
            )


def require(operator: Operator, needed: Property, purpose: str) -> None:
    """StructureError unless the operator declares at least `needed`."""
    order = get_args(Property)
    if order.index(operator.property) < order.index(needed):
        raise StructureError(
            f"{purpose} cannot use this operator",
            expected=f'an operator declared "{needed}"',
            got=f'"{operator.property}"',
            do=f'declare property="{needed}" if it holds, and test it with verify()',
        )


def checked_block(operator: Operator, vectors: Tensor, name: str, rows: int | None = None) -> Tensor:
    """`vectors` without its graph; DataError unless it is a finite block (k, P) the operator can take."""
    expected = f"({'k' if rows is None else rows}, {operator.size}) {operator.dtype} on {operator.device}"
    fits = vectors.dim() == 2 and vectors.shape[0] >= 1 and vectors.shape[1] == operator.size
    fits = fits and (rows is None or len(vectors) == rows)
    if not fits or vectors.dtype != operator.dtype or vectors.device != operator.device:
        raise DataError(
            f"{name} does not fit the operator",
            expected=expected,
            got=describe(vectors),
            do="pass one vector per row (v[None] for a single one), in the operator's dtype and on its device",
        )
    if not torch.isfinite(vectors).all():
        raise DataError(f"{name} is not finite", expected=expected, got="inf or nan", do="repair it before the solve")
    return vectors.detach()


def checked_tolerance(operator: Operator, tolerance: float | None) -> float:
    """A relative tolerance: sqrt(eps) of the dtype when None; OptionError outside (0, 1)."""
    if tolerance is None:
        return float(torch.finfo(operator.dtype).eps ** 0.5)
    if not 0 < tolerance < 1:
        raise OptionError("No relative tolerance", expected="a number in (0, 1)", got=repr(tolerance), do="try 1e-6")
    return tolerance


def normal_block(operator: Operator, count: int, generator: torch.Generator) -> Tensor:
    """Standard normal rows (count, P), drawn row by row so that they do not depend on how rows are grouped."""
    rows = torch.empty(count, operator.size, dtype=operator.dtype, device=generator.device)
    for row in rows:
        row.normal_(generator=generator)
    return rows.to(operator.device)


def dots(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of matching rows, (k,) float64. torch's sum adds pairwise; a BLAS dot loses digits in float32."""
    return torch.sum(left * right, -1).to(torch.float64)


def norms(vectors: Tensor) -> Tensor:
    """Euclidean norm of each row, (k,) float64."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return lengths.to(torch.float64)


def describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
