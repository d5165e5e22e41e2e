"""Optimisers from the rule: gradient descent, Newton, RMSprop, Adam, and the noise that SGD ends in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from lapis.learning_rule.algorithms.derivation import Derivation, Gap, normal
from lapis.learning_rule.gaussian import DiagonalGaussian, FixedGaussian, FullGaussian
from lapis.learning_rule.mixture import GaussianMixture
from lapis.learning_rule.rule import step

INPUTS = normal(0, 30, 3)
LABELS = torch.where(INPUTS @ torch.tensor([1.5, -1.0, 0.5]).double() + 0.7 * normal(1, 30) > 0, 1.0, -1.0)
START = torch.tensor([0.5, 0.5, -1.0]).double()


def logistic(theta: Tensor, rows: slice = slice(None)) -> Tensor:
    """-log p(D, theta) of logistic regression with a unit Gaussian prior; of some rows, to scale."""
    margins = LABELS[rows] * (INPUTS[rows] @ theta)
    return len(LABELS) / len(margins) * softplus(-margins).sum() + theta.square().sum() / 2


def batch_loss(number: int) -> Callable[[Tensor], Tensor]:
    """The loss of a minibatch of five, as SGD sees it."""
    first = 5 * number % len(LABELS)
    return lambda theta: logistic(theta, slice(first, first + 5)) / len(LABELS)


def optimised(kind: type[torch.optim.Optimizer], steps: int, state: str = "", **options: Any) -> list[list[Tensor]]:
    """Iterates of an optimiser of torch on the minibatches, and an entry of its state."""
    theta = START.clone().requires_grad_()
    optimiser = kind([theta], **options)
    found = []
    for number in range(steps):
        optimiser.zero_grad()
        batch_loss(number)(theta).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        kept = [optimiser.state[theta][state].clone()] if state else []
        found.append([theta.detach().clone(), *kept])
    return found


def gradient_descent(steps: int = 100) -> Derivation:
    """m <- m - rate g: covariance I, loss at the mean; stochastic gradients give SGD."""
    q, rate, gap = FixedGaussian(START), 0.1, Gap()
    for number, (theta,) in enumerate(optimised(torch.optim.SGD, steps, lr=rate)):
        q = step(q, batch_loss(number), rate)
        gap.add((q.mean, theta))
    return Derivation("gradient descent (torch SGD)", "Gaussian, fixed covariance", "local", steps, gap.largest)


def newton(steps: int = 8) -> Derivation:
    """m <- m - H^-1 g: rate 1."""
    q, gap = FullGaussian(START, torch.eye(3).double()), Gap()
    x, y, theta = INPUTS.numpy(), LABELS.numpy(), START.numpy().copy()
    for _ in range(steps):
        q = step(q, logistic, 1)
        p = 1 / (1 + np.exp(y * (x @ theta)))
        hessian = (x.T * (p * (1 - p))) @ x + np.eye(3)
        theta = theta - np.linalg.solve(hessian, theta - x.T @ (y * p))
        gap.add((q.mean, theta), (q.precision, hessian))
    return Derivation("Newton's method", "Gaussian, full", "local, rate 1", steps, gap.largest)


def rmsprop(steps: int = 100) -> Derivation:
    """The precision s averages squared gradients; the mean moves as under the covariance 1 / (sqrt(s) + eps)."""
    lr, alpha, eps, small = 0.02, 0.95, 1e-8, 1e-30
    reference = optimised(torch.optim.RMSprop, steps, "square_avg", lr=lr, alpha=alpha, eps=eps)
    q, gap = DiagonalGaussian(START, torch.full((3,), small)), Gap()
    for number, (theta, square) in enumerate(reference):
        loss = batch_loss(number)
        scale = step(q, loss, 1 - alpha, curvature="squared_gradients").precision
        mean = step(FixedGaussian(q.mean, 1 / (scale.sqrt() + eps)), loss, lr).mean
        q = DiagonalGaussian(mean, scale)
        gap.add((q.mean, theta), (q.precision, square))
    return Derivation(
        "RMSprop (torch)", "Gaussian, diagonal", "local, squared gradients, square root", steps,
        gap.largest, "first precision to 0 (1e-30)",
    )  # fmt: skip


def adam(steps: int = 100) -> Derivation:
    """RMSprop's choices, a heavy ball in the natural parameters, and rates that make up for the start.

    Adam's corrected average of squares is the rule's precision at the rate (1 - b2) / (1 - b2^t), the first of which is
    1. Its momentum is b1 a_t / a_(t-1) times the last change of the natural parameters, where a_t = lr / (1 - b1^t).
    """
    lr, first, second, eps = 0.05, 0.9, 0.99, 1e-8
    theta = START.clone().requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=lr, betas=(first, second), eps=eps)
    q, gap = DiagonalGaussian(START, torch.ones(3)), Gap()
    change, previous = torch.zeros(3).double(), math.inf
    for t in range(1, steps + 1):
        loss = batch_loss(t)
        optimiser.zero_grad()
        loss(theta).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

        scale = step(q, loss, (1 - second) / (1 - second**t), curvature="squared_gradients").precision
        size = lr / (1 - first**t)
        before = FixedGaussian(q.mean, 1 / (scale.sqrt() + eps))
        (natural,) = step(before, loss, size * (1 - first)).natural()
        natural = natural + first * size / previous * change
        change, previous = natural - before.natural()[0], size
        q = DiagonalGaussian(before.with_natural([natural]).mean, scale)
        square = optimiser.state[theta]["exp_avg_sq"] / (1 - second**t)
        gap.add((q.mean, theta), (q.precision, square))
    return Derivation("Adam (torch)", "Gaussian, diagonal", "local, as RMSprop, heavy ball", steps, gap.largest)


def ensemble_of_newton(steps: int = 6) -> Derivation:
    """Each component of a mixture is a Newton run of its own, if the components are far apart."""
    scale, corners = 400.0, torch.tensor([[1.2, 0.9], [-0.9, 1.1], [-1.1, -1.2]]).double()

    def loss(theta: Tensor) -> Tensor:
        return scale / 4 * (theta.square() - 1).square().sum(-1) + scale / 10 * theta.prod(-1)

    q = GaussianMixture(tuple(FullGaussian(corner, 2 * scale * torch.eye(2).double()) for corner in corners))
    runs, gap = corners.numpy().copy(), Gap()
    for _ in range(steps):
        q = step(q, loss, 1, batched=True)
        for c, theta in enumerate(runs):
            gradient = scale * (theta**3 - theta) + scale / 10 * theta[::-1]
            hessian = np.diag(scale * (3 * theta**2 - 1)) + scale / 10 * np.array([[0, 1], [1, 0]])
            runs[c] = theta - np.linalg.solve(hessian, gradient)
            gap.add((q.components[c].mean, runs[c]), (q.components[c].precision / scale, hessian / scale))
    return Derivation(
        "ensemble of Newton runs", "mixture of Gaussians", "local, rate 1", steps, gap.largest,
        "components far apart (over 40 sd)",
    )  # fmt: skip


def stationary_covariance(steps: int = 200) -> Derivation:
    """SGD at a constant rate on a quadratic: Sigma = (I - rate A) Sigma (I - rate A)^T + rate^2 C.

    The rule is linear here, so its stationary covariance under independent noise xi with covariance C is the sum of
    x x^T over all iterates x that follow from one kick by each column of a factor of C.
    """
    rate, a = 0.1, torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    root = torch.tensor([[1.0, 0.0], [0.4, 0.8]]).double()
    covariance = torch.zeros(2, 2).double()
    for kick in root.T:
        q = FixedGaussian(torch.zeros(2))
        for number in range(steps):
            noise = kick if number == 0 else 0 * kick

            def loss(theta: Tensor, noise: Tensor = noise) -> Tensor:
                return theta @ a @ theta / 2 + noise @ theta

            q = step(q, loss, rate)
            covariance += torch.outer(q.mean, q.mean)
    contraction = np.eye(2) - rate * a.numpy()
    noise_term = rate**2 * (root @ root.T).numpy()
    formula = np.linalg.solve(np.eye(4) - np.kron(contraction, contraction), noise_term.ravel()).reshape(2, 2)
    gap = Gap()
    gap.add((covariance, formula))
    return Derivation(
        "SGD's stationary covariance", "Gaussian, fixed covariance", "local, stochastic gradients", steps,
        gap.largest, f"time to infinity ({steps} steps)",
    )  # fmt: skip
