"""A likelihood from one function: the negative log density of an example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lapis.errors import DataError, LikelihoodError
from lapis.likelihoods._targets import as_tensor, check_finite, describe
from lapis.likelihoods.base import Kind, Likelihood
from lapis.options import check_arguments

SHAPE_ERRORS = (RuntimeError, IndexError, ValueError, TypeError)
"""Raised when a function written for one example is called with a batch, or the reverse."""


class Custom(Likelihood):
    """-log p(y | f) = nll(f, y), for any nll that is convex in f and twice differentiable by autograd.

    Args:
        nll: a function of one example, f of shape (C,) and its target y, that returns a 0-d tensor; or of a
            batch, f (B, C) and y (B, ...), that returns (B,). Constants matter for the evidence only. With
            positions, each position is passed like an example, and the values are summed.
        name: its name in summaries and files. Files keep the name, never the function.
        channels: see `Likelihood`.

    Targets may have any shape that starts with (B, *positions) (or (B, K, *positions) with channels="first").
    """

    name: ClassVar[str] = "custom"
    kind: ClassVar[Kind] = "function"

    def __init__(
        self,
        nll: Callable[[Tensor, Tensor], Tensor],
        name: str = "custom",
        *,
        channels: Literal["last", "first"] = "last",
    ) -> None:
        check_arguments(Custom.__init__, locals())
        super().__init__(channels=channels)
        self.function = nll
        self.label = name

    def targets(self, y: Any, f: Tensor, raw_shape: Sequence[int] | None = None) -> Tensor:
        """Targets (B, T, ...), in f's dtype if floating; checks that the function treats examples independently."""
        positions = None if raw_shape is None else self.positions(raw_shape)
        tensor = given = as_tensor(y, f)
        inner = self._position_dims(tensor, f, positions)
        if inner is None and self.channels == "first" and tensor.dim() > 1:
            tensor = tensor.movedim(1, -1)
            inner = self._position_dims(tensor, f, positions)
        if inner is None:
            raise DataError(
                "Targets do not match the outputs' positions",
                expected=describe(f, None, self.channels, positions) + ", and any dimensions after",
                got=str(tuple(given.shape)),
                do="pass one target per position",
            )
        check_finite(tensor)
        canonical = tensor.reshape(f.shape[0], f.shape[1], *tensor.shape[1 + inner :])
        canonical = canonical.to(f.dtype) if canonical.is_floating_point() else canonical
        self._check_examples_alone(f.detach(), canonical)
        return canonical

    @staticmethod
    def _position_dims(y: Tensor, f: Tensor, positions: Sequence[int] | None) -> int | None:
        """How many dimensions of y after the first are positions; None when y does not fit."""
        if positions is not None:
            return len(positions) if tuple(y.shape[1 : 1 + len(positions)]) == tuple(positions) else None
        counts = (count for count in range(y.dim()) if y.shape[1 : 1 + count].numel() == f.shape[1])
        return next(counts, None)

    def _check_examples_alone(self, f: Tensor, y: Tensor) -> None:
        if f.shape[0] * f.shape[1] < 2:
            return
        alone = self.position_nll(f[-1:, -1:], y[-1:, -1:]).reshape(())
        together = self.position_nll(f, y)[-1, -1]
        tolerance = torch.finfo(f.dtype).eps ** 0.5
        if not torch.allclose(alone, together, rtol=tolerance, atol=tolerance, equal_nan=True):
            raise LikelihoodError(
                f"The likelihood {self.label!r} mixes the examples of a batch",
                expected="the same value for an example alone and in a batch",
                got=f"{alone.item():.6g} alone, {together.item():.6g} in a batch",
                do="return one value per example, with no mean or sum over the batch",
            )

    def position_nll(self, f: Tensor, y: Tensor) -> Tensor:
        return self._values(f.reshape(-1, f.shape[-1]), y.flatten(0, 1)).reshape(f.shape[:2])

    def _values(self, f: Tensor, y: Tensor) -> Tensor:
        """nll of each row of f (N, C): (N,)."""
        if len(f) == 0:
            return f.sum(-1)
        if self._takes_one_example(f, y):
            try:
                values: Tensor = torch.func.vmap(self.function)(f, y)
            except RuntimeError:  # vmap rejects control flow that depends on values; a plain loop does not
                values = torch.stack([self.function(row, target) for row, target in zip(f, y, strict=True)])
        else:
            try:
                values = self.function(f, y)
            except SHAPE_ERRORS as error:
                raise LikelihoodError(
                    f"The likelihood {self.label!r} failed",
                    expected=f"a function of f {tuple(f.shape)} and y {tuple(y.shape)}, or of a row of each",
                    got=f"{type(error).__name__}: {error}",
                    do="call it on such tensors to see where it fails",
                ) from error
        if not isinstance(values, Tensor) or values.shape != (len(f),):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise LikelihoodError(
                f"The likelihood {self.label!r} returns no value per example",
                expected=f"shape () for one example, or ({len(f)},) for a batch",
                got=str(shape),
                do="sum over the outputs of each example",
            )
        return values

    def _takes_one_example(self, f: Tensor, y: Tensor) -> bool:
        """Whether nll(f (C,), y) returns a 0-d tensor; a function of batches fails or keeps a dimension."""
        try:
            value = self.function(f[-1], y[-1])
        except SHAPE_ERRORS:
            return False
        return isinstance(value, Tensor) and value.dim() == 0

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = f.detach().requires_grad_()
            return self._slope(leaf, y, graph=False)

    def _slope(self, leaf: Tensor, y: Tensor, *, graph: bool) -> Tensor:
        total = self.position_nll(leaf, y).sum()
        if not total.requires_grad:
            raise LikelihoodError(
                f"The likelihood {self.label!r} cannot be differentiated in f",
                expected="a function of f made of torch operations",
                got="a result without a graph",
                do="use torch operations, and neither .item() nor .detach()",
            )
        return torch.autograd.grad(total, leaf, create_graph=graph)[0]

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        """Hessian of nll in f at each position, (B, T, C, C): one backward pass per output."""
        with torch.enable_grad():
            leaf = f.detach().requires_grad_()
            slope = self._slope(leaf, y, graph=True)
            if not slope.requires_grad:
                return f.new_zeros(*f.shape, f.shape[-1])
            rows = [
                torch.autograd.grad(slope[..., c].sum(), leaf, retain_graph=True, materialize_grads=True)[0]
                for c in range(f.shape[-1])
            ]
        return torch.stack(rows, -2)

    def factor(self, f: Tensor, y: Tensor) -> Tensor:
        """S = U sqrt(l) with the Hessian's eigenvectors U and eigenvalues l; LikelihoodError if one is negative."""
        hessian = self.hessian(f, y).double()
        if not bool(torch.isfinite(hessian).all()):
            raise LikelihoodError(
                f"Second derivatives of the likelihood {self.label!r} are not finite",
                expected="a finite Hessian in f",
                got="NaN or infinity",
                do="check the function at these outputs, or use float64",
            )
        values, vectors = torch.linalg.eigh(hessian)
        largest = values.abs().amax(-1, keepdim=True)
        tolerance = max(1e-8, 100 * torch.finfo(f.dtype).eps)
        if not bool((values >= -tolerance * largest).all()):
            raise self._not_convex(f"an eigenvalue of {values.min().item():.4g}")
        factor: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        return factor.to(f.dtype)

    def _not_convex(self, got: str) -> LikelihoodError:
        return LikelihoodError(
            f"The likelihood {self.label!r} is not convex in the network's outputs here",
            expected="a positive semi-definite Hessian in f",
            got=got,
            do='use curvature="empirical", or a convex negative log-likelihood',
        )

    def curved(self, f: Tensor, y: Tensor, u: Tensor) -> Tensor:
        """The Hessian H times u, (k, B, T, C); LikelihoodError if u^T H u is negative for one of the vectors."""
        products = torch.einsum("btcd,kbtd->kbtc", self.hessian(f, y).to(u.dtype), u)
        along = (u * products).sum(-1)
        if not bool((along >= -1e-4 * u.norm(dim=-1) * products.norm(dim=-1)).all()):
            raise self._not_convex(f"a second derivative of {along.min().item():.4g} along a direction")
        return products

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        raise LikelihoodError(
            f"Targets cannot be drawn from the likelihood {self.label!r}: only its density is known",
            expected='curvature "ggn", "exact" or "empirical"',
            got="sampled curvature",
            do='choose curvature="exact" or "empirical"',
        )

    def curvature_scale(self, fitted: Likelihood) -> Tensor | float:
        self._same_family(fitted)
        if not isinstance(fitted, Custom) or fitted.label != self.label:
            raise LikelihoodError(
                "Curvature of one likelihood says nothing about another",
                expected=repr(self),
                got=repr(fitted),
                do="refit with this likelihood",
            )
        return 1.0

    def to_config(self) -> dict[str, Any]:
        return {**super().to_config(), "label": self.label}
