"""A user's loss of a weight vector: its values and derivatives at several points, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.options import shown

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """loss(theta) for theta (P,), or with `batched` for rows: (n, P) to (n,)."""

    function: Function
    batched: bool = False

    def values(self, points: Tensor) -> Tensor:
        """The loss at each of `points` (n, P), (n,); differentiable if they require gradients."""
        if self.batched:
            found = self._checked(self.function(points), (len(points),))
        else:
            found = torch.stack([self._checked(self.function(row), ()) for row in points])
        bad = int((~found.detach().isfinite()).sum())
        if bad:
            raise DataError(
                "The loss is not finite",
                expected="finite losses where q puts its points",
                got=f"{bad} NaN or infinite of {len(found)}",
                do="check the loss, or take a smaller rate",
            )
        return found

    def _checked(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.is_complex():
            raise DataError(
                "The loss is no real number for each weight vector",
                expected=f"a tensor of shape {shape}",
                got=shown(value),
                do="sum the loss over the data; with batched=True it takes (n, P) and returns (n,)",
            )
        return value.double()

    def gradients(self, points: Tensor) -> Tensor:
        """d loss / d theta at each point, (n, P)."""
        with torch.enable_grad():
            leaf = points.detach().requires_grad_()
            return self._gradients(leaf, create_graph=False).detach()

    def derivatives(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (n, P) and Hessians (n, P, P), row by row."""
        with torch.enable_grad():
            leaf = points.detach().requires_grad_()
            gradients = self._gradients(leaf, create_graph=True)
            if not gradients.requires_grad:  # the loss is linear
                return gradients, torch.zeros(*points.shape, points.shape[1], dtype=points.dtype)
            rows = [
                torch.autograd.grad(column.sum(), leaf, retain_graph=True, allow_unused=True, materialize_grads=True)[0]
                for column in gradients.unbind(1)
            ]
        hessians = torch.stack(rows, 1)
        return gradients.detach(), (hessians + hessians.mT) / 2

    def _gradients(self, leaf: Tensor, create_graph: bool) -> Tensor:
        total = self.values(leaf).sum()
        if not total.requires_grad:
            raise DataError(
                "The loss has no gradient",
                expected="a loss that torch can differentiate in the weights",
                got="a value without a graph",
                do='do not detach the weights, or use expectation="function_values"',
            )
        return torch.autograd.grad(total, leaf, create_graph=create_graph, allow_unused=True, materialize_grads=True)[0]

    def plus(self, other: Function) -> Loss:
        """The sum with a function of weight vectors, batched or not."""
        return Loss(lambda theta: self.function(theta) + other(theta), self.batched)
