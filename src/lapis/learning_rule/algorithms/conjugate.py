"""Exact Bayes from the rule, where the loss is linear in the sufficient statistics: one step with rate 1."""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import digamma
from torch import Tensor

from lapis.learning_rule.algorithms.derivation import Derivation, Gap, generator_of, normal
from lapis.learning_rule.dirichlet import Dirichlet
from lapis.learning_rule.discrete import Categorical
from lapis.learning_rule.gaussian import DiagonalGaussian, FullGaussian
from lapis.learning_rule.rule import step


def ridge_regression() -> Derivation:
    """S = X^T X / noise^2 + delta I, m = S^-1 X^T y / noise^2, from anywhere."""
    x, noise, delta = normal(0, 20, 4), 0.5, 2.0
    y = x @ normal(1, 4) + noise * normal(2, 20)

    def loss(theta: Tensor) -> Tensor:
        return (x @ theta - y).square().sum() / (2 * noise**2) + delta * theta.square().sum() / 2

    q = step(FullGaussian(normal(3, 4), 3 * torch.eye(4)), loss, 1)
    stacked = np.vstack([x.numpy() / noise, np.sqrt(delta) * np.eye(4)])
    mean = np.linalg.lstsq(stacked, np.concatenate([y.numpy() / noise, np.zeros(4)]), rcond=None)[0]
    gap = Gap()
    gap.add((q.mean, mean), (q.precision, stacked.T @ stacked))
    return Derivation("ridge regression", "Gaussian, full", "exact, rate 1", 1, gap.largest)


def kalman_filter(steps: int = 50) -> Derivation:
    """An observation is a step with rate 1 on -log p(y | theta) - log q(theta), q what was predicted."""
    move, spread = torch.tensor([[1.0, 0.3], [0.0, 1.0]]).double(), 0.1 * torch.eye(2).double()
    look, noise = torch.tensor([[1.0, 0.0]]).double(), 0.5
    observed = normal(0, steps).cumsum(0)
    q, gap = FullGaussian(torch.zeros(2), torch.eye(2)), Gap()
    mean, covariance = np.zeros(2), np.eye(2)
    a, h = move.numpy(), look.numpy()
    for y in observed:
        predicted = FullGaussian(move @ q.mean, torch.linalg.inv(move @ q.covariance @ move.T + spread))

        def loss(theta: Tensor, y: Tensor = y, prior: FullGaussian = predicted) -> Tensor:
            return (y - look @ theta).square().sum() / (2 * noise**2) - prior.log_prob(theta)

        q = step(predicted, loss, 1)
        mean, covariance = a @ mean, a @ covariance @ a.T + spread.numpy()
        gain = covariance @ h.T / (h @ covariance @ h.T + noise**2)
        mean = mean + gain @ (float(y) - h @ mean)
        covariance = (np.eye(2) - gain @ h) @ covariance
        gap.add((q.mean, mean), (q.covariance, covariance))
    return Derivation("Kalman filter", "Gaussian, full", "exact, rate 1, previous q as prior", steps, gap.largest)


def exponential_weights(steps: int = 50) -> Derivation:
    """w <- w exp(-eta loss) of experts: a step with rate 1 on eta loss - log q."""
    losses, eta = torch.rand(steps, 5, dtype=torch.float64, generator=generator_of(0)), 0.4
    q, gap, weights = Categorical(torch.zeros(5)), Gap(), np.full(5, 0.2)
    for row in losses:

        def loss(theta: Tensor, row: Tensor = row, prior: Categorical = q) -> Tensor:
            return eta * row @ theta - prior.log_prob(theta)

        q = step(q, loss, 1, "quadrature")
        weights = weights * np.exp(-eta * row.numpy())
        weights = weights / weights.sum()
        gap.add((q.mean, weights))
    return Derivation(
        "exponential weights", "categorical over experts", "exact, rate 1, previous q as prior", steps,
        gap.largest,
    )  # fmt: skip


