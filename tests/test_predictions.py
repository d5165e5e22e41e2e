"""Predictions against closed forms, scipy and brute-force integration, and in the user's layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, distributions

from lapis import errors
from lapis.likelihoods import (
    Bernoulli,
    Categorical,
    Custom,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from lapis.predictions import (
    ClassificationPrediction,
    CountPrediction,
    FunctionPrediction,
    LatentGaussian,
    LatentSamples,
    RegressionPrediction,
    predict,
)
from lapis.predictions.integrals.counts import cumulative
from lapis.predictions.integrals.links import expected_binary_entropy
from lapis.predictions.integrals.quadrature import gauss_hermite

F64 = torch.float64
LINKS = ["quasi", "mean_field", "probit", "mc", "bridge"]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def covariances(*shape: int, size: int, seed: int = 0) -> Tensor:
    root = rand(*shape, size, size, seed=seed)
    return root @ root.mT / size


def gaussian_latent(batch: int, positions: int, outputs: int, seed: int = 0) -> LatentGaussian:
    """A joint Gaussian and everything cut out of it."""
    total = batch * positions * outputs
    joint = covariances(size=total, seed=seed)
    variance = joint.diagonal().reshape(batch, positions, outputs)
    return LatentGaussian(rand(batch, positions, outputs, seed=seed + 1), variance, None, joint)


def marginal(latent: LatentGaussian, full: bool = True) -> LatentGaussian:
    return LatentGaussian(latent.mean, latent.variance, latent.blocks if full else None)


def close(a: Tensor, b: Tensor | float, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype).expand_as(a), rtol=tolerance, atol=tolerance)


def expectation(function: Callable[[float], float], mean: float, variance: float, *points: float) -> float:
    """E[function(f)], f ~ N(mean, variance), by adaptive quadrature; `points` mark narrow features."""
    if variance == 0:
        return function(mean)
    sd = math.sqrt(variance)
    low, high = mean - 12 * sd, mean + 12 * sd
    inside = [p for p in points if low < p < high]
    return float(
        integrate.quad(
            lambda f: function(f) * stats.norm.pdf(f, mean, sd),
            low,
            high,
            points=inside or None,
            limit=2000,
            epsabs=0,
            epsrel=1e-9,
        )[0]
    )


# -- quadrature ---------------------------------------------------------------------------------------------


def test_gauss_hermite_is_exact_for_polynomials_and_has_exact_tail_weights() -> None:
    z, log_weights = gauss_hermite()
    for power, moment in ((0, 1.0), (2, 1.0), (4, 3.0), (8, 105.0), (1, 0.0), (3, 0.0)):
        close((log_weights.exp() * z**power).sum(), moment)
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    close(z, torch.from_numpy(nodes))
    close(log_weights, torch.from_numpy(np.log(weights / math.sqrt(2 * math.pi))), 1e-9)


# -- regression ---------------------------------------------------------------------------------------------


def test_linearised_gaussian_regression_is_exact() -> None:
    latent = marginal(gaussian_latent(3, 1, 2), full=False)
    sigma = torch.tensor([0.5, 2.0], dtype=F64)
    prediction = predict(Gaussian(sigma), latent)
    assert isinstance(prediction, RegressionPrediction)
    assert prediction.method == "linearised"
    mean, variance = latent.mean[:, 0], latent.variance[:, 0]
    close(prediction.mean, mean)
    close(prediction.epistemic_variance, variance)
    close(prediction.aleatoric_variance, sigma**2)
    close(prediction.variance, variance + sigma**2)
    close(prediction.std, (variance + sigma**2).sqrt())
    y = rand(3, 2, seed=5)
    exact = distributions.Normal(mean, (variance + sigma**2).sqrt())
    close(prediction.log_prob(y), exact.log_prob(y).sum(-1))
    lower, upper = prediction.interval(0.9)
    close(exact.cdf(lower), 0.05)
    close(exact.cdf(upper), 0.95)
    assert prediction.f_covariance is None
    close(prediction.f_variance, variance)


def test_regression_density_uses_the_covariance_of_the_outputs_where_known() -> None:
    latent = marginal(gaussian_latent(3, 2, 2))
    prediction = predict(Gaussian(0.5), latent)
    assert latent.covariance is not None
    y = rand(3, 2, 2, seed=5)
    exact = distributions.MultivariateNormal(latent.mean, latent.covariance + 0.25 * torch.eye(2, dtype=F64))
    close(prediction.log_prob(y), exact.log_prob(y).sum(1))
    assert prediction.f_covariance is not None
    close(prediction.f_covariance, latent.covariance)


def test_joint_regression_density_is_the_multivariate_normal_of_the_whole_batch() -> None:
    latent = gaussian_latent(3, 2, 2)
    assert latent.joint is not None
    sigma = torch.tensor([0.5, 0.7], dtype=F64)
    prediction = predict(Gaussian(sigma), latent)
    y = rand(3, 2, 2, seed=5)
    noise = torch.diag((sigma**2).expand(3, 2, 2).flatten())
    exact = distributions.MultivariateNormal(latent.mean.flatten(), latent.joint + noise)
    result = prediction.log_prob(y)
    assert result.dim() == 0
    close(result, exact.log_prob(y.flatten()))
    assert prediction.f_covariance is not None
    rows = torch.arange(12).reshape(3, 2, 2)
    close(prediction.f_covariance[1, 1], latent.joint[rows[1, 1]][:, rows[1, 1]])


def test_sampled_regression_is_a_mixture_of_gaussians() -> None:
    values = rand(5, 3, 1, 2)
    prediction = predict(Gaussian(0.5), LatentSamples(values), samples=5)
    assert isinstance(prediction, RegressionPrediction)
    assert prediction.method == "sampled"
    close(prediction.mean, values.mean(0)[:, 0])
    close(prediction.variance, (values**2).mean(0)[:, 0] - values.mean(0)[:, 0] ** 2 + 0.25)
    each = torch.stack([values[:, n, 0].T.cov(correction=0) for n in range(3)])
    assert prediction.f_covariance is not None
    close(prediction.f_covariance, each)
    y = rand(3, 2, seed=5)
    components = distributions.Independent(distributions.Normal(values[:, :, 0].movedim(0, 1), 0.5), 1)
    weights = distributions.Categorical(torch.ones(3, 5, dtype=F64))
    mixture = distributions.MixtureSameFamily(weights, components)
    close(prediction.log_prob(y), mixture.log_prob(y))
    lower, upper = prediction.interval(0.8)
    close(distributions.Normal(values[:, :, 0], 0.5).cdf(lower).mean(0), 0.1)
    close(distributions.Normal(values[:, :, 0], 0.5).cdf(upper).mean(0), 0.9)
    joint = predict(Gaussian(0.5), LatentSamples(values, joint=True)).log_prob(y)
    together = distributions.Normal(values[:, :, 0], 0.5).log_prob(y).sum((1, 2))
    close(joint, together.logsumexp(0) - math.log(5))


@pytest.mark.parametrize("variance_s", [0.0, 1e-6, 0.1, 1.0, 4.0, 25.0])
def test_linearised_heteroscedastic_regression_matches_integration_over_the_log_variance(
    variance_s: float,
) -> None:
    """Relative error of the density below 1e-6 up to a standard deviation of 5 in the log variance."""
    m, s, variance_m = 0.3, -0.5, 0.2
    mean = torch.tensor([[[m, s]]], dtype=F64)
    variance = torch.tensor([[[variance_m, variance_s]]], dtype=F64)
    prediction = predict(HeteroscedasticGaussian(), LatentGaussian(mean, variance))
    assert isinstance(prediction, RegressionPrediction)
    for y in (0.3, 1.0, -4.0, 10.0):
        exact = expectation(lambda t, y=y: stats.norm.pdf(y, m, math.sqrt(variance_m + math.exp(t))), s, variance_s)
        close(prediction.log_prob(torch.tensor([y], dtype=F64)), math.log(exact), 1e-6)
    assert prediction.mean.shape == (1, 1)
    close(prediction.mean, m)
    close(prediction.epistemic_variance, variance_m)
    close(prediction.aleatoric_variance, expectation(math.exp, s, variance_s), 1e-6)
    lower, upper = prediction.interval(0.9)
    close(upper - m, m - lower)
    inside = expectation(
        lambda t: 2 * stats.norm.cdf(float(upper) - m, 0, math.sqrt(variance_m + math.exp(t))) - 1,
        s,
        variance_s,
    )
    assert inside == pytest.approx(0.9, abs=1e-6)


def test_sampled_heteroscedastic_regression_averages_the_networks() -> None:
    values = rand(7, 3, 1, 4)
    prediction = predict(HeteroscedasticGaussian(), LatentSamples(values))
    assert isinstance(prediction, RegressionPrediction)
    means, log_variances = values[:, :, 0, :2], values[:, :, 0, 2:]
    close(prediction.mean, means.mean(0))
    close(prediction.aleatoric_variance, log_variances.exp().mean(0))
    close(prediction.epistemic_variance, means.var(0, unbiased=False))
    y = rand(3, 2, seed=3)
    densities = distributions.Normal(means, (0.5 * log_variances).exp()).log_prob(y).sum(-1)
    close(prediction.log_prob(y), densities.logsumexp(0) - math.log(7))


@pytest.mark.parametrize("kind", ["linearised", "sampled", "heteroscedastic"])
def test_intervals_cover_draws_from_the_prediction_at_their_level(kind: str) -> None:
    """20,000 draws of y; false-alarm rate 1e-6 by the exact binomial distribution."""
    n, generator = 20_000, torch.Generator().manual_seed(3)
    mean, variance = torch.tensor([[[0.5, -1.0]]], dtype=F64), torch.tensor([[[0.3, 0.8]]], dtype=F64)
    gaussian = LatentGaussian(mean, variance)
    f = next(iter(gaussian.draws(n, 11)))[:, 0, 0]
    noise = torch.randn(n, dtype=F64, generator=generator)
    if kind == "linearised":
        prediction = predict(Gaussian(0.7), gaussian)
        y = f[:, 0] + 0.7 * noise
    elif kind == "sampled":
        prediction = predict(Gaussian(0.7), LatentSamples(f[:20, None, None]))
        y = f[torch.randint(20, (n,), generator=generator), 0] + 0.7 * noise
    else:
        prediction = predict(HeteroscedasticGaussian(), gaussian)
        y = f[:, 0] + (0.5 * f[:, 1]).exp() * noise
    assert isinstance(prediction, RegressionPrediction)
    for level in (0.5, 0.95):
        lower, upper = (end[0, 0] for end in prediction.interval(level))
        inside = int(((y >= lower) & (y <= upper)).sum())
        assert stats.binomtest(inside, n, level).pvalue > 0.5e-6


# -- classification -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["quasi", "mean_field", "probit", "mc"])
def test_without_variance_the_probabilities_are_the_softmax(link: str) -> None:
    mean = rand(4, 1, 3)
    latent = LatentGaussian(mean, torch.zeros_like(mean), torch.zeros(4, 1, 3, 3, dtype=F64))
    prediction = predict(Categorical(), latent, link=link)
    assert isinstance(prediction, ClassificationPrediction)
    close(prediction.probs, mean[:, 0].softmax(-1))
    close(prediction.entropy, distributions.Categorical(logits=mean[:, 0]).entropy())
    close(prediction.mutual_information, 0.0)
    binary = predict(Bernoulli(), latent, link=link)
    assert isinstance(binary, ClassificationPrediction)
    close(binary.probs, mean[:, 0].sigmoid())
    close(binary.entropy, distributions.Bernoulli(logits=mean[:, 0]).entropy())
    close(binary.mutual_information, 0.0)


def test_probit_is_its_formula() -> None:
    latent = marginal(gaussian_latent(4, 1, 3))
    prediction = predict(Categorical(), latent, link="probit")
    assert isinstance(prediction, ClassificationPrediction)
    scaled = latent.mean / (1 + math.pi / 8 * latent.variance).sqrt()
    close(prediction.probs, scaled.softmax(-1)[:, 0])


def test_monte_carlo_converges_to_the_integral_over_correlated_logits() -> None:
    """Two correlated logits: the exact answer is an integral over their difference. Five standard errors."""
    mean = torch.tensor([[[1.0, -0.5]]], dtype=F64)
    covariance = torch.tensor([[[[2.0, 0.9], [0.9, 1.0]]]], dtype=F64)
    latent = LatentGaussian(mean, covariance.diagonal(dim1=-2, dim2=-1), covariance)
    samples = 40_000
    prediction = predict(Categorical(), latent, link="mc", samples=samples)
    assert isinstance(prediction, ClassificationPrediction)
    z_mean, z_variance = 1.5, 2.0 + 1.0 - 2 * 0.9
    exact = expectation(lambda z: 1 / (1 + math.exp(-z)), z_mean, z_variance)
    assert abs(float(prediction.probs[0, 0]) - exact) < 5 * 0.5 / math.sqrt(samples)
    uncertain = expectation(lambda z: float(stats.bernoulli.entropy(1 / (1 + math.exp(-z)))), z_mean, z_variance)
    assert abs(float(prediction.aleatoric_entropy) - uncertain) < 5 * 0.35 / math.sqrt(samples)


@pytest.mark.parametrize("mean", [-6.0, -2.0, 0.0, 0.5, 3.0])
@pytest.mark.parametrize("variance", [0.01, 1.0, 10.0, 400.0])
def test_binary_probabilities_are_the_integral_and_probit_within_two_percent_of_it_with_exact_information(
    mean: float, variance: float
) -> None:
    """MacKay's approximation is off by at most 0.02 in probability, everywhere."""
    moments = (torch.full((1, 1, 1), mean, dtype=F64), torch.full((1, 1, 1), variance, dtype=F64))
    exact = expectation(lambda z: float(1 / (1 + np.exp(-z))), mean, variance, 0.0)
    entropy = expectation(lambda z: float(stats.bernoulli.entropy(1 / (1 + np.exp(-z)))), mean, variance, 0.0)
    for link, tolerance in ((None, 1e-8), ("probit", 0.02)):
        prediction = predict(Bernoulli(), LatentGaussian(*moments, raw_shape=(1,)), link=link)
        assert isinstance(prediction, ClassificationPrediction)
        assert float(prediction.probs) == pytest.approx(exact, abs=tolerance)
        information = float(stats.bernoulli.entropy(exact)) - entropy
        assert float(prediction.mutual_information) == pytest.approx(information, abs=1e-7)
        close(prediction.aleatoric_entropy, prediction.entropy - prediction.mutual_information)
        assert prediction.probs.shape == prediction.entropy.shape == prediction.mutual_information.shape == (1,)
    assert float(predict(Bernoulli(), LatentGaussian(*moments, raw_shape=(1,))).aleatoric_entropy) == pytest.approx(  # type: ignore[attr-defined]
        entropy, abs=1e-7
    )


