"""Leading eigenpairs of a curvature that is given by its products with vectors: by Lanczos, or from a small root."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lapis.batches import all_finite
from lapis.curvature.blocks.block import Block
from lapis.curvature.blocks.lowrank import MOST_ADAPTIVE
from lapis.curvature.outputs import curvature_not_finite
from lapis.errors import LapisWarning, MemoryBudgetError, users_level
from lapis.network import Network
from lapis.solvers import Operator, lanczos_eigenpairs

RANK_FRACTION = 0.01
"""An adaptive rank keeps eigenvalues above this fraction of the smallest prior precision: what is left out changes no
variance by more than a hundredth."""

TOLERANCE_POWER = 0.75
"""Lanczos' tolerance is eps to this power, relative to the largest eigenvalue: 2e-12 in float64, 6e-6 in float32."""

TINY = 1e-300
"""The smallest threshold for eigenvalues: those of a rank-deficient GGN that are zero are never asked for."""

FEW = 512
"""Up to this many rows or columns of its root S^T J, a GGN in less than float64 is decomposed from that root."""

ROOT_FLOOR = 1e-12
"""Smallest eigenvalue, relative to the largest, that a root with entries exact to float32's eps determines."""

MARGIN = 1e-6
"""By this fraction an eigenvalue must exceed the smallest kept one to replace it."""


@dataclass(frozen=True)
class Leading:
    """The largest eigenvalues (r,) of a GGN and their vectors (r, P), descending; `note` says how many and why.

    No eigenvalue that is not among them is above `omitted`.
    """

    values: Tensor
    vectors: Tensor
    note: str
    converged: bool
    omitted: float


class Products(Protocol):
    """A curvature R^T R through its products with vectors (k, P), and those of its root R (rows, P)."""

    @property
    def rows(self) -> int: ...
    def product(self, vectors: Tensor) -> Tensor: ...
    def root(self, vectors: Tensor) -> Tensor: ...
    def root_transposed(self, rows: Tensor) -> Tensor: ...


def load_leading(
    block: Block,
    products: Products,
    network: Network,
    *,
    rank: int | None,
    threshold: float,
    memory_budget: int,
    generator: torch.Generator,
    progress: bool | None,
) -> Leading:
    """Fill the block with the leading eigenpairs of a curvature: see `leading_eigenpairs`."""
    few = min(products.rows, network.size)
    in_memory = 32 * products.rows * network.size <= memory_budget
    if network.dtype != torch.float64 and few <= FEW and in_memory:
        found = _of_root(products, network, rank, threshold, memory_budget)
    else:
        found = leading_eigenpairs(
            Operator(products.product, network.size, network.dtype, network.device, "symmetric"),
            rank=rank,
            threshold=threshold,
            bound=products.rows,
            memory_budget=memory_budget,
            generator=generator,
            progress=progress,
        )
    ordered = torch.cat([site.gather(found.vectors, network).flatten(1) for site in block.sites], 1)
    omitted = found.values.new_tensor(found.omitted)
    block.load({"values": found.values, "vectors": ordered, "omitted": omitted})
    if not found.converged:
        warnings.warn(
            f"Not all of the {len(found.values)} leading eigenpairs were found to their tolerance; "
            "use float64, or a smaller rank.",
            LapisWarning,
            stacklevel=users_level(),
        )
    return found


