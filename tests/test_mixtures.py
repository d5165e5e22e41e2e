"""Mixtures of latents against naive float64 computations, and latents of batches joined to one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import Tensor, distributions

from lapis import errors
from lapis.likelihoods import Bernoulli, Categorical, Custom, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from lapis.predictions import (
    ClassificationPrediction,
    CountPrediction,
    FunctionPrediction,
    Latent,
    LatentGaussian,
    LatentMixture,
    LatentSamples,
    Prediction,
    RegressionPrediction,
    join_latents,
    predict,
)
from lapis.predictions._counts import quantile_between

F64 = torch.float64
CUSTOM = Custom(lambda f, y: -distributions.Normal(f, 1.0).log_prob(y).sum())
LIKELIHOODS = [Gaussian(0.5), HeteroscedasticGaussian(), Categorical(), Bernoulli(), Poisson(), CUSTOM]
CLASSES: dict[str, type[Prediction]] = {
    "regression": RegressionPrediction,
    "classification": ClassificationPrediction,
    "count": CountPrediction,
    "function": FunctionPrediction,
}
WEIGHTS = torch.tensor([0.3, 0.7], dtype=F64)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def gaussian(batch: int, positions: int, outputs: int, seed: int = 0, kind: str = "full") -> LatentGaussian:
    """A latent with a random joint covariance, or with what is left of it: "full" blocks, or "diagonal" variances."""
    total = batch * positions * outputs
    root = rand(total, total, seed=seed)
    joint = root @ root.mT / total
    mean = rand(batch, positions, outputs, seed=seed + 1)
    whole = LatentGaussian(mean, joint.diagonal().reshape(mean.shape), None, joint)
    if kind == "joint":
        return whole
    return LatentGaussian(mean, whole.variance, whole.blocks if kind == "full" else None)


def scalars(*moments: tuple[float, ...]) -> LatentMixture:
    """Two Gaussians over one example: each tuple is a mean and a variance for each output."""
    parts = []
    for numbers in moments:
        mean, variance = torch.tensor(numbers, dtype=F64).reshape(2, 1, 1, -1)
        parts.append(LatentGaussian(mean, variance))
    return LatentMixture(tuple(parts), WEIGHTS)


def close(a: Tensor, b: Tensor | float, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype).expand_as(a), rtol=tolerance, atol=tolerance)


def targets(likelihood: Likelihood, batch: int, positions: int, outputs: int) -> Tensor:
    shape = (batch, outputs) if positions == 1 else (batch, positions, outputs)
    if likelihood.name == "categorical":
        return torch.arange(batch * positions).reshape(shape[:-1]) % outputs
    if likelihood.name == "heteroscedastic":
        return rand(*shape[:-1], outputs // 2, seed=9)
    y = rand(*shape, seed=9)
    return (y > 0).long() if likelihood.name == "bernoulli" else y.abs().round() if likelihood.name == "poisson" else y


def everything(prediction: Prediction, y: Tensor) -> dict[str, Tensor]:
    """Every number that a prediction has."""
    names = ["f_mean", "f_variance", "f_covariance"]
    if isinstance(prediction, ClassificationPrediction):
        names += ["probs", "entropy", "aleatoric_entropy", "mutual_information"]
    elif not isinstance(prediction, FunctionPrediction):
        names += ["mean", "variance", "std", "epistemic_variance", "aleatoric_variance"]
    found = {name: getattr(prediction, name) for name in names}
    if isinstance(prediction, (RegressionPrediction, CountPrediction)):
        found["lower"], found["upper"] = prediction.interval(0.8)
    found["log_prob"] = prediction.log_prob(y)
    return {name: value for name, value in found.items() if value is not None}


def assert_same(one: Prediction, other: Prediction, y: Tensor, tolerance: float = 1e-10) -> None:
    assert isinstance(one, CLASSES[one.likelihood.kind])
    assert isinstance(other, CLASSES[one.likelihood.kind])
    a, b = everything(one, y), everything(other, y)
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.shape == b[name].shape, name
        assert value.dtype == b[name].dtype, name
        torch.testing.assert_close(value, b[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: name + m)


# -- what holds for every likelihood ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["joint", "full", "diagonal", "samples", "joint samples"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda it: it.name)
def test_a_mixture_of_one_is_the_plain_prediction(likelihood: Likelihood, kind: str) -> None:
    latent: LatentGaussian | LatentSamples
    if kind.endswith("samples"):
        latent = LatentSamples(rand(5, 3, 2, 4), joint=kind.startswith("joint"))
    else:
        latent = gaussian(3, 2, 4, kind=kind)
    links: list[str | None] = [None]
    if likelihood.kind == "classification" and isinstance(latent, LatentGaussian):
        links = [None, "mean_field", "probit", "mc", "bridge"]
    y = targets(likelihood, 3, 2, 4)
    for link in links:
        mixed = predict(likelihood, LatentMixture((latent,), torch.ones(1)), link=link)
        assert mixed.method == "mixture"
        assert "mixture" in repr(mixed)
        plain = predict(likelihood, latent, link=link)
        assert_same(mixed, plain, y)
        assert getattr(mixed, "link", None) == getattr(plain, "link", None)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda it: it.name)
def test_equal_parts_of_one_sample_are_the_sampled_prediction(likelihood: Likelihood, joint: bool) -> None:
    values = rand(5, 3, 2, 4)
    parts = tuple(LatentSamples(value[None], joint) for value in values)
    mixed = predict(likelihood, LatentMixture(parts, torch.full((5,), 0.2)))
    assert_same(mixed, predict(likelihood, LatentSamples(values, joint)), targets(likelihood, 3, 2, 4))


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda it: it.name)
def test_weights_are_shares_of_the_sampled_networks(likelihood: Likelihood) -> None:
    """Two networks with weight 0.4 and one of weight 0.6 are the five networks a, b, c, c, c."""
    a, b, c = rand(3, 3, 1, 4)
    parts = (LatentSamples(torch.stack([a, b])), LatentSamples(c[None]))
    mixed = predict(likelihood, LatentMixture(parts, torch.tensor([0.4, 0.6], dtype=F64)))
    assert_same(mixed, predict(likelihood, LatentSamples(torch.stack([a, b, c, c, c]))), targets(likelihood, 3, 1, 4))


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda it: it.name)
def test_parts_without_weight_do_not_matter(likelihood: Likelihood) -> None:
    """Not even where their rates overflow, or their intervals are wide."""
    one, other = gaussian(3, 1, 4), replace(gaussian(3, 1, 4, seed=5), mean=torch.full((3, 1, 4), 800.0, dtype=F64))
    weights = torch.tensor([1.0, 0.0], dtype=F64)
    mixed = predict(likelihood, LatentMixture((one, other), weights))
    assert_same(mixed, predict(likelihood, one), targets(likelihood, 3, 1, 4))


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda it: it.name)
def test_equal_parts_that_agree_are_the_part_whatever_the_weights(likelihood: Likelihood) -> None:
    """With networks drawn already, as Monte Carlo draws of Gaussian parts have seeds of their own."""
    latent = LatentSamples(rand(4, 3, 1, 4))
    mixed = predict(likelihood, LatentMixture((latent, latent), WEIGHTS))
    assert_same(mixed, predict(likelihood, latent), targets(likelihood, 3, 1, 4))


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=lambda it: it.name)
def test_gaussian_and_sampled_parts_mix(likelihood: Likelihood) -> None:
    """Options are those of the Gaussian part; densities at one position are weighted means of densities."""
    parts = (gaussian(3, 1, 4, kind="diagonal"), LatentSamples(rand(5, 3, 1, 4, seed=7)))
    options = {"link": "mc", "samples": 50} if likelihood.kind == "classification" else {}
    mixed = predict(likelihood, LatentMixture(parts, WEIGHTS), **options)  # type: ignore[arg-type]
    each = [predict(likelihood, parts[0], **options), predict(likelihood, parts[1])]  # type: ignore[arg-type]
    y = targets(likelihood, 3, 1, 4)
    assert mixed.f_covariance is None
    if likelihood.name == "bernoulli":
        probs = [part.probs for part in each if isinstance(part, ClassificationPrediction)]
        assert isinstance(mixed, ClassificationPrediction)
        close(mixed.probs, 0.3 * probs[0] + 0.7 * probs[1])
    else:
        a, b = (part.log_prob(y).exp() for part in each)
        close(mixed.log_prob(y), (0.3 * a + 0.7 * b).log())


@pytest.mark.parametrize("likelihood", LIKELIHOODS[:-1], ids=lambda it: it.name)
def test_float32_in_is_float32_out_and_agrees_with_float64(likelihood: Likelihood) -> None:
    """The custom density is left out: its draws are others in float32."""
    wide = tuple(gaussian(3, 2, 4, seed=seed, kind="diagonal") for seed in (0, 4))
    narrow = tuple(LatentGaussian(part.mean.float(), part.variance.float()) for part in wide)
    y = targets(likelihood, 3, 2, 4)
    a, b = (everything(predict(likelihood, LatentMixture(parts, WEIGHTS)), y) for parts in (narrow, wide))
    for name in a.keys() - {"aleatoric_entropy", "mutual_information"}:
        assert a[name].dtype == torch.float32, name
        torch.testing.assert_close(a[name].double(), b[name], rtol=1e-3, atol=1e-3)


def test_moments_of_the_outputs_are_those_of_the_mixture() -> None:
    """E[f f^T] - E[f] E[f]^T with the second moments of both parts, in the network's own layout."""
    parts = tuple(replace(gaussian(2, 6, 3, seed=seed), raw_shape=(2, 3, 3, 2)) for seed in (0, 4))
    first = predict(Gaussian(channels="first"), LatentMixture(parts, WEIGHTS))
    mean = sum(w * part.mean for w, part in zip(WEIGHTS, parts, strict=True))
    second = torch.zeros(2, 6, 3, 3, dtype=F64)
    for w, part in zip(WEIGHTS, parts, strict=True):
        assert part.covariance is not None
        second += w * (part.covariance + part.mean.unsqueeze(-1) * part.mean.unsqueeze(-2))
    covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    assert first.f_covariance is not None
    close(first.f_mean, mean.reshape(2, 3, 2, 3).movedim(-1, 1))
    close(first.f_covariance, covariance.reshape(2, 3, 2, 3, 3))
    close(first.f_variance, covariance.diagonal(dim1=-2, dim2=-1).reshape(2, 3, 2, 3).movedim(-1, 1))


