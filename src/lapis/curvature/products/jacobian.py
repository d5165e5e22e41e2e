"""The Jacobian J of a network's outputs in its weights over a data set, through its products with vectors.

    forward:  J_n v          backward:  sum_n J_n^T u_n          ggn:  sum_n J_n^T H_n J_n v

Vectors are the rows of a block (k, P), as in `lapis.solvers`; outputs of a batch are (k, B, T, C).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lapis.batches import Batch, Inputs, describe, take
from lapis.curvature.products.differentiation import (
    DERIVATIVE_ERRORS,
    Pass,
    agrees_with_backward,
    differentiable,
    rows,
)
from lapis.curvature.products.modes import (
    BATCHED_BACKWARD_MODES,
    BATCHED_MODES,
    ONE_VECTOR_MODES,
    SEVERAL_VECTORS_MODES,
    checked_mode,
    default_mode,
    least_parts,
)
from lapis.curvature.products.timing import TIMED_VECTORS, accepted_slowdown, fastest, timed_examples, worth_timing
from lapis.errors import DataError, LapisError, OptionError
from lapis.likelihoods import Likelihood
from lapis.network import Network

KEPT_ROWS_BYTES = 16 * 2**20
"""J is computed once and kept if it takes at most this many bytes: reading it is faster than running the network."""

RUN_SHARE = 6
"""A plain run may take the budget over this: its blocks, once freed, are gaps that products do not fill."""

ONE_VECTOR_SHARE, SEVERAL_VECTORS_SHARE = 3, 2
"""Graphs of products may take the budget over these; gaps in the heap take the rest (`benchmarks/memory.py`)."""

OUTPUT_COPIES = 4
"""Float64 arrays of the outputs' size in memory while a vector is pushed and multiplied by the curvature in f."""


@dataclass
class _Facts:
    """What was measured about a network's products, for all Jacobians of that network."""

    graph_bytes: tuple[int, int] | None = None
    """Bytes that the autograd graph of one example holds: in total, and its largest tensor."""
    fastest: dict[bool, str] = field(default_factory=dict)
    """The fastest mode for one vector (False) and for several (True), where it was asked for."""


_FACTS: WeakKeyDictionary[Network, _Facts] = WeakKeyDictionary()


def shortcut_name(mode: str) -> str:
    """What a mode is called among the shortcuts of `network.proofs`."""
    return f"Jacobian products in mode {mode!r}"


