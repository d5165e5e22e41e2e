"""The interface of an exponential family over weight vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lapis.errors import DataError, NotPositiveDefiniteError
from lapis.learning_rule.expectations import Expectation
from lapis.learning_rule.losses import Loss
from lapis.options import check_arguments, checked_numbers, shown

Parameters = tuple[Tensor, ...]
"""Natural or expectation parameters, one tensor for each sufficient statistic."""


class Family(ABC):
    """q(theta) proportional to h(theta) exp <lambda, T(theta)> over weights theta (P,): a frozen value in float64.

    lambda are the natural parameters, mu = E_q[T(theta)] the expectation parameters; either gives the other.
    """

    improvable: ClassVar[bool] = False
    """Whether the improved rule is there: a step that cannot leave the family."""

    if TYPE_CHECKING:  # a field of Gaussians, a property of others

        @property
        def mean(self) -> Tensor:
            """E_q[theta], (P,)."""

    @abstractmethod
    def natural(self) -> Parameters:
        """lambda."""

    @abstractmethod
    def expectation(self) -> Parameters:
        """mu."""

    @abstractmethod
    def with_natural(self: Q, natural: Sequence[Tensor]) -> Q:
        """The member with these natural parameters; what is fixed stays."""

    @abstractmethod
    def with_expectation(self: Q, expectation: Sequence[Tensor]) -> Q:
        """The member with these expectation parameters; what is fixed stays."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """H(q) = -E_q[log q(theta)], 0-d."""

    @abstractmethod
    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(theta) of (P,) or of each row of (n, P); differentiable in theta."""

    @abstractmethod
    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws (samples, P); the generator is seeded with 0 when None."""

    @abstractmethod
    def loss_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """grad_mu E_q[loss]."""

    def objective_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """grad_mu (E_q[loss] - H(q)); if h is constant, -grad_mu H = lambda."""
        gradient = self.loss_gradient(loss, how)
        return tuple(own + given for own, given in zip(self.natural(), gradient, strict=True))

    def moved(self: Q, gradient: Parameters, rate: float, improved: bool) -> Q:
        """lambda - rate gradient; families that are `improvable` keep inside their domain if `improved`."""
        return self.with_natural([own - rate * change for own, change in zip(self.natural(), gradient, strict=True)])

    @property
    def size(self) -> int:
        """The number of weights, P."""
        return len(self.mean)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self.size} weights>"

    def _rows(self, theta: Tensor) -> Tensor:
        """`theta` as float64 with P numbers in its last axis."""
        check_arguments(Family.log_prob, {"theta": theta})
        if theta.dim() not in (1, 2) or theta.shape[-1] != self.size or theta.is_complex():
            raise DataError(
                "theta does not fit q",
                expected=f"({self.size},) or (n, {self.size})",
                got=shown(theta),
                do="pass weight vectors of this size",
            )
        return theta.double()

    def _parts(self, name: str, given: Sequence[Tensor]) -> list[Tensor]:
        """Parameters in the shapes of this member's own."""
        check_arguments(Family.with_natural, {"natural": given})
        shapes = [tuple(own.shape) for own in getattr(self, name)()]
        found = [tuple(part.shape) for part in given]
        if shapes != found:
            raise DataError(
                f"The {name} parameters do not fit the family",
                expected=f"tensors of shapes {shapes}",
                got=f"{found}",
                do=f"start from q.{name}()",
            )
        return [checked_numbers(f"{name} parameter {i}", part) for i, part in enumerate(given)]


Q = TypeVar("Q", bound=Family)


def source_of(generator: torch.Generator | None) -> torch.Generator:
    """The generator, or one seeded with 0."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def vector_of(name: str, value: Any, size: int | None = None) -> Tensor:
    """A float64 vector, of a given size if there is one."""
    found = checked_numbers(name, value)
    if found.dim() != 1 or size not in (None, len(found)):
        raise DataError(
            f"{name} is no vector of the right size",
            expected="(P,)" if size is None else f"({size},)",
            got=shown(value),
            do="check its shape",
        )
    return found


def positive_vector(name: str, value: Any, size: int | None = None) -> Tensor:
    """A float64 vector of positive numbers."""
    found = vector_of(name, value, size)
    smallest = float(found.detach().min())
    if smallest <= 0:
        raise outside(name, f"a smallest entry of {smallest:.3g}")
    return found


def positive_definite(name: str, value: Any, size: int | None = None) -> Tensor:
    """A symmetric positive definite float64 matrix."""
    found = checked_numbers(name, value)
    if found.dim() != 2 or found.shape[0] != found.shape[1] or size not in (None, len(found)):
        raise DataError(
            f"{name} is no square matrix of the right size",
            expected="(P, P)" if size is None else f"({size}, {size})",
            got=shown(value),
            do="check its shape",
        )
    plain = found.detach()
    if float((plain - plain.T).abs().max()) > 1e-8 * float(plain.abs().max()):
        raise DataError(
            f"{name} is not symmetric", expected="A = A^T", got="entries that differ", do="use (A + A.T) / 2"
        )
    if int(torch.linalg.cholesky_ex(plain).info) != 0:
        raise outside(name, f"a smallest eigenvalue of {float(torch.linalg.eigvalsh(plain)[0]):.3g}")
    return (found + found.mT) / 2


def outside(name: str, got: str) -> NotPositiveDefiniteError:
    """The error for parameters beyond a family's domain, in which a step can end."""
    return NotPositiveDefiniteError(
        f"{name} is not positive{'' if 'entry' in got else ' definite'}",
        expected="a member of the family",
        got=got,
        do="take a smaller rate, the improved rule (improved=True) where there is one, or more samples",
    )