# -- two Gaussians, likelihood by likelihood ----------------------------------------------------------------


def mixed_expectation(function: Callable[[float], float], moments: list[tuple[float, float]]) -> float:
    """sum_k w_k E[function(f)], f ~ N(m_k, v_k), by adaptive quadrature."""
    total = 0.0
    for w, (mean, variance) in zip(WEIGHTS.tolist(), moments, strict=True):
        sd = math.sqrt(variance)
        density = lambda f, mean=mean, sd=sd: function(f) * stats.norm.pdf(f, mean, sd)  # noqa: E731
        total += w * integrate.quad(density, mean - 12 * sd, mean + 12 * sd, limit=500, epsabs=0, epsrel=1e-10)[0]
    return total


def test_regression_of_two_gaussians_is_the_naive_mixture() -> None:
    """Moments and quantiles by integration of the density; intervals reach from one mode to the other."""
    prediction = predict(Gaussian(0.5), scalars((-2.0, 0.1), (3.0, 0.4)))
    assert isinstance(prediction, RegressionPrediction)
    sds = [math.sqrt(0.1 + 0.25), math.sqrt(0.4 + 0.25)]

    def density(y: float) -> float:
        return float(0.3 * stats.norm.pdf(y, -2.0, sds[0]) + 0.7 * stats.norm.pdf(y, 3.0, sds[1]))

    def integral(function: Callable[[float], float], high: float = 15.0) -> float:
        points = [p for p in (-2.0, 0.5, 3.0) if p < high]
        return float(integrate.quad(function, -15.0, high, points=points, epsabs=1e-13, epsrel=1e-12, limit=500)[0])

    mean = integral(lambda y: y * density(y))
    close(prediction.mean, mean)
    close(prediction.variance, integral(lambda y: (y - mean) ** 2 * density(y)))
    close(prediction.aleatoric_variance, 0.25)
    close(prediction.epistemic_variance, prediction.f_variance)
    close(prediction.std, prediction.variance.sqrt())
    for y in (-4.0, -2.0, 0.0, 5.0):
        close(prediction.log_prob(torch.tensor([[y]], dtype=F64)), math.log(density(y)))
    for level in (0.1, 0.5, 0.95):
        lower, upper = prediction.interval(level)
        assert integral(density, float(lower)) == pytest.approx((1 - level) / 2, abs=1e-9)
        assert integral(density, float(upper)) == pytest.approx((1 + level) / 2, abs=1e-9)


