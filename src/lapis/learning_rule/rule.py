"""The Bayesian learning rule: lambda <- lambda - rate grad_mu (E_q[loss] - H(q)) (Khan and Rue 2023)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from lapis.errors import OptionError
from lapis.learning_rule.expectations import Curvature, Expectation, Kind
from lapis.learning_rule.family import Family, Parameters, Q
from lapis.learning_rule.losses import Loss
from lapis.options import check_arguments
from lapis.progress import track


def step(
    q: Q,
    loss: Callable[[Tensor], Tensor],
    rate: float,
    expectation: Kind = "local",
    *,
    samples: int | None = None,
    points: int | None = None,
    curvature: Curvature | Callable[[Tensor], Tensor] | None = None,
    improved: bool | None = None,
    batched: bool = False,
    generator: torch.Generator | None = None,
) -> Q:
    """One step of the rule, as a new member of the family.

        lambda <- lambda - rate grad_mu (E_q[loss] - H(q)) = (1 - rate) lambda - rate grad_mu E_q[loss]

    The second form is for families whose base measure is constant. The minimum of E_q[loss] - H(q) over all
    distributions is q proportional to exp(-loss): if loss = -log p(D | theta) - log p(theta), the posterior.

    Args:
        q: a member of a family of `lapis.learning_rule`.
        loss: of a weight vector (P,) in float64, summed over all data and with -log prior: a 0-d tensor.
        rate: rho; 1 forgets where q was.
        expectation: "local" (derivatives at the mean), "monte_carlo" (at draws), "quadrature" (Gauss-Hermite, all
            vectors of a discrete family, a grid of proportions) or "function_values" (of draws, without derivatives).
        samples: draws, 16 by default.
        points: of the quadrature in each dimension, 20 by default.
        curvature: for Gaussians whose precision is learned: "hessian" (the default), "reparameterised" (the expected
            Hessian from gradients and noise), "squared_gradients", or a function from theta to a matrix (P, P) or a
            diagonal (P,), such as the GGN.
        improved: the rule with a term of second order in the rate, under which precisions stay positive definite (Lin,
            Schmidt and Khan 2020). By default where the expectation is drawn and the family has such a rule.
        batched: whether the loss takes rows (n, P) and returns (n,), which is faster.
        generator: source of draws; seeded with 0 when None. In a loop, make one and pass it to every step.

    >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]).double(), torch.tensor([0.0, 1.0, 3.0]).double()
    >>> def loss(theta):  # ridge regression: unit noise and a unit Gaussian prior
    ...     return (x @ theta - y).square().sum() / 2 + theta.square().sum() / 2
    >>> from lapis.learning_rule import FullGaussian
    >>> q = step(FullGaussian(torch.zeros(2), torch.eye(2)), loss, rate=1)
    >>> torch.allclose(q.mean, torch.linalg.solve(x.T @ x + torch.eye(2), x.T @ y))
    True
    """
    check_arguments(step, locals())
    how = Expectation.of(expectation, samples, points, curvature, generator)
    return q.moved(q.objective_gradient(Loss(loss, batched), how), rate, _improved(q, improved, how))


def expected_gradient(
    q: Family,
    loss: Callable[[Tensor], Tensor],
    expectation: Kind = "local",
    *,
    samples: int | None = None,
    points: int | None = None,
    curvature: Curvature | Callable[[Tensor], Tensor] | None = None,
    batched: bool = False,
    generator: torch.Generator | None = None,
) -> Parameters:
    """grad_mu E_q[loss], one tensor for each natural parameter; the arguments are those of `step`."""
    check_arguments(expected_gradient, locals())
    return q.loss_gradient(Loss(loss, batched), Expectation.of(expectation, samples, points, curvature, generator))


def _improved(q: Family, asked: bool | None, how: Expectation) -> bool:
    if asked and not q.improvable:
        raise OptionError(
            "This family has no improved rule",
            expected="improved=None or False",
            got=f"improved=True for {type(q).__name__}",
            do="leave it out",
        )
    return how.is_stochastic and q.improvable if asked is None else asked


@dataclass(frozen=True, repr=False)
class Run(Generic[Q]):
    """What a run of the rule leaves behind."""

    q: Q
    """The last iterate."""
    iterates: tuple[Q, ...]
    """All of them, the start first."""
    residuals: tuple[float, ...]
    """Largest entry of grad_mu (E_q[loss] - H(q)) before each step, in units of 1 + the largest natural parameter."""
    converged: bool
    reason: str
    """Why it ended, and whether that is convergence."""

    def __repr__(self) -> str:
        return f"<Run of {len(self.residuals)} steps to {self.q!r}: {self.reason}>"


def run(
    q: Q,
    loss: Callable[[Tensor], Tensor],
    rate: float | Callable[[int], float],
    expectation: Kind = "local",
    *,
    max_iterations: int = 100,
    tolerance: float = 1e-8,
    samples: int | None = None,
    points: int | None = None,
    curvature: Curvature | Callable[[Tensor], Tensor] | None = None,
    improved: bool | None = None,
    batched: bool = False,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Run[Q]:
    """Steps of the rule until its gradient vanishes, with all iterates.

    A drawn expectation never vanishes: such runs make all steps, and `converged` stays False. Other arguments are those
    of `step`.

    Args:
        rate: a number, or a function of the step (0, 1, ...) to one.
        max_iterations: steps at most.
        tolerance: of the residual, where the expectation is not drawn.
        progress: show a bar; by default on a terminal only.

    >>> from lapis.learning_rule import DiagonalGaussian
    >>> q = DiagonalGaussian(torch.tensor([3.0]), torch.tensor([1.0]))
    >>> found = run(q, lambda theta: theta.cosh().sum(), rate=0.5, expectation="quadrature")
    >>> found.converged, abs(float(found.q.mean)) < 1e-6
    (True, True)
    """
    check_arguments(run, locals())
    how = Expectation.of(expectation, samples, points, curvature, generator)
    checked, better = Loss(loss, batched), _improved(q, improved, how)
    iterates, residuals = [q], []
    for number in track(range(max_iterations), "Bayesian learning rule", max_iterations, progress):
        gradient = q.objective_gradient(checked, how)
        scale = 1 + max(float(part.abs().max()) for part in q.natural())
        residuals.append(max(float(part.abs().max()) for part in gradient) / scale)
        if not how.is_stochastic and residuals[-1] <= tolerance:
            return Run(q, tuple(iterates), tuple(residuals), True, "the gradient vanishes")
        q = q.moved(gradient, _rate_at(rate, number), better)
        iterates.append(q)
    reason = f"{max_iterations} steps were made" + (
        "; an expectation by draws is not judged" if how.is_stochastic else f", the residual is {residuals[-1]:.2g}"
    )
    return Run(q, tuple(iterates), tuple(residuals), False, reason)


def _rate_at(rate: float | Callable[[int], float], number: int) -> float:
    found = rate(number) if callable(rate) else rate
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
        raise OptionError(
            "Bad rate", expected="a positive number", got=f"{found!r} at step {number}", do="check the function"
        )
    return found