def test_expected_binary_entropy_is_continuous_where_its_two_rules_meet() -> None:
    mean = torch.linspace(-5, 5, 11, dtype=F64)
    narrow = expected_binary_entropy(mean, torch.full_like(mean, 1.0))
    wide = expected_binary_entropy(mean, torch.full_like(mean, 1.0 + 1e-12))
    close(narrow, wide, 1e-8)


def test_laplace_bridge_is_its_formula_on_zero_sum_logits() -> None:
    latent = marginal(gaussian_latent(4, 1, 3))
    prediction = predict(Categorical(), latent, link="bridge")
    assert isinstance(prediction, ClassificationPrediction)
    assert latent.covariance is not None
    for row in range(4):
        mu, v = latent.mean[row, 0], latent.covariance[row, 0]
        ones = torch.ones(3, dtype=F64)
        total = ones @ v @ ones
        mu, v = mu - v @ ones * mu.sum() / total, v - torch.outer(v @ ones, v @ ones) / total
        close(mu.sum(), 0.0)
        close(v.sum(0), 0.0)
        alpha = (1 - 2 / 3 + mu.exp() / 9 * (-mu).exp().sum()) / v.diagonal()
        close(prediction.probs[row], alpha / alpha.sum())
        draws = distributions.Dirichlet(alpha).sample(torch.Size([20_000]))
        entropies = distributions.Categorical(probs=draws).entropy()
        error = float(entropies.std()) / math.sqrt(20_000)
        assert abs(float(prediction.aleatoric_entropy[row] - entropies.mean())) < 5 * error