def test_regression_densities_use_the_full_and_the_joint_covariances_of_the_parts() -> None:
    parts = tuple(gaussian(3, 2, 2, seed=seed, kind="joint") for seed in (0, 4))
    sigma = torch.tensor([0.5, 0.7], dtype=F64)
    y = rand(3, 2, 2, seed=9)
    full = tuple(LatentGaussian(part.mean, part.variance, part.blocks) for part in parts)
    position, joint = [], []
    for part in parts:
        assert part.joint is not None
        assert part.blocks is not None
        normal = distributions.MultivariateNormal(part.mean, part.blocks + torch.diag(sigma**2))
        position.append(normal.log_prob(y).exp())
        whole = distributions.MultivariateNormal(part.mean.flatten(), part.joint + torch.diag((sigma**2).repeat(6)))
        joint.append(whole.log_prob(y.flatten()).exp())
    expected = (0.3 * position[0] + 0.7 * position[1]).log().sum(1)
    close(predict(Gaussian(sigma), LatentMixture(full, WEIGHTS)).log_prob(y), expected)
    result = predict(Gaussian(sigma), LatentMixture(parts, WEIGHTS)).log_prob(y)
    assert result.dim() == 0
    close(result, (0.3 * joint[0] + 0.7 * joint[1]).log())


