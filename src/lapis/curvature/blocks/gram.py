"""The sum of J^T J over rows J of all weights, in the order of multiplication that takes the least work.

Rows of Jacobians wait until there are many, so that the whole matrix is gone through seldom. A layer whose weights act
at few positions, J[b, m, (o, i)] = sum_t g[b, t, o, m] a[b, t, i] with fewer positions t than seeds m, need not be
multiplied row by row: with any other columns R[b, m, c] of the Jacobian,

    sum_bm J[b, m, (o, i)] R[b, m, c] = sum_bt a[b, t, i] (sum_m g[b, t, o, m] R[b, m, c]),

where the outer sum, which is most of the work, is shorter: nine times in a linear layer under ten classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lapis.curvature.backward.contributions import CHUNK_BYTES, Contribution, Outer
from lapis.curvature.moments import symmetric

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
    """Of one layer and batch: gradients g (b, T, O, M), and inputs a (b, T, I) with a one for the bias."""

    g: Tensor
    a: Tensor

    def rows(self, outputs: slice) -> Tensor:
        """J of some outputs, (b, M, o * I)."""
        g = self.g[:, :, outputs]
        batch, positions, chosen, seeds = g.shape
        return torch.bmm(g.permute(0, 3, 2, 1).reshape(batch, seeds * chosen, positions), self.a).view(batch, seeds, -1)


@dataclass(frozen=True)
class _Part:
    """One batch: rows of the plain sites' columns, (M, b, columns), and the other sites' factors, by site."""

    rows: Tensor
    factors: dict[int, _Factors]

    def whole(self, spans: Sequence[Span], plain: Sequence[int]) -> Tensor:
        """Rows of all columns, (M * b, size)."""
        parts = dict(zip(plain, torch.split(self.rows, [spans[s][1] - spans[s][0] for s in plain], -1), strict=True))
        parts |= {site: factors.rows(slice(None)).transpose(0, 1) for site, factors in self.factors.items()}
        return torch.cat([parts[site] for site in range(len(spans))], -1).flatten(0, 1)


class Gram:
    """A float64 matrix that grows by J^T J; `sizes` says how many columns each site has, in order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        stops = np.cumsum(sizes).tolist()
        self._spans: list[Span] = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        self.size: int = stops[-1]
        # numpy's zeros take no memory before they are written to, and only one triangle is until somebody looks
        self._total = torch.from_numpy(np.zeros((self.size, self.size)))
        self._room = torch.empty(0, 0)
        self._parts: list[_Part] = []
        self._multiplied = False
        self._mirrored = True

    @property
    def _count(self) -> int:
        """Rows that wait."""
        return sum(part.rows.shape[:2].numel() for part in self._parts)

    @property
    def _plain(self) -> list[int]:
        """Sites of the parts that wait as rows."""
        return [site for site in range(len(self._spans)) if site not in self._parts[0].factors]

    def add(self, contributions: Sequence[Contribution]) -> None:
        """Let what a batch says wait, and multiply what came before if there is no room for both."""
        factors = {site: found for site, each in enumerate(contributions) if (found := _factors(each)) is not None}
        rows = [each.rows().detach() for site, each in enumerate(contributions) if site not in factors]
        some = rows[0] if rows else next(iter(factors.values())).g.permute(3, 0, 1, 2)
        seeds, batch = some.shape[:2]
        room = max(FEWEST_ROWS, min(self.size, MOST_ROWS), seeds * batch)
        alike = not self._parts or factors.keys() == self._parts[0].factors.keys()
        if not alike or self._count + seeds * batch > room or len(self._room) == 0:
            self._multiply()
        count, columns = self._count + seeds * batch, sum(part.shape[-1] for part in rows)
        if len(self._room) < count or self._room.shape[1] != columns:
            self._room = some.new_empty(room, columns)
        place = self._room[count - seeds * batch : count].view(seeds, batch, columns)
        if rows:
            torch.cat(rows, -1, out=place)
        self._parts.append(_Part(place, factors))

    def flush(self) -> None:
        """Multiply what waits, if it is much, and take no more memory than what is left."""
        if self._multiplied or self._count > FEW * self.size:
            self._multiply()
        rows = [part.whole(self._spans, self._plain) for part in self._parts]
        self._room = torch.empty(0, 0)
        self._parts = [_Part(torch.cat(rows)[:, None], {})] if rows else []

    def load(self, matrix: Tensor) -> None:
        """Begin again from this sum."""
        self._total, self._parts = matrix, []
        self._multiplied = self._mirrored = True

    @property
    def rows(self) -> Tensor | None:
        """All rows, float64, where they are few beside the weights; else None. To be asked for after a flush."""
        return None if self._multiplied or not self._parts else self._parts[0].rows[:, 0].double()

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
        """Add what waits to the lower triangle."""
        if not self._parts:
            return
        plain, first = self._plain, self._parts[0].factors
        self._add_plain(plain)
        factored = sorted(first, key=lambda site: first[site].a.shape[1])
        for place, site in enumerate(factored):
            self._add_factored(site, plain, factored[place + 1 :])
        self._parts = []
        self._multiplied, self._mirrored = True, False

    def _columns(self, plain: Sequence[int]) -> list[tuple[Span, int]]:
        """Where the columns of plain sites belong, neighbours as one span, and where each span begins among them."""
        found: list[tuple[Span, int]] = []
        place = 0
        for start, stop in (self._spans[site] for site in plain):
            if found and found[-1][0][1] == start:
                found[-1] = ((found[-1][0][0], stop), found[-1][1])
            else:
                found.append(((start, stop), place))
            place += stop - start
        return found

    def _add_plain(self, plain: Sequence[int]) -> None:
        """Products of rows with rows, in strips, each still in the cache when it is added."""
        rows = self._parts[0].rows.flatten(0, 1) if len(self._parts) == 1 else self._room[: self._count]
        columns = self._columns(plain)
        for number, ((begin, end), place) in enumerate(columns):
            for start, stop in strips(begin, end):
                left = rows[:, place + start - begin : place + stop - begin].mT
                before = [(first, last, other) for (first, last), other in columns[:number]]
                for first, last, other in (*before, (begin, stop, place)):
                    right, total = rows[:, other : other + last - first], self._total[start:stop, first:last]
                    if rows.dtype == total.dtype:
                        torch.addmm(total, left, right, out=total)
                    else:
                        total += left @ right

    def _add_factored(self, site: int, plain: Sequence[int], others: Sequence[int]) -> None:
        """Products of a site's rows, by its factors, with themselves, other such sites' rows, and plain columns."""
        begin, end = self._spans[site]
        own = [part.factors[site] for part in self._parts]
        a = torch.cat([factors.a.flatten(0, 1) for factors in own]).mT
        inputs, outputs = a.shape[0], (end - begin) // a.shape[0]
        width = max(1, CHUNK_BYTES // (a.shape[1] * outputs * a.element_size()))

        def add(first: int, start: int, stop: int, rows: Iterable[Tensor]) -> None:
            """The outputs from the first on with columns from start to stop, of which each part has rows (b, M, c)."""
            inner = a.new_empty(a.shape[1], (outputs - first) * (stop - start))
            lengths = [factors.a.shape[:2].numel() for factors in own]
            for factors, right, place in zip(own, rows, torch.split(inner, lengths), strict=True):
                torch.bmm(factors.g[:, :, first:].flatten(1, 2), right, out=place.view(len(right), -1, stop - start))
            found = (a @ inner).view(inputs, outputs - first, stop - start).transpose(0, 1)
            top = begin + first * inputs
            place = self._total[top:end, start:stop] if start <= top else self._total[start:stop, top:end].mT
            place.view(outputs - first, inputs, stop - start).add_(found)

        for other in (site, *others):
            base, final = self._spans[other]
            each = [part.factors[other] for part in self._parts]
            step = each[0].a.shape[2]
            for start, stop in strips(base, final, step * max(1, width // step)):
                chosen = slice((start - base) // step, (stop - base) // step)
                first = chosen.start if other == site else 0
                add(first, start, stop, (factors.rows(chosen) for factors in each))
        for (base, final), place in self._columns(plain):
            for start, stop in strips(base, final, width):
                seen = slice(place + start - base, place + stop - base)
                add(0, start, stop, (part.rows[:, :, seen].transpose(0, 1) for part in self._parts))


def strips(start: int, stop: int, width: int | None = None) -> Iterator[Span]:
    """A span in pieces of this width, STRIP by default, but for the last."""
    width = width or STRIP
    return ((first, min(first + width, stop)) for first in range(start, stop, width))


def _factors(contribution: Contribution) -> _Factors | None:
    """The factors of a layer that multiplies quicker by them; else None."""
    if not isinstance(contribution, Outer) or contribution.g.shape[0] > 1:
        return None
    _, seeds, _, positions, _ = contribution.g.shape
    if seeds <= positions:
        return None
    a = contribution.inputs()[0].detach()
    inputs = a.shape[2] + int(contribution.bias)
    if positions * (inputs + INNER_COST * seeds) >= seeds * inputs:
        return None
    if contribution.bias:
        a = torch.cat([a, a.new_ones(*a.shape[:2], 1)], 2)
    return _Factors(contribution.g[0].detach().permute(1, 2, 3, 0).contiguous(), a)