def test_laplace_bridge_of_independent_logits_is_that_of_a_diagonal_covariance() -> None:
    latent = marginal(gaussian_latent(4, 1, 3), full=False)
    full = LatentGaussian(latent.mean, latent.variance, torch.diag_embed(latent.variance))
    one, other = (predict(Categorical(), it, link="bridge") for it in (latent, full))
    assert isinstance(one, ClassificationPrediction)
    assert isinstance(other, ClassificationPrediction)
    close(one.probs, other.probs)
    close(one.mutual_information, other.mutual_information)


def test_laplace_bridge_of_a_binary_logit_is_a_beta_distribution() -> None:
    z, v = rand(5, 1, 1), rand(5, 1, 1, seed=1).abs()
    prediction = predict(Bernoulli(), LatentGaussian(z, v, raw_shape=(5,)), link="bridge")
    assert isinstance(prediction, ClassificationPrediction)
    a, b = ((1 + z.exp()) / v).flatten(), ((1 + (-z).exp()) / v).flatten()
    close(prediction.probs, a / (a + b))
    for i in range(5):
        p = np.linspace(0, 1, 20_001)[1:-1]
        weights = stats.beta.pdf(p, float(a[i]), float(b[i]))
        exact = float((weights * stats.bernoulli.entropy(p)).sum() / weights.sum())
        assert float(prediction.aleatoric_entropy[i]) == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("link", [*LINKS, None])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_entropy_is_expected_entropy_plus_mutual_information(likelihood: Likelihood, link: str | None) -> None:
    latent: LatentGaussian | LatentSamples = marginal(gaussian_latent(6, 2, 3))
    if link is None:
        latent = LatentSamples(rand(9, 6, 2, 3))
    prediction = predict(likelihood, latent, link=link)
    assert isinstance(prediction, ClassificationPrediction)
    shape = (6, 2) if likelihood.name == "categorical" else (6, 2, 3)
    assert prediction.entropy.shape == prediction.mutual_information.shape == shape
    assert bool((prediction.mutual_information >= 0).all())
    assert bool((prediction.mutual_information > 0).any())
    total = prediction.aleatoric_entropy + prediction.mutual_information
    close(total, prediction.entropy, 1e-15)
    p = prediction.probs
    by_hand = -(p * p.log()).sum(-1) if shape == (6, 2) else -(p * p.log() + (1 - p) * (1 - p).log())
    close(prediction.entropy, by_hand)