class Jacobian:
    """J at the network's weights, for every batch of a data set.

    Products run in the network's dtype; sums over batches and results have the dtype of the vectors that went in, and
    follow the order of the batches.

    Memory: beside its vectors and results, a product holds the autograd graph of the examples worked on together (up to
    three times as much where it is differentiated again) and, for vectors worked on together, one layer's tangents and
    3 P numbers each. How many examples and vectors that are follows from `memory_budget`. J itself is kept if it fits
    in `kept_bytes`.

    Each mode of multiplication is checked against plain backward passes before its first use; where it disagrees, or
    torch lacks a derivative, the next one takes its place.

    Args:
        network: the network and its chosen weights, P of them.
        canonical: brings raw outputs to (B, T, C), as `likelihood.canonical` does.
        batches: the data.
        memory_budget: bytes that one product may work in.
        kept_bytes: J is kept as rows if it takes at most this many bytes.
        mode: how products are computed. None follows a fixed rule (`modes.default_mode`), so that equal networks give
            bitwise equal products; "fastest" times the modes on a few examples, so that rounding may differ from run to
            run; a mode's name forces that one, and there is an error where it cannot be used.
    """

    def __init__(
        self,
        network: Network,
        canonical: Callable[[Tensor], Tensor],
        batches: Sequence[Batch],
        *,
        memory_budget: int = 4 * 2**30,
        kept_bytes: int = KEPT_ROWS_BYTES,
        mode: str | None = None,
    ) -> None:
        self.network, self.canonical, self.batches, self.memory_budget = network, canonical, batches, memory_budget
        self.size, self.mode = network.size, checked_mode(mode)
        self.outputs: list[Tensor] = []
        """f of each batch, (B, T, C) float64."""
        self.shapes: list[torch.Size] = []
        """Shapes of the raw outputs."""
        self._facts = _FACTS.setdefault(network, _Facts())
        with network.prepared():
            for batch in batches:
                outputs, shape = self._run(batch)
                self.outputs.append(outputs)
                self.shapes.append(shape)
        needed = self.n_outputs * self.size * network.dtype.itemsize
        self._rows_fit = 2 * needed <= min(2 * kept_bytes, memory_budget)
        self._rows: list[Tensor | None] = [None] * len(batches)

    def _run(self, batch: Batch) -> tuple[Tensor, torch.Size]:
        """f of a batch, (B, T, C) float64, and the shape of the raw output, in parts that fit in memory."""
        start, found = 0, torch.empty(0)
        for part in batch.split(self._run_at_once(batch)):
            with torch.no_grad():
                raw = self.network.call(part.inputs)
                f = self.canonical(raw).double()
            if len(part) == len(batch):
                return f, raw.shape
            found = found if start else f.new_empty(len(batch), *f.shape[1:])
            found[start : start + len(part)] = f
            start += len(part)
        return found, torch.Size((len(batch), *raw.shape[1:]))

    def _run_at_once(self, batch: Batch) -> int:
        """How many examples of a batch the network runs on together, by the bytes that their graph would take."""
        try:
            graph = self._graph_bytes()[0] if len(batch) > 1 else 0
        except LapisError:
            return len(batch)  # the run itself says what is wrong with the inputs
        return max(1, self.memory_budget // (RUN_SHARE * max(1, graph)))

    @property
    def n_outputs(self) -> int:
        """The number of rows of J: outputs over all examples and positions."""
        return sum(f.numel() for f in self.outputs)

    @property
    def keeps_rows(self) -> bool:
        """Whether J is computed once and kept: if it is small enough, and no mode is forced."""
        return self._rows_fit and self.mode in (None, "fastest")

    def of_batches(self, indices: int | Sequence[int]) -> Jacobian:
        """The Jacobian of some of the batches, by their indices in `batches`."""
        chosen = [indices] if isinstance(indices, int) else list(indices)
        part = object.__new__(Jacobian)
        part.__dict__.update(self.__dict__)
        part.batches = [self.batches[i] for i in chosen]
        part.outputs = [self.outputs[i] for i in chosen]
        part.shapes = [self.shapes[i] for i in chosen]
        part._rows = [self._rows[i] for i in chosen]
        return part

    def with_kept_rows(self) -> Jacobian:
        """The same Jacobian, computed once and kept whatever memory that takes."""
        same = self.with_mode(None)
        same._rows_fit = True
        return same

    def with_mode(self, mode: str | None) -> Jacobian:
        """The same Jacobian, multiplied in another mode."""
        same = self.of_batches(range(len(self.batches)))
        same.mode = checked_mode(mode)
        return same

    # products --------------------------------------------------------------------------------------

    def forward(self, vectors: Tensor) -> list[Tensor]:
        """J v of each vector: for every batch (k, B, T, C)."""
        return list(self.forward_each(vectors))

    def forward_each(self, vectors: Tensor) -> Generator[Tensor, None, None]:
        """The same, batch by batch. To be closed if not used up: meanwhile the network is prepared."""
        v = self._checked(vectors).to(self.network.dtype)
        if self.keeps_rows:
            yield from (torch.einsum("btcp,kp->kbtc", j, v).to(vectors.dtype) for j in self.rows())
            return
        with self._ready(v) as together:
            for batch in self.batches:
                parts = [
                    torch.cat([self._multiply(part, block, Pass.push) for block in torch.split(v, together)])
                    for part, _ in self._parts(batch, together)
                ]
                yield torch.cat(parts, 1).to(vectors.dtype)

    def backward(self, seeds: Iterable[Tensor]) -> Tensor:
        """J^T u, (k, P), for u given as (k, B, T, C) batch by batch; these may come one by one."""
        waiting = iter(seeds)
        first = next(waiting)
        count, dtype, each = len(first), first.dtype, chain([first], waiting)
        del first
        total = torch.zeros(count, self.size, dtype=dtype, device=self.network.device)
        if self.keeps_rows:
            for j, seed in zip(self.rows(), each, strict=True):
                total += seed.to(j.dtype).reshape(count, -1) @ j.reshape(-1, self.size)
            return total
        with self._ready(total) as together:
            for batch, seed in zip(self.batches, each, strict=True):
                s = seed.to(self.network.dtype)
                for part, span in self._parts(batch, together):
                    for i in range(0, count, together):
                        into = total[i : i + together]

                        def pull(examples: Pass, block: Tensor, mode: str, into: Tensor = into) -> Tensor:
                            return examples.pull_into(into, block, mode)

                        self._multiply(part, s[i : i + together, span], pull, pushes=False)
        return total

    def ggn(
        self,
        vectors: Tensor,
        likelihood: Likelihood,
        targets: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """sum_n J_n^T H_n J_n v, (k, P), in one pass over the data; H = S S^T is the likelihood's curvature.

        Args:
            vectors: v, (k, P).
            likelihood: whose curvature H is.
            targets: of each batch, as `likelihood.targets` lays them out.
            outputs: where H is taken, (B, T, C) for each batch; the network's own outputs when None.
        """
        v = self._checked(vectors).to(self.network.dtype)
        total = torch.zeros_like(vectors)
        at_batches = zip(outputs or self.outputs, targets, strict=True)
        if self.keeps_rows:
            for j, (f, y) in zip(self.rows(), at_batches, strict=True):
                seeds = likelihood.curved(f, y, torch.einsum("btcp,kp->kbtc", j, v)).detach()
                total += seeds.reshape(len(v), -1) @ j.reshape(-1, self.size)
            return total
        with self._ready(v) as together:
            for batch, (f, y) in zip(self.batches, at_batches, strict=True):
                for part, span in self._parts(batch, together):
                    for i in range(0, len(v), together):

                        def product(
                            examples: Pass,
                            block: Tensor,
                            mode: str,
                            at: tuple[Tensor, Tensor] = (f[span], y[span]),
                            into: Tensor = total[i : i + together],
                        ) -> Tensor:
                            seeds = likelihood.curved(*at, examples.push(block, mode, tracked=True)).detach()
                            return examples.pull_into(into, seeds, mode)

                        self._multiply(part, v[i : i + together], product)
        return total

    def rows(self) -> list[Tensor]:
        """J of each batch, (B, T, C, P), computed once; only where `keeps_rows`."""
        assert self.keeps_rows
        missing = [i for i, found in enumerate(self._rows) if found is None]
        if missing:
            with self.network.prepared(), differentiable():
                for i in missing:
                    self._rows[i] = rows(self.network, self.canonical, self.batches[i].inputs)
        return [found for found in self._rows if found is not None]

    # modes -----------------------------------------------------------------------------------------

    def mode_for(self, count: int) -> str:
        """The mode in which a block of so many vectors is multiplied, as far as is known before the product."""
        return self._modes(count)[0]

    def _modes(self, count: int) -> list[str]:
        """The preferred mode and those to fall back on, without those that were found not to work."""
        several = count > 1
        if self.mode == "fastest":
            if several not in self._facts.fastest:
                self._facts.fastest[several] = self._time_modes(count)
            preferred = self._facts.fastest[several]
        elif self.mode is None:
            preferred = default_mode(self.network, several, self._graph_bytes()[0])
        else:
            return [self.mode]
        order = SEVERAL_VECTORS_MODES if several else ONE_VECTOR_MODES
        modes = (preferred, *(mode for mode in order if mode != preferred))
        return [mode for mode in modes if shortcut_name(mode) not in self.network.proofs.refused]

    def _multiply(
        self, batch: Batch, block: Tensor, product: Callable[[Pass, Tensor, str], Tensor], *, pushes: bool = True
    ) -> Tensor:
        """A product for some examples in the first mode that works for them; `pushes`: whether J v is part of it."""
        for mode in self._modes(len(block)):
            cause: BaseException | None = None
            try:
                if self._proven(batch.inputs, mode, len(block), pushes):
                    return product(Pass(self.network, self.canonical, batch.inputs), block, mode)
            except DERIVATIVE_ERRORS as error:
                if mode == "rows":
                    raise
                self.network.proofs.refused.add(shortcut_name(mode))
                cause = error
            if self.mode == mode:
                raise OptionError(
                    f"This network's Jacobian cannot be multiplied in mode {mode!r}",
                    expected="products that agree with plain backward passes",
                    got=f"the error: {cause}" if cause else "products that disagree, or an error in an earlier attempt",
                    do="leave the mode to Lapis (None), or choose another",
                ) from cause
        raise AssertionError("the rows of J can always be computed")

    def _proven(self, inputs: Inputs, mode: str, count: int, pushes: bool = True) -> bool:
        """Whether a mode is right for so many vectors and examples. Plain backward passes and rows need no proof."""
        if mode == "rows" or not (pushes or mode in BATCHED_BACKWARD_MODES):
            return True
        together = count if mode in BATCHED_MODES else 1

        def agrees() -> bool:
            return agrees_with_backward(Pass(self.network, self.canonical, inputs), mode, self._random(together))

        return self.network.proofs.holds(shortcut_name(mode), (together, describe(inputs)), agrees)

    def _time_modes(self, count: int) -> str:
        """The fastest mode for one vector, or for several, by the clock."""
        several, graph = count > 1, self._graph_bytes()[0]
        first = self.batches[0]
        inputs, vectors = timed_examples(first, graph), self._random(min(count, TIMED_VECTORS))

        def product(mode: str) -> Tensor:
            examples = Pass(self.network, self.canonical, inputs)
            return examples.pull(examples.push(vectors, mode, tracked=True), mode)

        working = []
        with self.network.prepared(), differentiable():
            for mode in SEVERAL_VECTORS_MODES if several else ONE_VECTOR_MODES:
                try:
                    if worth_timing(mode, several, len(first) * graph) and self._proven(inputs, mode, len(vectors)):
                        product(mode)
                        working.append(mode)
                except DERIVATIVE_ERRORS:
                    self.network.proofs.refused.add(shortcut_name(mode))
            return fastest(working, product, accepted_slowdown(several, inputs, first)) if working else "rows"

    # sizes -----------------------------------------------------------------------------------------

    @contextmanager
    def _ready(self, vectors: Tensor) -> Iterator[int]:
        """The network prepared for products with such a block; yields how many of its vectors go together."""
        with self.network.prepared(), differentiable():
            together = len(vectors)
            if self.mode_for(together) in BATCHED_MODES:
                together = min(together, max(1, self.memory_budget // (6 * self.size * self.network.dtype.itemsize)))
            yield together

    def _parts(self, batch: Batch, together: int) -> Iterator[tuple[Batch, slice]]:
        """The batch in parts that fit in memory when so many vectors go together, each with its span of examples."""
        start = 0
        for part in batch.split(self._examples(together, len(batch))):
            yield part, slice(start, start + len(part))
            start += len(part)

    def _examples(self, together: int, count: int) -> int:
        """How many of `count` examples are worked on at once, so that they fit in their share of the budget."""
        graph, largest = self._graph_bytes()
        mode = self.mode_for(together)
        each = 3 * graph + (4 * together * largest if mode in BATCHED_MODES else 0)
        each += together * OUTPUT_COPIES * 8 * self.outputs[0][0].numel()
        parts = least_parts(mode, count, together, graph, largest)
        share = SEVERAL_VECTORS_SHARE if together > 1 else ONE_VECTOR_SHARE
        return max(1, min(math.ceil(count / parts), self.memory_budget // (share * max(1, each))))

    def _graph_bytes(self) -> tuple[int, int]:
        """Bytes that the autograd graph of one example holds beside the weights: in total, and its largest tensor."""
        if self._facts.graph_bytes is None:
            with self.network.prepared(), differentiable():
                output, held = self.network.traced(take(self.batches[0].inputs, 0, 1))
            self._facts.graph_bytes = sum(held) + output.nbytes, max(held, default=output.nbytes)
        return self._facts.graph_bytes

    def _random(self, count: int) -> Tensor:
        """The same random vectors (count, P) every time."""
        generator = torch.Generator(device=self.network.device).manual_seed(1)
        return self.network.flat().new_empty(count, self.size).normal_(generator=generator)

    def _checked(self, vectors: Tensor) -> Tensor:
        if vectors.dim() != 2 or not len(vectors) or vectors.shape[1] != self.size:
            raise DataError(
                "The vectors do not fit the weights",
                expected=f"a block (k, {self.size}), one vector a row",
                got=str(tuple(vectors.shape)),
                do="pass v[None] for a single one",
            )
        return vectors
