"""The sum of J^T J over rows J of all weights, in the order of multiplication that takes the least work.

Rows of Jacobians wait until there are many, so that the whole matrix is gone through seldom. A layer whose weights act
at few positions, J[b, m, (o, i)] = sum_t g[b, t, o, m] a[b, t, i] with fewer positions t than seeds m, need not be
multiplied row by row: with any other columns R[b, m, c] of the Jacobian,

    sum_bm J[b, m, (o, i)] R[b, m, c] = sum_bt a[b, t, i] (sum_m g[b, t, o, m] R[b, m, c]),

where the outer sum, which is most of the work, is shorter: nine times in a linear layer under ten classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lapis.curvature.contributions import CHUNK_BYTES, Contribution, Outer
from lapis.curvature.products import symmetric

STRIP = 256
"""Rows of the matrix that are computed, and added in float64, in one go."""

FEWEST_ROWS, MOST_ROWS = 1024, 8192
"""Rows that wait to be multiplied, in between as many as weights."""

FEW = 0.5
"""Up to this many rows in all, as a fraction of the weights, they stay as they are until the matrix is asked for."""

INNER_COST = 4
"""Time of an operation in the inner sums, small products for each example, in operations of the outer ones."""

Span = tuple[int, int]


@dataclass(frozen=True)
class _Factors:
    """Of one layer and batch: gradients g (b, T, O, M), and inputs a (b * T, I) with a one for the bias."""

    g: Tensor
    a: Tensor


@dataclass(frozen=True)
class _Part:
    """Rows of one batch, (M, b, size), and the factors of those sites (by their number) that multiply quicker so."""

    rows: Tensor
    factors: dict[int, _Factors]

    def inner(self, site: int, outputs: slice, columns: slice, place: Tensor) -> None:
        """Write sum_m g[b, t, o, m] R[b, m, c] into `place` (b * T, o * c)."""
        g = self.factors[site].g[:, :, outputs]
        rows = self.rows[:, :, columns].transpose(0, 1)
        torch.bmm(g.flatten(1, 2), rows, out=place.view(len(g), -1, rows.shape[-1]))


class Gram:
    """A float64 matrix that grows by J^T J; `sizes` says how many columns each site has, in order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        stops = np.cumsum(sizes).tolist()
        self._spans: list[Span] = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        self.size: int = stops[-1]
        # numpy's zeros take no memory before they are written to, and only one triangle is until somebody looks
        self._total = torch.from_numpy(np.zeros((self.size, self.size)))
        self._room = torch.empty(0, self.size)
        self._count = 0
        self._parts: list[_Part] = []
        self._multiplied = False
        self._mirrored = True

    def add(self, contributions: Sequence[Contribution]) -> None:
        """Let the rows of a batch wait, and multiply those before them if there is no room for both."""
        parts = [each.rows().detach() for each in contributions]
        seeds, batch = parts[0].shape[:2]
        factors = {site: found for site, each in enumerate(contributions) if (found := _factors(each)) is not None}
        alike = not self._parts or factors.keys() == self._parts[0].factors.keys()
        if self._count + seeds * batch > len(self._room) or not alike:
            self._multiply()
        if seeds * batch > len(self._room):
            room = max(FEWEST_ROWS, min(self.size, MOST_ROWS), seeds * batch)
            self._room = parts[0].new_empty(room, self.size)
        place = self._room[self._count : self._count + seeds * batch].view(seeds, batch, self.size)
        torch.cat(parts, -1, out=place)
        self._parts.append(_Part(place, factors))
        self._count += seeds * batch

    def settle(self) -> None:
        """Multiply what waits, if it is much, and take no more memory than what is left."""
        if self._multiplied or self._count > FEW * self.size:
            self._multiply()
        self._room = self._room[: self._count].clone()
        self._parts = [_Part(self._room[:, None], {})] if self._count else []

    def load(self, matrix: Tensor) -> None:
        """Begin again from this sum."""
        self._total, self._count, self._parts = matrix, 0, []
        self._multiplied = self._mirrored = True

    @property
    def rows(self) -> Tensor | None:
        """All rows, float64, where they are few beside the weights; else None."""
        return None if self._multiplied or self._count == 0 else self._room[: self._count].double()

    @property
    def lower(self) -> Tensor:
        """The matrix, of which only the lower triangle means something."""
        self._multiply()
        return self._total

    @property
    def matrix(self) -> Tensor:
        """The matrix, all of it."""
        self._multiply()
        if not self._mirrored:
            for start, stop in strips(0, self.size):
                self._total[start:stop, start:stop] = symmetric(self._total[start:stop, start:stop])
                self._total[start:stop, stop:] = self._total[stop:, start:stop].mT
            self._mirrored = True
        return self._total

    def _multiply(self) -> None:
        """Add what the waiting rows say to the lower triangle."""
        if self._count == 0:
            return
        factored = sorted(self._parts[0].factors, key=lambda site: len(self._parts[0].factors[site].a))
        plain = [span for site, span in enumerate(self._spans) if site not in factored]
        self._add_plain(_joined(plain))
        for place, site in enumerate(factored):
            others = plain + [self._spans[later] for later in factored[place + 1 :]]
            self._add_factored(site, _joined(sorted(others)))
        self._count, self._parts = 0, []
        self._multiplied, self._mirrored = True, False

    def _add_plain(self, spans: Sequence[Span]) -> None:
        """Products of rows with rows, in strips, each still in the cache when it is added."""
        rows = self._room[: self._count]
        for number, span in enumerate(spans):
            for start, stop in strips(*span):
                for first, last in (*spans[:number], (span[0], stop)):
                    left, right = rows[:, start:stop].mT, rows[:, first:last]
                    total = self._total[start:stop, first:last]
                    if rows.dtype == total.dtype:
                        torch.addmm(total, left, right, out=total)
                    else:
                        total += left @ right

    def _add_factored(self, site: int, others: Sequence[Span]) -> None:
        """Products of a site's rows with themselves and those of others, by its factors."""
        begin, end = self._spans[site]
        a = torch.cat([part.factors[site].a for part in self._parts]).mT
        inputs, outputs = a.shape[0], (end - begin) // a.shape[0]
        width = max(1, CHUNK_BYTES // (a.shape[1] * outputs * a.element_size()))

        def products(first: int, start: int, stop: int) -> Tensor:
            """Of the outputs from the first on with some columns, (outputs, inputs, columns)."""
            inner = a.new_empty(a.shape[1], (outputs - first) * (stop - start))
            lengths = [len(part.factors[site].a) for part in self._parts]
            for part, place in zip(self._parts, torch.split(inner, lengths), strict=True):
                part.inner(site, slice(first, None), slice(start, stop), place)
            found = a @ inner
            return found.view(inputs, outputs - first, stop - start).transpose(0, 1)

        for start, stop in strips(begin, end, inputs * max(1, width // inputs)):
            first = (start - begin) // inputs
            self._total[start:end, start:stop].view(-1, inputs, stop - start).add_(products(first, start, stop))
        for span in others:
            for start, stop in strips(*span, width):
                before = start < begin
                place = self._total[begin:end, start:stop] if before else self._total[start:stop, begin:end].mT
                place.view(-1, inputs, stop - start).add_(products(0, start, stop))


def strips(start: int, stop: int, width: int | None = None) -> Iterator[Span]:
    """A span in pieces of this width, STRIP by default, but for the last."""
    width = width or STRIP
    return ((first, min(first + width, stop)) for first in range(start, stop, width))


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Neighbours as one."""
    found: list[Span] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _factors(contribution: Contribution) -> _Factors | None:
    """The factors of a layer that multiplies quicker by them; else None."""
    if not isinstance(contribution, Outer) or contribution.g.shape[0] > 1:
        return None
    _, seeds, _, positions, _ = contribution.g.shape
    if seeds <= positions:
        return None
    a = contribution.inputs()[0].flatten(0, 1).detach()
    inputs = a.shape[1] + int(contribution.bias)
    if positions * (inputs + INNER_COST * seeds) >= seeds * inputs:
        return None
    if contribution.bias:
        a = torch.cat([a, a.new_ones(len(a), 1)], 1)
    return _Factors(contribution.g[0].detach().permute(1, 2, 3, 0).contiguous(), a)