def test_sampled_classification_averages_probabilities() -> None:
    values = rand(9, 4, 1, 3)
    prediction = predict(Categorical(), LatentSamples(values))
    assert isinstance(prediction, ClassificationPrediction)
    each = distributions.Categorical(logits=values[:, :, 0])
    close(prediction.probs, each.probs.mean(0))
    close(prediction.aleatoric_entropy, each.entropy().mean(0))
    close(prediction.f_mean, values.mean(0)[:, 0])
    close(prediction.f_variance, values.var(0, unbiased=False)[:, 0])


@pytest.mark.parametrize("link", LINKS)
def test_class_densities_are_the_probabilities(link: str) -> None:
    latent = marginal(gaussian_latent(4, 2, 3))
    prediction = predict(Categorical(), latent, link=link)
    assert isinstance(prediction, ClassificationPrediction)
    y = torch.tensor([[0, 1], [2, -100], [1, 1], [-100, -100]])
    p = prediction.probs
    expected = torch.stack([p[0, 0, 0] * p[0, 1, 1], p[1, 0, 2], p[2, 0, 1] * p[2, 1, 1], p.new_tensor(1.0)])
    close(prediction.log_prob(y), expected.log())
    soft = rand(4, 2, 3, seed=4).softmax(-1)
    close(prediction.log_prob(soft), (soft * p.log()).sum((1, 2)))
    binary = predict(Bernoulli(), latent, link=link)
    assert isinstance(binary, ClassificationPrediction)
    labels = rand(4, 2, 3, seed=5) > 0
    close(binary.log_prob(labels), torch.where(labels, binary.probs, 1 - binary.probs).log().sum((1, 2)))