def test_heteroscedastic_regression_of_two_gaussians_is_the_naive_mixture() -> None:
    """Integration over the log variance s of each part."""
    prediction = predict(HeteroscedasticGaussian(), scalars((-1.0, -0.5, 0.2, 1.0), (2.0, 0.5, 0.4, 0.3)))
    assert isinstance(prediction, RegressionPrediction)
    outputs = [(-1.0, 0.2), (2.0, 0.4)]
    noise = [(-0.5, 1.0), (0.5, 0.3)]

    def of_parts(function: Callable[[float, float], float]) -> float:
        """sum_k w_k E_s[function(m_k, standard deviation of y given s)]."""
        total = 0.0
        for k, (mean, variance) in enumerate(outputs):
            sd, s = math.sqrt(noise[k][1]), noise[k][0]
            inner = lambda t, m=mean, v=variance, s=s, sd=sd: (  # noqa: E731
                function(m, math.sqrt(v + math.exp(t))) * stats.norm.pdf(t, s, sd)
            )
            total += float(WEIGHTS[k]) * integrate.quad(inner, s - 12 * sd, s + 12 * sd, epsabs=1e-13, limit=500)[0]
        return total

    mean = 0.3 * -1.0 + 0.7 * 2.0
    epistemic = 0.3 * (0.2 + (-1.0 - mean) ** 2) + 0.7 * (0.4 + (2.0 - mean) ** 2)
    assert prediction.mean.shape == (1, 1)
    close(prediction.mean, mean)
    close(prediction.epistemic_variance, epistemic)
    close(prediction.aleatoric_variance, mixed_expectation(math.exp, noise), 1e-9)
    close(prediction.variance, epistemic + mixed_expectation(math.exp, noise), 1e-9)
    for y in (-3.0, 0.5, 6.0):
        exact = of_parts(lambda m, sd, y=y: float(stats.norm.pdf(y, m, sd)))
        close(prediction.log_prob(torch.tensor([[y]], dtype=F64)), math.log(exact), 1e-8)
    for end, tail in zip(prediction.interval(0.9), (0.05, 0.95), strict=True):
        assert of_parts(lambda m, sd, y=float(end): float(stats.norm.cdf(y, m, sd))) == pytest.approx(tail, abs=1e-8)


