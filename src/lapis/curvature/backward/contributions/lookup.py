"""The Jacobian of embeddings, as indices and gradients: J[b, m, o, v] = sum_t g[m, b, o, t] [index[b, t] = v]."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapis.curvature.backward.contributions.outer import Outer
from lapis.curvature.moments import add_half_gram


@dataclass(frozen=True)
class Lookup:
    """Indices (B, T) into V rows and gradients g (M, B, O, T); weights are seen as (1, O, V)."""

    index: Tensor
    g: Tensor
    entries: int
    padding: int | None = None
    """Index of the padding row, which is never learned: its g are zero, and its look-ups are not counted."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.index.nbytes + self.g.nbytes

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
        return Outer(lambda: self._one_hot()[None], self.g.mT[None])

    def rows(self) -> Tensor:
        return self.as_outer().rows()

    def add_square_sum(self, total: Tensor) -> None:
        """Add the sum over examples and seeds of J^2 to `total` (1, O, V)."""
        # (sum_t g_t)^2 over the positions of a row = sum_t g_t (sum of g over t's own row)
        per_position = (self.g * (self.g @ self._same())).sum(0)
        total[0].index_add_(1, self.index.reshape(-1), per_position.transpose(0, 1).flatten(1))

    def covariance(self, variance: Tensor, diagonal: bool) -> Tensor:
        weight = variance[0][:, self.index].permute(1, 0, 2)
        left, right = self.g * weight, self.g @ self._same()
        if diagonal:
            return (left * right).sum((2, 3)).T
        return torch.einsum("mbot,nbot->bmn", left, right)

    def settled(self) -> Lookup:
        return self

    def double(self) -> Lookup:
        return replace(self, g=self.g.double())

    def project(self, vectors: Tensor) -> Tensor:
        """J v for weight vectors v (n, 1, O, V): (B, M, n)."""
        return torch.einsum("mbot,nobt->bmn", self.g, vectors[:, 0][:, :, self.index])

    def gradient(self, coefficients: Tensor) -> Tensor:
        return self.as_outer().gradient(coefficients)

    def rotate(self, outputs: Tensor) -> Lookup:
        return replace(self, g=outputs[0].mT @ self.g)

    def add_gradient_moment(self, total: Tensor) -> None:
        """Add the lower triangle of the sum over seeds, examples and positions of g g^T to `total` (1, O, O)."""
        add_half_gram(total[0], self.g.permute(0, 1, 3, 2).flatten(0, 2))

    def add_input_moment(self, total: Tensor) -> None:
        """Add how often each row was looked up to `total` (V,): one-hot inputs have a diagonal moment."""
        total += self.counts()

    def counts(self) -> Tensor:
        """How often each row was looked up, (V,)."""
        counts = torch.bincount(self.index.reshape(-1), minlength=self.entries).to(self.g.dtype)
        if self.padding is not None:
            counts[self.padding] = 0
        return counts

    @property
    def positions(self) -> int:
        """Look-ups of rows that are learned."""
        return int(self.counts().sum())

    def of_seed(self, seed: int) -> Lookup:
        """The Jacobian of one of the M seeds."""
        return replace(self, g=self.g[seed : seed + 1])
