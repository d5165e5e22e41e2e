"""The Gram matrix J^T J of the Jacobian's rows over all weights, in the order of multiplication that costs least.

Rows of several batches are buffered and multiplied together, so that the whole matrix is read and written seldom.

A layer whose weights act at few positions, J[b, m, (o, i)] = sum_t g[b, t, o, m] a[b, t, i] with fewer positions t than
seeds m, need not be multiplied row by row: with any other columns R[b, m, c] of the Jacobian,

    sum_bm J[b, m, (o, i)] R[b, m, c] = sum_bt a[b, t, i] (sum_m g[b, t, o, m] R[b, m, c]),

where the outer sum, which is most of the work, is shorter: nine times in a linear layer under ten classes. This is a
shortcut, and is proven like every other (see `lapis.proofs`): a layer's factors against its rows, and the first product
by factors against a product of rows with a random vector.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lapis.curvature.backward.contributions import CHUNK_BYTES, Contribution, Outer
from lapis.curvature.moments import sum_rounding, symmetric
from lapis.proofs import Proofs, close

STRIP = 256
"""Rows of the matrix that are computed, and added in float64, in one go."""

FEWEST_ROWS, MOST_ROWS = 1024, 8192
"""The buffer holds as many rows as there are weights, within these bounds."""

FEW_ROWS = 0.5
"""Up to this many rows in all, as a fraction of the weights, the rows are kept and the matrix is formed on demand."""

EXACT_SIZE = 1024
"""Up to this many weights, rows are multiplied in float64; so are kept rows. See `sum_rounding`."""

INNER_COST = 4
"""Time of a multiplication in the inner sums, small products for each example, relative to one in the outer sum."""

FACTORED_PRODUCTS = "products of layers by their factors"

PROVEN_EXAMPLES = 2
"""Examples on which a layer's factors are compared with its rows."""

Span = tuple[int, int]
"""The first column, and the one after the last."""


_forming = threading.RLock()


@dataclass(frozen=True)
class _Factors:
    """One layer's Jacobian on one batch: gradients g (b, T, O, M) and inputs a (b, T, I), with a one for the bias."""

    g: Tensor
    a: Tensor

    def rows(self, outputs: slice = slice(None)) -> Tensor:
        """The Jacobian for some of the layer's outputs, (b, M, o * I)."""
        g = self.g[:, :, outputs]
        batch, positions, chosen, seeds = g.shape
        return torch.bmm(g.permute(0, 3, 2, 1).reshape(batch, seeds * chosen, positions), self.a).view(batch, seeds, -1)

    def examples(self, chosen: slice) -> _Factors:
        """The factors of some of the examples."""
        return _Factors(self.g[chosen], self.a[chosen])

    @property
    def key(self) -> Hashable:
        """All sizes but the number of examples, and the dtype: what a proof is for."""
        return (self.g.shape[1:], self.a.shape[1:], self.g.dtype)

    def agrees(self, contribution: Outer) -> bool:
        """Whether these are the factors of the contribution's rows, judged by the first examples."""
        few = slice(PROVEN_EXAMPLES)
        inputs = contribution.inputs()[:, few]
        plain = replace(contribution, inputs=lambda: inputs, g=contribution.g[:, :, few]).rows()
        return close(plain.transpose(0, 1), self.examples(few).rows())


@dataclass(frozen=True)
class _Part:
    """One batch: rows of the plain sites' columns, (M, b, columns), and the factors of the other sites, by site."""

    rows: Tensor
    factors: dict[int, _Factors]

    def by_site(self, spans: Sequence[Span]) -> dict[int, Tensor]:
        """The rows of each plain site's columns."""
        plain = [site for site in range(len(spans)) if site not in self.factors]
        widths = [stop - start for start, stop in (spans[site] for site in plain)]
        return dict(zip(plain, torch.split(self.rows, widths, -1), strict=True))

    def whole(self, spans: Sequence[Span]) -> Tensor:
        """Rows of all columns, (M * b, size)."""
        parts = self.by_site(spans)
        parts |= {site: factors.rows().transpose(0, 1) for site, factors in self.factors.items()}
        return torch.cat([parts[site] for site in range(len(spans))], -1).flatten(0, 1)