@pytest.mark.parametrize("link", ["quasi", "mean_field", "probit", "mc", "bridge"])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=lambda it: it.name)
def test_classes_of_two_gaussians_have_the_weighted_means_of_their_parts(likelihood: Likelihood, link: str) -> None:
    """The parts' own numbers are the plain predictions'; part k draws with seed k, and the plain one with seed 0."""
    parts = tuple(gaussian(3, 2, 4, seed=seed) for seed in (0, 4))
    mixed = predict(likelihood, LatentMixture(parts, WEIGHTS), link=link, samples=40 if link == "mc" else None)
    assert isinstance(mixed, ClassificationPrediction)
    assert mixed.link == link
    probs, entropies = [], []
    for k, part in enumerate(parts):
        plain = predict(likelihood, part, link=link, samples=40 if link == "mc" else None)
        assert isinstance(plain, ClassificationPrediction)
        plain = replace(plain, seed=k)
        probs.append(plain.probs)
        entropies.append(plain.aleatoric_entropy)
        if link == "mc":
            draws = next(iter(part.draws(40, k)))
            close(plain.probs, (draws.softmax(-1) if likelihood.name == "categorical" else draws.sigmoid()).mean(0))
    p = 0.3 * probs[0] + 0.7 * probs[1]
    close(mixed.probs, p)
    if likelihood.name == "categorical":
        close(mixed.entropy, -(p * p.log()).sum(-1))
        close(mixed.log_prob(torch.tensor([[0, 1], [2, -100], [3, 3]])), torch.stack(
            [p[0, 0, 0] * p[0, 1, 1], p[1, 0, 2], p[2, 0, 3] * p[2, 1, 3]]
        ).log())  # fmt: skip
        soft = rand(3, 2, 4, seed=4).softmax(-1)
        close(mixed.log_prob(soft), (soft * p.log()).sum((1, 2)))
    else:
        close(mixed.entropy, -(p * p.log() + (1 - p) * (1 - p).log()))
        labels = rand(3, 2, 4, seed=5) > 0
        close(mixed.log_prob(labels), torch.where(labels, p, 1 - p).log().sum((1, 2)))
    close(mixed.aleatoric_entropy, 0.3 * entropies[0] + 0.7 * entropies[1])
    close(mixed.mutual_information, (mixed.entropy - mixed.aleatoric_entropy).clamp_min(0))


def test_information_about_a_binary_label_counts_the_parts_uncertainty_and_their_disagreement() -> None:
    """Expected entropy and probabilities over both parts by integration."""
    moments = [(-2.0, 0.5), (1.0, 3.0)]
    prediction = predict(Bernoulli(), scalars(*moments))
    assert isinstance(prediction, ClassificationPrediction)
    p = mixed_expectation(lambda z: 1 / (1 + math.exp(-z)), moments)
    expected = mixed_expectation(lambda z: float(stats.bernoulli.entropy(1 / (1 + math.exp(-z)))), moments)
    close(prediction.probs, p, 1e-7)
    close(prediction.aleatoric_entropy, expected, 1e-7)
    close(prediction.mutual_information, float(stats.bernoulli.entropy(p)) - expected, 1e-7)
    apart = predict(Bernoulli(), scalars((-20.0, 0.0), (20.0, 0.0)))
    assert isinstance(apart, ClassificationPrediction)
    close(apart.mutual_information, float(stats.bernoulli.entropy(0.3)), 1e-7)  # each part is certain


def test_joint_density_of_classes_is_a_probability_over_all_labelings() -> None:
    """Two examples, 2 x 3 classes: the mixture of both parts' joint Monte Carlo tables, which have seeds 0 and 1."""
    parts = tuple(gaussian(2, 1, 3, seed=seed, kind="joint") for seed in (0, 4))
    mixed = predict(Categorical(), LatentMixture(parts, WEIGHTS), link="mc", samples=500)
    table = torch.zeros(3, 3, dtype=F64)
    for k, part in enumerate(parts):
        p = next(iter(part.draws(500, k, joint=True)))[:, :, 0].softmax(-1)
        table += WEIGHTS[k] * torch.einsum("sa,sb->ab", p[:, 0], p[:, 1]) / 500
    close(table.sum(), 1.0)
    for a in range(3):
        for b in range(3):
            close(mixed.log_prob(torch.tensor([a, b])), table[a, b].log())