class _Mixture:
    """p(x_n | pi, m) = sum_k pi_k N(x_n | m_k, 1), pi ~ Dirichlet(1.5), m_k ~ N(0, 4); the labels z_n are latent.

    `labels`, `shares` and `centres` are steps of the rule for q(z_n), q(pi) and q(m), each on the expected loss given
    the other factors.
    """

    def __init__(self) -> None:
        data = normal(0, 30)
        self.data = torch.where(torch.arange(30) < 12, data - 2, data + 1.5)
        self.prior, self.precision = torch.full((2,), 1.5).double(), 0.25
        self.pi = Dirichlet(self.prior)
        self.means = DiagonalGaussian(torch.tensor([-0.5, 0.5]), torch.full((2,), self.precision))

    def label(self, x: Tensor) -> Tensor:
        """q(z_n), (K,), by one step with rate 1."""
        (log_pi,), (mean, square) = self.pi.expectation(), self.means.expectation()
        fit = log_pi - (x.square() - 2 * x * mean + square) / 2
        return step(Categorical(torch.zeros(2)), lambda z: -(z @ fit), 1).mean

    def shares(self, counts: Tensor, rate: float) -> None:
        """A step for q(pi)."""
        self.pi = step(self.pi, lambda pi: -((self.prior - 1 + counts) @ pi.log()), rate)

    def centres(self, x: Tensor, labels: Tensor, repeats: float, rate: float) -> None:
        """A step for q(m), each of the data counted `repeats` times."""

        def loss(m: Tensor) -> Tensor:
            fit = (labels * (x[:, None] - m).square()).sum()
            return repeats * fit / 2 + self.precision * m.square().sum() / 2

        self.means = step(self.means, loss, rate)

    def responsibilities(self, x: np.ndarray, alpha: np.ndarray, m: np.ndarray, s: np.ndarray) -> np.ndarray:
        """The same as `label` for all of x, (N, K), as textbooks write it."""
        logs = digamma(alpha) - digamma(alpha.sum()) - ((x[:, None] - m) ** 2 + 1 / s) / 2
        weights = np.exp(logs - logs.max(1, keepdims=True))
        return np.asarray(weights / weights.sum(1, keepdims=True))


def message_passing(steps: int = 10) -> Derivation:
    """Variational message passing: all labels, then pi, then the means, each by a step with rate 1."""
    rule, gap = _Mixture(), Gap()
    x = rule.data.numpy()
    alpha, m, s = np.full(2, 1.5), np.array([-0.5, 0.5]), np.full(2, 0.25)
    for _ in range(steps):
        labels = torch.stack([rule.label(each) for each in rule.data])
        rule.shares(labels.sum(0), 1)
        rule.centres(rule.data, labels, 1, 1)
        r = rule.responsibilities(x, alpha, m, s)
        alpha, s = 1.5 + r.sum(0), 0.25 + r.sum(0)
        m = r.T @ x / s
        gap.add((labels, r), (rule.pi.concentration, alpha), (rule.means.mean, m), (rule.means.precision, s))
    return Derivation(
        "variational message passing", "categorical, Dirichlet, Gaussian", "exact, rate 1", steps,
        gap.largest,
    )  # fmt: skip


def stochastic_variational_inference(steps: int = 100) -> Derivation:
    """One of N data a step, counted N times: a step with rate rho_t for pi and the means."""
    rule, gap = _Mixture(), Gap()
    alpha, m, s = np.full(2, 1.5), np.array([-0.5, 0.5]), np.full(2, 0.25)
    count = len(rule.data)
    chosen = torch.randint(count, (steps,), generator=generator_of(1))
    for number, n in enumerate(chosen.tolist()):
        rate, x = (number + 2) ** -0.7, rule.data[n : n + 1]
        labels = rule.label(x[0])[None]
        rule.shares(count * labels[0], rate)
        rule.centres(x, labels, count, rate)
        r = rule.responsibilities(x.numpy(), alpha, m, s)[0]
        alpha = (1 - rate) * alpha + rate * (1.5 + count * r)
        weighted = (1 - rate) * s * m + rate * count * r * float(x[0])
        s = (1 - rate) * s + rate * (0.25 + count * r)
        m = weighted / s
        gap.add((rule.pi.concentration, alpha), (rule.means.mean, m), (rule.means.precision, s))
    return Derivation(
        "stochastic variational inference", "categorical, Dirichlet, Gaussian", "exact, of minibatches", steps,
        gap.largest,
    )  # fmt: skip