def test_joint_class_density_is_a_probability_over_all_labelings() -> None:
    """The 9 labelings of two correlated examples sum to one; their marginals are those of each example."""
    latent = gaussian_latent(2, 1, 3)
    joint = predict(Categorical(), latent, link="mc", samples=20_000)
    table = torch.stack([joint.log_prob(torch.tensor([a, b])).exp() for a in range(3) for b in range(3)]).reshape(3, 3)
    assert joint.log_prob(torch.tensor([0, 0])).dim() == 0
    close(table.sum(), 1.0)
    alone = predict(Categorical(), marginal(latent), link="mc", samples=20_000)
    assert isinstance(alone, ClassificationPrediction)
    close(table.sum(1), alone.probs[0], 5 * 0.5 / math.sqrt(10_000))  # five standard errors of a difference
    close(table.sum(0), alone.probs[1], 5 * 0.5 / math.sqrt(10_000))
    assert float((table - torch.outer(table.sum(1), table.sum(0))).abs().max()) > 0.01


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_extreme_logits_stay_finite_in_float32(likelihood: Likelihood, link: str) -> None:
    mean = torch.tensor([[[1e3, -1e3, 0.0]], [[1e3, 1e3, 1e3]], [[0.0, 0.0, 0.0]]])
    for scale in (0.0, 1e-6, 1.0, 1e6):
        variance = torch.full_like(mean, scale)
        for covariance in (None, torch.diag_embed(variance)):
            prediction = predict(likelihood, LatentGaussian(mean, variance, covariance), link=link)
            assert isinstance(prediction, ClassificationPrediction)
            y = torch.tensor([1, 0, 0]) if likelihood.name == "categorical" else torch.ones(3, 3)
            values = (
                prediction.probs,
                prediction.entropy,
                prediction.mutual_information,
                prediction.log_prob(y),
            )
            assert all(bool(torch.isfinite(value).all()) for value in values), scale
            assert all(value.dtype == torch.float32 for value in values)


def test_draws_follow_the_generator_and_predictions_keep_their_numbers() -> None:
    latent = marginal(gaussian_latent(4, 1, 3))

    def probs(generator: torch.Generator | None) -> Tensor:
        prediction = predict(Categorical(), latent, link="mc", generator=generator)
        assert isinstance(prediction, ClassificationPrediction)
        assert torch.equal(prediction.probs, prediction.probs)
        return prediction.probs

    assert torch.equal(probs(None), probs(None))
    assert torch.equal(probs(torch.Generator().manual_seed(1)), probs(torch.Generator().manual_seed(1)))
    generator = torch.Generator().manual_seed(1)
    assert not torch.equal(probs(generator), probs(generator))


