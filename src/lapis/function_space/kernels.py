"""Kernels J(x) Sigma J(x')^T of a linearised network, for a covariance Sigma of its weights in any form.

A batch's Jacobian is brought once to the form in which Sigma is simple (`features`), and meets the features of other
batches (`between`). Features of stored structures are factored, layer by layer: J itself is not formed unless the
structure is dense.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lapis.batches import Inputs, batch_length, take
from lapis.curvature.backward.contributions import Contribution
from lapis.curvature.backward.seeds import position_seeds, unit_factor
from lapis.curvature.blocks.block import BlockGaussian
from lapis.curvature.blocks.dense.matrix import inner_products
from lapis.curvature.blocks.diagonal import DiagonalGaussian
from lapis.curvature.plan import planned_tape
from lapis.curvature.tape import Tape
from lapis.errors import check_fits
from lapis.function_space.directed import directed
from lapis.function_space.tangent import PART, Tangent
from lapis.proofs import close

KEPT_SHARE, PART_SHARE = 4, 16
"""Features of all inputs are kept if they fit in this part of the memory budget; those of one part fit in the other."""

DIRECTED = "covariances of outputs with one direction, by differentiating twice"

PROVEN = 4
"""Examples on which they are compared with the covariances of all outputs."""

Direction = Callable[[Tensor, tuple[int, ...], int], Tensor]
"""g (B, T, C) from outputs f (B, T, C), the shape of the network's own output, and the index of the first example."""


@dataclass(frozen=True)
class Features:
    """The Jacobian of a batch in the form that its kernel takes, for n = B T C outputs."""

    n: int
    value: Any

    @property
    def nbytes(self) -> int:
        return _nbytes(self.value)


class WeightKernel(ABC):
    """J Sigma J'^T for one covariance Sigma of the weights."""

    tangent: Tangent
    exact: bool = False
    """Whether matrices are float64, whatever the network's dtype."""

    def begin(self, inputs: Inputs) -> None:  # noqa: B027  (only kernels with a tape look at the network first)
        """Learn what features take from some inputs, before the first are computed; while the tangent is ready."""

    @abstractmethod
    def features(self, inputs: Inputs) -> Features:
        """Of some examples; to be called while the tangent is ready."""

    @abstractmethod
    def between(self, left: Features, right: Features) -> Tensor:
        """J Sigma J'^T, (n, n'), where `right` has been `met`."""

    def met(self, features: Features) -> Features:
        """Features for the right side, where these differ from those of the left."""
        return features

    def directed(self, inputs: Inputs, direction: Direction) -> tuple[Tensor, tuple[int, ...], Tensor] | None:
        """Outputs f (B, T, C), the network's own output shape, and J Sigma J^T g of each example for its g.

        Without the covariances of all outputs; None where there is no such shortcut. While the tangent is ready.
        """
        return None

    @abstractmethod
    def product(self, vectors: Tensor) -> Tensor:
        """Sigma v for weight vectors v (k, P), float64."""


class _TapedKernel(WeightKernel):
    """Kernels whose features come from a recorded forward pass, in factored form."""

    def __init__(self, tangent: Tangent, tape: Tape | None) -> None:
        self.tangent, self._tape = tangent, tape

    def begin(self, inputs: Inputs) -> None:
        """Plan the tape on these inputs, if there is none yet."""
        if self._tape is None:
            with self.tangent.network.prepared():
                self._tape, _ = planned_tape(self.tangent.network, self.tangent.likelihood.canonical, inputs)

    @abstractmethod
    def _of(self, contributions: list[Contribution]) -> Any:
        """Features of recorded contributions, one for each site."""

    def features(self, inputs: Inputs) -> Features:
        assert self._tape is not None  # begun
        with self.tangent.network.prepared():
            record = self._tape.record(inputs)
            f = record.f.detach()
            seeds = torch.cat(list(position_seeds(unit_factor(f), f.shape[-1])))
            return Features(f.numel(), self._of(record.contributions(seeds)))


