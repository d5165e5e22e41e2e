"""VON against the formulas, Newton's method and Laplace; BayesBiNN against its formulas, and its posterior."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapis
from lapis.optim import VON, BayesBiNN
from lapis.optim.draws import Draws
from test_optim import F64, N, batch, closure_of, loss_of, network, train, weights


def flat_loss(model: nn.Module, number: int, theta: Tensor) -> Tensor:
    named = dict(zip([name for name, _ in model.named_parameters()], _split(model, theta), strict=True))
    x, y = batch(number)
    return (torch.func.functional_call(model, named, (x,)) - y).square().sum(-1).mean() / 2


def _split(model: nn.Module, theta: Tensor) -> list[Tensor]:
    params = list(model.parameters())
    return [part.view(p.shape) for part, p in zip(theta.split([p.numel() for p in params]), params, strict=True)]


def test_von_follows_the_formulas() -> None:
    model = network()
    d, rho, m = 0.5 / N, 0.2, weights(model)
    eye = torch.eye(len(m), dtype=F64)
    hessian, noise = 0.7 * eye, Draws(0)
    for number in range(5):
        precision = hessian + d * eye
        (e,) = noise.normal([m])
        noise.count()
        theta = m + torch.linalg.solve(torch.linalg.cholesky(precision).mT, e) / math.sqrt(N)
        k = torch.autograd.functional.hessian(lambda t, n=number: flat_loss(model, n, t), theta)
        g = torch.func.grad(lambda t, n=number: flat_loss(model, n, t))(theta)
        hessian = (
            hessian + rho * (k - hessian) + rho**2 / 2 * (k - hessian) @ torch.linalg.inv(precision) @ (k - hessian)
        )
        m = m - 0.1 * torch.linalg.solve(hessian + d * eye, g + d * m)
    optimiser = VON(model.parameters(), lr=0.1, data_size=N, prior_precision=0.5, beta=0.8, hess_init=0.7)
    train(optimiser, model, range(5))
    assert torch.allclose(weights(model), m, rtol=1e-9)
    posterior = optimiser.posterior(model, lapis.Gaussian(1.0))
    covariance = torch.linalg.inv(N * (hessian + d * eye))
    assert torch.allclose(posterior.covariance_product(eye), covariance, rtol=1e-8, atol=1e-12)


def test_newton_s_method_gives_the_exact_posterior_in_one_step() -> None:
    model = nn.Linear(3, 2).double()
    optimiser = VON(
        model.parameters(), lr=1.0, data_size=8, prior_precision=0.5, beta=0.0, at_mean=True, positive=False
    )
    x, y = batch(0)
    optimiser.step(closure_of(optimiser, model, x, y))
    posterior = optimiser.posterior(model, lapis.Gaussian(1.0))
    exact = lapis.laplace(model, (x, y), lapis.Gaussian(1.0), structure="dense", prior=0.5)
    assert torch.allclose(posterior.functional_covariance(x), exact.functional_covariance(x), rtol=1e-8, atol=1e-10)
    assert torch.allclose(posterior.marginal_variance(), exact.marginal_variance(), rtol=1e-8)
    before = weights(model)
    optimiser.step(closure_of(optimiser, model, x, y))
    assert torch.allclose(weights(model), before, rtol=1e-10)


def test_laplace_is_the_fixed_point_of_online_newton() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = torch.randn(N, 3, dtype=F64)
    y = (x[:, :1] + 0.5 * torch.randn(N, 1, dtype=F64) > 0).double()
    optimiser = VON(model.parameters(), lr=0.5, data_size=N, beta=0.5, at_mean=True)
    for _ in range(80):
        optimiser.zero_grad()
        with optimiser.sampled():
            F.binary_cross_entropy_with_logits(model(x), y).backward()
        optimiser.step()
    posterior = optimiser.posterior(model, "binary")
    exact = lapis.laplace(model, (x, y), "binary", structure="dense", prior=1.0)
    assert torch.allclose(posterior.functional_covariance(x), exact.functional_covariance(x), rtol=1e-6, atol=1e-9)
    loss = N * F.binary_cross_entropy_with_logits(model(x), y) + weights(model).square().sum() / 2
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.allclose(g, -p.detach(), rtol=1e-6) for g, p in zip(gradient, model.parameters(), strict=True))


def test_von_says_what_it_cannot_do() -> None:
    with pytest.raises(lapis.OptionError, match="one matrix"):
        VON(nn.Linear(100, 100).parameters(), data_size=N)
    model = network()
    optimiser = VON(model.parameters(), data_size=N)
    with pytest.raises(lapis.OptionError, match="not seen"), optimiser.sampled():
        torch.autograd.backward(loss_of(model, *batch(0)))


def test_bayesbinn_follows_the_formulas() -> None:
    model = network()
    optimiser = BayesBiNN(
        model.parameters(), lr=0.01, data_size=N, start=1.0, temperature=0.5, momentum=0.5, epsilon=1e-3
    )
    natural = torch.cat([optimiser.state[p]["natural"].reshape(-1) for p in model.parameters()])
    assert torch.equal(natural.abs(), torch.ones_like(natural))
    assert torch.equal(weights(model), natural.tanh())
    noise, v, trial = Draws(0, made=1), torch.zeros_like(natural), copy.deepcopy(model)
    for t in range(1, 11):
        (u,) = noise.uniform([natural])
        noise.count()
        w = torch.tanh((natural + torch.log(u / (1 - u)) / 2) / 0.5)
        nn.utils.vector_to_parameters(w, trial.parameters())
        found = torch.autograd.grad(loss_of(trial, *batch(t - 1)), list(trial.parameters()))
        g = torch.cat([each.reshape(-1) for each in found])
        big = N * g * (1 - w**2 + 1e-3) / 0.5 / (1 - natural.tanh() ** 2 + 1e-3)
        v = 0.5 * v + 0.5 * (big + natural)
        natural = natural - 0.01 * v / (1 - 0.5**t)
    train(optimiser, model, range(10))
    assert torch.allclose(weights(model), natural.tanh(), rtol=1e-10)


def test_draws_of_the_binary_posterior_are_signs_of_the_right_frequency() -> None:
    """Frequencies of 4000 draws of 32 weights are within 5 standard deviations: false alarms below 2e-5."""
    model = network()
    posterior = BayesBiNN(model.parameters(), data_size=N, start=0.4).posterior(model, lapis.Gaussian(1.0))
    draws = posterior.sample(4000)
    assert torch.equal(draws.abs(), torch.ones_like(draws))
    chance = torch.sigmoid(2 * posterior.natural)
    error = (chance * (1 - chance) / 4000).sqrt()
    assert bool((((draws + 1) / 2).mean(0) - chance).abs().lt(5 * error).all())
    assert torch.allclose(posterior.mean, 2 * chance - 1)
    assert torch.equal(posterior.mode, posterior.natural.sign())


def test_bayesbinn_learns_binary_weights_that_a_binary_network_has() -> None:
    torch.manual_seed(0)
    truth = torch.where(torch.rand(12) < 0.5, -1.0, 1.0)
    x = torch.randn(200, 12)
    y = (x @ truth > 0).float()
    model = nn.Linear(12, 1, bias=False)
    optimiser = BayesBiNN(model.parameters(), lr=1e-3, data_size=200)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x)[:, 0], y)
        loss.backward()
        return loss

    for _ in range(200):
        optimiser.step(closure)
    posterior = optimiser.posterior(model, "binary")
    assert torch.equal(posterior.mode, truth)
    assert float(((posterior.predict(x).probs[:, 0] > 0.5).float() == y).float().mean()) == 1.0