def test_draws_in_chunks_have_the_moments_of_the_latent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five standard errors for every entry of the covariance; singular covariances included."""
    monkeypatch.setattr("lapis.predictions.latent.CHUNK", 1000)
    root = rand(2, 1, 3, 2)
    covariance = root @ root.mT
    latent = LatentGaussian(rand(2, 1, 3), covariance.diagonal(dim1=-2, dim2=-1), covariance)
    chunks = list(latent.draws(20_000, 0))
    assert len(chunks) > 1
    f = torch.cat(chunks)
    assert len(f) == 20_000
    centred = f - latent.mean
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    error = products.std(0) / math.sqrt(20_000)
    assert bool(((products.mean(0) - covariance).abs() < 5 * error).all())


def test_an_indefinite_covariance_is_refused() -> None:
    covariance = torch.tensor([[[[1.0, 2.0], [2.0, 1.0]]]], dtype=F64)
    latent = LatentGaussian(torch.zeros(1, 1, 2, dtype=F64), torch.ones(1, 1, 2, dtype=F64), covariance)
    ring = torch.eye(4, dtype=F64) + 0.9 * (torch.eye(4, dtype=F64).roll(1, 0) + torch.eye(4, dtype=F64).roll(-1, 0))
    other = LatentGaussian(torch.zeros(1, 1, 4, dtype=F64), torch.ones(1, 1, 4, dtype=F64), ring[None, None])
    for prediction in (predict(Categorical(), latent, link="mc"), predict(Categorical(), other)):
        assert isinstance(prediction, ClassificationPrediction)
        with pytest.raises(errors.NotPositiveDefiniteError, match="eigenvalues"):
            _ = prediction.probs
    with pytest.raises(errors.NotPositiveDefiniteError, match="positive definite"):
        predict(Gaussian(0.1), latent).log_prob(torch.zeros(1, 2))


# -- counts -------------------------------------------------------------------------------------------------


def poisson_quad(y: int, mean: float, variance: float) -> float:
    """log P(Y = y) by a dense trapezoidal sum over f, independent of the code's own quadrature."""
    sd = math.sqrt(variance)
    at = math.log(y + 0.5)
    f = np.linspace(min(mean - 15 * sd, at - 1), max(mean + 15 * sd, at + 1), 400_001)
    log = stats.norm.logpdf(f, mean, sd) + stats.poisson.logpmf(y, np.exp(f))
    return float(np.log(np.trapezoid(np.exp(log - log.max()), f)) + log.max())


@pytest.mark.parametrize("mean", [-3.0, 0.5, 6.0])
@pytest.mark.parametrize("variance", [1e-8, 0.01, 1.0, 9.0, 100.0])
def test_count_density_and_moments_match_brute_force_integration(mean: float, variance: float) -> None:
    latent = LatentGaussian(torch.full((1, 1, 1), mean, dtype=F64), torch.full((1, 1, 1), variance, dtype=F64))
    prediction = predict(Poisson(), latent)
    assert isinstance(prediction, CountPrediction)
    for y in (0, 1, 7, 400, 3000):
        close(prediction.log_prob(torch.tensor([y])), poisson_quad(y, mean, variance), 1e-6)
    rate = stats.lognorm(math.sqrt(variance), scale=math.exp(mean))
    close(prediction.mean, float(rate.mean()), 1e-9)
    close(prediction.aleatoric_variance, float(rate.mean()), 1e-9)
    close(prediction.epistemic_variance, float(rate.var()), 1e-7)
    close(prediction.variance, float(rate.mean() + rate.var()), 1e-7)
    close(prediction.std**2, prediction.variance)


@pytest.mark.parametrize("mean", [-3.0, 0.5, 6.0])
@pytest.mark.parametrize("variance", [0.0, 1e-4, 0.3, 4.0])
def test_count_intervals_are_the_quantiles_of_the_summed_probabilities(mean: float, variance: float) -> None:
    latent = LatentGaussian(torch.full((1, 1, 1), mean, dtype=F64), torch.full((1, 1, 1), variance, dtype=F64))
    prediction = predict(Poisson(), latent)
    assert isinstance(prediction, CountPrediction)
    sd = math.sqrt(variance)
    f = np.linspace(mean - 9 * sd, mean + 9 * sd, 200_001) if sd else np.array([mean])
    weights = stats.norm.pdf(f, mean, sd) if sd else np.ones(1)
    weights = weights / weights.sum()

    def distribution(k: float) -> float:
        return float((weights * stats.poisson.cdf(k, np.exp(f))).sum())

    for level in (0.5, 0.95):
        for end, tail in zip(prediction.interval(level), ((1 - level) / 2, (1 + level) / 2), strict=True):
            k = float(end)
            assert k == round(k) >= 0
            exact = distribution(k)
            assert exact >= tail - 1e-7
            assert distribution(k - 1) < tail + 1e-7
            close(
                cumulative(torch.tensor([k], dtype=F64), latent.mean.flatten(), latent.variance.flatten()),
                exact,
                1e-6,
            )


def test_sampled_counts_are_a_mixture_of_poissons() -> None:
    values = rand(9, 4, 1, 2)
    prediction = predict(Poisson(), LatentSamples(values))
    assert isinstance(prediction, CountPrediction)
    rates = values[:, :, 0].exp()
    close(prediction.mean, rates.mean(0))
    close(prediction.variance, rates.mean(0) + rates.var(0, unbiased=False))
    y = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 0]])
    densities = distributions.Poisson(rates).log_prob(y.double()).sum(-1)
    close(prediction.log_prob(y), densities.logsumexp(0) - math.log(9))
    lower, upper = prediction.interval(0.8)
    for end, tail in ((lower, 0.1), (upper, 0.9)):
        k = end.numpy()
        assert (stats.poisson.cdf(k, rates.numpy()).mean(0) >= tail).all()
        assert (stats.poisson.cdf(k - 1, rates.numpy()).mean(0) < tail).all()


