"""Posterior approximations as fixed points of the rule: Laplace of the local one, variational inference of the global.

And natural evolution strategies: the global rule from function values alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from lapis.learning_rule.algorithms.derivation import Derivation, Gap, generator_of, normal
from lapis.learning_rule.algorithms.descent import INPUTS, LABELS
from lapis.learning_rule.gaussian import FullGaussian
from lapis.learning_rule.rule import run, step
from lapis.likelihoods import Gaussian
from lapis.network import split_vector
from lapis.posteriors.laplace.fit import laplace as fit_laplace


def laplace() -> Derivation:
    """m = the mode, by L-BFGS; S = the Hessian (or the GGN) there, by `lapis.laplace`; of a small network."""
    x, noise = torch.linspace(-2, 2, 20).double()[:, None], 0.3
    y = torch.sin(x) + noise * normal(0, 20, 1)
    with torch.random.fork_rng(devices=[]):  # whose first weights do not matter
        model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def outputs(theta: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, split_vector(theta, shapes), (x,))
        return found

    def loss(theta: Tensor) -> Tensor:
        return (outputs(theta) - y).square().sum() / (2 * noise**2) + theta.square().sum() / 2

    def ggn(theta: Tensor) -> Tensor:
        jacobian: Tensor = torch.func.jacrev(outputs)(theta)[:, 0]
        return jacobian.T @ jacobian / noise**2 + torch.eye(len(theta))

    mode = torch.tensor([1.0, -0.8, 0.3, 0.5, 0.9, -0.7, 0.1]).double().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [mode], max_iter=500, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(mode)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    mode = mode.detach()
    model.load_state_dict(split_vector(mode, shapes))
    gap, steps = Gap(), 0
    for curvature, own, rate in (("hessian", None, 0.7), ("ggn", ggn, 0.3)):
        posterior = fit_laplace(model, (x, y), Gaussian(noise), structure="dense", prior=1.0, curvature=curvature)
        start = FullGaussian(mode + 0.02, 50 * torch.eye(len(mode)))
        found = run(start, loss, rate, curvature=own, max_iterations=200, tolerance=1e-11)
        steps += len(found.residuals)
        scale = posterior.precision().abs().max()
        gap.add((found.q.mean, mode), (found.q.precision / scale, posterior.precision() / scale))
    return Derivation("Laplace (lapis.laplace)", "Gaussian, full", "local", steps, gap.largest, "fixed point")


def variational_inference() -> Derivation:
    """E[g] = 0 and S = E[H]: against the minimum of E_q[loss] - H(q) over (m, L) by Newton's method on a grid."""
    x = INPUTS[:, :2] * LABELS[:, None]

    def loss(theta: Tensor) -> Tensor:
        return softplus(-theta @ x.T).sum(1) + theta.square().sum(1) / 2

    start = FullGaussian(torch.zeros(2), torch.eye(2))
    found = run(start, loss, 0.7, "quadrature", points=32, batched=True, max_iterations=200, tolerance=1e-11)
    line = torch.linspace(-8, 8, 81, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    weights = (-grid.square().sum(1) / 2).exp()
    weights = weights / weights.sum()

    def spread(free: Tensor) -> Tensor:
        return torch.stack([free[2].exp(), torch.zeros(()).double(), free[4], free[3].exp()]).reshape(2, 2)

    def objective(free: Tensor) -> Tensor:
        theta = free[:2] + grid @ spread(free).T
        values = torch.log1p((-theta @ x.T).exp()).sum(1) + theta.square().sum(1) / 2
        return weights @ values - free[2] - free[3]

    free = torch.tensor([0.0, 0.0, -1.0, -1.0, 0.0]).double()
    slope = torch.func.grad(objective)
    for _ in range(12):
        free = free - torch.linalg.solve(torch.func.jacrev(slope)(free), slope(free))
    factor = spread(free).numpy()
    precision = np.linalg.inv(factor @ factor.T)
    theta = free.numpy()[:2] + grid.numpy() @ factor.T
    slopes = 1 / (1 + np.exp(theta @ x.numpy().T))
    gradient = weights.numpy() @ (theta - slopes @ x.numpy())
    curvature = np.einsum("g,gn,ni,nj->ij", weights.numpy(), slopes * (1 - slopes), x.numpy(), x.numpy()) + np.eye(2)
    gap = Gap()
    gap.add((found.q.mean, free[:2]), (found.q.precision, precision), (gradient, 0.0), (curvature, found.q.precision))
    return Derivation(
        "Gaussian variational inference", "Gaussian, full", "quadrature", len(found.residuals),
        gap.largest, "fixed point",
    )  # fmt: skip


def evolution_strategies(steps: int = 20, samples: int = 40) -> Derivation:
    """Natural evolution strategies: F^-1 times the mean of loss times score, in natural parameters, with the entropy.

    The reference has the statistics T = (theta_1, theta_2, theta_1^2, 2 theta_1 theta_2, theta_2^2), and the Fisher
    information as their covariance.
    """

    def loss(theta: Tensor) -> Tensor:
        return (theta[..., 0] - 1).square() + 2 * (theta[..., 1] + 0.5 * theta[..., 0]).abs() + theta.sum(-1).cos()

    q, gap, rate = FullGaussian(torch.zeros(2), torch.eye(2)), Gap(), 0.02
    ours, draws = generator_of(0), generator_of(0)
    natural = np.array([0.0, 0.0, -0.5, 0.0, -0.5])
    nodes, node_weights = np.polynomial.hermite_e.hermegauss(5)
    noise = np.array([(a, b) for a in nodes for b in nodes])
    weights = np.outer(node_weights, node_weights).ravel() / node_weights.sum() ** 2
    for _ in range(steps):
        theta = q.sample(samples, generator=draws).numpy()
        precision = -2 * np.array([[natural[2], natural[3]], [natural[3], natural[4]]])
        mean = np.linalg.solve(precision, natural[:2])
        statistics = _statistics(mean + noise @ np.linalg.cholesky(np.linalg.inv(precision)).T)
        mu = weights @ statistics
        fisher = (statistics - mu).T @ ((statistics - mu) * weights[:, None])
        values = loss(torch.from_numpy(theta)).numpy()
        slope = (values - values.mean()) @ (_statistics(theta) - mu) / (samples - 1)
        natural = natural - rate * (np.linalg.solve(fisher, slope) + natural)
        q = step(q, loss, rate, "function_values", samples=samples, improved=False, batched=True, generator=ours)
        first, second = q.natural()
        gap.add((torch.stack([*first, second[0, 0], second[0, 1], second[1, 1]]), natural))
    return Derivation(
        "natural evolution strategies", "Gaussian, full", f"function values, {samples} draws", steps,
        gap.largest,
    )  # fmt: skip


def _statistics(theta: np.ndarray) -> np.ndarray:
    one, two = theta.T
    return np.stack([one, two, one**2, 2 * one * two, two**2], 1)
