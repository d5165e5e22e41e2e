"""Linear models through products alone: equal to the dense closed form, whatever the features are given as."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.sparse.linalg import aslinearoperator
from sklearn.linear_model import BayesianRidge
from torch import Tensor

import lapis
from lapis.linear_models import LinearPosterior

DOUBLE = torch.float64
N, D = 60, 15


def problem(n: int = N, d: int = D, noise: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """A sparse Phi (n, d), targets, and the weights behind them."""
    source = torch.Generator().manual_seed(0)
    phi = torch.randn(n, d, dtype=DOUBLE, generator=source) * (torch.rand(n, d, generator=source) < 0.4)
    w = torch.randn(d, dtype=DOUBLE, generator=source)
    return phi, phi @ w + noise * torch.randn(n, dtype=DOUBLE, generator=source), w


def closed(phi: Tensor, y: Tensor, noise: float, precision: Tensor | float) -> tuple[Tensor, Tensor]:
    """The mean and the covariance."""
    covariance = torch.linalg.inv(phi.mT @ phi / noise**2 + torch.eye(phi.shape[1], dtype=DOUBLE) * precision)
    return covariance @ phi.mT @ y / noise**2, covariance


class Turned:
    """An operator of torch as others write it: a shape, @ and mT."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.shape = matrix, matrix.shape

    def __matmul__(self, columns: Tensor) -> Tensor:
        return self.matrix @ columns

    @property
    def mT(self) -> Turned:
        return Turned(self.matrix.mT)