def test_large_rates_do_not_overflow_or_lose_their_quantiles() -> None:
    mean = torch.tensor([[[60.0]], [[45.0]], [[-200.0]]])
    prediction = predict(Poisson(), LatentGaussian(mean, torch.zeros_like(mean)))
    assert isinstance(prediction, CountPrediction)
    torch.testing.assert_close(prediction.mean, mean[:, 0].exp())
    assert bool((prediction.epistemic_variance == 0).all())
    lower, upper = prediction.interval()
    torch.testing.assert_close(lower[:2], mean[:2, 0].exp(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(upper[:2], mean[:2, 0].exp(), rtol=1e-5, atol=0.0)
    assert float(upper[2]) == 0.0


# -- custom -------------------------------------------------------------------------------------------------


def test_density_of_a_custom_likelihood_converges_to_the_exact_one() -> None:
    """A Gaussian written by hand; 40,000 draws, five standard errors."""
    latent = marginal(gaussian_latent(3, 1, 2))
    custom = Custom(lambda f, y: -distributions.Normal(f, 1.0).log_prob(y).sum())
    prediction = predict(custom, latent, samples=40_000)
    assert isinstance(prediction, FunctionPrediction)
    y = rand(3, 2, seed=5)
    exact = predict(Gaussian(1.0), latent).log_prob(y)
    densities = distributions.Normal(next(iter(latent.draws(40_000, 0)))[:, :, 0], 1.0).log_prob(y).sum(-1).exp()
    error = densities.std(0) / densities.mean(0) / math.sqrt(40_000)
    assert bool(((prediction.log_prob(y) - exact).abs() < 5 * error).all())
    close(prediction.f_mean, latent.mean[:, 0])


# -- layout -------------------------------------------------------------------------------------------------

ALL: list[Callable[..., Likelihood]] = [Gaussian, HeteroscedasticGaussian, Categorical, Bernoulli, Poisson]


@pytest.mark.parametrize("kind", ALL)
def test_channels_first_predictions_are_channels_last_ones_permuted(kind: Callable[..., Likelihood]) -> None:
    latent = marginal(gaussian_latent(2, 6, 4))
    last = predict(kind(), replace(latent, raw_shape=(2, 3, 2, 4)))
    first = predict(kind(channels="first"), replace(latent, raw_shape=(2, 4, 3, 2)))
    assert latent.covariance is not None
    assert first.f_covariance is not None
    assert last.f_covariance is not None
    close(first.f_covariance, latent.covariance.reshape(2, 3, 2, 4, 4))
    close(last.f_covariance, first.f_covariance)
    names = ["f_mean", "f_variance"]
    if isinstance(last, ClassificationPrediction):
        names += ["probs"] if kind is Categorical else ["probs", "entropy", "mutual_information"]
    else:
        names += ["mean", "variance", "std", "epistemic_variance", "aleatoric_variance"]
    for name in names:
        value = getattr(last, name)
        assert value.shape[:3] == (2, 3, 2)
        close(getattr(first, name), value.movedim(-1, 1))
    if kind is Categorical:
        assert isinstance(first, ClassificationPrediction)
        assert isinstance(last, ClassificationPrediction)
        assert first.entropy.shape == (2, 3, 2)
        close(first.mutual_information, last.mutual_information)
        y = torch.arange(12).reshape(2, 3, 2) % 4
        close(first.log_prob(y), last.log_prob(y))
    else:
        y = torch.ones(2, 3, 2, 2 if kind is HeteroscedasticGaussian else 4)
        assert last.log_prob(y).shape == (2,)
        close(first.log_prob(y.movedim(-1, 1)), last.log_prob(y))


@pytest.mark.parametrize("kind", [Gaussian, Bernoulli, Poisson])
def test_outputs_without_a_channel_dimension_give_predictions_without_one(
    kind: Callable[..., Likelihood],
) -> None:
    latent = replace(marginal(gaussian_latent(5, 1, 1)), raw_shape=(5,))
    prediction = predict(kind(), latent)
    value = prediction.probs if isinstance(prediction, ClassificationPrediction) else prediction.mean  # type: ignore[attr-defined]
    assert value.shape == prediction.f_mean.shape == prediction.f_variance.shape == (5,)
    assert prediction.f_covariance is not None
    assert prediction.f_covariance.shape == (5, 1, 1)
    assert prediction.log_prob(torch.ones(5)).shape == (5,)
    assert type(prediction).__name__ in repr(prediction)


@pytest.mark.parametrize("kind", ALL)
def test_float32_in_is_float32_out_and_agrees_with_float64(kind: Callable[..., Likelihood]) -> None:
    wide = marginal(gaussian_latent(3, 1, 4))
    assert wide.covariance is not None
    narrow = LatentGaussian(wide.mean.float(), wide.variance.float(), wide.covariance.float())
    y = torch.tensor([0, 1, 3]) if kind is Categorical else torch.ones(3, 2 if kind is HeteroscedasticGaussian else 4)
    a, b = (predict(kind(), latent).log_prob(y) for latent in (narrow, wide))
    assert a.dtype == torch.float32
    torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


# -- bad options --------------------------------------------------------------------------------------------

GAUSSIAN = LatentGaussian(torch.zeros(2, 1, 2), torch.ones(2, 1, 2))
SAMPLES = LatentSamples(torch.zeros(3, 2, 1, 2))


@pytest.mark.parametrize(
    ("likelihood", "latent", "options", "words"),
    [
        (Gaussian(), GAUSSIAN, {"link": "probit"}, "gaussian"),
        (Poisson(), GAUSSIAN, {"link": "mc"}, "poisson"),
        (Categorical(), SAMPLES, {"link": "mc"}, "sampled networks"),
        (Categorical(), GAUSSIAN, {"link": "softmax"}, '"quasi" or "mean_field" or "probit"'),
        (Categorical(), GAUSSIAN, {"samples": 0}, "whole number"),
        (Categorical(), GAUSSIAN, {"samples": 2.5}, "whole number"),
        (Categorical(), GAUSSIAN, {"link": "bridge", "samples": 10}, "nothing is drawn"),
        (Bernoulli(), GAUSSIAN, {"samples": 10}, "nothing is drawn"),
        (Categorical(), GAUSSIAN, {"link": "probit", "samples": 10}, "of two classes: nothing is drawn"),
        (Gaussian(), GAUSSIAN, {"samples": 10}, "nothing is drawn"),
        (Categorical(), SAMPLES, {"samples": 10}, "drawn already"),
    ],
)
def test_options_without_a_meaning_are_refused(
    likelihood: Likelihood, latent: LatentGaussian | LatentSamples, options: dict[str, object], words: str
) -> None:
    with pytest.raises(errors.OptionError, match=words):
        predict(likelihood, latent, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", [0.0, 1.0, 95, -0.5, float("nan"), "high"])
def test_interval_levels_that_are_no_probabilities_are_refused(level: float) -> None:
    for likelihood in (Gaussian(), Poisson()):
        prediction = predict(likelihood, GAUSSIAN)
        assert isinstance(prediction, (RegressionPrediction, CountPrediction))
        with pytest.raises(errors.OptionError, match=r"level=0\.95"):
            prediction.interval(level)


def test_targets_that_do_not_fit_a_prediction_are_refused() -> None:
    prediction = predict(Categorical(), GAUSSIAN)
    with pytest.raises(errors.DataError, match="out of range"):
        prediction.log_prob(torch.tensor([0, 5]))
    with pytest.raises(errors.DataError, match="batch size"):
        prediction.log_prob(torch.tensor([0]))


def test_latents_with_shapes_that_disagree_are_refused() -> None:
    mean = torch.zeros(2, 1, 2)
    with pytest.raises(errors.ModelError, match="variance"):
        LatentGaussian(mean, torch.ones(2, 2))
    with pytest.raises(errors.ModelError, match="covariance"):
        LatentGaussian(mean, torch.ones(2, 1, 2), torch.ones(2, 2, 2))
    with pytest.raises(errors.ModelError, match="joint"):
        LatentGaussian(mean, torch.ones(2, 1, 2), None, torch.ones(2, 2))
    with pytest.raises(errors.ModelError, match="S, B, T, C"):
        LatentSamples(mean)
    with pytest.raises(errors.ModelError, match="mean"):
        LatentGaussian(mean[0], torch.ones(1, 2))


def test_raw_shapes_are_the_usual_ones_unless_given_and_have_to_fit() -> None:
    """The default is the layout of likelihoods whose channels come last."""
    one, several = torch.zeros(2, 1, 3), torch.zeros(2, 4, 3)
    assert LatentGaussian(one, one).raw_shape == LatentSamples(one[None]).raw_shape == (2, 3)
    assert LatentGaussian(several, several).raw_shape == LatentSamples(several[None]).raw_shape == (2, 4, 3)
    given = LatentSamples(several[None], raw_shape=torch.Size([2, 2, 2, 3]))
    assert given.raw_shape == predict(Gaussian(), given).raw_shape == (2, 2, 2, 3)
    assert predict(Gaussian(), given).f_mean.shape == (2, 2, 2, 3)
    for wrong in ((3, 2), (2, 4), (1, 2, 3)):
        with pytest.raises(errors.ModelError, match="raw_shape"):
            LatentGaussian(one, one, raw_shape=wrong)
        with pytest.raises(errors.ModelError, match="raw_shape"):
            LatentSamples(one[None], raw_shape=wrong)


def test_predictions_cannot_be_changed() -> None:
    prediction = predict(Gaussian(), GAUSSIAN)
    with pytest.raises(AttributeError):
        prediction.samples = 3  # type: ignore[misc]
