"""The Jacobian of linear maps over positions, as inputs and gradients: J[b, m, k, o, i] = sum_t g a."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapis.curvature.backward.contributions.rows import Rows
from lapis.curvature.moments import add_half_gram

CHUNK_BYTES = 16 * 2**20
"""Largest explicit piece of a Jacobian held while contracting it; about the size of a last-level cache."""

SMALL_ENTRIES = 2**16
"""Up to this many entries of g, squaring a copy is faster than adding squares seed by seed."""

NARROW_CHANNELS = 64
"""Up to this many channels, one small product for each image is faster than one product of a transposed copy."""


@dataclass(frozen=True)
class Outer:
    """Inputs a (K, B, T, I) and gradients g (K, M, B, T, O), in any memory order.

    The inputs are made when they are asked for: patches of a convolution take many times the memory of its images.
    With `bias`, they have one more column of ones that is not written out.
    """

    inputs: Callable[[], Tensor]
    g: Tensor
    bias: bool = False
    add_moment: Callable[[Tensor], bool] | None = None
    """`add_input_moment` without forming the inputs; returns False, having added nothing, if it cannot."""
    saving: int = 1
    """By which factor that takes less memory than the inputs."""
    direct: tuple[Callable[[slice], Tensor], int] | None = None
    """J of some examples, (b, K, M, O, I), without forming the inputs, and how many examples fit the cache."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes, with its inputs made."""
        return self.inputs().nbytes + self.g.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.g.dtype

    def rows(self) -> Tensor:
        """J as (M, B, K*O*I)."""
        groups, seeds, batch, positions, outputs = self.g.shape
        if positions == 1:
            g = self.g.squeeze(3).permute(1, 2, 0, 3)
            a = self.inputs().squeeze(2).transpose(0, 1)
            if g.requires_grad:  # autograd follows no `out=`
                a = torch.nn.functional.pad(a, (0, int(self.bias)), value=1.0)
                return (g[..., None] * a[:, :, None]).flatten(2)
            jacobian = g.new_empty(seeds, batch, groups, outputs, a.shape[-1] + int(self.bias))
            torch.mul(g[..., None], a[:, :, None], out=jacobian[..., : a.shape[-1]])
            if self.bias:
                jacobian[..., -1] = g
            return jacobian.flatten(2)
        g = self.g.permute(2, 0, 1, 4, 3).reshape(batch * groups, seeds * outputs, positions)
        jacobian = torch.bmm(g, _matrices(self.inputs()))
        if self.bias:
            jacobian = torch.cat([jacobian, g.sum(-1, keepdim=True)], -1)
        return jacobian.reshape(batch, groups, seeds, outputs, -1).permute(2, 0, 1, 3, 4).reshape(seeds, batch, -1)

    def pieces(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """J in pieces that fit the cache: (examples, outputs, J (b, K, M, o, I), column of the bias (b, K, M, o))."""
        none = self.g.new_empty(0)
        groups, seeds, batch, positions, outputs = self.g.shape
        if self.direct is not None:
            jacobian_of, step = self.direct
            for b in range(0, batch, step):
                examples = slice(b, min(b + step, batch))
                yield (
                    examples,
                    slice(0, outputs),
                    jacobian_of(examples),
                    self.g[:, :, examples].sum(3).permute(2, 0, 1, 3) if self.bias else none,
                )
            return
        every = self.inputs()
        inputs = every.shape[-1]
        row = groups * seeds * max(inputs, 1) * self.g.element_size()
        o_step = max(1, min(outputs, CHUNK_BYTES // row))
        b_step = max(1, min(batch, CHUNK_BYTES // (row * o_step)))
        for b in range(0, batch, b_step):
            examples = slice(b, min(b + b_step, batch))
            a = _matrices(every[:, examples])
            for o in range(0, outputs, o_step):
                chosen = slice(o, min(o + o_step, outputs))
                g = self.g[:, :, examples, :, chosen].permute(2, 0, 1, 4, 3)
                jacobian = torch.bmm(g.reshape(a.shape[0], -1, positions), a)
                yield examples, chosen, jacobian.reshape(*g.shape[:-1], inputs), g.sum(-1) if self.bias else none

    def add_square_sum(self, total: Tensor) -> None:
        """Add the sum over examples and seeds of J^2 to `total` (K, O, I)."""
        if self.g.shape[3] == 1:
            every = self.inputs()
            for group in range(len(total)):
                g2, a2 = _squares(self.g[group, :, :, 0]), every[group, :, 0].square()
                weights = total[group, :, : a2.shape[1]]
                torch.addmm(weights, g2.mT, a2, out=weights)
                if self.bias:
                    total[group, :, -1].add_(g2.sum(0))
            return
        weights = total[..., : total.shape[-1] - int(self.bias)]
        for _, chosen, jacobian, column in self.pieces():
            weights[:, chosen] += jacobian.square_().sum((0, 2))
            if self.bias:
                total[:, chosen, -1] += column.square().sum((0, 2))

    def covariance(self, variance: Tensor, diagonal: bool) -> Tensor:
        """J diag(variance) J^T for each example: (B, M, M), or its diagonal (B, M). `variance`: (K, O, I)."""
        groups, seeds, batch, positions, outputs = self.g.shape
        inputs = variance.shape[-1] - int(self.bias)
        if positions == 1:
            weight = torch.bmm(self.inputs().squeeze(2).square(), variance[..., :inputs].mT)
            if self.bias:
                weight += variance[:, None, :, -1]
            weight = weight.transpose(0, 1).reshape(batch, 1, groups * outputs)
            g = self.g.squeeze(3).permute(2, 1, 0, 3).reshape(batch, seeds, groups * outputs)
            if diagonal:
                return (g.square() * weight).sum(-1)
            return torch.bmm(g * weight, g.mT)
        total = self.g.new_zeros((batch, seeds) if diagonal else (batch, seeds, seeds))
        for examples, chosen, jacobian, column in self.pieces():
            total[examples] += _weighted(jacobian, variance[:, None, chosen, :inputs], diagonal)
            if self.bias:
                total[examples] += _weighted(column[..., None], variance[:, None, chosen, -1:], diagonal)
        return total

    def settled(self) -> Outer:
        """The same with its inputs at hand and nothing else of its batch, to be kept while other batches come."""
        a = self.inputs().detach()
        return Outer(lambda: a, self.g, self.bias)

    def double(self) -> Outer:
        """In float64."""
        inputs = self.inputs
        return replace(self, inputs=lambda: inputs().double(), g=self.g.double(), add_moment=None, direct=None)

    def project(self, vectors: Tensor) -> Tensor:
        """J v for weight vectors v (n, K, O, I): (B, M, n), a few vectors at a time."""
        groups, seeds, batch, positions, outputs = self.g.shape
        a = self.inputs().reshape(groups, batch * positions, -1).mT
        inputs = a.shape[1]
        g = self.g.permute(2, 1, 0, 3, 4).reshape(batch, seeds, -1)
        step = max(1, CHUNK_BYTES // (self.g.element_size() * groups * batch * positions * outputs))
        found = []
        for some in torch.split(vectors, step):
            moved = (some[..., :inputs] @ a).reshape(len(some), groups, outputs, batch, positions)
            if self.bias:
                moved = moved + some[:, :, :, -1, None, None]
            found.append(g @ moved.permute(3, 1, 4, 2, 0).reshape(batch, -1, len(some)))
        return torch.cat(found, -1)

    def gradient(self, coefficients: Tensor) -> Tensor:
        """sum over examples of coefficient_b J[b, 0], (K, O, I)."""
        g = (self.g[:, 0] * coefficients[:, None, None]).flatten(1, 2).mT
        a = self.inputs().flatten(1, 2)
        total = g.new_empty(*g.shape[:2], a.shape[-1] + int(self.bias))
        for group, weights in enumerate(total[..., : a.shape[-1]]):
            torch.mm(g[group], a[group], out=weights)
        if self.bias:
            total[..., -1] = g.sum(-1)
        return total

    def rotate(self, inputs: Tensor, outputs: Tensor) -> Outer | Rows:
        """In the bases of `inputs` (K, I, I) and `outputs` (K, O, O): a Q_A and g Q_G, or J where that is smaller."""
        groups, _, batch, positions, width = self.g.shape
        columns = inputs.shape[-1]
        if positions > columns:
            return Rows(self.rows()).rotate(inputs, outputs, (groups, width, columns))
        a = torch.bmm(self.inputs().flatten(1, 2), inputs[:, : columns - int(self.bias)])
        if self.bias:
            a += inputs[:, -1:]
        a = a.reshape(groups, batch, positions, columns)
        g = torch.bmm(self.g.flatten(1, 3), outputs)
        return Outer(lambda: a, g.reshape(self.g.shape))

    def along(self, vectors: Tensor) -> Tensor:
        """J[b, m, k, o, :] v[k, o, :] for v (K, O, I): (B, M, K * O)."""
        a = self.inputs()
        products = torch.bmm(a.flatten(1, 2), vectors[..., : a.shape[-1]].mT).reshape(*a.shape[:3], -1)
        if self.bias:
            products = products + vectors[:, None, None, :, -1]
        return torch.einsum("kmbto,kbto->bmko", self.g, products).flatten(2)

    def reduced(self) -> Outer:
        """Positions merged: the mean of a, the sum of g."""
        inputs = self.inputs
        g = self.g.sum(3, keepdim=True)
        return replace(self, inputs=lambda: inputs().mean(2, keepdim=True), g=g, add_moment=None, direct=None)

    def add_input_moment(self, total: Tensor) -> None:
        """Add the lower triangle of the sum over examples and positions of a a^T to `total` (K, I, I).

        The bias counts where `total` has a column for it.
        """
        if self.add_moment is not None and self.add_moment(total):
            return
        every = self.inputs().flatten(1, 2)
        for group in range(len(every)):
            each, width = every[group], every.shape[2]
            add_half_gram(total[group, :width, :width], each)
            if total.shape[-1] > width:
                total[group, -1, :width] += each.sum(0)
                total[group, -1, -1] += each.shape[0]

    def add_gradient_moment(self, total: Tensor) -> None:
        """Add the lower triangle of the sum over seeds, examples and positions of g g^T to `total` (K, O, O)."""
        channels_first = self.g.stride(-2) == 1 and self.g.shape[-2] > 1
        examples_first = self.g.stride(1) < self.g.stride(2)
        images = (self.g.transpose(1, 2) if examples_first else self.g).flatten(1, 2)  # as they lie in memory
        if channels_first and self.g.shape[-1] <= NARROW_CHANNELS:
            for group, each in enumerate(images):
                total[group] += torch.bmm(each.mT, each).sum(0)
            return
        every = images.flatten(1, 2)
        for group in range(len(every)):
            add_half_gram(total[group], every[group])

    @property
    def positions(self) -> int:
        """Examples times positions."""
        return self.g.shape[2] * self.g.shape[3]

    def of_seed(self, seed: int) -> Outer:
        """The Jacobian of one of the M seeds."""
        return replace(self, g=self.g[:, seed : seed + 1], direct=None)


def _squares(g: Tensor) -> Tensor:
    """The sum over seeds of g^2 for g (M, ...), without a copy of g where it is large."""
    if g.numel() <= SMALL_ENTRIES:
        return g.square().sum(0)
    first, *others = g.unbind()
    total = first.square()
    for each in others:
        total.addcmul_(each, each)
    return total


def _matrices(a: Tensor) -> Tensor:
    """(K, b, T, I) as (b * K, T, I)."""
    return a.transpose(0, 1).flatten(0, 1)


def _weighted(jacobian: Tensor, variance: Tensor, diagonal: bool) -> Tensor:
    """J diag(variance) J^T for J (b, K, M, o, I): (b, M, M) or (b, M)."""
    weighted = jacobian * variance
    if diagonal:
        return (weighted * jacobian).sum((1, 3, 4))
    return torch.bmm(weighted.transpose(1, 2).flatten(2), jacobian.transpose(1, 2).flatten(2).mT)
