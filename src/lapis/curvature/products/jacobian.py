"""The Jacobian J of a network's outputs in its weights over a data set, known by its products.

    forward:  J_n v          backward:  sum_n J_n^T u_n          ggn:  sum_n J_n^T H_n J_n v

Vectors are rows of a block (k, P), as in `lapis.solvers`; outputs of a batch are (k, B, T, C).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lapis.batches import Batch, Inputs, batch_length, take
from lapis.curvature.products.differentiation import (
    BATCHED,
    FOR_ONE,
    FOR_SEVERAL,
    LEANEST,
    UNABLE,
    Pass,
    differentiable,
    proven,
    rows,
)
from lapis.errors import DataError, OptionError
from lapis.likelihoods import Likelihood
from lapis.network import Network

KEPT_BYTES = 16 * 2**20
"""Rows of J that take no more than this are kept: reading them is then faster than running the network."""

PROBED_EXAMPLES, PROBED_VECTORS, PROBED_BYTES = 64, 8, 16 * 2**20
"""Examples, vectors and bytes of graph at most that the ways are timed on: a few examples of a large network tell."""

NEARLY = {False: 1.25, True: 1.1}
"""A way within this factor of the fastest that takes less memory is as good; for one vector, and for several."""

NEARLY_WHOLE, NEARLY_LARGE = 1.05, 1.5
"""The same for several vectors where the ways were timed on a whole batch, and on few examples of a large network. On
fewer examples several vectors at once look better than they are: they leave the cache later.
"""

SMALL_BYTES, LARGE_BYTES, LARGE_PARTS = 4 * 2**20, 16 * 2**20, 3
"""Whether the tangents' graph may be held beside the network's. Yes where that is small. Where it is large, too, in so
many parts: these keep the processor busy, and take no more than the network's graph of all examples. In between it is
weighed against one more run of the network.
"""

CONTENDERS, ROUNDS, ROUNDS_SECONDS = 3, 5, 0.5
"""Ways, the fastest at first sight, that are timed again in turns, as often as this or until so long has passed: other
programs make single times unsure.
"""


@dataclass
class _Known:
    """What was found out about a network's products; shared by all its Jacobians."""

    way: dict[bool, str] = field(default_factory=dict)
    """The fastest way for one vector (False) and several (True)."""
    unable: set[str] = field(default_factory=set)
    proven: set[tuple[str, int, int]] = field(default_factory=set)
    """Ways, numbers of vectors and of examples for which torch's batching rules were checked."""
    example_bytes: tuple[int, int] | None = None
    """What an example's graph holds: in all, and its largest tensor."""


_KNOWN: WeakKeyDictionary[Network, _Known] = WeakKeyDictionary()