class BlockKernel(_TapedKernel):
    """Sigma stored in blocks.

    Args:
        sites_of: for each block, the indices of its sites in the tape's plan.
        gaussians: the distribution of each block's weights.
        product: Sigma times weight vectors.
    """

    def __init__(
        self,
        tangent: Tangent,
        tape: Tape,
        sites_of: Sequence[Sequence[int]],
        gaussians: Sequence[BlockGaussian],
        product: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(tangent, tape)
        self.sites_of, self.gaussians, self._product = sites_of, gaussians, product
        self._example_bytes: int | None = None

    def _of(self, contributions: list[Contribution]) -> list[Any]:
        pairs = zip(self.gaussians, self.sites_of, strict=True)
        return [gaussian.features([contributions[site] for site in sites]) for gaussian, sites in pairs]

    def between(self, left: Features, right: Features) -> Tensor:
        blocks = zip(self.gaussians, left.value, right.value, strict=True)
        return reduce(torch.add, (g.kernel(a, b) for g, a, b in blocks)).reshape(left.n, right.n)

    def directed(self, inputs: Inputs, direction: Direction) -> tuple[Tensor, tuple[int, ...], Tensor] | None:
        """By differentiating twice, for several outputs at one position: see `directed`."""
        network, length = self.tangent.network, batch_length(inputs)
        if self._example_bytes is None:
            self._example_bytes = self.features(take(inputs, 0, 1)).nbytes
        step = part_length(self.tangent.memory_budget, self._example_bytes)
        outputs, products, shape = [], [], (0,)
        for start in range(0, length, step):
            part = take(inputs, start, min(start + step, length))
            with network.prepared():
                assert self._tape is not None
                record = self._tape.record(part)
                f, shape = record.f.detach(), (length, *record.raw_shape[1:])
                if f.shape[1] > 1 or f.shape[2] == 1 or DIRECTED in network.proofs.refused:
                    return None
                g = direction(f, tuple(record.raw_shape), start).to(f.dtype)
                found = directed(record, self.sites_of, self.gaussians, g)
            if found is None or not self._proven(part, g, found):
                network.proofs.refused.add(DIRECTED)
                return None
            outputs.append(f)
            products.append(found)
        return torch.cat(outputs), shape, torch.cat(products)

    def _proven(self, inputs: Inputs, g: Tensor, found: Tensor) -> bool:
        def agrees() -> bool:
            few = self.features(take(inputs, 0, PROVEN))
            rows = g[:PROVEN].reshape(-1, found.shape[-1])
            cells = self.between(few, few).reshape(*rows.shape, *rows.shape).diagonal(dim1=0, dim2=2)
            plain = torch.einsum("cdb,bd->bc", cells, rows.to(cells))
            return close(plain.reshape(found[:PROVEN].shape).to(found), found[:PROVEN])

        kinds = tuple(sorted({type(gaussian).__name__ for gaussian in self.gaussians}))
        return self.tangent.network.proofs.holds(DIRECTED, (kinds, found.dtype, *found.shape[1:]), agrees)

    def product(self, vectors: Tensor) -> Tensor:
        return self._product(vectors)


class DiagonalKernel(_TapedKernel):
    """Sigma = diag(variance) + F^T F: priors, and posteriors of independent weights, such as an optimiser leaves.

    Args:
        variance: of each weight, (P,).
        factors: F (K, P), or None.
        exact: multiply in float64: where data are to be subtracted from a prior, single precision would cancel.
    """

    def __init__(
        self, tangent: Tangent, variance: Tensor, factors: Tensor | None = None, *, exact: bool = False
    ) -> None:
        super().__init__(tangent, None)
        self.exact = exact
        self.variance, self.factors = variance.double(), None if factors is None else factors.double()
        self._blocks: tuple[list[DiagonalGaussian], list[Tensor]] | None = None

    def _by_site(self) -> tuple[list[DiagonalGaussian], list[Tensor]]:
        """The independent part and F, (K, *site.shape), of each site's weights."""
        if self._blocks is None:
            assert self._tape is not None
            network, sites = self.tangent.network, self._tape.plan.sites
            precision = self.variance.reciprocal()
            factors = [] if self.factors is None else [site.gather(self.factors, network) for site in sites]
            self._blocks = [DiagonalGaussian(site.gather(precision, network)) for site in sites], factors
        return self._blocks

    def _of(self, contributions: list[Contribution]) -> tuple[list[Contribution], Tensor | None]:
        gaussians, factors = self._by_site()
        held = [gaussian.features([own]) for gaussian, own in zip(gaussians, contributions, strict=True)]
        held = [own.double() for own in held] if self.exact else held
        if not factors:
            return held, None
        along = (own.project(f.to(own.dtype)) for own, f in zip(held, factors, strict=True))
        return held, reduce(torch.add, along).movedim(-1, 0)

    def between(self, left: Features, right: Features) -> Tensor:
        (one, along), (two, across) = left.value, right.value
        blocks = zip(self._by_site()[0], one, two, strict=True)
        total = reduce(torch.add, (g.kernel(a, b) for g, a, b in blocks))
        if along is not None and across is not None:
            total = total + inner_products(along, across)
        return total.reshape(left.n, right.n)

    def product(self, vectors: Tensor) -> Tensor:
        found = vectors.double() * self.variance
        return found if self.factors is None else found + (vectors.double() @ self.factors.mT) @ self.factors


class SolvedKernel(WeightKernel):
    """Sigma by its products with vectors (k, P): a solve for every output of the right side."""

    def __init__(self, tangent: Tangent, solve: Callable[[Tensor], Tensor]) -> None:
        self.tangent, self._solve = tangent, solve

    def features(self, inputs: Inputs) -> Features:
        """J itself, (n, P)."""
        rows = self.tangent.jacobian(inputs).with_kept_rows().rows()
        flat = torch.cat([each.flatten(0, 2) for each in rows])
        return Features(len(flat), flat)

    def met(self, features: Features) -> Features:
        return Features(features.n, self._solve(features.value))

    def between(self, left: Features, right: Features) -> Tensor:
        product: Tensor = left.value.double() @ right.value.mT
        return product

    def product(self, vectors: Tensor) -> Tensor:
        return self._solve(vectors)


class DrawnKernel(WeightKernel):
    """Sigma = mean_k z_k z_k^T for draws z (K, P): K Jacobian-vector products."""

    def __init__(self, tangent: Tangent, deviations: Tensor) -> None:
        self.tangent, self.deviations = tangent, deviations

    def features(self, inputs: Inputs) -> Features:
        """J z / sqrt(K), (n, K)."""
        draws = torch.cat(self.tangent.jacobian(inputs).forward(self.deviations), 1)
        flat = draws.flatten(1).mT.double() / len(draws) ** 0.5
        return Features(len(flat), flat)

    def between(self, left: Features, right: Features) -> Tensor:
        product: Tensor = left.value @ right.value.mT
        return product

    def product(self, vectors: Tensor) -> Tensor:
        z = self.deviations.double()
        return (vectors.double() @ z.mT) @ z / len(z)


def assembled(kernel: WeightKernel, left: Inputs, right: Inputs | None) -> Tensor:
    """J Sigma J'^T between all outputs of `left` and of `right` (None: of `left`), (n, n').

    The matrix is computed in tiles. Features that do not fit in memory are computed again for every column of tiles.
    To be called while the tangent is ready.
    """
    tangent = kernel.tangent
    kernel.begin(left)
    first = kernel.features(take(left, 0, 1))
    met = first if right is None else kernel.features(take(right, 0, 1))
    rows, columns = batch_length(left) * first.n, batch_length(left if right is None else right) * met.n
    budget, dtype = tangent.memory_budget, torch.float64 if kernel.exact else tangent.network.dtype
    check_matrix(rows, columns, dtype.itemsize, budget)
    step = part_length(budget, max(first.nbytes, met.nbytes))
    total = torch.empty(rows, columns, dtype=dtype, device=tangent.network.device)
    starts = range(0, batch_length(left), step)
    kept: dict[int, Features] = {}
    keeps = batch_length(left) * first.nbytes <= budget // KEPT_SHARE

    def features(start: int) -> Features:
        if start in kept:
            return kept[start]
        found = kernel.features(take(left, start, start + step))
        if keeps:
            kept[start] = found
        return found

    for begin in starts if right is None else range(0, batch_length(right), step):
        across = kernel.met(features(begin) if right is None else kernel.features(take(right, begin, begin + step)))
        where = slice(begin * met.n, begin * met.n + across.n)
        for start in starts:
            if right is None and start < begin:
                continue
            down = features(start)
            span = slice(start * first.n, start * first.n + down.n)
            total[span, where] = kernel.between(down, across).to(dtype)
            if right is None and start > begin:
                total[where, span] = total[span, where].mT
    return total


def part_length(memory_budget: int, nbytes: int) -> int:
    """Examples of which features of so many bytes each are in memory together."""
    return max(1, min(PART, memory_budget // (PART_SHARE * max(1, nbytes))))


def check_matrix(rows: int, columns: int, itemsize: int, memory_budget: int) -> None:
    """MemoryBudgetError if a kernel matrix does not fit."""
    check_fits(
        rows * columns * itemsize,
        memory_budget,
        f"A kernel matrix of {rows:,} x {columns:,} outputs does not fit",
        do="take fewer examples, or the products of operator(x)",
    )


def _nbytes(value: Any) -> int:
    """Memory that features take."""
    if isinstance(value, Tensor | Contribution):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0
