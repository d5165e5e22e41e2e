"""Where there is an exact answer, the Laplace posterior is that; where there is none in closed form, it is near it.

Exact: linear Gaussian models, Kronecker factors of deep linear networks, gradients of the evidence, the distribution of
samples. Near, with a bound on the distance: logistic regression against numerical integration.

References are written out here with dense float64 matrices. Errors are relative, in the largest entry.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import lapis
import reference
from cases import CASES
from lapis.posteriors.laplace.tuning.own_noise import gamma_of_outputs

F64 = torch.float64
STRUCTURES = ("dense", "diagonal", "kronecker", "ekfac")
every_structure = pytest.mark.parametrize("structure", STRUCTURES)


def error(found: Tensor, expected: Tensor) -> float:
    """Largest deviation relative to the largest expected entry."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def set_weights(model: nn.Module, flat: Tensor) -> None:
    nn.utils.vector_to_parameters(flat, model.parameters())


# ----------------------------------------------------------------------------------------------------------
# Linear regression: y = W x + b + noise, theta = (W row by row, b)


class LinearRegression:
    """Several features and outputs, a prior mean, a precision for every weight; everything in closed form.

    A = sum_n J_n^T J_n / sigma^2 + Lambda, m = A^-1 (sum_n J_n^T y_n / sigma^2 + Lambda m0),
    p(D) = N(y; J m0, J Lambda^-1 J^T + sigma^2), with sigma a vector over outputs.
    """

    def __init__(self, outputs: int, precision: Tensor | float, noise: float | Tensor, x: Tensor | None = None) -> None:
        self.x = draw(0, 25, 4) if x is None else x
        examples, features = self.x.shape
        self.outputs, self.noise = outputs, torch.as_tensor(noise, dtype=F64).expand(outputs)
        size = outputs * (features + 1)
        self.prior_mean = draw(1, size)
        self.prior = torch.as_tensor(precision, dtype=F64).expand(size)
        true = draw(2, size)
        self.y = self.outputs_at(self.x, true) + self.noise * draw(3, examples, outputs)
        rows = self.jacobian(self.x)
        weight = self.noise.repeat(examples) ** -2
        self.precision = rows.T @ (weight[:, None] * rows) + torch.diag(self.prior)
        target = rows.T @ (weight * self.y.flatten()) + self.prior * self.prior_mean
        self.mean = torch.linalg.solve(self.precision, target)
        self.covariance = torch.linalg.inv(self.precision)
        self.model = nn.Linear(features, outputs).to(F64)
        set_weights(self.model, self.mean)

    def jacobian(self, x: Tensor) -> Tensor:
        """(N outputs, P): each output reads its own row of W and its own bias."""
        each = torch.eye(self.outputs, dtype=F64)
        return torch.cat([torch.cat([torch.kron(each, row[None]), each], 1) for row in x])

    def outputs_at(self, x: Tensor, weights: Tensor) -> Tensor:
        return (self.jacobian(x) @ weights).reshape(-1, self.outputs)

    def evidence(self) -> Tensor:
        rows = self.jacobian(self.x)
        covariance = rows @ torch.diag(1 / self.prior) @ rows.T + torch.diag(self.noise.repeat(len(self.x)) ** 2)
        return MultivariateNormal(rows @ self.prior_mean, covariance).log_prob(self.y.flatten())

    def predictive(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (N, C) and joint covariance of the outputs (N C, N C), without noise."""
        rows = self.jacobian(x)
        return self.outputs_at(x, self.mean), rows @ self.covariance @ rows.T


GROUPS: dict[str, tuple[Any, Callable[[int, int], Tensor]]] = {
    "one": (0.7, lambda outputs, features: torch.tensor(0.7, dtype=F64)),
    "parameter": (
        {"weight": 0.7, "bias": 2.3},
        lambda outputs, features: torch.tensor([0.7] * outputs * features + [2.3] * outputs, dtype=F64),
    ),
    "weight": (None, lambda outputs, features: 0.3 + draw(9, outputs * (features + 1)).abs()),
}
NOISES = {"one noise": 0.6, "a noise an output": torch.tensor([0.4, 0.6, 1.1], dtype=F64)}


def linear_case(groups: str, outputs: int, noise: float | Tensor) -> tuple[LinearRegression, lapis.Prior]:
    given, vector = GROUPS[groups]
    problem = LinearRegression(outputs, vector(outputs, 4), noise)
    precision = vector(outputs, 4) if given is None else given
    return problem, lapis.Prior(precision, groups=groups, mean=problem.prior_mean)


exact_cases = pytest.mark.parametrize(
    ("structure", "groups", "outputs", "noise"),
    [
        pytest.param(structure, groups, outputs, noise, id=f"{structure}-{groups}-{outputs}-{name}")
        for structure, groups in itertools.product(("dense", "kronecker", "ekfac"), GROUPS)
        for outputs, name in ((1, "one noise"), (3, "one noise"), (3, "a noise an output"))
        if structure == "dense" or groups != "weight"
        for noise in [NOISES[name]]
    ],
)


@exact_cases
def test_posterior_of_linear_model_is_exact(structure: str, groups: str, outputs: int, noise: float | Tensor) -> None:
    """One linear layer with Gaussian noise has curvature diag(sigma^-2) (x) sum a a^T: Kronecker loses nothing."""
    problem, prior = linear_case(groups, outputs, noise)
    data = (problem.x, problem.y)
    posterior = lapis.laplace(problem.model, data, lapis.Gaussian(noise), structure=structure, prior=prior)
    assert error(posterior.mean, problem.mean) < 1e-10
    assert error(posterior.precision(), problem.precision) < 1e-10
    assert error(posterior.marginal_variance(), problem.covariance.diagonal()) < 1e-10
    rows = problem.jacobian(problem.x)
    expected = (rows @ problem.covariance @ rows.T).reshape(25, outputs, 25, outputs)
    assert error(posterior.functional_covariance(problem.x), expected) < 1e-10


@exact_cases
def test_evidence_of_linear_model_is_exact(structure: str, groups: str, outputs: int, noise: float | Tensor) -> None:
    problem, prior = linear_case(groups, outputs, noise)
    data = (problem.x, problem.y)
    posterior = lapis.laplace(problem.model, data, lapis.Gaussian(noise), structure=structure, prior=prior)
    assert error(posterior.log_evidence(), problem.evidence()) < 1e-10
    # not exact away from the mode, so the agreement above is no accident
    set_weights(problem.model, problem.mean + 0.1)
    elsewhere = lapis.laplace(problem.model, data, lapis.Gaussian(noise), structure=structure, prior=prior)
    assert error(elsewhere.log_evidence(), problem.evidence()) > 1e-3


@exact_cases
def test_predictive_of_linear_model_is_exact(structure: str, groups: str, outputs: int, noise: float | Tensor) -> None:
    problem, prior = linear_case(groups, outputs, noise)
    data = (problem.x, problem.y)
    posterior = lapis.laplace(problem.model, data, lapis.Gaussian(noise), structure=structure, prior=prior)
    x, y = draw(5, 6, 4), draw(6, 6, outputs)
    mean, joint = problem.predictive(x)
    joint = joint + torch.diag(problem.noise.repeat(6) ** 2)
    each = torch.stack([joint.reshape(6, outputs, 6, outputs)[n, :, n] for n in range(6)])
    spread = joint.diagonal().reshape(6, outputs)

    prediction = posterior.predict(x)
    assert error(prediction.mean, mean) < 1e-10
    assert error(prediction.epistemic_variance, spread - problem.noise**2) < 1e-10
    assert error(prediction.aleatoric_variance, (problem.noise**2).expand(6, outputs)) < 1e-10
    assert error(prediction.std, spread.sqrt()) < 1e-10
    assert error(prediction.f_covariance, each - torch.diag(problem.noise**2)) < 1e-10
    assert error(prediction.log_prob(y), MultivariateNormal(mean, each).log_prob(y)) < 1e-10
    lower, upper = prediction.interval(0.9)
    normal = torch.distributions.Normal(mean, spread.sqrt())
    assert error(normal.cdf(lower), torch.full_like(mean, 0.05)) < 1e-9
    assert error(normal.cdf(upper), torch.full_like(mean, 0.95)) < 1e-9
    together = posterior.predict(x, joint=True).log_prob(y)
    assert error(together, MultivariateNormal(mean.flatten(), joint).log_prob(y.flatten())) < 1e-10


def test_diagonal_posterior_of_orthogonal_features_is_exact() -> None:
    """Features orthogonal to each other and to the constant leave nothing off the diagonal."""
    basis = torch.linalg.qr(torch.cat([torch.ones(25, 1, dtype=F64), draw(0, 25, 4)], 1)).Q
    problem = LinearRegression(3, 0.7, 0.6, x=5 * basis[:, 1:])
    prior = lapis.Prior(0.7, mean=problem.prior_mean)
    data = (problem.x, problem.y)
    posterior = lapis.laplace(problem.model, data, lapis.Gaussian(0.6), structure="diagonal", prior=prior)
    assert error(posterior.precision(), problem.precision) < 1e-10
    assert error(posterior.log_evidence(), problem.evidence()) < 1e-10


def test_evidence_adds_up_over_observations() -> None:
    """log p(y_1 .. y_N) = sum_n log p(y_n | y_1 .. y_n-1): the evidence is the product of one-step predictions."""
    problem = LinearRegression(2, 0.7, 0.6)
    prior = lapis.Prior(0.7, mean=problem.prior_mean)
    steps = []
    for n in range(1, 6):
        part = LinearRegression.__new__(LinearRegression)
        part.__dict__ = {**problem.__dict__, "x": problem.x[:n], "y": problem.y[:n]}
        rows = part.jacobian(part.x)
        part.precision = rows.T @ rows / 0.36 + torch.diag(part.prior)
        target = rows.T @ part.y.flatten() / 0.36 + part.prior * part.prior_mean
        set_weights(problem.model, torch.linalg.solve(part.precision, target))
        posterior = lapis.laplace(problem.model, (part.x, part.y), lapis.Gaussian(0.6), structure="dense", prior=prior)
        steps.append((posterior.log_evidence(), posterior.predict(problem.x[n : n + 1]).log_prob(problem.y[n : n + 1])))
    for (before, step), (after, _) in itertools.pairwise(steps):
        assert error(after, before + step[0]) < 1e-10


# ----------------------------------------------------------------------------------------------------------
# The evidence as a function of prior and noise


def small_network(outputs: int = 2) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).to(F64)
    set_weights(model, draw(11, sum(p.numel() for p in model.parameters())))
    return model


X, Y, LABELS = draw(12, 20, 3), draw(13, 20, 2), torch.arange(20) % 2
GROUP_SIZES = {"one": [26], "layer": [16, 10], "parameter": [12, 4, 8, 2]}
START = torch.tensor([0.5, 1.7, 0.9, 3.1], dtype=F64)
MEAN = 0.2
every_grouping = pytest.mark.parametrize("groups", GROUP_SIZES)


def network_posterior(structure: str, groups: str = "one", **options: Any) -> Any:
    prior = lapis.Prior(START[: len(GROUP_SIZES[groups])].clone(), groups=groups, mean=MEAN)
    arguments = {"likelihood": lapis.Gaussian(0.6), "prior": prior, **options}
    return lapis.laplace(small_network(), (X, Y), structure=structure, **arguments)


def blocks_of(groups: str) -> list[slice]:
    edges = [0, *itertools.accumulate(GROUP_SIZES[groups])]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@every_structure
@every_grouping
def test_gradient_of_evidence_in_prior_is_the_analytic_one(structure: str, groups: str) -> None:
    """d log Z / d alpha_g = 1/2 (n_g / alpha_g - |t - m|_g^2 - tr_g A^-1); and refitting with changed priors agrees."""
    alpha = START[: len(GROUP_SIZES[groups])].clone().requires_grad_()
    prior = lapis.Prior(alpha, groups=groups, mean=MEAN)
    posterior = network_posterior(structure, groups, prior=prior)
    (found,) = torch.autograd.grad(posterior.log_evidence(), alpha)

    variance = torch.linalg.inv(posterior.precision().detach()).diagonal()
    squares = (posterior.mean - MEAN).square()
    analytic = torch.stack(
        [0.5 * (n / a - squares[s].sum() - variance[s].sum())
         for n, a, s in zip(GROUP_SIZES[groups], alpha.detach(), blocks_of(groups), strict=True)]
    )  # fmt: skip
    assert error(found, analytic) < 1e-10

    step = 1e-5
    for g in range(len(alpha)):
        values = []
        for sign in (1, -1):
            moved = alpha.detach().clone()
            moved[g] += sign * step
            refit = network_posterior(structure, groups, prior=lapis.Prior(moved, groups=groups, mean=MEAN))
            values.append(refit.log_evidence())
        assert abs(float((values[0] - values[1]) / (2 * step) - found[g])) < 1e-6 * float(found.abs().max())


@every_structure
@every_grouping
def test_gradient_of_evidence_in_noise_is_the_analytic_one(structure: str, groups: str) -> None:
    """d log Z / d sigma = SSE / sigma^3 - N C / sigma + tr A^-1 (A - Lambda) / sigma; three ways to reach it."""
    sigma = torch.tensor(0.6, dtype=F64, requires_grad=True)
    fitted = network_posterior(structure, groups, likelihood=lapis.Gaussian(sigma))
    (found,) = torch.autograd.grad(fitted.log_evidence(), sigma)
    (later,) = torch.autograd.grad(network_posterior(structure, groups).with_noise(sigma).log_evidence(), sigma)

    precision = fitted.precision().detach()
    prior = torch.cat([a.expand(n) for a, n in zip(START, GROUP_SIZES[groups], strict=False)])
    gamma = (torch.linalg.inv(precision) @ (precision - torch.diag(prior))).trace()
    errors = (Y - small_network()(X).detach()).square().sum()
    analytic = errors / 0.6**3 - Y.numel() / 0.6 + gamma / 0.6
    assert error(found, analytic) < 1e-10
    assert error(later, analytic) < 1e-10

    step = 1e-5
    values = [network_posterior(structure, groups, likelihood=lapis.Gaussian(0.6 + s)) for s in (step, -step)]
    difference = (values[0].log_evidence() - values[1].log_evidence()) / (2 * step)
    assert error(difference, analytic) < 1e-6


@pytest.mark.parametrize(
    "name",
    ["mlp_gaussian", "conv2d_grouped", "conv_transpose2d_grouped", "embedding_padding", "self_attention",
     "attention_separate", "vision_transformer", "tied_linears", "batch_norm2d"],
)  # fmt: skip
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_kronecker_posterior_with_a_prior_for_each_parameter_is_factors_plus_prior(name: str, bias: str) -> None:
    """A bias column with its own prior precision: kron(G, A) + diag(prior), its determinant, inverse and variances."""
    case = CASES[name]
    model, batch = case.make_model(), case.make_batch()
    names = list(reference.parameters(model))
    alpha = {name: 0.3 + 0.4 * i for i, name in enumerate(names)}
    prior = lapis.Prior(alpha, groups="parameter")
    options = {"structure": "kronecker", "bias": bias, "prior": prior}
    posterior = lapis.laplace(model, [batch], case.likelihood.build(), **options)

    curvature = reference.case_curvature(name, "kronecker", bias=bias)
    diagonal = torch.cat(
        [torch.full((p.numel(),), alpha[n], dtype=F64) for n, p in reference.parameters(model).items()]
    )
    expected = curvature + torch.diag(diagonal)
    assert error(posterior.precision(), expected) < 1e-9
    covariance = torch.linalg.inv(expected)
    assert error(posterior.marginal_variance(), covariance.diagonal()) < 1e-9
    squares = (diagonal * posterior.mean.square()).sum()
    logdets = diagonal.log().sum() - torch.linalg.slogdet(expected).logabsdet
    assert error(posterior.log_evidence(), posterior.log_likelihood() + 0.5 * (logdets - squares)) < 1e-9
    rows = torch.stack(reference.case_jacobians(name)).flatten(0, 1)
    joint = posterior.functional_covariance(batch[0])
    assert error(joint.reshape(len(rows), len(rows)), rows @ covariance @ rows.T) < 1e-8


# ----------------------------------------------------------------------------------------------------------
# Effective parameters and tuning


@pytest.mark.parametrize(
    ("structure", "groups"),
    [
        (structure, groups)
        for structure, groups in itertools.product(STRUCTURES, [*GROUP_SIZES, "weight"])
        if groups != "weight" or structure in ("dense", "diagonal")
    ],
)
def test_effective_parameters_are_the_trace_of_their_definition(structure: str, groups: str) -> None:
    """gamma = tr A^-1 (A - Lambda), over all weights and over each group."""
    if groups == "weight":
        vector, slices = 0.3 + draw(14, 26).abs(), [slice(i, i + 1) for i in range(26)]
        posterior = network_posterior(structure, prior=lapis.Prior(vector, groups="weight", mean=MEAN))
    else:
        posterior, slices = network_posterior(structure, groups), blocks_of(groups)
        vector = torch.cat([a.expand(n) for a, n in zip(START, GROUP_SIZES[groups], strict=False)])
    precision = posterior.precision()
    kept = (torch.linalg.inv(precision) @ (precision - torch.diag(vector))).diagonal()
    found = posterior.effective_parameters(per_group=True)
    assert error(found, torch.stack([kept[s].sum() for s in slices])) < 1e-10
    assert error(posterior.effective_parameters(), kept.sum()) < 1e-10
    assert error(found.sum(), posterior.effective_parameters()) < 1e-12
    assert 0 < float(posterior.effective_parameters()) < 26


def slopes(posterior: Any, groups: str) -> Tensor:
    """Gradient of the evidence in the logarithms of the tuned posterior's precisions and of a factor of its noises."""
    logs = torch.cat([posterior.weight_prior.precision.detach().log(), torch.zeros(1, dtype=F64)])
    logs.requires_grad_()
    prior = lapis.Prior(logs[:-1].exp(), groups=groups, mean=MEAN)
    scaled = posterior.likelihood.scaled_noise(logs[-1].exp())
    evidence = replace(posterior.with_prior(prior), likelihood=scaled).log_evidence()
    return torch.autograd.grad(evidence, logs)[0]


@every_structure
@every_grouping
def test_tune_ends_where_the_gradient_is_zero_and_mackay_s_equations_hold(structure: str, groups: str) -> None:
    """alpha_g |t - m|_g^2 = gamma_g, sigma_c^2 (N - gamma_c) = SSE_c; and no step away from there does better."""
    tuned = network_posterior(structure, groups).tune()
    assert float(slopes(tuned, groups).abs().max()) < 5e-5
    alpha, sigma = tuned.weight_prior.precision, tuned.likelihood.noise
    squares = torch.stack([(tuned.mean - MEAN)[s].square().sum() for s in blocks_of(groups)])
    assert error(alpha * squares, tuned.effective_parameters(per_group=True)) < 1e-5
    errors = (Y - small_network()(X).detach()).square().sum(0)
    assert error(sigma**2 * (len(Y) - gamma_of_outputs(tuned)), errors) < 1e-5
    best = float(tuned.log_evidence())
    assert best > float(network_posterior(structure, groups).log_evidence())
    for factor in (0.8, 1.25):
        for g in range(len(alpha)):
            moved = alpha.clone()
            moved[g] *= factor
            other = tuned.with_prior(lapis.Prior(moved, groups=groups, mean=MEAN))
            assert float(other.log_evidence()) < best
        assert float(tuned.with_noise(sigma * factor).log_evidence()) < best


@every_structure
def test_tune_beats_a_grid(structure: str) -> None:
    posterior = network_posterior(structure)
    best = float(posterior.tune().log_evidence())
    grid = [
        float(posterior.with_prior(lapis.Prior(alpha, mean=MEAN)).with_noise(sigma).log_evidence())
        for alpha in torch.logspace(-3, 3, 25).tolist()
        for sigma in torch.logspace(-1, 1.5, 25).tolist()
    ]
    assert best >= max(grid)
    assert best - max(grid) < 1.0


@every_structure
def test_tune_of_a_classifier_touches_the_prior_alone(structure: str) -> None:
    prior = lapis.Prior(1.0, groups="layer")
    posterior = lapis.laplace(small_network(), (X, LABELS), "categorical", structure=structure, prior=prior)
    tuned = posterior.tune()
    squares = torch.stack([tuned.mean[s].square().sum() for s in blocks_of("layer")])
    gamma = tuned.effective_parameters(per_group=True)
    assert error(tuned.weight_prior.precision * squares, gamma) < 1e-5
    assert float(tuned.log_evidence()) > float(posterior.log_evidence())


@every_structure
def test_tune_leaves_the_noise_alone_when_told(structure: str) -> None:
    tuned = network_posterior(structure).tune(noise=False)
    assert float(tuned.likelihood.noise) == 0.6
    assert abs(float(slopes(tuned, "one")[0])) < 1e-4
    assert abs(float(slopes(tuned, "one")[1])) > 1e-2


def test_tune_reaches_the_same_optimum_from_afar() -> None:
    """From prior precisions 1e-3 to 1e3 and noises 0.1 to 10."""
    posterior = network_posterior("dense")
    reached = [
        float(posterior.with_prior(lapis.Prior(alpha, mean=MEAN)).with_noise(sigma).tune().log_evidence())
        for alpha in (1e-3, 1.0, 1e3)
        for sigma in (0.1, 10.0)
    ]
    assert max(reached) - min(reached) < 1e-6


# ----------------------------------------------------------------------------------------------------------
# Deep linear networks


def deep_linear(pooled: bool) -> nn.Module:
    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    layers = [nn.Linear(3, 4), nn.Linear(4, 3), *([Pooled()] if pooled else []), nn.Linear(3, 2)]
    return nn.Sequential(*layers).to(F64)


def layer_errors(model: nn.Module, x: Tensor, sharing: str, likelihood: Any = None) -> list[float]:
    """Kronecker against dense curvature, layer by layer (weight and bias together)."""
    likelihood = likelihood or lapis.Gaussian(0.6)
    data = (x, draw(22, len(x), 2))
    dense = lapis.laplace(model, data, likelihood, structure="dense", prior=1.0).precision()
    kronecker = lapis.laplace(model, data, likelihood, structure="kronecker", prior=1.0, sharing=sharing).precision()
    unit = torch.eye(len(dense), dtype=F64)
    found, start = [], 0
    for layer in (module for module in model if isinstance(module, nn.Linear)):
        stop = start + layer.weight.numel() + layer.bias.numel()
        s = slice(start, stop)
        found.append(error((kronecker - unit)[s, s], (dense - unit)[s, s]))
        start = stop
    return found


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("noise", [0.6, torch.tensor([0.3, 1.4], dtype=F64)], ids=["one noise", "a noise an output"])
def test_kronecker_is_exact_on_deep_linear_networks(sharing: str, noise: Any) -> None:
    """Gradients do not depend on the example there, so that a mean of products is a product of means."""
    assert max(layer_errors(deep_linear(False), draw(21, 10, 3), sharing, lapis.Gaussian(noise))) < 1e-10


def test_reduced_kronecker_is_exact_on_deep_linear_networks_with_mean_pooling() -> None:
    errors = layer_errors(deep_linear(True), draw(21, 10, 5, 3), "reduce")
    assert max(errors) < 1e-10
    # expanding the positions is another approximation where they share weights, and a good one nowhere here
    assert min(layer_errors(deep_linear(True), draw(21, 10, 5, 3), "expand")[:2]) > 1e-2


def test_kronecker_is_an_approximation_elsewhere() -> None:
    """The exactness above is a property of linear networks, not of the comparison."""
    assert layer_errors(small_network(), X[:10], "expand")[0] > 1e-2


# ----------------------------------------------------------------------------------------------------------
# Samples and densities

FALSE_ALARM = 1e-6
"""Probability that right draws fail a test below; the seeds are fixed, so a failure means a change."""


def oddities(draws: Tensor, mean: Tensor, precision: Tensor) -> list[str]:
    """What is wrong with draws (n, P) if they come from N(mean, precision^-1), at a false-alarm rate of FALSE_ALARM.

    Whitened, z = L^T (theta - mean) is standard normal. Under that hypothesis each of these is exactly chi-square, and
    their two-sided tests share the rate (Bonferroni): n |mean z|^2 with P degrees of freedom, sum |z|^2 with n P, and,
    with n each, sum_n z_i^2 for every i and sum_n (z_i +- z_j)^2 / 2 for every pair, which see wrong correlations.
    """
    n, size = draws.shape
    white = (draws - mean) @ torch.linalg.cholesky(precision)
    moment = white.T @ white
    variances = moment.diagonal()
    i, j = torch.triu_indices(size, size, 1)
    middle, off = (variances[i] + variances[j]) / 2, moment[i, j]
    statistics = {
        "mean": (n * white.mean(0).square().sum()[None], size),
        "total": (white.square().sum()[None], n * size),
        "variance": (variances, n),
        "correlation": (torch.cat([middle + off, middle - off]), n),
    }
    rate = FALSE_ALARM / sum(len(values) for values, _ in statistics.values())
    found = []
    for name, (values, freedom) in statistics.items():
        low, high = chi2.ppf(rate / 2, freedom), chi2.isf(rate / 2, freedom)
        found += [name] * int(((values < low) | (values > high)).sum())
    return found


SAMPLED = {
    "dense": {"structure": "dense"},
    "diagonal": {"structure": "diagonal"},
    "kronecker": {"structure": "kronecker"},
    "kronecker, bias apart": {"structure": "kronecker", "bias": "separate"},
    "dense, prior a parameter": {"structure": "dense", "groups": "parameter"},
    "kronecker, prior a parameter": {"structure": "kronecker", "groups": "parameter"},
    "kronecker, cold": {"structure": "kronecker", "temperature": 0.2},
    "ekfac": {"structure": "ekfac"},
    "ekfac, bias apart": {"structure": "ekfac", "bias": "separate", "groups": "parameter"},
    "ekfac, prior a parameter": {"structure": "ekfac", "groups": "parameter"},
}
every_sampler = pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)


