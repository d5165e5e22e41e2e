"""Variational EM where the truth is known: factor analysis in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.decomposition import FactorAnalysis
from torch import Tensor, nn

import lapis
from lapis.latent import variational_em

DOUBLE = torch.float64


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


LOADINGS, LOG_NOISE = 1.5 * normal(0, 4, 2), torch.tensor([-0.5, 0.0, 0.3, -1.0], dtype=DOUBLE)
Y = normal(1, 12, 2) @ LOADINGS.mT + normal(2, 12, 4) * LOG_NOISE.exp()


def log_joint(y: Tensor, z: Tensor, theta: dict[str, Tensor]) -> Tensor:
    """z ~ N(0, I), y ~ N(W z, diag(noise^2))."""
    gaps = (y - z @ theta["W"].mT) / theta["log_noise"].exp()
    sizes = 6 * math.log(2 * math.pi) / 2 + theta["log_noise"].sum()
    return -0.5 * (gaps.square().sum(-1) + z.square().sum(-1)) - sizes


def known(y: Tensor, z: Tensor) -> Tensor:
    return log_joint(y, z, {"W": LOADINGS, "log_noise": LOG_NOISE})


def closed_form(w: Tensor, log_noise: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """Posterior means (N, L), their covariance (L, L), and log p(y)."""
    weighted = w / (2 * log_noise).exp()[:, None]
    covariance = torch.linalg.inv(torch.eye(2, dtype=DOUBLE) + w.mT @ weighted)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(4, dtype=DOUBLE), w @ w.mT + (2 * log_noise).exp().diag()
    )
    return y @ weighted @ covariance, covariance, float(marginal.log_prob(y).sum())


def divergence(means: Tensor, covariances: Tensor, truth: Tensor, spread: Tensor) -> float:
    """sum_i KL(q_i | posterior_i)."""
    q = torch.distributions.MultivariateNormal(means, covariances)
    p = torch.distributions.MultivariateNormal(truth, spread.expand_as(covariances))
    return float(torch.distributions.kl_divergence(q, p).sum())


def test_a_full_gaussian_becomes_the_posterior_and_the_bound_touches() -> None:
    fit = variational_em(known, "full", Y, n_latent=2, rounds=100)
    means, covariance, log_p = closed_form(LOADINGS, LOG_NOISE, Y)
    torch.testing.assert_close(fit.q.means, means, atol=1e-2, rtol=0)
    torch.testing.assert_close(fit.q.covariances, covariance.expand(12, 2, 2), atol=3e-2, rtol=0)
    assert fit.elbo(100)[0] == pytest.approx(log_p, abs=0.1)
    assert fit.converged


@pytest.mark.parametrize("rounds", [3, 60])
def test_divergence_and_elbo_add_up_to_the_log_likelihood(rounds: int) -> None:
    """KL + ELBO = log p(y), for any q: far from the posterior, and the best of independent ones. False alarm 6e-5."""
    with pytest.warns(lapis.LapisWarning, match="climbing") if rounds == 3 else _nothing():
        fit = variational_em(known, "mean_field", Y, n_latent=2, rounds=rounds, steps=5 if rounds > 3 else 1)
    means, covariance, log_p = closed_form(LOADINGS, LOG_NOISE, Y)
    kl = divergence(fit.q.means, fit.q.covariances, means, covariance)
    elbo, error = fit.elbo(2000)
    assert kl > 0.1
    assert abs(kl + elbo - log_p) < 4 * error


class _nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_the_m_step_comes_near_the_maximum_likelihood_of_factor_analysis() -> None:
    y = normal(11, 60, 2) @ LOADINGS.mT + normal(12, 60, 4) * LOG_NOISE.exp()
    y = y - y.mean(0)
    start = {"W": LOADINGS + 0.5 * normal(5, 4, 2), "log_noise": torch.zeros(4, dtype=DOUBLE)}
    before = start["W"].clone()
    fit = variational_em(log_joint, "full", y, n_latent=2, parameters=start, rounds=70, draws=4)
    assert torch.equal(start["W"], before)
    peer = FactorAnalysis(2, tol=1e-5, max_iter=10000).fit(y.numpy())
    noise = torch.as_tensor(peer.noise_variance_)
    *_, best = closed_form(torch.as_tensor(peer.components_.T.copy()), noise.log() / 2, y)
    *_, at_start = closed_form(start["W"], start["log_noise"], y)
    *_, reached = closed_form(fit.parameters["W"], fit.parameters["log_noise"], y)
    assert best - reached < 0.2 * (best - at_start)
    elbo, error = fit.elbo(200)
    assert elbo < reached + 4 * error


def test_a_network_can_be_q_and_stays_as_it_was() -> None:
    """The posterior of factor analysis is linear in y: a linear network can be exact."""
    network = nn.Linear(4, 5, dtype=DOUBLE)
    weight = network.weight.detach().clone()
    fit = variational_em(known, network, Y, n_latent=2, rounds=120)
    assert torch.equal(network.weight, weight)
    *_, log_p = closed_form(LOADINGS, LOG_NOISE, Y)
    elbo, error = fit.elbo(500)
    assert log_p - elbo < 0.6 + 4 * error
    assert fit.of(normal(9, 3, 4)).means.shape == (3, 2)


def test_bad_input_is_refused() -> None:
    with pytest.raises(lapis.OptionError, match="Unknown q"):
        variational_em(known, "diagonal", Y, n_latent=2)  # type: ignore[arg-type]
    with pytest.raises(lapis.ModelError, match="log_joint"):
        variational_em(lambda y, z: z.sum(), "full", Y, n_latent=2)
    with pytest.raises(lapis.ModelError, match="network of q"):
        variational_em(known, nn.Linear(4, 3, dtype=DOUBLE), Y, n_latent=2)
    with pytest.raises(lapis.DataError, match="finite"):
        variational_em(known, "full", Y * math.nan, n_latent=2, rounds=2)
    with pytest.raises(lapis.DataError, match="data"):
        variational_em(known, "full", (Y, Y[:3]), n_latent=2)
    with pytest.raises(lapis.OptionError, match="twice"):
        variational_em(nn.Linear(2, 1), "full", Y, n_latent=2, parameters={"w": Y})
