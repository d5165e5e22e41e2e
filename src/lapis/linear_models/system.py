"""The posterior precision A = Phi^T diag(h) Phi + Lambda of a linear model: solves with it, and draws by optimisation.

A draw of N(0, A^-1) minimises 1/2 |h^1/2 Phi z|^2 + 1/2 |z - z^n|^2_Lambda with the noise moved to the prior's centre,
z^n = Lambda^-1/2 e + Lambda^-1 Phi^T h^1/2 u (the low-noise objective). Its minimum is that of A z = Lambda^1/2 e +
Phi^T h^1/2 u: conjugate gradients solve it over all data, SGD descends on minibatches of rows.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from lapis.errors import LapisWarning, OptionError
from lapis.linear_models.design import Design
from lapis.solvers import (
    Diagonal,
    Operator,
    Preconditioner,
    SGDSettings,
    SGDState,
    conjugate_gradients,
    sgd,
    sgd_learning_rate,
)
from lapis.solvers.operator import norms

BLOCKS = 10
"""Vectors in memory for each that is solved for, of weights and of observations together."""

MOST_VECTORS = 32
"""Vectors that are solved for together."""

SGD_RESIDUAL = 0.1
"""Draws by SGD count as converged below this |A z - b| / |b|."""

RATE_STEPS, RATE_PARTS = 8, 3
"""Lanczos steps, and minibatches, from which the learning rate is taken."""


@dataclass(frozen=True)
class System:
    """A, with the solver's settings.

    Args:
        design: Phi.
        curvature: h (n,): the second derivatives of -log p(y | f) in f.
        precision: Lambda's diagonal, 0-d or (d,).
        tolerance: on |A x - b| / |b|.
        max_iterations: of conjugate gradients.
        memory_budget: bytes of working memory.
    """

    design: Design
    curvature: Tensor
    precision: Tensor
    tolerance: float
    max_iterations: int
    memory_budget: int

    @property
    def size(self) -> int:
        return self.design.shape[1]

    @cached_property
    def diagonal(self) -> Tensor:
        """Lambda's diagonal, (d,)."""
        return self.precision.expand(self.size).contiguous()

    @cached_property
    def preconditioner(self) -> Preconditioner:
        """A's diagonal, or Lambda where entries of Phi cannot be seen."""
        squares = self.design.squares(self.curvature)
        return Diagonal(self.diagonal if squares is None else squares + self.diagonal)

    @cached_property
    def operator(self) -> Operator:
        return Operator(self.multiply, self.size)

    def multiply(self, vectors: Tensor) -> Tensor:
        """A v."""
        pushed = self.design.forward(vectors).mul_(self.curvature)
        return self.design.backward(pushed).addcmul_(self.diagonal, vectors)

    def at_once(self) -> int:
        """How many vectors are solved for together."""
        return max(1, min(MOST_VECTORS, self.memory_budget // (8 * BLOCKS * sum(self.design.shape))))

    def solve(self, targets: Tensor, start: Tensor | None = None, progress: bool | None = False) -> Tensor:
        """A^-1 b of each row b (k, d); warns where the tolerance is not reached."""
        found = torch.empty_like(targets)
        for first in range(0, len(targets), self.at_once()):
            some = slice(first, first + self.at_once())
            solved = conjugate_gradients(
                self.operator, targets[some], preconditioner=self.preconditioner, tolerance=self.tolerance,
                start=None if start is None else start[some], max_iterations=self.max_iterations, progress=progress,
            )  # fmt: skip
            found[some] = solved.solution
            if not bool(solved.converged.all()):
                warnings.warn(
                    f"A solve ended with a relative residual of {float(solved.relative_residuals.max()):.1e}, above "
                    f"the tolerance of {self.tolerance:.1e}. Raise max_iterations, or the prior precision.",
                    LapisWarning,
                    stacklevel=4,
                )
        return found

    # draws -----------------------------------------------------------------------------------------

    def noise(self, seed: int, samples: int) -> tuple[Tensor, Tensor]:
        """White noise e (k, d) and u (k, n), each draw from a seed of its own."""
        n, d = self.design.shape
        e, u = (torch.empty(samples, length, dtype=torch.float64) for length in (d, n))
        for number in range(samples):
            source = torch.Generator().manual_seed((seed + number) % 2**63)
            e[number].normal_(generator=source)
            u[number].normal_(generator=source)
        return e, u

    def target(self, e: Tensor, u: Tensor) -> Tensor:
        """Lambda^1/2 e + Phi^T h^1/2 u, (k, d)."""
        return self.design.backward(u * self.curvature.sqrt()).addcmul_(self.diagonal.sqrt(), e)

    def draws(self, seed: int, samples: int, start: Tensor | None = None, progress: bool | None = False) -> Tensor:
        """Draws of N(0, A^-1), (k, d), by conjugate gradients."""
        found = torch.empty(samples, self.size, dtype=torch.float64)
        for first in range(0, samples, self.at_once()):
            some = slice(first, min(first + self.at_once(), samples))
            e, u = self.noise(seed + first, some.stop - first)
            found[some] = self.solve(self.target(e, u), None if start is None else start[some], progress)
        return found

    def descended(self, seed: int, samples: int, epochs: int, batch_size: int, progress: bool | None = False) -> Tensor:
        """The same draws by SGD on minibatches of rows: Nesterov's method, the last half of the iterates averaged.

        In units of A's diagonal M^1/2 z, in which minibatches have nearly one learning rate for all weights.
        """
        n = self.design.shape[0]
        count = -(-n // batch_size)
        order = torch.randperm(n, generator=torch.Generator().manual_seed((seed + 2**40) % 2**63))
        parts = self.design.parts(order, count)
        if parts is None:
            raise OptionError(
                "Minibatches take some of the rows",
                expected="a matrix with solver='sgd'",
                got=f"features by {type(self.design).__name__.lower()} products only",
                do='use solver="cg"',
            )
        weights = torch.tensor_split(self.curvature[order], count)
        root = self.preconditioner.root(torch.ones(1, self.size, dtype=torch.float64))[0]
        target = self.target(*self.noise(seed, samples)) * root

        def product(y: Tensor, part: int) -> Tensor:
            """An estimate of M^-1/2 A M^-1/2 y from one minibatch."""
            z = y * root
            pushed = parts[part].forward(z).mul_(count * weights[part])
            return parts[part].backward(pushed).addcmul_(self.diagonal, z).mul_(root)

        def gradient(y: Tensor, step: int) -> Tensor:
            source = torch.Generator().manual_seed((seed + 2**41 + step // count) % 2**63)
            return product(y, int(torch.randperm(count, generator=source)[step % count])).sub_(target)

        rates = [
            sgd_learning_rate(
                Operator(partial(product, part=part), self.size), momentum=0.9, steps=min(RATE_STEPS, self.size),
                generator=torch.Generator().manual_seed(0),
            )
            for part in range(min(RATE_PARTS, count))
        ]  # fmt: skip
        settings = SGDSettings(epochs * count, min(rates), 0.9, None, "tail", 0.5)
        found = sgd(gradient, SGDState.begin(torch.zeros_like(target), settings), progress=progress).solution * root
        left = norms((self.multiply(found) * root).sub_(target)) / norms(target)
        if bool((left > SGD_RESIDUAL).any()):
            warnings.warn(
                f"SGD left a relative residual of {float(left.max()):.2g}, above {SGD_RESIDUAL}: these are not yet "
                "draws of the posterior. Raise epochs or batch_size.",
                LapisWarning,
                stacklevel=4,
            )
        return found