def test_counts_of_two_gaussians_are_the_naive_mixture() -> None:
    """Rates are log-normal within each part; the distribution function is summed up count by count."""
    moments = [(0.5, 0.2), (2.5, 0.05)]
    prediction = predict(Poisson(), scalars(*moments))
    assert isinstance(prediction, CountPrediction)
    mean = mixed_expectation(math.exp, moments)
    close(prediction.mean, mean, 1e-9)
    close(prediction.aleatoric_variance, mean, 1e-9)
    epistemic = mixed_expectation(lambda f: (math.exp(f) - mean) ** 2, moments)
    close(prediction.epistemic_variance, epistemic, 1e-9)
    close(prediction.variance, epistemic + mean, 1e-9)
    table = np.array(
        [mixed_expectation(lambda f, y=y: float(stats.poisson.pmf(y, math.exp(f))), moments) for y in range(60)]
    )
    for y in (0, 3, 12, 40):
        close(prediction.log_prob(torch.tensor([[y]])), math.log(table[y]), 1e-7)
    for level in (0.2, 0.8, 0.99):
        for end, tail in zip(prediction.interval(level), ((1 - level) / 2, (1 + level) / 2), strict=True):
            assert float(end) == np.searchsorted(np.cumsum(table), tail)


def test_count_intervals_reach_from_small_to_huge_rates() -> None:
    """e^-3, and e^60 counts, whose own spread is 1e-13 of them; no overflow where rates pass float64."""
    prediction = predict(Poisson(), scalars((-3.0, 0.0), (60.0, 0.0)))
    assert isinstance(prediction, CountPrediction)
    lower, upper = prediction.interval(0.5)
    assert float(lower) == 0.0
    assert float(upper) == pytest.approx(math.exp(60.0), rel=1e-9)
    wide = predict(Poisson(), scalars((800.0, 0.0), (900.0, 0.0)))
    assert isinstance(wide, CountPrediction)
    assert bool((wide.mean == math.inf).all())
    one = predict(
        Poisson(), LatentMixture((LatentGaussian(*torch.full((2, 1, 1, 1), 800.0, dtype=F64)),), torch.ones(1))
    )
    assert isinstance(one, CountPrediction)
    assert bool((one.epistemic_variance == math.inf).all())


def test_bisection_for_counts_ends_between_bounds_that_are_no_whole_numbers() -> None:
    """As quantiles beyond 2^50 counts are, being those of the rate."""
    low, high = torch.tensor([2.0**50 + 0.25], dtype=F64), torch.tensor([2.0**50 + 1.5], dtype=F64)
    assert float(quantile_between(0.5, torch.zeros_like, low, high)) == 2.0**50 + 2
    assert float(quantile_between(0.5, torch.ones_like, low, high)) == 2.0**50 + 1


def test_density_of_a_custom_likelihood_converges_to_that_of_the_mixture() -> None:
    """A Gaussian written by hand; 40,000 draws of each part, five standard errors."""
    parts = tuple(gaussian(3, 1, 2, seed=seed) for seed in (0, 4))
    y = rand(3, 2, seed=5)
    mixed = predict(CUSTOM, LatentMixture(parts, WEIGHTS), samples=40_000)
    exact = predict(Gaussian(1.0), LatentMixture(parts, WEIGHTS)).log_prob(y)
    variance = torch.zeros(3, dtype=F64)
    for k, part in enumerate(parts):
        f = next(iter(part.draws(40_000, k)))[:, :, 0]
        variance += WEIGHTS[k] ** 2 * distributions.Normal(f, 1.0).log_prob(y).sum(-1).exp().var(0) / 40_000
    assert bool(((mixed.log_prob(y).exp() - exact.exp()).abs() < 5 * variance.sqrt()).all())


