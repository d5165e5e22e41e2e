"""Variational EM where the truth is known: factor analysis in closed form."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from sklearn.decomposition import FactorAnalysis
from torch import Tensor, nn

import lapis
from lapis.latent import VariationalFit, variational_em
from lapis.latent.variational.ascent import Ascent

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


def of_the_best_independent(covariance: Tensor) -> float:
    """KL of the independent q that are nearest to the posteriors of Y: their precisions are the diagonal."""
    precision = torch.linalg.inv(covariance)
    return 0.5 * len(Y) * float(precision.diagonal().log().sum() - torch.logdet(precision))


def test_a_full_gaussian_becomes_the_posterior_and_the_bound_touches() -> None:
    fit = variational_em(known, "full", Y, n_latent=2, rounds=100)
    means, covariance, log_p = closed_form(LOADINGS, LOG_NOISE, Y)
    torch.testing.assert_close(fit.q.means, means, atol=1e-2, rtol=0)
    torch.testing.assert_close(fit.q.covariances, covariance.expand(12, 2, 2), atol=1e-2, rtol=0)
    kl = divergence(fit.q.means, fit.q.covariances, means, covariance)
    assert kl < 0.2 * of_the_best_independent(covariance)
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
    least = of_the_best_independent(covariance)
    assert least < kl < (math.inf if rounds == 3 else least + 0.05)
    assert abs(kl + elbo - log_p) < 4 * error


class _nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


MANY = normal(31, 60, 2) @ LOADINGS.mT + normal(32, 60, 4) * LOG_NOISE.exp()
MANY = MANY - MANY.mean(0)


def shortfall(fit: VariationalFit) -> float:
    """Nats between the ELBO, in closed form, and the maximum of the likelihood of MANY."""
    peer = FactorAnalysis(2, tol=1e-8, max_iter=10000, svd_method="lapack").fit(MANY.numpy())
    noise = torch.as_tensor(peer.noise_variance_)
    *_, best = closed_form(torch.as_tensor(peer.components_.T.copy()), noise.log() / 2, MANY)
    means, covariance, reached = closed_form(fit.parameters["W"], fit.parameters["log_noise"], MANY)
    return best - reached + divergence(fit.q.means, fit.q.covariances, means, covariance)


@pytest.mark.parametrize("options", [
    {"rounds": 3}, {"rounds": 20, "learning_rate": 1e-3}, {"rounds": 80}, {"rounds": 100},
    {"rounds": 40, "batch_size": 10},
])  # fmt: skip
def test_what_is_said_to_have_converged_is_at_the_maximum_of_factor_analysis(options: dict[str, Any]) -> None:
    """Of the likelihood, as a full q is exact: within twice the tolerance of a thousandth of a nat a datum, or told."""
    start = {"W": LOADINGS + 0.5 * normal(5, 4, 2), "log_noise": torch.zeros(4, dtype=DOUBLE)}
    before = start["W"].clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = variational_em(log_joint, "full", MANY, n_latent=2, parameters=start, **options)
    assert torch.equal(start["W"], before)
    assert fit.converged == (not caught)
    assert fit.converged == (options["rounds"] > 50)
    short, (gain, error) = shortfall(fit), fit.gain
    assert 0 <= short < (2 * 1e-3 * len(MANY) if fit.converged else math.inf)
    if not fit.converged:
        assert gain > 5 * error
        assert short > 0.06
    assert len(fit.elbos) == options["rounds"] + 1


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
    with pytest.warns(lapis.LapisWarning, match="climbing"):
        told = variational_em(known, nn.Linear(4, 4, dtype=DOUBLE), Y, rounds=2)
    assert told.n_latent == 2


class Factors(nn.Module):
    """The same model as a module: theta are its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.log_noise = nn.Parameter(LOADINGS.clone()), nn.Parameter(torch.zeros(4, dtype=DOUBLE))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        return log_joint(y, z, {"W": self.W, "log_noise": self.log_noise})


def test_a_module_is_a_function_of_its_parameters_and_stays_as_it_was() -> None:
    module = Factors()
    how: dict[str, Any] = {"n_latent": 2, "rounds": 20, "draws": 4}
    with pytest.warns(lapis.LapisWarning, match="climbing"):
        by_module = variational_em(module, "full", Y, **how)
    with pytest.warns(lapis.LapisWarning, match="climbing"):
        by_names = variational_em(log_joint, "full", Y, parameters=dict(module.named_parameters()), **how)
    for name, value in by_names.parameters.items():
        torch.testing.assert_close(by_module.parameters[name], value)
    assert isinstance(by_module.log_joint, Factors)
    assert by_module.log_joint is not module
    assert torch.equal(module.W, LOADINGS)
    assert not torch.equal(by_module.log_joint.W, LOADINGS)


def test_minibatches_come_to_the_same_posterior() -> None:
    fit = variational_em(known, "full", Y, n_latent=2, rounds=120, batch_size=4)
    means, covariance, _ = closed_form(LOADINGS, LOG_NOISE, Y)
    torch.testing.assert_close(fit.q.means, means, atol=3e-2, rtol=0)
    assert divergence(fit.q.means, fit.q.covariances, means, covariance) < 0.1
    assert fit.converged


