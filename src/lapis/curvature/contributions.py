"""What a batch says about a site's weights: its Jacobian in factored form, and the sums that structures take from it.

With B examples and M seeds (scalar functions of the outputs) the Jacobian of a site is J[b, m, weight]. It is never
stored whole unless a structure asks for its `rows`:

* `Outer`: J[b, m, k, o, i] = sum_t g[m, b, k, o, t] a[b, k, t, i]: linear maps over T positions, in K groups.
* `Lookup`: J[b, m, o, v] = sum_t g[m, b, o, t] [index[b, t] = v]: embeddings.
* `Rows`: J given as it is: norm layers, raw parameters, everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CHUNK_BYTES = 32 * 2**20
"""Largest explicit piece of a Jacobian held while contracting it; about the size of a last-level cache."""


@dataclass(frozen=True)
class Outer:
    """Inputs a (B, K, T, I) and gradients g (M, B, K, O, T)."""

    a: Tensor
    g: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.g.dtype

    @property
    def dims(self) -> tuple[int, int, int, int, int, int]:
        seeds, batch, groups, outputs, positions = self.g.shape
        return seeds, batch, groups, outputs, positions, self.a.shape[-1]

    def rows(self) -> Tensor:
        """J as (M, B, K*O*I)."""
        seeds, batch, groups, outputs, positions, inputs = self.dims
        if positions == 1:
            return (self.g * self.a.squeeze(2)[:, :, None, :]).reshape(seeds, batch, -1)
        g = self.g.permute(1, 2, 0, 3, 4).reshape(batch * groups, seeds * outputs, positions)
        jacobian = torch.bmm(g, self.a.reshape(batch * groups, positions, inputs))
        return jacobian.reshape(batch, groups, seeds, outputs, inputs).permute(2, 0, 1, 3, 4).reshape(seeds, batch, -1)

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """J in pieces small enough for the cache: (examples, outputs, J as (b, K, M, o, I))."""
        seeds, batch, groups, outputs, positions, inputs = self.dims
        row = groups * seeds * inputs * self.g.element_size()
        o_step = max(1, min(outputs, CHUNK_BYTES // row))
        b_step = max(1, min(batch, CHUNK_BYTES // (row * o_step)))
        for b in range(0, batch, b_step):
            examples = slice(b, min(b + b_step, batch))
            a = self.a[examples]
            n = a.shape[0]
            a = a.reshape(n * groups, positions, inputs)
            for o in range(0, outputs, o_step):
                chosen = slice(o, min(o + o_step, outputs))
                g = self.g[:, examples, :, chosen].permute(1, 2, 0, 3, 4)
                jacobian = torch.bmm(g.reshape(n * groups, -1, positions), a)
                yield examples, chosen, jacobian.reshape(n, groups, seeds, -1, inputs)

    def square_sum(self) -> Tensor:
        """sum over examples and seeds of J^2, (K, O, I)."""
        _, _, groups, outputs, positions, inputs = self.dims
        if positions == 1:
            g2 = self.g.square().sum(0).squeeze(-1)
            return torch.einsum("bko,bki->koi", g2, self.a.squeeze(2).square())
        total = self.a.new_zeros(groups, outputs, inputs)
        for _, chosen, jacobian in self.pieces():
            total[:, chosen] += jacobian.square_().sum((0, 2))
        return total

    def covariance(self, variance: Tensor, diagonal: bool) -> Tensor:
        """J diag(variance) J^T for each example: (B, M, M), or its diagonal (B, M). `variance`: (K, O, I)."""
        seeds, batch, _, _, positions, _ = self.dims
        if positions == 1:
            weight = torch.einsum("bki,koi->bko", self.a.squeeze(2).square(), variance).reshape(batch, -1)
            g = self.g.reshape(seeds, batch, -1).transpose(0, 1)
            if diagonal:
                return torch.einsum("bmo,bo->bm", g.square(), weight)
            return torch.bmm(g * weight[:, None], g.transpose(1, 2))
        total = self.g.new_zeros((batch, seeds) if diagonal else (batch, seeds, seeds))
        for examples, chosen, jacobian in self.pieces():
            weighted = jacobian * variance[:, None, chosen]
            if diagonal:
                total[examples] += (weighted * jacobian).sum((1, 3, 4))
            else:
                left = weighted.transpose(1, 2).flatten(2)
                total[examples] += torch.bmm(left, jacobian.transpose(1, 2).flatten(2).transpose(1, 2))
        return total

    def joint(self, variance: Tensor) -> Tensor:
        """J diag(variance) J^T over all examples together: (B, M, B, M)."""
        seeds, batch, _groups, outputs, _positions, _inputs = self.dims
        total = self.g.new_zeros(batch * seeds, batch * seeds)
        step = max(1, CHUNK_BYTES // (self.g.element_size() * batch * seeds * self.a.shape[1] * self.a.shape[-1]))
        for o in range(0, outputs, step):
            part = replace(self, g=self.g[:, :, :, o : o + step])
            rows = part.rows().transpose(0, 1).reshape(batch * seeds, -1)
            total += (rows * variance[:, o : o + step].reshape(-1)) @ rows.T
        return total.reshape(batch, seeds, batch, seeds)

    def gradient(self, coefficients: Tensor) -> Tensor:
        """sum over examples of coefficient_b J[b, 0], (K, O, I)."""
        a = (self.a * coefficients[:, None, None, None]).transpose(0, 1).flatten(1, 2)
        return torch.bmm(self.g[0].permute(1, 2, 0, 3).flatten(2), a)

    def rotate(self, inputs: Tensor, outputs: Tensor) -> Outer:
        """In the bases of `inputs` (K, I, I) and `outputs` (K, O, O): a Q_A and Q_G^T g."""
        return Outer(self.a @ inputs, outputs.mT @ self.g)

    def reduced(self) -> Outer:
        """Positions merged: the mean of a, the sum of g."""
        return Outer(self.a.mean(2, keepdim=True), self.g.sum(-1, keepdim=True))

    def input_moment(self) -> Tensor:
        """sum over examples and positions of a a^T, (K, I, I)."""
        a = self.a.transpose(0, 1).flatten(1, 2)
        return torch.bmm(a.mT, a)

    def gradient_moment(self) -> Tensor:
        """sum over seeds, examples and positions of g g^T, (K, O, O)."""
        g = self.g.permute(2, 3, 0, 1, 4).flatten(2)
        return torch.bmm(g, g.mT)

    @property
    def positions(self) -> int:
        """Examples times positions."""
        return self.a.shape[0] * self.a.shape[2]


@dataclass(frozen=True)
class Lookup:
    """Indices (B, T) into V rows and gradients g (M, B, O, T); weights are seen as (1, O, V)."""

    index: Tensor
    g: Tensor
    entries: int
    padding: int | None = None
    """A row that is never learned: its g are zero, and it is not counted."""

    @property
    def dtype(self) -> torch.dtype:
        return self.g.dtype

    def _same(self) -> Tensor:
        """(B, T, T): positions that look up the same row, as numbers."""
        return (self.index[:, :, None] == self.index[:, None, :]).to(self.g.dtype)

    def _one_hot(self) -> Tensor:
        codes = torch.nn.functional.one_hot(self.index, self.entries).to(self.g.dtype)
        if self.padding is not None:
            codes[..., self.padding] = 0
        return codes

    def as_outer(self) -> Outer:
        """The same with one-hot inputs written out."""
        return Outer(self._one_hot()[:, None], self.g[:, :, None])

    def rows(self) -> Tensor:
        return self.as_outer().rows()

    def square_sum(self) -> Tensor:
        # (sum_t g_t)^2 over the positions of a row = sum_t g_t (sum of g over t's own row)
        per_position = (self.g * (self.g @ self._same())).sum(0)
        total = self.g.new_zeros(self.g.shape[2], self.entries)
        total.index_add_(1, self.index.reshape(-1), per_position.transpose(0, 1).flatten(1))
        return total[None]

    def covariance(self, variance: Tensor, diagonal: bool) -> Tensor:
        weight = variance[0][:, self.index].permute(1, 0, 2)
        left, right = self.g * weight, self.g @ self._same()
        if diagonal:
            return (left * right).sum((2, 3)).T
        return torch.einsum("mbot,nbot->bmn", left, right)

    def joint(self, variance: Tensor) -> Tensor:
        return self.as_outer().joint(variance)

    def gradient(self, coefficients: Tensor) -> Tensor:
        return self.as_outer().gradient(coefficients)

    def rotate(self, outputs: Tensor) -> Lookup:
        return replace(self, g=outputs[0].mT @ self.g)

    def gradient_moment(self) -> Tensor:
        g = self.g.permute(2, 0, 1, 3).flatten(1)
        return (g @ g.T)[None]

    def counts(self) -> Tensor:
        """How often each row was looked up, (V,)."""
        counts = torch.bincount(self.index.reshape(-1), minlength=self.entries).to(self.g.dtype)
        if self.padding is not None:
            counts[self.padding] = 0
        return counts

    @property
    def positions(self) -> int:
        return self.index.numel()


@dataclass(frozen=True)
class Rows:
    """J itself, (M, B, entries)."""

    values: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def rows(self) -> Tensor:
        return self.values

    def square_sum(self) -> Tensor:
        return self.values.square().sum((0, 1))

    def covariance(self, variance: Tensor, diagonal: bool) -> Tensor:
        jacobian, variance = self.values.transpose(0, 1), variance.reshape(-1)
        if diagonal:
            return torch.einsum("bmp,p->bm", jacobian.square(), variance)
        return torch.bmm(jacobian * variance, jacobian.mT)

    def gradient(self, coefficients: Tensor) -> Tensor:
        return torch.einsum("bp,b->p", self.values[0], coefficients)

    def rotate(self, inputs: Tensor | None, outputs: Tensor, shape: tuple[int, ...]) -> Rows:
        """Rows over a (K, O, I) array in the bases of inputs (K, I, I) and outputs (K, O, O)."""
        array = outputs.mT @ self.values.reshape(*self.values.shape[:2], *shape)
        return Rows((array if inputs is None else array @ inputs).flatten(2))

    def joint(self, variance: Tensor) -> Tensor:
        seeds, batch, entries = self.values.shape
        rows = self.values.transpose(0, 1).reshape(batch * seeds, entries)
        return ((rows * variance.reshape(-1)) @ rows.T).reshape(batch, seeds, batch, seeds)


Contribution = Outer | Lookup | Rows