@every_sampler
def test_samples_have_the_posterior_s_mean_and_covariance(options: dict[str, Any]) -> None:
    posterior = network_posterior(**options)
    draws = posterior.sample(20_000, generator=torch.Generator().manual_seed(31))
    assert draws.shape == (20_000, 26)
    assert oddities(draws, posterior.mean, posterior.precision()) == []


@pytest.mark.parametrize("name", ["conv2d_grouped", "embedding_padding", "self_attention", "batch_norm2d"])
@every_structure
def test_samples_of_other_layers_have_the_posterior_s_covariance(name: str, structure: str) -> None:
    case = CASES[name]
    posterior = lapis.laplace(case.make_model(), [case.make_batch()], case.likelihood.build(), structure=structure)
    draws = posterior.sample(5_000, generator=torch.Generator().manual_seed(32))
    expected = reference.case_curvature(name, structure) + torch.eye(posterior.n_weights, dtype=F64)
    assert oddities(draws, posterior.mean, expected) == []


def test_the_chi_square_tests_see_ten_percent() -> None:
    """Their power: a variance 10 % off, in all directions or one; a correlation of 0.1; a mean off by a tenth of a
    standard deviation; marginal variances that are right, without their correlations.
    """
    posterior = network_posterior("dense")
    draws = posterior.sample(20_000, generator=torch.Generator().manual_seed(31))
    mean, precision = posterior.mean, posterior.precision()
    root = torch.linalg.cholesky(precision)
    white = (draws - mean) @ root

    def alarms(changed: Tensor) -> list[str]:
        return oddities(mean + torch.linalg.solve_triangular(root, changed, upper=False, left=False), mean, precision)

    assert alarms(white) == []
    assert "total" in alarms(white * 1.1**0.5)
    one = white.clone()
    one[:, 7] *= 1.1**0.5
    assert alarms(one).count("variance") == 1
    pair = white.clone()
    pair[:, 3] = 0.1 * white[:, 9] + (1 - 0.1**2) ** 0.5 * white[:, 3]
    assert "correlation" in alarms(pair)
    assert "mean" in alarms(white + 0.1)
    independent = draw(33, 20_000, 26) * posterior.marginal_variance().sqrt()
    assert "correlation" in oddities(mean + independent, mean, precision)