def test_a_search_ends_what_tiny_steps_left_undone_and_is_judged_by_other_draws() -> None:
    """With a tiny rate the trace is flat from the beginning, and 275 nats below the optimum."""
    fit = variational_em(known, "mean_field", Y, n_latent=2, rounds=80, learning_rate=1e-2)
    means, covariance, _ = closed_form(LOADINGS, LOG_NOISE, Y)
    least = of_the_best_independent(covariance)
    assert fit.converged
    assert divergence(fit.q.means, fit.q.covariances, means, covariance) < least + 1e-3
    assert fit.elbos[-1] > fit.elbos[-2] + 100


def test_what_a_search_made_worse_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ascent, "_search", lambda self, evaluations: None)
    monkeypatch.setattr(Ascent, "_wander", lambda self, rounds, rate: None)
    as_it_was = variational_em(known, "full", Y, n_latent=2, rounds=20)
    assert as_it_was.gain == (0, 0)

    def astray(self: Ascent, *_: object) -> None:
        with torch.no_grad():
            for p in self.parameters:
                p.add_(1.0)

    monkeypatch.setattr(Ascent, "_search", astray)
    monkeypatch.setattr(Ascent, "_wander", astray)
    fit = variational_em(known, "full", Y, n_latent=2, rounds=20)
    assert fit.gain[0] < -10
    torch.testing.assert_close(fit.q.means, as_it_was.q.means)


def test_a_logistic_regression_whose_weights_scale_is_latent_too() -> None:
    """z = (w, log s): w ~ N(0, s^2), log s ~ N(0, 1), y ~ Bernoulli(sigmoid(w x)); log p(y) by a grid."""
    x = normal(21, 40)
    y = (torch.rand(40, generator=torch.Generator().manual_seed(22), dtype=DOUBLE) < (2 * x).sigmoid()).double()

    def joint(data: tuple[Tensor, Tensor], z: Tensor) -> Tensor:
        (inputs, labels), (w, log_s) = data, z.unbind(-1)
        logits = w[..., None] * inputs
        seen = (labels * logits - nn.functional.softplus(logits)).sum(-1)
        weight = -0.5 * (w / log_s.exp()).square() - log_s
        return seen + weight - 0.5 * log_s.square() - math.log(2 * math.pi)

    fit = variational_em(joint, "full", (x[None], y[None]), n_latent=2, rounds=80)
    w, log_s = torch.linspace(-3, 9, 400, dtype=DOUBLE), torch.linspace(-5, 5, 400, dtype=DOUBLE)
    grid = torch.stack(torch.meshgrid(w, log_s, indexing="ij"), -1).reshape(-1, 1, 2)
    cell = float((w[1] - w[0]) * (log_s[1] - log_s[0]))
    log_p = joint((x[None], y[None]), grid)[:, 0]
    evidence = float(log_p.logsumexp(0)) + math.log(cell)
    log_q = fit.q.log_prob(grid)[:, 0]
    kl = float((log_q.exp() * (log_q - log_p + evidence)).sum() * cell)
    elbo, error = fit.elbo(4000)
    assert fit.converged
    assert 0 < kl < 0.1
    assert abs(kl + elbo - evidence) < 4 * error + 1e-3
    mean = float(((log_p - evidence).exp() * grid[:, 0, 0]).sum() * cell)
    assert float(fit.q.means[0, 0]) == pytest.approx(mean, abs=0.05)


def test_bad_input_is_refused() -> None:
    with pytest.raises(lapis.OptionError, match="Unknown q"):
        variational_em(known, "diagonal", Y, n_latent=2)  # type: ignore[arg-type]
    with pytest.raises(lapis.ModelError, match="log_joint"):
        variational_em(lambda y, z: z.sum(), "full", Y, n_latent=2)
    with pytest.raises(lapis.ModelError, match="network of q"):
        variational_em(known, nn.Linear(4, 3, dtype=DOUBLE), Y, n_latent=2)
    for q in ("full", nn.Linear(4, 5, dtype=DOUBLE)):
        with pytest.raises(lapis.OptionError, match="n_latent"):
            variational_em(known, q, Y)  # type: ignore[arg-type]
    for theta, words in ((torch.tensor(1.0), "depend on theta"), (torch.tensor(1), "floating point")):
        with pytest.raises(lapis.LapisError, match=words):
            variational_em(lambda y, z, theta: known(y, z), "full", Y, n_latent=2, parameters={"a": theta})
    with pytest.raises(lapis.OptionError, match="network as q"):
        variational_em(known, "full", Y, n_latent=2, rounds=60).of(Y[:3])
    with pytest.raises(lapis.DataError, match="finite"):
        variational_em(known, "full", Y * math.nan, n_latent=2, rounds=2)
    with pytest.raises(lapis.DataError, match="data"):
        variational_em(known, "full", (Y, Y[:3]), n_latent=2)
    with pytest.raises(lapis.OptionError, match="twice"):
        variational_em(nn.Linear(2, 1), "full", Y, n_latent=2, parameters={"w": Y})
