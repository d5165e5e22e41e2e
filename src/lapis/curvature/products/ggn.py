"""The GGN of a data set through its products with vectors, and the Gaussian posterior that it makes with a prior.

With G = s^1/2 S^T J (M x P; M = examples x positions x columns of S, s a scale) the precision is A = G^T G + Lambda.
Systems with it are solved in the space of weights (matrix A, P unknowns) or in the space of outputs (matrix
B = I + G Lambda^-1 G^T, M unknowns, without the inverse of S S^T, which may be singular):

    A^-1 = Lambda^-1 - Lambda^-1 G^T B^-1 G Lambda^-1,    log |A| = log |Lambda| + log |B|.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from lapis.batches import Batch, digest, joined, naming
from lapis.curvature.budget import work_bytes
from lapis.curvature.outputs import check_outputs
from lapis.curvature.products.factors import Factors, GivenFactors
from lapis.curvature.products.jacobian import Jacobian
from lapis.errors import OptionError
from lapis.likelihoods import Likelihood
from lapis.network import Network, full_precision
from lapis.priors import WeightPrior
from lapis.ranks import Ranks
from lapis.solvers import (
    CGResult,
    Diagonal,
    Operator,
    Preconditioner,
    SpectralQuadrature,
    conjugate_gradients,
    preconditioned,
    spectral_quadrature,
)

Space = Literal["weights", "outputs"]

ROWS = ("rows", "_own_rows", "_rows_of_ranks")
"""Cached properties that depend on the factors."""


class ImplicitCurvature:
    """The GGN sum_n J_n^T S_n S_n^T J_n of kept data as a linear operator, and the sums that the evidence needs.

    In memory stay the data, the network's outputs for them in float64, and S if small. Blocks of vectors (k, P) go in
    and come out in the network's dtype. `mode` says how products are computed, as `Jacobian` takes it.

    With `ranks` each process holds batches of its own, or none. Rows are then those of all ranks, one rank after the
    other, and every product is summed over them: all ranks must multiply the same vectors at the same time.
    """

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        batches: Sequence[Batch],
        signature: str,
        memory_budget: int,
        mode: str | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.network, self.likelihood, self.signature = network, likelihood, signature
        self.ranks = ranks
        self.memory_budget = memory_budget
        self.jacobian = Jacobian(network, likelihood.canonical, batches, memory_budget=memory_budget, mode=mode)
        self.outputs = self.jacobian.outputs[0].shape[-1] if batches else 0
        if ranks is not None:
            self.outputs = max(ranks.numbers(self.outputs))
        self.targets: list[Tensor] = []
        sums: list[Tensor] = []
        self.digest = 0
        for batch, f, shape in zip(batches, self.jacobian.outputs, self.jacobian.shapes, strict=True):
            with naming(batch.where):
                check_outputs(f, self.outputs)
                likelihood.check_outputs(f)
                self.targets.append(likelihood.targets(batch.targets, f, shape))
            step = max(1, work_bytes(memory_budget) // (4 * f[0].nbytes))
            pairs = zip(torch.split(f, step), torch.split(self.targets[-1], step), strict=True)
            sums += [likelihood.statistics(some, y) for some, y in pairs]
            self.digest = (self.digest + digest(batch.inputs, batch.targets)) % 2**64
        own = torch.stack(sums).sum(0) if sums else torch.zeros(0, dtype=torch.float64, device=network.device)
        if ranks is not None and not batches:
            own = own.new_zeros(max(ranks.numbers(0)))
        elif ranks is not None:
            ranks.numbers(len(own))  # for ranks without examples
        self.statistics = self._total(own)
        self.n_data, self.n_outputs = sum(map(len, batches)), self.jacobian.n_outputs
        if ranks is not None:
            self.n_data, self.n_outputs = sum(ranks.numbers(self.n_data)), sum(ranks.numbers(self.n_outputs))
            self.digest = sum(ranks.numbers(self.digest)) % 2**64
        self.factors: Factors | GivenFactors = Factors(likelihood, self.jacobian.outputs, self.targets, memory_budget)
        self.own_hessian = True
        """Whether the factors are those of the likelihood's Hessian at the trained outputs (see `with_factors`)."""
        self.order: Tensor | None = None
        """The index that each example had before the data were shuffled by `rebatched`; None if they were not."""
        self.minibatches = len(batches)
        """The number of batches; of ranks without examples, that of the others."""

    @property
    def batches(self) -> Sequence[Batch]:
        return self.jacobian.batches

    def _total(self, own: Tensor) -> Tensor:
        """A sum over the data of all ranks, from this one's."""
        return own if self.ranks is None else self.ranks.total(own)

    @cached_property
    def rows(self) -> int:
        """M, the number of rows of G."""
        return self._own_rows if self.ranks is None else sum(self._rows_of_ranks)

    @cached_property
    def _rows_of_ranks(self) -> list[int]:
        assert self.ranks is not None
        return self.ranks.numbers(self._own_rows)

    @cached_property
    def _own_rows(self) -> int:
        if not self.own_hessian:
            pieces = chain.from_iterable(map(self.factors.pieces, range(len(self.batches))))
            return sum(s[..., 0, :].numel() for _, s in pieces)
        if not self.batches:
            return 0
        f, y = self.jacobian.outputs[0], self.targets[0]
        first = self.likelihood.factor(f[:1, :1], y[:1, :1])
        return self.jacobian.n_outputs // first.shape[-2] * first.shape[-1]

    def root(self, vectors: Tensor) -> Tensor:
        """S^T J v, (k, M), for vectors v (k, P): a square root of the GGN."""
        found, start = vectors.new_empty(len(vectors), self._own_rows), 0
        if not self.batches:
            return found if self.ranks is None else self.ranks.gathered(found, 1)
        with closing(self.jacobian.forward_each(vectors)) as pushed:
            for batch, f in enumerate(pushed):
                for some, s in self.factors.pieces(batch):
                    with full_precision(self.network.device):
                        u = (s.to(f.dtype).mT @ f[:, some, ..., None])[..., 0].flatten(1)
                    found[:, start : start + u.shape[1]] = u
                    start += u.shape[1]
        return found if self.ranks is None else self.ranks.gathered(found, 1)

    def root_transposed(self, rows: Tensor) -> Tensor:
        """J^T S u, (k, P), for rows u (k, M)."""
        if self.ranks is not None:
            rows = torch.split(rows, self._rows_of_ranks, 1)[self.ranks.rank]
        if not self.batches:
            return self._total(rows.new_zeros(len(rows), self.network.size))
        return self._total(self.jacobian.backward(self._seeds(rows)))

    def _seeds(self, rows: Tensor) -> Iterator[Tensor]:
        """S u, (k, B, T, C) for each batch, of rows u (k, M)."""
        start = 0
        for batch, f in enumerate(self.jacobian.outputs):
            seeds = rows.new_empty(len(rows), *f.shape)
            for some, s in self.factors.pieces(batch):
                stop = start + s[..., 0, :].numel()
                u = rows[:, start:stop].reshape(len(rows), *s.shape[:2], s.shape[-1], 1)
                with full_precision(self.network.device):
                    seeds[:, some] = (s.to(rows.dtype) @ u)[..., 0]
                start = stop
            yield seeds

    def product(self, vectors: Tensor) -> Tensor:
        """The GGN times each vector, (k, P)."""
        if not self.own_hessian:
            return self.root_transposed(self.root(vectors))
        if not self.batches:
            return self._total(torch.zeros_like(vectors))
        return self._total(self.jacobian.ggn(vectors, self.likelihood, self.targets))

    def part(self, index: int) -> ImplicitCurvature:
        """The GGN of one batch alone; its products are summands of the whole."""
        part = object.__new__(ImplicitCurvature)
        part.__dict__.update({name: value for name, value in self.__dict__.items() if name not in ROWS})
        if not self.batches:
            return part  # of a rank without examples: it takes part in the others' sums
        part.jacobian = self.jacobian.of_batches(index)
        part.targets = [self.targets[index]]
        part.factors = Factors(self.likelihood, part.jacobian.outputs, part.targets, self.memory_budget)
        if not self.own_hessian:
            part.factors = GivenFactors([s for _, s in self.factors.pieces(index)])
        return part

    def with_mode(self, mode: str | None) -> ImplicitCurvature:
        """The same with products in another mode of multiplication, as `Jacobian` takes it."""
        same = object.__new__(ImplicitCurvature)
        same.__dict__.update(self.__dict__)
        same.jacobian = self.jacobian.with_mode(mode)
        return same

    def with_factors(self, factors: Sequence[Tensor]) -> ImplicitCurvature:
        """The same data with other factors S (B, T, C, R) of the Hessian in f, one for each batch."""
        same = object.__new__(ImplicitCurvature)
        same.__dict__.update({name: value for name, value in self.__dict__.items() if name not in ROWS})
        same.factors, same.own_hessian = GivenFactors(factors), False
        return same

    def rebatched(self, size: int, generator: torch.Generator) -> ImplicitCurvature:
        """The same data in batches of at most `size` examples, shuffled where their shapes allow joining batches."""
        if not self.own_hessian:
            raise OptionError(
                "A refined posterior has its curvature for the batches that it was refined with",
                expected='solver="cg"',
                got='solver="sgd", which shuffles the data',
                do='use solver="cg"',
            )
        whole, order = joined(self.batches) if self.batches else None, None
        if self.ranks is not None:
            return self._redivided(whole, size, generator, self.ranks)
        if whole is not None:
            order = torch.randperm(len(whole), generator=generator, device=generator.device).to(whole.targets.device)
        sources = self.batches if whole is None or order is None else [whole.chosen(order)]
        parts = [part for batch in sources for part in batch.split(size)]
        numbered = [replace(part, index=i, start=0) for i, part in enumerate(parts)]
        found = ImplicitCurvature(
            self.network, self.likelihood, numbered, self.signature, self.memory_budget, self.jacobian.mode
        )
        found.order = order
        return found

    def _redivided(self, whole: Batch | None, size: int, generator: torch.Generator, ranks: Ranks) -> ImplicitCurvature:
        """As `rebatched`: minibatches of about `size` examples in all, of which each rank has a part of its own."""
        if 0 in ranks.numbers(int(whole is not None or not self.batches)):
            raise OptionError(
                "Minibatches over several processes take examples of one shape",
                expected='solver="cg", or inputs of one shape',
                got='solver="sgd" and inputs whose shapes differ from batch to batch',
                do='use solver="cg"',
            )
        lengths = ranks.numbers(0 if whole is None else len(whole))
        count = min(-(-self.n_data // size), *(length for length in lengths if length))
        numbered, order = list[Batch](), None
        if whole is not None:
            order = torch.randperm(len(whole), generator=generator, device=generator.device).to(whole.targets.device)
            parts = [whole.chosen(some) for some in torch.tensor_split(order, count)]
            numbered = [replace(part, index=i) for i, part in enumerate(parts)]
        found = ImplicitCurvature(
            self.network, self.likelihood, numbered, self.signature, self.memory_budget, self.jacobian.mode, ranks
        )
        found.order, found.minibatches = order, count
        return found

    def by_part(self, rows: Tensor, parts: Sequence[ImplicitCurvature]) -> list[Tensor]:
        """Rows (k, M), as `reordered` gives them, for each of the batches: those of all ranks, one after the other."""
        if self.ranks is None:
            return list(torch.split(rows, [part.rows for part in parts], 1))
        own = torch.split(rows, self._rows_of_ranks, 1)[self.ranks.rank]
        pieces = torch.split(own, [part._own_rows for part in parts], 1)
        return [self.ranks.gathered(piece, 1) for piece in pieces]

    def reordered(self, rows: Tensor) -> Tensor:
        """Rows (k, M) in the order of the data before `rebatched`, brought to the order of these batches.

        Of several ranks' rows only this rank's own are: no other are used here.
        """
        if self.order is None:
            return rows
        if self.ranks is not None:
            every = list(torch.split(rows, self._rows_of_ranks, 1))
            own = every[self.ranks.rank]
            every[self.ranks.rank] = own.reshape(len(rows), len(self.order), -1)[:, self.order].flatten(1)
            return torch.cat(every, 1)
        return rows.reshape(len(rows), len(self.order), -1)[:, self.order].flatten(1)


@dataclass(frozen=True)
class Solved:
    """Weight vectors (k, P), and the result of conjugate gradients that they come from.

    The `solution` of that result lies in the space that was solved in, and can be the start for a similar system.
    """

    vectors: Tensor
    result: CGResult


@dataclass(frozen=True)
class ImplicitGaussian:
    """N(0, A^-1) with A = scale * GGN + Lambda, through solves with A. Blocks (k, P) are in the network's dtype."""

    curvature: ImplicitCurvature
    prior: WeightPrior
    scale: Tensor
    space: Space
    tolerance: float
    max_iterations: int
    preconditioner: Preconditioner | None = None
    """An approximation of A, for solves in the space of weights; the prior precision when None."""

    @cached_property
    def precision(self) -> Tensor:
        """Lambda's diagonal, (P,), in the network's dtype."""
        return self.prior.vector().detach().to(self.curvature.network.dtype)

    @cached_property
    def _scale(self) -> float:
        return float(self.scale.detach())

    def multiply(self, vectors: Tensor) -> Tensor:
        """A v."""
        return self.curvature.product(vectors).mul_(self._scale).addcmul_(self.precision, vectors)

    def operator(self) -> Operator:
        """A."""
        network = self.curvature.network
        return Operator(self.multiply, network.size, network.dtype, network.device)

    def output_operator(self) -> Operator:
        """B = I + G Lambda^-1 G^T."""
        network = self.curvature.network

        def product(rows: Tensor) -> Tensor:
            return rows + self._scale * self.curvature.root(self.curvature.root_transposed(rows) / self.precision)

        return Operator(product, self.curvature.rows, network.dtype, network.device)

    def solve(self, vectors: Tensor, **how: Any) -> Solved:
        """A^-1 v of each vector; `how` are options of `conjugate_gradients` (start, callback, progress)."""
        if self.space == "weights":
            found = self._run(self.operator(), vectors, self.preconditioner or Diagonal(self.precision), how)
            return Solved(found.solution, found)
        root, spread = self._scale**0.5, vectors / self.precision
        found = self._run(self.output_operator(), self.curvature.root(spread).mul_(root), None, how)
        return Solved(spread.sub_(self._pulled(found.solution), alpha=root), found)

    def draws(self, white: Tensor, rows: Tensor, **how: Any) -> Solved:
        """Draws z = A^-1 (Lambda^1/2 e + G^T u) of N(0, A^-1) from white noise e (k, P) and u (k, M).

        In the outputs' space z = z0 + Lambda^-1 G^T B^-1 (u - G z0) with z0 = Lambda^-1/2 e: the same draws.
        """
        root = self._scale**0.5
        if self.space == "weights":
            target = self.curvature.root_transposed(rows).mul_(root)
            return self.solve(target.addcmul_(self.precision.sqrt(), white), **how)
        first = white * self.precision.rsqrt()
        found = self._run(self.output_operator(), rows - root * self.curvature.root(first), None, how)
        return Solved(first.add_(self._pulled(found.solution), alpha=root), found)

    def _pulled(self, rows: Tensor) -> Tensor:
        """Lambda^-1 J^T S u, (k, P), for rows u (k, M)."""
        return self.curvature.root_transposed(rows).div_(self.precision)

    def _run(
        self, operator: Operator, target: Tensor, preconditioner: Preconditioner | None, how: dict[str, Any]
    ) -> CGResult:
        with full_precision(target.device):
            return conjugate_gradients(
                operator,
                target,
                preconditioner=preconditioner,
                tolerance=self.tolerance,
                max_iterations=self.max_iterations,
                **how,
            )

    def spectrum(
        self, probes: int, steps: int, generator: torch.Generator, progress: bool | None
    ) -> SpectralQuadrature:
        """Quadrature over the eigenvalues of Lambda^-1/2 A Lambda^-1/2 (those of B, and ones): log |A| - log |Lambda|
        is its trace of log t, gamma that of 1 - 1/t.
        """
        operator = self.output_operator() if self.space == "outputs" else self.operator()
        if self.space == "weights":
            operator = preconditioned(operator, Diagonal(self.precision))
        with full_precision(operator.device):
            return spectral_quadrature(operator, probes=probes, steps=steps, generator=generator, progress=progress)