class Gram:
    """A float64 matrix J^T J that grows batch by batch; `sizes` are the numbers of columns of each site, in order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        stops = np.cumsum(sizes).tolist()
        self._spans: list[Span] = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        self.size: int = stops[-1]
        self._total = self._zeros(torch.device("cpu"))
        self._buffer = torch.empty(0, 0)
        """Rows of the plain sites' columns, batch after batch; every part's rows are a view into it."""
        self._parts: list[_Part] = []
        """The batches that are buffered."""
        self._proofs = Proofs()
        self._proven: set[Hashable] = set()
        """Sizes of factored sites whose products by factors were seen to agree with products of rows."""
        self.eps = 0.0
        """Of the least precise dtype in which rows were multiplied, unless that was float64."""
        self._is_zero = self._mirrored = True

    def _zeros(self, device: torch.device) -> Tensor:
        """An empty sum. numpy's zeros take no memory before they are written to, and only one triangle mostly is."""
        if device.type == "cpu":
            return torch.from_numpy(np.zeros((self.size, self.size)))
        return torch.zeros(self.size, self.size, dtype=torch.float64, device=device)

    @property
    def _count(self) -> int:
        """The number of buffered rows."""
        return sum(part.rows.shape[:2].numel() for part in self._parts)

    @property
    def _plain(self) -> list[int]:
        """Sites that are buffered as rows, the others being buffered as factors."""
        return [site for site in range(len(self._spans)) if site not in self._parts[0].factors]

    def add(self, contributions: Sequence[Contribution]) -> None:
        """Buffer this batch; multiply what is buffered first if it would overflow."""
        factors = {site: found for site, each in enumerate(contributions) if (found := self._factors(each)) is not None}
        rows = [each.rows().detach() for site, each in enumerate(contributions) if site not in factors]
        if self.size <= EXACT_SIZE:
            rows = [part.double() for part in rows]
        some = rows[0] if rows else next(iter(factors.values())).g.permute(3, 0, 1, 2)
        seeds, batch = some.shape[:2]
        capacity = max(FEWEST_ROWS, min(self.size, MOST_ROWS), seeds * batch)
        alike = not self._parts or factors.keys() == self._parts[0].factors.keys()
        if not alike or self._count + seeds * batch > capacity or len(self._buffer) == 0:
            self._multiply()
        count, columns = self._count + seeds * batch, sum(part.shape[-1] for part in rows)
        if len(self._buffer) < count or self._buffer.shape[1] != columns:
            self._buffer = some.new_empty(capacity, columns)
        buffered = self._buffer[count - seeds * batch : count].view(seeds, batch, columns)
        if rows:
            torch.cat(rows, -1, out=buffered)
        self._parts.append(_Part(buffered, factors))

    def _factors(self, contribution: Contribution) -> _Factors | None:
        """The factors of a layer that is multiplied faster by them; None for any other, or if they were disproven."""
        if FACTORED_PRODUCTS in self._proofs.refused or not isinstance(contribution, Outer):
            return None
        found = _factors(contribution)
        if found is None:
            return None
        if not self._proofs.holds(FACTORED_PRODUCTS, found.key, lambda: found.agrees(contribution)):
            return None
        return _Factors(found.g.double(), found.a.double()) if self.size <= EXACT_SIZE else found

    def flush(self) -> None:
        """Multiply what is buffered unless all rows are few, and free the buffer's spare memory."""
        if not self._is_zero or self._count > FEW_ROWS * self.size:
            self._multiply()
        rows = [part.whole(self._spans) for part in self._parts]
        self._buffer = torch.empty(0, 0)
        self._parts = [_Part(torch.cat(rows)[:, None].double(), {})] if rows else []

    def load(self, matrix: Tensor) -> None:
        """Replace the sum by this matrix."""
        self._total, self._parts = matrix, []
        self._is_zero, self._mirrored = False, True

    def load_rows(self, rows: Tensor) -> None:
        """Replace the sum by that of these rows (n, size), which are kept if they are few."""
        self._total = self._zeros(rows.device)
        self._parts = [_Part(rows[:, None], {})]
        self._is_zero = self._mirrored = True
        self.flush()

    @property
    def rows(self) -> Tensor | None:
        """After a flush: all rows so far, float64 (n, size), if they are few beside the weights; else None."""
        with _forming:
            return self._parts[0].rows[:, 0] if self._is_zero and self._parts else None

    @property
    def rounding(self) -> float:
        """About the error in eigenvalues of the sum: see `sum_rounding`."""
        return sum_rounding(self.eps, self.lower.diagonal()) if self.eps else 0.0

    @property
    def lower(self) -> Tensor:
        """The matrix, valid in its lower triangle only."""
        with _forming:  # on demand, perhaps by several threads at once
            self._multiply()
            self._is_zero = False  # the caller may write to it
            return self._total

    @property
    def matrix(self) -> Tensor:
        """The whole matrix."""
        total = self.lower
        if not self._mirrored:
            for start, stop in strips(0, self.size):
                total[start:stop, start:stop] = symmetric(total[start:stop, start:stop])
                total[start:stop, stop:] = total[stop:, start:stop].mT
            self._mirrored = True
        return total

    def _multiply(self) -> None:
        """Add the products of all that is buffered to the lower triangle."""
        if not self._parts:
            return
        first = self._parts[0].factors
        dtype = self._parts[0].rows.dtype
        self.eps = max(self.eps, 0.0 if dtype == torch.float64 else torch.finfo(dtype).eps)
        sizes = tuple(sorted((site, factors.a.shape[1:], factors.g.shape[2]) for site, factors in first.items()))
        if first and FACTORED_PRODUCTS in self._proofs.refused:
            self._add_unfactored()
        elif first and sizes not in self._proven:
            self._prove(sizes)
        else:
            self._add_buffered()
        self._parts = []
        self._is_zero = self._mirrored = False

    def _prove(self, sizes: Hashable) -> None:
        """Add what is buffered by factors, compare with rows, and use rows instead should the two disagree."""
        before = self._total
        if not self._is_zero:
            self._total = self._zeros(before.device)  # to see these products alone
        self._add_buffered()
        if self._proofs.holds(FACTORED_PRODUCTS, sizes, self._products_agree):
            self._proven.add(sizes)
        else:
            self._total = self._zeros(before.device)
            self._add_unfactored()
        if not self._is_zero:
            for start, stop in strips(0, self.size):
                before[start:stop, :stop] += self._total[start:stop, :stop]
            self._total = before

    def _add_buffered(self) -> None:
        """Products of plain columns by rows, and of the others by factors."""
        plain, first = self._plain, self._parts[0].factors
        self._add_rows(
            self._buffer[: self._count] if len(self._parts) > 1 else self._parts[0].rows.flatten(0, 1), plain
        )
        factored = sorted(first, key=lambda site: first[site].a.shape[1])
        for number, site in enumerate(factored):
            self._add_factored(site, plain, factored[number + 1 :])

    def _add_unfactored(self) -> None:
        """Products of all columns by rows, batch by batch."""
        for part in self._parts:
            self._add_rows(part.whole(self._spans), range(len(self._spans)))

    def _columns(self, sites: Sequence[int]) -> list[tuple[Span, int]]:
        """The matrix columns of some sites, neighbours joined, each with its first column among rows of these sites."""
        found: list[tuple[Span, int]] = []
        offset = 0
        for start, stop in (self._spans[site] for site in sites):
            if found and found[-1][0][1] == start:
                found[-1] = ((found[-1][0][0], stop), found[-1][1])
            else:
                found.append(((start, stop), offset))
            offset += stop - start
        return found

    def _add_rows(self, rows: Tensor, sites: Sequence[int]) -> None:
        """Products of rows (n, columns of the sites) with themselves, in strips that are added while in the cache."""
        columns = self._columns(sites)
        for number, ((begin, end), offset) in enumerate(columns):
            for start, stop in strips(begin, end):
                left = rows[:, offset + start - begin : offset + stop - begin].mT
                before = [(first, last, other) for (first, last), other in columns[:number]]
                for first, last, other in (*before, (begin, stop, offset)):
                    right, total = rows[:, other : other + last - first], self._total[start:stop, first:last]
                    if rows.dtype == total.dtype:
                        torch.addmm(total, left, right, out=total)
                    else:
                        total += left @ right

    def _add_factored(self, site: int, plain: Sequence[int], others: Sequence[int]) -> None:
        """Products of a site, by its factors, with itself, other factored sites, and the plain sites' columns."""
        begin, end = self._spans[site]
        own = [part.factors[site] for part in self._parts]
        a = torch.cat([factors.a.flatten(0, 1) for factors in own]).mT
        inputs, outputs = a.shape[0], (end - begin) // a.shape[0]
        width = max(1, CHUNK_BYTES // (a.shape[1] * outputs * a.element_size()))

        def add(first: int, start: int, stop: int, rows: Iterable[Tensor]) -> None:
            """The site's outputs from the first on, times columns start to stop; `rows` (b, M, c) of each batch."""
            inner = a.new_empty(a.shape[1], (outputs - first) * (stop - start))
            lengths = [factors.a.shape[:2].numel() for factors in own]
            for factors, right, target in zip(own, rows, torch.split(inner, lengths), strict=True):
                torch.bmm(factors.g[:, :, first:].flatten(1, 2), right, out=target.view(len(right), -1, stop - start))
            found = (a @ inner).view(inputs, outputs - first, stop - start).transpose(0, 1)
            top = begin + first * inputs
            target = self._total[top:end, start:stop] if start <= top else self._total[start:stop, top:end].mT
            target.view(outputs - first, inputs, stop - start).add_(found)

        for other in (site, *others):
            base, final = self._spans[other]
            each = [part.factors[other] for part in self._parts]
            step = each[0].a.shape[2]
            for start, stop in strips(base, final, step * max(1, width // step)):
                chosen = slice((start - base) // step, (stop - base) // step)
                first = chosen.start if other == site else 0
                add(first, start, stop, (factors.rows(chosen) for factors in each))
        for (base, final), offset in self._columns(plain):
            for start, stop in strips(base, final, width):
                chosen = slice(offset + start - base, offset + stop - base)
                add(0, start, stop, (part.rows[:, :, chosen].transpose(0, 1) for part in self._parts))

    def _products_agree(self) -> bool:
        """Whether the sum, M, is J^T J in all columns J_s of factored sites s, J the rows that are buffered.

        With a random v, M[s, t] v[t] must be J_s^T (J_t v[t]) for every site t by itself, so that a site with small
        gradients counts as much as any other. The right-hand side takes plain rows, of a few examples at a time.
        """
        dtype, sites = self._parts[0].rows.dtype, range(len(self._spans))
        vector = torch.randn(self.size, generator=torch.Generator().manual_seed(0), dtype=dtype).to(self._total.device)
        pieces = [vector[start:stop] for start, stop in self._spans]
        factored = sorted(self._parts[0].factors)
        expected = {site: self._total.new_zeros(len(sites), len(pieces[site])) for site in factored}
        for part in self._parts:
            seeds, batch, _ = part.rows.shape
            products = vector.new_empty(batch, seeds, len(sites))
            for site, rows in part.by_site(self._spans).items():
                products[..., site] = (rows @ pieces[site]).mT
            step = max(1, CHUNK_BYTES // (seeds * sum(len(pieces[site]) for site in factored) * vector.element_size()))
            for start, stop in strips(0, batch, step):
                found = {site: part.factors[site].examples(slice(start, stop)).rows() for site in factored}
                for site in factored:
                    products[start:stop, :, site] = found[site] @ pieces[site]
                for site in factored:
                    expected[site] += products[start:stop].flatten(0, 1).mT @ found[site].flatten(0, 1)
        return all(
            close(expected[site][other].to(dtype), self._times(site, other, pieces[other].double()).to(dtype))
            for site in factored
            for other in sites
        )

    def _times(self, site: int, other: int, right: Tensor) -> Tensor:
        """M[site, other] times a vector, from the lower triangle of M."""
        (begin, end), (first, last) = self._spans[site], self._spans[other]
        if other < site:
            return self._total[begin:end, first:last] @ right
        if other > site:
            return self._total[first:last, begin:end].mT @ right
        found = torch.zeros_like(right)
        for start, stop in strips(0, end - begin):
            square = symmetric(self._total[begin + start : begin + stop, begin + start : begin + stop])
            left = self._total[begin + start : begin + stop, begin : begin + start]
            found[start:stop] += square @ right[start:stop] + left @ right[:start]
            found[:start] += left.mT @ right[start:stop]
        return found


def strips(start: int, stop: int, width: int | None = None) -> Iterator[Span]:
    """A span cut into pieces of this width, STRIP by default; the last may be narrower."""
    width = width or STRIP
    return ((first, min(first + width, stop)) for first in range(start, stop, width))


def _factors(contribution: Outer) -> _Factors | None:
    """The factors of a layer that is multiplied faster by them; else None."""
    if contribution.g.shape[0] > 1:
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