def test_intervals_agree_with_a_root_finder_for_parts_of_every_kind() -> None:
    """One Gaussian part and one of five networks, element by element."""
    part, values = gaussian(3, 1, 2, kind="diagonal"), rand(5, 3, 1, 2, seed=7)
    prediction = predict(Gaussian(0.3), LatentMixture((part, LatentSamples(values)), WEIGHTS))
    assert isinstance(prediction, RegressionPrediction)
    for end, tail in zip(prediction.interval(0.7), (0.15, 0.85), strict=True):
        for b in range(3):
            for c in range(2):
                mean, sd = float(part.mean[b, 0, c]), math.sqrt(float(part.variance[b, 0, c]) + 0.09)
                networks = values[:, b, 0, c].numpy()
                root = optimize.brentq(
                    lambda y, mean=mean, sd=sd, networks=networks, tail=tail: (
                        0.3 * stats.norm.cdf(y, mean, sd) + 0.7 * stats.norm.cdf(y, networks, 0.3).mean() - tail
                    ),
                    -20, 20, xtol=1e-12,
                )  # fmt: skip
                assert float(end[b, c]) == pytest.approx(root, abs=1e-9)


# -- bad mixtures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[0.5, 0.6], [1.5, -0.5], [1.0], [[0.5, 0.5]], [float("nan"), 1.0], [0.0, 0.0]])
def test_weights_that_are_no_probabilities_are_refused(weights: list[float]) -> None:
    part = gaussian(2, 1, 2)
    with pytest.raises(errors.OptionError, match="sum is one"):
        LatentMixture((part, part), torch.tensor(weights))


def test_mixtures_of_nothing_or_of_different_outputs_are_refused() -> None:
    one = gaussian(2, 1, 2)
    others = [gaussian(3, 1, 2), gaussian(2, 2, 2), replace(one, raw_shape=(2, 1, 2)), gaussian(2, 1, 2, kind="joint")]
    with pytest.raises(errors.OptionError):
        LatentMixture((), torch.ones(0))
    for other in [*others, LatentSamples(torch.zeros(3, 2, 1, 2, dtype=F64), joint=True)]:
        with pytest.raises(errors.ModelError, match="fit together"):
            LatentMixture((one, other), WEIGHTS)


def test_options_that_no_part_can_take_are_refused() -> None:
    drawn = LatentSamples(torch.zeros(3, 2, 1, 2))
    exact = LatentGaussian(torch.zeros(2, 1, 2), torch.ones(2, 1, 2))
    with pytest.raises(errors.OptionError, match="sampled networks"):
        predict(Categorical(), LatentMixture((drawn, drawn), WEIGHTS), link="mc")
    with pytest.raises(errors.OptionError, match="drawn already"):
        predict(Categorical(), LatentMixture((drawn, drawn), WEIGHTS), samples=10)
    with pytest.raises(errors.OptionError, match="nothing is drawn"):
        predict(Gaussian(), LatentMixture((exact, drawn), WEIGHTS), samples=10)
    with pytest.raises(errors.OptionError, match="probit"):
        predict(Categorical(), LatentMixture((exact, drawn), WEIGHTS), link="softmax")


# -- joining ------------------------------------------------------------------------------------------------


def cut(latent: Latent, start: int, end: int) -> Latent:
    """The latent of some of the examples."""
    raw_shape = (end - start, *latent.raw_shape[1:])
    if isinstance(latent, LatentMixture):
        parts = tuple(cut(part, start, end) for part in latent.parts)
        return LatentMixture(parts, latent.weights)  # type: ignore[arg-type]
    if isinstance(latent, LatentSamples):
        return LatentSamples(latent.values[:, start:end], raw_shape=raw_shape)
    covariance = None if latent.covariance is None else latent.covariance[start:end]
    return LatentGaussian(latent.mean[start:end], latent.variance[start:end], covariance, raw_shape=raw_shape)