def _of_root(products: Products, network: Network, rank: int | None, threshold: float, memory_budget: int) -> Leading:
    """As `leading_eigenpairs`, from the root R (M, P) of the GGN and in float64: R R^T, or R^T R if that is smaller.

    Products in float32 are exact to eps times the largest eigenvalue, and smaller ones drown; the entries of R are
    exact to eps of themselves.
    """
    by_rows = products.rows <= network.size
    unit = torch.eye(min(products.rows, network.size), dtype=network.dtype, device=network.device)
    step = max(1, memory_budget // (64 * network.size))
    parts = [products.root_transposed(some) if by_rows else products.root(some) for some in torch.split(unit, step)]
    root = torch.cat(parts).double()  # R, or R^T
    if not all_finite(root):
        raise curvature_not_finite(network.dtype, network.names)
    values, vectors = (found.flip(-1) for found in torch.linalg.eigh(root @ root.mT))
    least = max(ROOT_FLOOR * float(values[0]), threshold if rank is None else 0.0, TINY)
    count = min(int((values > least).sum()), len(values) if rank is None else rank)
    omitted = max(least, float(values[count])) if count < len(values) else 0.0
    values, vectors = values[:count], vectors[:, :count].mT
    if by_rows:
        vectors = (vectors @ root) / values.sqrt()[:, None]
    note = f"rank {count}" + (f": eigenvalues of the GGN above {threshold:.3g}" if rank is None else "")
    return Leading(values, vectors, note, True, omitted)


def leading_eigenpairs(
    operator: Operator,
    *,
    rank: int | None,
    threshold: float,
    bound: int,
    memory_budget: int,
    generator: torch.Generator,
    progress: bool | None,
) -> Leading:
    """The `rank` largest eigenvalues, or when None all above `threshold`, by Lanczos with deflation.

    One Lanczos run sees a single copy of a repeated eigenvalue (a linear last layer repeats all of them). So what was
    found is projected out and Lanczos runs again, until nothing that is left belongs among the pairs kept.

    Args:
        operator: the GGN, of rank at most `bound`.
        memory_budget: bytes; Lanczos keeps its steps (m, P), the result is (r, P) in float64.
    """
    per_vector = 8 * operator.size
    fits = max(1, memory_budget // (4 * per_vector))
    if rank is not None and rank > fits:
        raise MemoryBudgetError(
            f"{rank:,} eigenvectors of {operator.size:,} weights do not fit",
            expected=f"at most {memory_budget:,} bytes (memory_budget)",
            got=f"{4 * rank * per_vector:,} bytes for the vectors and the search",
            do=f"ask for at most {fits:,}, or raise memory_budget",
        )
    most = min(operator.size, bound, fits, MOST_ADAPTIVE if rank is None else rank)
    values = torch.zeros(0, dtype=torch.float64, device=operator.device)
    vectors = torch.zeros(0, operator.size, dtype=operator.dtype, device=operator.device)
    converged, floor = True, 0.0
    while len(values) < operator.size:
        full = len(values) >= most
        found = lanczos_eigenpairs(
            _deflated(operator, vectors),
            rank=min(most, operator.size - len(values)),
            tolerance=torch.finfo(operator.dtype).eps ** TOLERANCE_POWER,
            threshold=float(values[most - 1]) if full else max(threshold if rank is None else 0.0, TINY),
            max_steps=min(operator.size - len(values), max(4 * most + 40, 1), max(fits, most)),
            generator=generator,
            progress=progress,
        )
        if len(found.values) == 0:
            break
        floor = operator.size * torch.finfo(operator.dtype).eps * float(torch.cat([values, found.values.abs()]).max())
        fresh = found.values > max(floor, float(values[most - 1]) * (1 + MARGIN) if full else 0.0)
        if not bool(fresh.any()):
            break
        converged = converged and bool(found.converged[fresh].all())
        values, order = torch.cat([values, found.values[fresh]]).sort(descending=True)
        vectors = torch.linalg.qr(torch.cat([vectors, found.vectors[fresh]]).mT).Q.mT[order]
    if len(values) < most and floor > 10 * threshold and operator.dtype != torch.float64:
        warnings.warn(
            f"Eigenvalues of the GGN below {floor:.2g} are lost in {operator.dtype}, and were asked for down to "
            f"{threshold:.2g}: variances can be too large. Fit in float64: model.double().",
            LapisWarning,
            stacklevel=users_level(),
        )
    kept = most if rank is not None or len(values) > most else int((values >= threshold).sum())
    values, vectors = values[:kept], vectors[:kept]
    omitted = max(floor, TINY if rank is not None else threshold)
    if len(values) == min(operator.size, bound):
        omitted = 0.0
    elif len(values) == most:
        omitted = max(omitted, float(values[-1]))
    note = f"rank {len(values)}"
    if rank is None:
        note += f": eigenvalues of the GGN above {threshold:.3g}"
        note += f", cut at {most} ({'memory' if most == fits else 'limit'})" if len(values) == most else ""
    return Leading(values, vectors.double(), note, converged, omitted)


def _deflated(operator: Operator, vectors: Tensor) -> Operator:
    """(I - U^T U) A (I - U^T U)."""
    if len(vectors) == 0:
        return replace(operator, property="symmetric")

    def without(block: Tensor) -> Tensor:
        return block - (block @ vectors.mT) @ vectors

    return replace(operator, product=lambda block: without(operator(without(block))), property="symmetric")