class Jacobian:
    """J at the network's weights, for every batch. Products run in the network's dtype; sums over batches and results
    have the dtype of the vectors that went in, and follow the order of the batches.

    A product holds, beside its vectors and results: the graph of the examples worked on at once, up to three times that
    where dual numbers or double backward run through it, and for vectors worked on together one layer's tangents and
    3 P numbers each. Examples and vectors at once follow from `memory_budget`. J itself, if it fits in `kept_bytes`, is
    kept.

    The way of multiplying (`products.differentiation`) is chosen when the network's first product is asked for, by
    timing those that its operators allow on a few examples; each is checked against plain backward passes before use.

    Args:
        network: the network and its chosen weights, P of them.
        canonical: brings raw outputs to (B, T, C), as `likelihood.canonical` does.
        batches: the data.
        memory_budget: bytes that one product may work in.
        kept_bytes: J is kept as rows when that takes no more.
        way: one of the ways by name instead of the fastest.
    """

    def __init__(
        self,
        network: Network,
        canonical: Callable[[Tensor], Tensor],
        batches: Sequence[Batch],
        *,
        memory_budget: int = 4 * 2**30,
        kept_bytes: int = KEPT_BYTES,
        way: str | None = None,
    ) -> None:
        if way is not None and way not in LEANEST:
            raise OptionError("Unknown way to multiply", expected=", ".join(LEANEST), got=repr(way), do="choose one")
        self.network, self.canonical, self.batches, self.memory_budget = network, canonical, batches, memory_budget
        self.size, self.forced = network.size, way
        self.outputs: list[Tensor] = []
        """f of each batch, (B, T, C) float64."""
        self.shapes: list[torch.Size] = []
        """Shapes of the raw outputs."""
        self._known = _KNOWN.setdefault(network, _Known())
        with network.prepared(), torch.no_grad():
            for batch in batches:
                raw = network.call(batch.inputs)
                self.outputs.append(canonical(raw).detach().double())
                self.shapes.append(raw.shape)
        needed = self.n_outputs * self.size * network.dtype.itemsize
        self.keeps = way is None and 2 * needed <= min(2 * kept_bytes, memory_budget)
        """Whether rows are kept."""
        self._rows: list[Tensor | None] = [None] * len(batches)

    @property
    def n_outputs(self) -> int:
        """The number of rows of J: outputs over all examples and positions."""
        return sum(f.numel() for f in self.outputs)

    def at(self, chosen: int | Sequence[int]) -> Jacobian:
        """The same products over some of the batches, by their places in `batches`."""
        places = [chosen] if isinstance(chosen, int) else list(chosen)
        part = object.__new__(Jacobian)
        part.__dict__.update(self.__dict__)
        part.batches = [self.batches[place] for place in places]
        part.outputs = [self.outputs[place] for place in places]
        part.shapes = [self.shapes[place] for place in places]
        part._rows = [self._rows[place] for place in places]
        return part

    def keeping(self) -> Jacobian:
        """The same Jacobian with its rows kept, whatever they take."""
        part = self.at(range(len(self.batches)))
        part.keeps = True
        return part

    # products --------------------------------------------------------------------------------------

    def forward(self, vectors: Tensor) -> list[Tensor]:
        """J v of each vector: for every batch (k, B, T, C)."""
        v = self._checked(vectors).to(self.network.dtype)
        if self.keeps:
            return [torch.einsum("btcp,kp->kbtc", j, v).to(vectors.dtype) for j in self.rows()]
        found = []
        with self._ready(v) as at_once:
            for batch in self.batches:
                parts = [
                    torch.cat([self._multiply(part, v[i : i + at_once], Pass.push) for i in range(0, len(v), at_once)])
                    for part, _ in self._parts(batch, at_once)
                ]
                found.append(torch.cat(parts, 1).to(vectors.dtype))
        return found

    def backward(self, seeds: Sequence[Tensor]) -> Tensor:
        """J^T u, (k, P), for u given as (k, B, T, C) batch by batch."""
        count, dtype = len(seeds[0]), seeds[0].dtype
        total = torch.zeros(count, self.size, dtype=dtype, device=self.network.device)
        if self.keeps:
            for j, seed in zip(self.rows(), seeds, strict=True):
                total += seed.to(j.dtype).reshape(count, -1) @ j.reshape(-1, self.size)
            return total
        with self._ready(total) as at_once:
            for batch, seed in zip(self.batches, seeds, strict=True):
                s = seed.to(self.network.dtype)
                for part, span in self._parts(batch, at_once):
                    for i in range(0, count, at_once):
                        into = total[i : i + at_once]

                        def pull(examples: Pass, block: Tensor, way: str, into: Tensor = into) -> Tensor:
                            return examples.pull_into(into, block, way)

                        self._multiply(part, s[i : i + at_once, span], pull)
        return total

    def ggn(
        self,
        vectors: Tensor,
        likelihood: Likelihood,
        targets: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """sum_n J_n^T H_n J_n v, (k, P), in one pass over the data; H = S S^T is the likelihood's curvature.

        `targets` as the likelihood lays them out, batch by batch; H is taken at `outputs` (B, T, C), the network's own
        when None.
        """
        v = self._checked(vectors).to(self.network.dtype)
        total = torch.zeros_like(vectors)
        places = zip(outputs or self.outputs, targets, strict=True)
        if self.keeps:
            for j, (f, y) in zip(self.rows(), places, strict=True):
                seeds = likelihood.curved(f, y, torch.einsum("btcp,kp->kbtc", j, v)).detach()
                total += seeds.reshape(len(v), -1) @ j.reshape(-1, self.size)
            return total
        with self._ready(v) as at_once:
            for batch, (f, y) in zip(self.batches, places, strict=True):
                for part, span in self._parts(batch, at_once):
                    for i in range(0, len(v), at_once):

                        def product(
                            examples: Pass,
                            block: Tensor,
                            way: str,
                            at: tuple[Tensor, Tensor] = (f[span], y[span]),
                            into: Tensor = total[i : i + at_once],
                        ) -> Tensor:
                            seeds = likelihood.curved(*at, examples.push(block, way, tracked=True)).detach()
                            return examples.pull_into(into, seeds, way)

                        self._multiply(part, v[i : i + at_once], product)
        return total

    def rows(self) -> list[Tensor]:
        """J of each batch, (B, T, C, P), computed once; only for a Jacobian that `keeps` them."""
        assert self.keeps
        missing = [place for place, found in enumerate(self._rows) if found is None]
        if missing:
            with self.network.prepared(), differentiable():
                for place in missing:
                    self._rows[place] = rows(self.network, self.canonical, self.batches[place].inputs)
        return [found for found in self._rows if found is not None]

    # how -------------------------------------------------------------------------------------------

    @contextmanager
    def _ready(self, vectors: Tensor) -> Iterator[int]:
        """The network ready for products, the way for such a block known; yields how many vectors go at once."""
        with self.network.prepared(), differentiable():
            if self._known.example_bytes is None:
                self._known.example_bytes = self._measure_bytes()
            self._choose(len(vectors))
            at_once = len(vectors)
            if self.way(at_once) in BATCHED:
                at_once = min(at_once, max(1, self.memory_budget // (6 * self.size * self.network.dtype.itemsize)))
            self._choose(at_once)
            yield at_once

    def way(self, count: int) -> str:
        """How a block of so many vectors is multiplied; to be asked after a product with one."""
        return self.forced or self._known.way[count > 1]

    def _parts(self, batch: Batch, at_once: int) -> Iterator[tuple[Batch, slice]]:
        start = 0
        for part in batch.split(self._examples(at_once, len(batch))):
            yield part, slice(start, start + len(part))
            start += len(part)

    def _examples(self, at_once: int, count: int) -> int:
        """How many of `count` examples are worked on at once: they fit in half of the memory."""
        assert self._known.example_bytes is not None
        graph, largest = self._known.example_bytes
        way = self.way(at_once)
        each = 3 * graph + (4 * at_once * largest if way in BATCHED else 0)
        parts = LARGE_PARTS if way == "one_pass" and count * graph > LARGE_BYTES else 1
        return max(1, min(math.ceil(count / parts), self.memory_budget // (2 * max(1, each))))

    def _measure_bytes(self) -> tuple[int, int]:
        """What one example's graph holds beside the weights: in all, and its largest tensor."""
        output, held = self.network.traced(take(self.batches[0].inputs, 0, 1))
        return sum(held) + output.nbytes, max(held, default=output.nbytes)

    def _multiply(self, batch: Batch, block: Tensor, product: Callable[[Pass, Tensor, str], Tensor]) -> Tensor:
        """One product for some examples, by the chosen way or the next that these examples allow."""
        order = FOR_SEVERAL if len(block) > 1 else FOR_ONE
        self._choose(len(block))  # the last of a long block may stand alone
        first = self.way(len(block))
        if self.forced:
            return product(self._pass(batch.inputs), block, first)
        for way in (first, *(other for other in order if other != first)):
            if way in self._known.unable:
                continue
            examples = self._pass(batch.inputs)
            try:
                if way not in BATCHED or self._proven(examples, way, len(block)):
                    return product(examples, block, way)
            except UNABLE:
                if way == "rows":
                    raise
            self._known.unable.add(way)
        raise AssertionError("the rows of J can always be computed")

    def _pass(self, inputs: Inputs) -> Pass:
        return Pass(self.network, self.canonical, inputs)

    def _proven(self, examples: Pass, way: str, count: int) -> bool:
        key = (way, count, batch_length(examples.inputs))  # not of f: its graph would lie beside the tangents
        if key not in self._known.proven:
            if not proven(examples, way, self._random(count)):
                return False
            self._known.proven.add(key)
        return True

    def _random(self, count: int) -> Tensor:
        generator = torch.Generator(device=self.network.device).manual_seed(1)
        return self.network.flat().new_empty(count, self.size).normal_(generator=generator)

    def _choose(self, count: int) -> None:
        """Time the ways that work on a few examples; the fastest for one vector, or for several, is remembered."""
        several = count > 1
        if self.forced or several in self._known.way:
            return
        assert self._known.example_bytes is not None
        graph = self._known.example_bytes[0]
        inputs = take(self.batches[0].inputs, 0, min(PROBED_EXAMPLES, max(1, PROBED_BYTES // graph)))
        vectors = self._random(min(count, PROBED_VECTORS))
        seconds: dict[str, float] = {}
        weighed = several or SMALL_BYTES < len(self.batches[0]) * graph <= LARGE_BYTES
        for way in FOR_SEVERAL if several else FOR_ONE:
            if way in self._known.unable or (way == "forward" and not weighed) or (way == "rows" and seconds):
                continue  # rows are slower than any other way
            try:
                if proven(self._pass(inputs), way, vectors):
                    seconds[way] = self._timed(inputs, way, vectors)
                    continue
            except UNABLE:
                if way == "rows":
                    raise
            self._known.unable.add(way)
        contenders = sorted(seconds, key=seconds.__getitem__)[:CONTENDERS] if len(seconds) > 1 else []
        end = time.perf_counter() + ROUNDS_SECONDS
        for turn in range(ROUNDS):
            if turn and time.perf_counter() > end:
                break
            for way in contenders:
                seconds[way] = min(seconds[way], self._timed(inputs, way, vectors))
        nearly, timed = NEARLY[several], batch_length(inputs)
        if several and timed == len(self.batches[0]):
            nearly = NEARLY_WHOLE
        elif several and timed < PROBED_EXAMPLES:
            nearly = NEARLY_LARGE
        limit = nearly * min(seconds.values(), default=0.0)
        good = [way for way in LEANEST if seconds.get(way, math.inf) <= limit]
        self._known.way[several] = good[0] if good else "rows"

    def _timed(self, inputs: Inputs, way: str, vectors: Tensor) -> float:
        start = time.perf_counter()
        examples = self._pass(inputs)
        examples.pull(examples.push(vectors, way, tracked=True), way)
        return time.perf_counter() - start

    def _checked(self, vectors: Tensor) -> Tensor:
        if vectors.dim() != 2 or not len(vectors) or vectors.shape[1] != self.size:
            raise DataError(
                "The vectors do not fit the weights",
                expected=f"a block (k, {self.size}), one vector a row",
                got=str(tuple(vectors.shape)),
                do="pass v[None] for a single one",
            )
        return vectors