PHI, Y, W = problem()
FORMS: dict[str, tuple[Any, Any, Any]] = {  # features, data, and the same features for predictions
    "tensor": (PHI, Y, PHI),
    "array": (PHI.numpy(), Y.numpy(), PHI.numpy()),
    "scipy": (sparse.csr_matrix(PHI.numpy()), Y, sparse.coo_array(PHI.numpy())),
    "torch sparse": (PHI.to_sparse(), (None, Y), PHI.to_sparse()),
    "linear operator": (aslinearoperator(PHI.numpy()), Y, PHI),
    "torch operator": (Turned(PHI), Y, Turned(PHI)),
    "function": (lambda x: 2 * x, (PHI / 2, Y), PHI / 2),
    "sparse function": (lambda x: sparse.csr_array(x.numpy()), [(PHI[:20], Y[:20]), (PHI[20:], Y[20:])], PHI),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_features_gives_the_closed_form(form: str) -> None:
    features, data, new = FORMS[form]
    precision = torch.linspace(0.5, 2, D, dtype=DOUBLE)
    found = lapis.linear(features, data, lapis.Gaussian(0.3), precision, samples=2, tolerance=1e-12)
    mean, covariance = closed(PHI, Y, 0.3, precision)
    torch.testing.assert_close(found.mean, mean, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.solve(torch.eye(D, dtype=DOUBLE)), covariance, rtol=1e-7, atol=1e-9)
    exact = found.predict(new, exact=True)
    variance = ((PHI @ covariance) * PHI).sum(1) + 0.09
    torch.testing.assert_close(exact.mean, PHI @ mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(exact.variance, variance, rtol=1e-7, atol=1e-9)
    drawn = found.predict(new)
    torch.testing.assert_close(drawn.f_variance, (PHI @ found.deviations.mT).square().mean(1), rtol=1e-9, atol=1e-12)


def test_streamed_features_equal_kept_ones() -> None:
    made: list[LinearPosterior] = []
    for budget in (2**30, 2**10):
        made.append(
            lapis.linear(torch.sin, (PHI, Y), lapis.Gaussian(0.3), samples=2, memory_budget=budget, batch_size=7)
        )
    kept, streamed = made
    assert type(kept.system.design).__name__ == "Dense"
    assert type(streamed.system.design).__name__ == "Streamed"
    torch.testing.assert_close(streamed.mean, kept.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(streamed.deviations, kept.deviations, rtol=1e-3, atol=1e-4)


def test_draws_have_the_posteriors_covariance() -> None:
    # the sum over 1,000 draws of z^T A z is chi square with 1,000 d degrees of freedom; false alarms: 1e-6
    found = lapis.linear(PHI, Y, lapis.Gaussian(0.3), samples=1000, tolerance=1e-8)
    _, covariance = closed(PHI, Y, 0.3, 1.0)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), found.deviations.mT, upper=False)
    degrees = white.numel()
    assert abs(float(white.square().sum()) - degrees) < 4.9 * math.sqrt(2 * degrees)
    empirical = white @ white.mT / 1000 - torch.eye(D, dtype=DOUBLE)
    assert float(empirical.abs().max()) < 5.6 * math.sqrt(2 / 1000)  # of 120 entries
    torch.testing.assert_close(found.sample(3)[0] - found.mean, found.sample(1)[0] - found.mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("samples", [2, 32])
def test_intervals_cover_as_they_say_however_few_the_draws(samples: int) -> None:
    # 25 problems of one prior, 100 new observations each, most of whose variance is the posterior's. Coverages of the
    # problems are independent: five standard errors of their mean. 2 draws without Student's t: .81.
    covered: dict[str, list[float]] = {"y": [], "f": []}
    for seed in range(25):
        source = torch.Generator().manual_seed(seed)
        phi = torch.randn(130, 60, dtype=DOUBLE, generator=source)
        f = phi @ torch.randn(60, dtype=DOUBLE, generator=source)
        y = f + 0.5 * torch.randn(130, dtype=DOUBLE, generator=source)
        posterior = lapis.linear(phi[:30], y[:30], lapis.Gaussian(0.5), samples=samples, generator=source)
        predicted: Any = posterior.predict(phi[30:])
        for name, truth, (low, high) in (("y", y, predicted.interval(0.95)), ("f", f, predicted.f_interval(0.95))):
            covered[name].append(float(((low <= truth[30:]) & (truth[30:] <= high)).double().mean()))
    for name, shares in covered.items():
        each = torch.tensor(shares)
        assert abs(float(each.mean()) - 0.95) < max(5 * float(each.std()) / math.sqrt(len(each)), 0.005), name
        assert float(each.std()) < 0.1, name


def test_exact_predictions_have_gaussian_intervals() -> None:
    predicted: Any = lapis.linear(PHI, Y, lapis.Gaussian(0.3), samples=1).predict(PHI[:3], exact=True)
    assert predicted.latent.degrees is None
    torch.testing.assert_close(predicted.interval(0.95)[1] - predicted.mean, 1.959963985 * predicted.std)


def test_draws_by_sgd_are_those_by_conjugate_gradients() -> None:
    options: Any = {"samples": 4, "prior": 2.0}
    phi, y, _ = problem(600)
    exact = lapis.linear(phi, y, lapis.Gaussian(0.3), **options)
    for features in (phi, sparse.csr_array(phi.numpy())):
        drawn = lapis.linear(features, y, lapis.Gaussian(0.3), solver="sgd", epochs=40, batch_size=100, **options)
        assert float((drawn.deviations - exact.deviations).norm() / exact.deviations.norm()) < 0.1
    with pytest.raises(lapis.OptionError, match="rows"):
        lapis.linear(aslinearoperator(PHI.numpy()), Y, lapis.Gaussian(0.3), solver="sgd")


def test_evidence_is_that_of_the_marginal_likelihood() -> None:
    found = lapis.linear(PHI, Y, lapis.Gaussian(0.3), 2.0, samples=2, tolerance=1e-10)
    estimate = found.log_evidence_estimate(probes=64, steps=D)
    covariance = PHI @ PHI.mT / 2 + 0.09 * torch.eye(N, dtype=DOUBLE)
    exact = torch.distributions.MultivariateNormal(torch.zeros(N, dtype=DOUBLE), covariance).log_prob(Y)
    assert abs(float(estimate.value - exact)) < 5 * float(estimate.standard_error) + 1e-6  # five standard errors


def test_em_finds_the_prior_and_noise_of_bayesian_ridge() -> None:
    phi, y, _ = problem(400, 40)
    ridge = BayesianRidge(
        fit_intercept=False, alpha_1=0, alpha_2=0, lambda_1=0, lambda_2=0, tol=1e-10, max_iter=1000
    ).fit(phi.numpy(), y.numpy())
    found = lapis.linear(phi, y, "regression", samples=20).tune(tolerance=1e-6)
    assert found.tuning is not None
    assert found.tuning.converged
    # gamma, nearly 40, is from 20 draws: five standard errors of `determined`
    curved = torch.linalg.eigvalsh(phi.mT @ phi) * ridge.alpha_
    leverages = curved / (curved + ridge.lambda_)
    error = 5 * float((leverages - leverages.mean()).norm()) * (2 / 20) ** 0.5 / float(leverages.sum())
    assert error < 0.002
    assert float(found.prior.precision) == pytest.approx(ridge.lambda_, rel=error)
    assert float(found.likelihood.noise) == pytest.approx(ridge.alpha_**-0.5, rel=error)  # type: ignore[arg-type]
    torch.testing.assert_close(found.mean, torch.from_numpy(ridge.coef_), rtol=1e-3, atol=1e-3)
    fresh, std = problem(50, 40)[0], None
    mean, std = ridge.predict(fresh.numpy(), return_std=True)
    predicted = found.predict(fresh, exact=True)
    np.testing.assert_allclose(predicted.mean.numpy(), mean, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(predicted.std.numpy(), std, rtol=1e-2)


def test_groups_tell_weights_that_matter_from_those_that_do_not() -> None:
    source = torch.Generator().manual_seed(1)
    phi = torch.randn(300, 40, dtype=DOUBLE, generator=source)
    groups = (torch.arange(40) >= 20).long()
    w = torch.randn(40, dtype=DOUBLE, generator=source) * torch.tensor([1.0, 0.02], dtype=DOUBLE)[groups]
    y = phi @ w + 0.1 * torch.randn(300, dtype=DOUBLE, generator=source)
    found = lapis.linear(phi, y, "regression", samples=50).tune(groups=groups)
    strong, weak = found.prior.precision.tolist()
    assert 0.3 < strong < 3
    assert weak > 300
    torch.testing.assert_close(found.effective_parameters(per_group=True).sum(), found.effective_parameters())


@pytest.mark.parametrize(("likelihood", "draw"), [("binary", "sigmoid"), ("poisson", "exp")])
def test_generalised_linear_models_have_the_laplace_posterior(likelihood: str, draw: str) -> None:
    rates = getattr(torch, draw)(0.3 * PHI @ W)
    source = torch.Generator().manual_seed(0)
    y = torch.bernoulli(rates, generator=source) if draw == "sigmoid" else torch.poisson(rates, generator=source)
    found = lapis.linear(PHI, y, likelihood, 0.7, samples=2, tolerance=1e-10)
    layer = torch.nn.Linear(D, 1, bias=False, dtype=DOUBLE)
    with torch.no_grad():
        layer.weight.copy_(found.mean)
    posterior = lapis.laplace(layer, (PHI, y[:, None]), likelihood, structure="dense", prior=0.7)
    moved = posterior.at_tangent_mode((PHI, y[:, None])).mode
    assert moved is not None
    torch.testing.assert_close(moved, found.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        found.solve(torch.eye(D, dtype=DOUBLE)), torch.linalg.inv(posterior.precision()), rtol=1e-5, atol=1e-8
    )
    assert found.predict(PHI[:4]).f_mean.shape == (4,)


def test_random_fourier_features_approach_their_kernels() -> None:
    x = torch.linspace(-1, 1, 7, dtype=DOUBLE)
    gap = (x[:, None] - x).abs() / 0.7
    kernels = {"rbf": (-0.5 * gap**2).exp(), "matern12": (-gap).exp()}
    kernels["matern32"] = (1 + 3**0.5 * gap) * (-(3**0.5) * gap).exp()
    kernels["matern52"] = (1 + 5**0.5 * gap + 5 / 3 * gap**2) * (-(5**0.5) * gap).exp()
    for kernel, expected in kernels.items():
        phi = lapis.RandomFourierFeatures(1, 20_000, 0.7, kernel)(x)  # type: ignore[arg-type]
        assert float((phi @ phi.mT - expected).abs().max()) < 5 / math.sqrt(20_000)  # five standard errors


def test_what_cannot_be_fitted_is_refused_before_any_work() -> None:
    for features, data, likelihood, options in (
        (PHI, Y[:5], "regression", {}),
        (PHI, torch.stack([Y, Y], 1), "regression", {}),
        (object(), Y, "regression", {}),
        (PHI * torch.inf, Y, "regression", {}),
        (PHI, Y, "regression", {"prior": -1.0}),
        (PHI, Y, "regression", {"prior": torch.ones(3)}),
        (PHI, Y, lapis.Gaussian(torch.tensor([1.0, 2.0])), {}),
        (PHI, "y", "regression", {}),
        (lambda x: x[:, 0], (PHI, Y), "regression", {}),
    ):
        with pytest.raises(lapis.LapisError):
            lapis.linear(features, data, likelihood, **options)
    found = lapis.linear(PHI, Y, "regression", samples=1)
    for likelihood in ("classification", "heteroscedastic"):
        with pytest.raises(lapis.LapisError, match=r"one output.*one binary model for each class"):
            lapis.linear(PHI, torch.zeros(N, dtype=torch.long), likelihood)
    with pytest.raises(lapis.DataError, match="columns"):
        found.predict(PHI[:, :3])
    with pytest.raises(lapis.OptionError, match="groups"):
        found.tune(groups=torch.zeros(3))
    assert "60 observations" in found.summary()
    other = found.with_prior(3.0).with_noise(0.3)
    torch.testing.assert_close(other.mean, closed(PHI, Y, 0.3, 3.0)[0], rtol=1e-4, atol=1e-4)