@every_sampler
def test_log_prob_is_that_of_the_multivariate_normal(options: dict[str, Any]) -> None:
    posterior = network_posterior(**options)
    normal = MultivariateNormal(posterior.mean, precision_matrix=posterior.precision())
    theta = posterior.mean + 0.3 * draw(34, 5, 26)
    assert error(posterior.log_prob(theta), normal.log_prob(theta)) < 1e-10
    assert posterior.log_prob(theta[0]).shape == ()
    assert error(posterior.log_prob(theta[0]), normal.log_prob(theta[0])) < 1e-10


def test_samples_follow_the_generator() -> None:
    posterior = network_posterior("kronecker")

    def once(seed: int) -> Tensor:
        return posterior.sample(3, generator=torch.Generator().manual_seed(seed))

    state = torch.get_rng_state()
    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))
    assert torch.equal(posterior.sample(3), posterior.sample(3))
    assert torch.equal(torch.get_rng_state(), state)


# ----------------------------------------------------------------------------------------------------------
# Logistic regression against numerical integration


@pytest.fixture(scope="module")
def experiment() -> ModuleType:
    """experiments/logistic_regression.py, which also draws docs/figures/logistic.png."""
    path = Path(__file__).parents[1] / "experiments" / "logistic_regression.py"
    spec = importlib.util.spec_from_file_location("logistic_regression", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_logistic_regression_is_near_the_exact_predictive(experiment: ModuleType) -> None:
    """Two inputs, three weights. Probabilities within 0.03 on a square three times as wide as the data; weights without
    error bars are off by more than 0.1 there. The log evidence is within 0.06 nats."""
    task, x = experiment.problem(), experiment.square(points=13)
    exact, evidence = experiment.integrate(task, x)
    finer, finer_evidence = experiment.integrate(task, x[::5], step=0.3)
    assert float((finer - exact[::5]).abs().max()) < 1e-7
    assert abs(finer_evidence - evidence) < 1e-7

    posterior, found = experiment.predictions(task, x)
    errors = {name: float((probabilities - exact).abs().max()) for name, probabilities in found.items()}
    assert all(errors[name] < bound for name, bound in experiment.BOUNDS.items()), errors
    assert errors["plug-in"] > 0.1
    assert abs(float(posterior.log_evidence()) - evidence) < experiment.EVIDENCE_BOUND
    assert torch.equal(found["probit"] > 0.5, found["plug-in"] > 0.5)


def test_links_are_near_the_integral_over_the_gaussian(experiment: ModuleType) -> None:
    """E[sigmoid(z)], z ~ N(f, v), is one-dimensional: Monte Carlo within 5 standard errors, probit within 0.02."""
    task, x = experiment.problem(), experiment.square(points=13)
    posterior, found = experiment.predictions(task, x)
    mean = task.model(x).detach().flatten()
    rows = torch.cat([x, torch.ones(len(x), 1, dtype=F64)], 1)
    p = torch.sigmoid(task.model(task.x)).detach().flatten()
    design = torch.cat([task.x, torch.ones(len(task.x), 1, dtype=F64)], 1)
    precision = design.T @ ((p * (1 - p))[:, None] * design) + experiment.PRIOR * torch.eye(3, dtype=F64)
    variance = (rows @ torch.linalg.inv(precision) * rows).sum(1)
    assert error(posterior.functional_variance(x).flatten(), variance) < 1e-10

    nodes = torch.linspace(-9, 9, 2001, dtype=F64)
    density = torch.exp(-0.5 * nodes**2) / math.sqrt(2 * math.pi) * (nodes[1] - nodes[0])
    integral = torch.sigmoid(mean[:, None] + variance.sqrt()[:, None] * nodes) @ density
    second = torch.sigmoid(mean[:, None] + variance.sqrt()[:, None] * nodes).square() @ density
    deviation = (second - integral**2).clamp_min(1e-12).sqrt() / math.sqrt(experiment.SAMPLES)
    assert float(((found["mc"] - integral).abs() / deviation).max()) < 5.0
    assert float((found["probit"] - integral).abs().max()) < 0.02


def test_the_figure_is_drawn(experiment: ModuleType, tmp_path: Path) -> None:
    task, x = experiment.problem(), experiment.square(points=5)
    exact = torch.sigmoid(task.model(x)).detach().flatten()
    experiment.figure(task, exact, exact + 0.01, 5, tmp_path / "deep" / "logistic.png")
    assert (tmp_path / "deep" / "logistic.png").read_bytes()[:4] == b"\x89PNG"