def assert_equal(one: Latent, other: Latent) -> None:
    assert type(one) is type(other)
    assert one.raw_shape == other.raw_shape
    if isinstance(one, LatentMixture) and isinstance(other, LatentMixture):
        assert torch.equal(one.weights, other.weights)
        for a, b in zip(one.parts, other.parts, strict=True):
            assert_equal(a, b)
    elif isinstance(one, LatentSamples) and isinstance(other, LatentSamples):
        assert torch.equal(one.values, other.values)
    else:
        assert torch.equal(one.mean, other.mean)
        assert torch.equal(one.variance, other.variance)
        assert (one.blocks is None) == (other.blocks is None)
        assert one.blocks is None or (other.blocks is not None and torch.equal(one.blocks, other.blocks))


@pytest.mark.parametrize("raw_shape", [(5,), (5, 4), (5, 6, 2), (5, 3, 2, 2), (5, 2, 2, 3)])
@pytest.mark.parametrize("kind", ["full", "diagonal", "samples", "mixture"])
def test_joined_batches_are_the_latent_of_all_examples(kind: str, raw_shape: tuple[int, ...]) -> None:
    outputs = 1 if len(raw_shape) == 1 else 4 if len(raw_shape) == 2 else 2
    positions = math.prod(raw_shape) // 5 // outputs
    samples = LatentSamples(rand(3, 5, positions, outputs), raw_shape=raw_shape)
    full = replace(gaussian(5, positions, outputs), raw_shape=raw_shape)
    whole: Latent = {
        "full": full,
        "diagonal": replace(full, covariance=None),
        "samples": samples,
        "mixture": LatentMixture((full, samples), WEIGHTS),
    }[kind]
    for cuts in ([0, 5], [0, 2, 5], [0, 1, 1, 4, 5]):
        batches = [cut(whole, start, end) for start, end in pairwise(cuts)]
        assert_equal(join_latents(batches), whole)


@pytest.mark.parametrize("likelihood", LIKELIHOODS[:-1], ids=lambda it: it.name)
def test_predictions_of_joined_batches_are_those_of_the_batches(likelihood: Likelihood) -> None:
    whole = LatentMixture(tuple(gaussian(5, 2, 4, seed=seed) for seed in (0, 4)), WEIGHTS)
    batches = [cut(whole, 0, 2), cut(whole, 2, 5)]
    y = targets(likelihood, 5, 2, 4)
    joined = everything(predict(likelihood, join_latents(batches)), y)
    first, second = (
        everything(predict(likelihood, it), part) for it, part in zip(batches, (y[:2], y[2:]), strict=True)
    )
    drawn = {"aleatoric_entropy", "mutual_information"} if likelihood.name == "categorical" else set()
    for name in joined.keys() - drawn:
        close(joined[name], torch.cat([first[name], second[name]]))


def test_covariances_are_kept_only_when_all_batches_have_them() -> None:
    joined = join_latents([gaussian(2, 1, 3), gaussian(2, 1, 3, kind="diagonal")])
    assert isinstance(joined, LatentGaussian)
    assert joined.covariance is None
    assert joined.raw_shape == (4, 3)


def test_latents_that_cannot_be_joined_are_refused() -> None:
    one, drawn = gaussian(2, 1, 3), LatentSamples(rand(4, 2, 1, 3))
    with pytest.raises(errors.DataError, match="no latents"):
        join_latents([])
    for joint in (gaussian(2, 1, 3, kind="joint"), replace(drawn, joint=True)):
        for mixture in (joint, LatentMixture((joint,), torch.ones(1))):
            with pytest.raises(errors.ModelError, match="Joint latents"):
                join_latents([mixture, mixture])
    for other in (drawn, gaussian(2, 1, 2), replace(one, raw_shape=(2, 1, 3)), LatentMixture((one,), torch.ones(1))):
        with pytest.raises(errors.ModelError, match="kinds or shapes"):
            join_latents([one, other])
    with pytest.raises(errors.ModelError, match="numbers of sampled networks"):
        join_latents([drawn, LatentSamples(rand(3, 2, 1, 3))])
    with pytest.raises(errors.ModelError, match="weights of the mixtures"):
        join_latents([LatentMixture((one, one), WEIGHTS), LatentMixture((one, one), WEIGHTS.flip(0))])
    with pytest.raises(errors.ModelError, match="kinds or shapes"):
        join_latents([LatentMixture((one, drawn), WEIGHTS), LatentMixture((drawn, one), WEIGHTS)])
