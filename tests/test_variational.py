"""Variational inference: exact where the optimum is known, unbiased everywhere, and the model is left as found."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lapis
from lapis.likelihoods import Gaussian, Likelihood
from lapis.network import Network
from lapis.posteriors import VariationalPosterior
from lapis.priors import Prior
from lapis.training.variational import ascent as ascending
from lapis.training.variational.approximation import Approximation
from lapis.training.variational.perturbation import Draws, Pass, forward
from untouched import untouched

F64 = torch.float64
NOISE = 0.3


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear_problem(examples: int = 60) -> tuple[nn.Module, Tensor, Tensor]:
    """Correlated inputs, so that the mean-field optimum is not the posterior."""
    source = seeded(1)
    mixing = torch.tensor([[1.0, 0.6, 0.0], [0.0, 1.0, 0.4], [0.0, 0.0, 1.0]], dtype=F64)
    x = torch.randn(examples, 3, dtype=F64, generator=source) @ mixing
    truth = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 1.0]], dtype=F64)
    y = x @ truth.T + 0.2 + NOISE * torch.randn(examples, 2, dtype=F64, generator=source)
    torch.manual_seed(0)
    return nn.Linear(3, 2).double(), x, y


PRIOR = Prior({"weight": 2.0, "bias": 0.5}, groups="parameter", mean=0.1)


def exact(model: nn.Module, x: Tensor, y: Tensor, prior: Prior) -> tuple[Tensor, Tensor, Tensor]:
    """Precision and mean of the posterior of a linear Gaussian model, and log p(D); naive, in float64."""
    resolved = prior.resolve(Network(model))
    lam, m0 = resolved.vector().diag(), resolved.mean.expand(8)
    features = torch.zeros(len(x), 2, 8, dtype=F64)  # the order of named_parameters(): weight (2, 3), bias (2,)
    for c in range(2):
        features[:, c, 3 * c : 3 * c + 3], features[:, c, 6 + c] = x, 1.0
    design, targets = features.reshape(-1, 8), y.reshape(-1)
    precision = design.T @ design / NOISE**2 + lam
    mean = torch.linalg.solve(precision, design.T @ targets / NOISE**2 + lam @ m0)
    covariance = NOISE**2 * torch.eye(len(targets), dtype=F64) + design @ torch.linalg.inv(lam) @ design.T
    evidence = torch.distributions.MultivariateNormal(design @ m0, covariance).log_prob(targets)
    return precision, mean, evidence


def mean_field_elbo(precision: Tensor, evidence: Tensor) -> Tensor:
    """log p(D) - KL(q | posterior) at the mean-field optimum, where KL = 1/2 (sum log A_ii - log |A|)."""
    return evidence - 0.5 * (precision.diagonal().log().sum() - torch.logdet(precision))


# exactness ---------------------------------------------------------------------------------------------


def test_a_linear_gaussian_model_gets_the_mean_field_optimum() -> None:
    """Mean of the posterior, variances 1 / A_ii, and the ELBO there: nothing is drawn, so to rounding."""
    model, x, y = linear_problem()
    precision, mean, evidence = exact(model, x, y, PRIOR)
    posterior = lapis.variational(model, (x, y), Gaussian(NOISE), prior=PRIOR, steps=800)
    torch.testing.assert_close(posterior.mean, mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(posterior.marginal_variance(), 1 / precision.diagonal(), rtol=1e-6, atol=0)
    torch.testing.assert_close(posterior.elbo(), mean_field_elbo(precision, evidence), rtol=0, atol=1e-8)
    assert posterior.inference.elbo_error < 1e-9
    assert posterior.inference.converged
    assert posterior.inference.trace[-1] > posterior.inference.trace[0]


class Shaped(nn.Module):
    """A linear layer, and its outputs in another shape."""

    def __init__(self, layer: nn.Module, shape: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x: Tensor) -> Tensor:
        return self.shape(self.layer(x))


@pytest.mark.parametrize("positions", [(), (5,)])
@pytest.mark.parametrize("shape", [lambda f: f, lambda f: f[..., None].mT, lambda f: f[..., :1].squeeze(-1)])
def test_outputs_of_any_shape_have_known_moments(shape: Callable[[Tensor], Tensor], positions: tuple[int, ...]) -> None:
    """Mean W x + b and variance S_W^2 x^2 + s_b^2, for views of a last layer's outputs and where it has positions."""
    network = Network(Shaped(nn.Linear(3, 2), shape).double())
    deviation = torch.rand(8, dtype=F64, generator=seeded(1)) + 0.1
    q = Approximation(network.flat().requires_grad_(), deviation.log().requires_grad_(), None)
    x = torch.randn(7, *positions, 3, dtype=F64, generator=seeded(2))
    found = forward(network, q, x, frozenset(network.names), seeded(0)).moments()
    assert found is not None
    spread = network.unflatten(deviation.square())
    torch.testing.assert_close(found[0], network.module(x))
    torch.testing.assert_close(found[1], shape(F.linear(x.square(), spread["layer.weight"], spread["layer.bias"])))


@pytest.mark.parametrize("change", [F.relu_, lambda f: f.add_(5.0), lambda f: f.squeeze(1).exp_()])
def test_outputs_changed_in_place_are_no_longer_the_layers(change: Callable[[Tensor], Tensor]) -> None:
    network = Network(Shaped(nn.Linear(3, 1), change))
    q = Approximation(network.flat().requires_grad_(), torch.full((4,), -1.0).requires_grad_(), None)
    made = forward(network, q, torch.randn(7, 3), frozenset(network.names), seeded(0))
    assert made.moments() is None


def test_minibatches_find_the_same_optimum() -> None:
    """N / M times the log likelihood of M examples; without the factor, variances would be 3 times as large."""
    model, x, y = linear_problem()
    precision, mean, _ = exact(model, x, y, PRIOR)
    posterior = lapis.variational(model, (x, y), Gaussian(NOISE), prior=PRIOR, steps=700, batch_size=20)
    torch.testing.assert_close(posterior.mean, mean, rtol=0, atol=0.01)
    torch.testing.assert_close(posterior.marginal_variance(), 1 / precision.diagonal(), rtol=0.03, atol=0)


def test_a_low_rank_part_closes_the_gap_to_the_evidence() -> None:
    """With as many factors as weights q can be the posterior itself, whose ELBO is log p(D).

    The ELBO is an estimate: it strays 5 standard errors with probability below 1e-6.
    """
    model, x, y = linear_problem(20)
    precision, mean, evidence = exact(model, x, y, PRIOR)
    options: dict[str, Any] = {"prior": PRIOR, "steps": 700, "generator": seeded(3)}
    posterior = quick(model, (x, y), Gaussian(NOISE), rank=8, draws=2, **options)
    covariance = posterior.covariance_product(torch.eye(8, dtype=F64))
    divergence = torch.distributions.kl_divergence(
        torch.distributions.MultivariateNormal(posterior.mean, covariance),
        torch.distributions.MultivariateNormal(mean, torch.linalg.inv(precision)),
    )
    gap = evidence - mean_field_elbo(precision, evidence)
    assert float(divergence) < 0.2 * float(gap)
    error = posterior.inference.elbo_error
    assert abs(float(posterior.elbo() - (evidence - divergence))) < 5 * error


def test_a_low_rank_part_does_not_drown_a_network_in_noise() -> None:
    """Factors that learn at the means' rate flatten the function, a hundred nats below independent weights."""
    source = seeded(5)
    x = torch.linspace(-2, 2, 60, dtype=F64)[:, None]
    y = torch.sin(2.5 * x) + 0.15 * torch.randn(60, 1, dtype=F64, generator=source)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    prior = Prior({"0": 0.25, "2": 20.0, "4": 10.0}, groups="layer")
    fits = [quick(model, (x, y), Gaussian(0.15), prior=prior, rank=rank, steps=400) for rank in (0, 20)]
    alone, correlated = (fit.inference for fit in fits)
    assert correlated.elbo > alone.elbo - 0.5 * len(x)


def test_what_the_weights_know_is_not_given_up_at_the_start() -> None:
    """Under the divergence's whole weight from the first step a tuned prior narrows to one class for all digits."""
    digits = load_digits()
    x, y = torch.tensor(digits.data[:200] / 16).float(), torch.tensor(digits.target[:200])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(100):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    posterior = quick(model, (x, y), "classification", tune=True, steps=900)
    assert float((posterior.predict(x, samples=20).probs.argmax(1) == y).double().mean()) > 0.9


def test_noise_and_prior_are_those_of_the_highest_elbo() -> None:
    """At the optimum both have a closed form: sigma^2 = E_q[sse] / count, and P_g / E_q|theta_g - m_g|^2."""
    model, x, y = linear_problem()
    posterior = lapis.variational(model, (x, y), "regression", tune=True, noise=True, steps=900)
    variance = posterior.marginal_variance()
    spread = x.square() @ variance[:6].reshape(2, 3).T + variance[6:]
    f = x @ posterior.mean[:6].reshape(2, 3).T + posterior.mean[6:]
    sigma = ((y - f).square() + spread).mean().sqrt()
    assert posterior.likelihood.noise is not None
    torch.testing.assert_close(posterior.likelihood.noise, sigma, rtol=1e-5, atol=0)
    moments = (posterior.mean.square() + variance).sum()
    torch.testing.assert_close(posterior.weight_prior.precision, 8 / moments.reshape(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rank", [0, 3])
def test_divergence_and_density_are_those_of_the_gaussian(rank: int) -> None:
    model, x, y = linear_problem()
    prior = PRIOR.resolve(Network(model))
    source = seeded(4)
    mean, log_deviation = torch.randn(2, 8, dtype=F64, generator=source)
    q = Approximation(mean, log_deviation, torch.randn(rank, 8, dtype=F64, generator=source) if rank else None)
    factors = q.factors()
    covariance = (2 * log_deviation).exp().diag() + (factors.T @ factors if factors is not None else 0)
    gaussian = torch.distributions.MultivariateNormal(mean, covariance)
    about = torch.distributions.MultivariateNormal(prior.mean.expand(8), precision_matrix=prior.vector().diag())
    torch.testing.assert_close(q.divergence(prior), torch.distributions.kl_divergence(gaussian, about))
    leaves = [parameter.requires_grad_() for parameter in q.parameters()]
    value, pull = q.pull(prior, prior.vector())
    assert value == pytest.approx(float(q.divergence(prior).detach()))
    torch.testing.assert_close(pull, list(torch.autograd.grad(q.divergence(prior), leaves)))
    for parameter in leaves:
        parameter.requires_grad_(False)
    best = q.best_prior(prior)
    for factor in (0.9, 1.1):
        assert q.divergence(best) < q.divergence(best.with_precision(best.precision * torch.tensor([factor, 1.0])))
        assert q.divergence(best) < q.divergence(best.with_precision(best.precision * torch.tensor([1.0, factor])))

    fitted = quick(model, (x, y), Gaussian(NOISE))
    posterior = VariationalPosterior(
        network=fitted.network, likelihood=fitted.likelihood, facts=fitted.facts, mean=mean, point=mean,
        deviation=log_deviation.exp(), factors=factors, weight_prior=prior, inference=fitted.inference,
    )  # fmt: skip
    points = torch.randn(5, 8, dtype=F64, generator=source)
    torch.testing.assert_close(posterior.log_prob(points), gaussian.log_prob(points))
    torch.testing.assert_close(posterior.marginal_variance(), covariance.diagonal())
    # 20,000 draws: an entry's relative error is below sqrt(2 / 20,000) = 0.01; 6 of these in any of 36: below 1e-7
    drawn = posterior.sample(20_000, generator=source)
    scale = covariance.diagonal().sqrt()
    assert float(((drawn.T.cov() - covariance) / scale.outer(scale)).abs().max()) < 0.06
    assert float(((drawn.mean(0) - mean) / scale).abs().max()) < 0.06


def quick(model: nn.Module, data: Any, likelihood: Any, **options: Any) -> VariationalPosterior:
    """A short fit, whose warning about that is of no interest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)
        return lapis.variational(model, data, likelihood, **{"steps": 20, **options})


def test_linearised_predictions_are_about_the_variational_mean() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(12, 2, dtype=F64), torch.randn(12, 2, dtype=F64)
    posterior = quick(model, (x, y), Gaussian(0.5), rank=2, steps=60)
    assert float((posterior.mean - posterior.network.flat()).abs().max()) > 0.05

    def outputs(weights: Tensor) -> Tensor:
        return posterior.network.call(x, posterior.network.unflatten(weights))

    with untouched(model):
        prediction = posterior.predict(x, method="linearised")
    torch.testing.assert_close(prediction.mean, outputs(posterior.mean).detach())
    jacobian = torch.autograd.functional.jacobian(outputs, posterior.mean)
    covariance = posterior.covariance_product(torch.eye(posterior.n_weights, dtype=F64))
    expected = torch.einsum("bcp,pq,bdq->bcd", jacobian, covariance, jacobian)
    with untouched(model):
        torch.testing.assert_close(posterior.functional_variance(x), expected)


# gradients ---------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """The sum over positions of a layer's outputs: its positions are correlated, and add up."""

    def __init__(self, layer: nn.Module, axis: int) -> None:
        super().__init__()
        self.layer, self.axis = layer, axis

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).sum(self.axis)
        return out


@dataclass(frozen=True)
class LinearCase:
    """A network that is linear in its weights: outputs F.linear(features(x), W, times * b)."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    features: Callable[[Tensor], Tensor] = lambda x: x
    times: float = 1.0


LINEAR_CASES = {
    "one position": LinearCase(lambda: nn.Linear(3, 2), (3,)),
    "tokens": LinearCase(lambda: nn.Linear(3, 2), (4, 3)),
    "pooled tokens": LinearCase(lambda: Pooled(nn.Linear(3, 2), 1), (4, 3), lambda x: x.sum(1), 4),
    "pooled convolution": LinearCase(lambda: Pooled(nn.Conv1d(3, 2, 1), 2), (3, 4), lambda x: x.sum(2), 4),
}


class Convolved(nn.Module):
    """Convolutions along a sequence, so that positions of an example meet in its classes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv1d(2, 3, 3), nn.ConvTranspose1d(3, 2, 2), nn.Linear(2 * 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.two(self.one(x).tanh()).tanh().flatten(1))
        return out


def start(network: Network, rank: int = 0) -> Approximation:
    source = seeded(5)
    deviation = 0.2 + 0.3 * torch.rand(network.size, dtype=F64, generator=source)
    factors = 0.2 * torch.randn(rank, network.size, dtype=F64, generator=source) if rank else None
    leaves = [network.flat(), deviation.log(), *([] if factors is None else [factors])]
    return Approximation(*(leaf.requires_grad_() for leaf in leaves))


def gradients(
    network: Network, q: Approximation, x: Tensor, y: Tensor, likelihood: Likelihood, local: bool, repeats: int
) -> Tensor:
    """Gradients of E_q[-log p(y | f)] in all parameters of q, (repeats, total), from drawn outputs."""

    def loss(made: Pass) -> Tensor:
        f = likelihood.canonical(made.raw)
        return likelihood.nll(f, likelihood.targets(y, f, made.raw.shape)).sum()

    source, rows = seeded(6), []
    with network.prepared():
        draws = Draws.found(network, q, [x, x[:-1]], source) if local else Draws(network, q)
        for _ in range(repeats):
            _, found = draws.gradient(x, loss, q.parameters(), source)
            rows.append(torch.cat([g.reshape(-1) for g in found]))
    assert (draws.each_example == frozenset(network.names)) == local
    return torch.stack(rows)


def z_scores(rows: Tensor, expected: Tensor) -> Tensor:
    return (rows.mean(0) - expected) / (rows.std(0) / len(rows) ** 0.5).clamp_min(1e-12)


@pytest.mark.parametrize("local", [True, False], ids=["local", "weights"])
@pytest.mark.parametrize("name", LINEAR_CASES)
@pytest.mark.parametrize("rank", [0, 2])
def test_gradients_are_unbiased(name: str, local: bool, rank: int) -> None:
    """Against the closed form of a linear Gaussian model: local reparameterisation, flipout, and shared draws.

    At most 32 means of 300 draws: one is 5 standard errors off with probability below 32 x 6e-7 = 2e-5.
    """
    torch.manual_seed(0)
    case = LINEAR_CASES[name]
    network = Network(case.make().double())
    x = 0.5 + torch.randn(6, *case.shape, dtype=F64)
    features = case.features(x)
    y = torch.randn(*features.shape[:-1], 2, dtype=F64)
    q = start(network, rank)

    def layer(inputs: Tensor, weights: Tensor, times: float) -> Tensor:
        return F.linear(inputs, weights[:6].reshape(2, 3), times * weights[6:])

    f = layer(features, q.mean, case.times)
    spread = layer(features.square(), (2 * q.log_deviation).exp(), case.times**2)
    factors = q.factors()
    if factors is not None:
        spread = spread + sum(layer(features, row, case.times).square() for row in factors)
    expected_loss = ((y - f).square() + spread).sum() / (2 * NOISE**2)
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(expected_loss, q.parameters())])
    rows = gradients(network, q, x, y, Gaussian(NOISE), local, 300)
    assert float(z_scores(rows, expected).abs().max()) < 5


def test_convolutions_have_the_same_expected_gradient_and_less_noise() -> None:
    """Flipout and local draws against draws shared by the batch, where positions of an example interact.

    164 differences of means of 300 draws each: one is 5.5 standard errors off with probability below 1e-5.
    """
    torch.manual_seed(0)
    network = Network(Convolved().double())
    x, y = torch.randn(16, 2, 6, dtype=F64), torch.randint(3, (16,))
    q = start(network)
    likelihood = lapis.Categorical()
    local, shared = (gradients(network, q, x, y, likelihood, each, 300) for each in (True, False))
    error = ((local.var(0) + shared.var(0)) / 300).sqrt().clamp_min(1e-12)
    assert float(((local.mean(0) - shared.mean(0)) / error).abs().max()) < 5.5
    assert float(local.var(0).sum()) < 0.5 * float(shared.var(0).sum())


def test_local_draws_are_less_noisy_than_draws_of_weights() -> None:
    """A batch of 64 shares one draw of the weights, or has 64: here the variance falls by a factor of at least ten."""
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double())
    x, y = torch.randn(64, 3, dtype=F64), torch.randn(64, 2, dtype=F64)
    q = start(network)
    local, shared = (gradients(network, q, x, y, Gaussian(NOISE), each, 150) for each in (True, False))
    assert float(local.var(0).sum()) < 0.1 * float(shared.var(0).sum())


# which weights are drawn for each example ----------------------------------------------------------------


class Odd(nn.Module):
    """Uses of weights that a draw for each example would get wrong, beside one that is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.twice, self.rows, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(2, 2), nn.Linear(4, 2)
        self.product = nn.Parameter(torch.eye(4))
        self.also, self.norm = nn.Linear(4, 4, bias=False), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(self.twice(self.fine(x).tanh()).tanh())
        h = self.rows(h.reshape(-1, 2)).reshape(-1, 4).tanh()  # two rows an example
        h = self.norm(h @ self.product)
        h = self.also(h) + h * self.also.weight.sum()
        out: Tensor = self.out(h)
        return out


class TimeFirst(nn.Module):
    """Examples along the second axis, as many positions as examples in the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(x.transpose(0, 1)).tanh().sum(0))
        return out


def test_only_weights_that_an_example_uses_once_are_drawn_for_each() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(10, 3, dtype=F64), torch.randn(10, 2, dtype=F64)
    odd = quick(Odd().double(), (x, y), Gaussian(0.5))
    assert odd.inference.each_example == ("fine.bias", "fine.weight", "out.bias", "out.weight")
    long = torch.randn(10, 8, 3, dtype=F64)  # as many positions as examples that are looked at first
    first = quick(TimeFirst().double(), (long, y), Gaussian(0.5))
    assert first.inference.each_example == ("out.bias", "out.weight")
    assert quick(Odd().double(), (x, y), Gaussian(0.5), reparameterisation="weights").inference.each_example == ()


def test_draws_for_each_example_have_the_moments_of_drawn_networks() -> None:
    """Outputs of a network with every odd use: means and variances against networks drawn as a whole.

    20 means and 20 variances of 800 draws; the tolerances are 5 standard errors of both (below 1e-4 in total).
    """
    torch.manual_seed(0)
    network = Network(Odd().double())
    x = torch.randn(10, 3, dtype=F64)
    q = Approximation(network.flat(), torch.full((network.size,), 0.1, dtype=F64).log())
    source = seeded(8)
    with network.prepared():
        draws = Draws.found(
            network, Approximation(*(p.clone().requires_grad_() for p in q.parameters())), [x, x[:7]], source
        )
        with torch.no_grad():
            own, whole = (
                torch.stack([forward(network, q, x, each, source).raw for _ in range(800)])
                for each in (draws.each_example, frozenset[str]())
            )
    error = ((own.var(0) + whole.var(0)) / 800).sqrt()
    assert float(((own.mean(0) - whole.mean(0)) / error).abs().max()) < 5
    kurtosis = (whole - whole.mean(0)).pow(4).mean(0) / whole.var(0) ** 2
    relative = (2 * (kurtosis - 1) / 800).sqrt()
    assert float(((own.var(0) / whole.var(0)).log() / relative).abs().max()) < 5


# the fit ------------------------------------------------------------------------------------------------


def classifier() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3)).double().train()
    return model, (torch.randn(30, 2, dtype=F64), torch.randint(3, (30,)))


def test_the_model_and_global_randomness_are_left_as_found() -> None:
    model, data = classifier()
    next(model.parameters()).grad = torch.ones(6, 2, dtype=F64)
    with untouched(model):
        posterior = quick(model, data, "classification", rank=2)
        posterior.predict(data[0], method="linearised")
        posterior.diagnose(data)
    with untouched(model), pytest.raises(lapis.ModelError, match="diverged"):
        lapis.variational(model, data, "classification", learning_rate=1e300, steps=50)


def test_the_generator_decides() -> None:
    model, data = classifier()
    one, two, other = (quick(model, data, "classification", batch_size=8, generator=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(one.mean, two.mean)
    assert one.inference == two.inference
    assert not torch.equal(one.mean, other.mean)


def test_a_climbing_elbo_is_told() -> None:
    model, data = classifier()
    with pytest.warns(lapis.LapisWarning, match="has not converged: the ELBO still rose"):
        posterior = lapis.variational(model, data, "classification", steps=60, deviation=1e-6)
    assert not posterior.inference.converged
    assert any("before it converged" in finding for finding in posterior.diagnose().findings)
    with pytest.warns(lapis.LapisWarning, match="too few to tell"):
        lapis.variational(model, data, "classification", steps=4)


def test_a_start_is_taken_as_given() -> None:
    model, data = classifier()
    size = sum(p.numel() for p in model.parameters())
    deviation = torch.linspace(0.1, 0.2, size, dtype=F64)
    mean = torch.linspace(-1, 1, size, dtype=F64)
    posterior = quick(model, data, "classification", steps=1, mean=mean, deviation=deviation, learning_rate=1e-12)
    torch.testing.assert_close(posterior.mean, mean)
    torch.testing.assert_close(posterior.deviation, deviation, rtol=0.021, atol=0)  # one step of 0.02 in the logarithm


def test_means_and_deviations_have_rates_of_their_own() -> None:
    """Adam's first step has the length of the learning rate, whatever the gradient."""
    model, x, y = linear_problem()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    options: dict[str, Any] = {"steps": 1, "deviation": 0.1, "learning_rate": 0.02, "deviation_rate": 0.005}
    with pytest.warns(lapis.LapisWarning):
        found = lapis.variational(model, (x, y), Gaussian(NOISE), **options)
    moved, widened = (found.mean - start).abs(), (found.deviation / 0.1).log().abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.02), rtol=1e-4, atol=0)
    torch.testing.assert_close(widened, torch.full_like(widened, 0.005), rtol=1e-4, atol=0)


def test_an_interrupted_fit_goes_on_as_if_nothing_had_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = linear_problem()
    options: dict[str, Any] = {"steps": 130, "batch_size": 20, "rank": 2, "noise": True, "tune": True}
    whole = quick(model, (x, y), Gaussian(NOISE), **options)
    step, left = ascending.Ascent._step, iter(range(80))

    def interrupted(self: Any, *rest: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        step(self, *rest)

    path = tmp_path / "fit.lapis"
    with monkeypatch.context() as patched:
        patched.setattr(ascending.Ascent, "_step", interrupted)
        with untouched(model), pytest.raises(KeyboardInterrupt):
            quick(model, (x, y), Gaussian(NOISE), checkpoint=path, **options)
    taken: list[int] = []
    monkeypatch.setattr(ascending.Ascent, "_step", lambda self, *rest: taken.append(1) or step(self, *rest))
    resumed = quick(model, (x, y), Gaussian(NOISE), checkpoint=path, **options)
    assert len(taken) == 130 - 51  # rounds of 51 steps: 17 passes over 3 batches
    assert torch.equal(resumed.mean, whole.mean)
    assert torch.equal(resumed.deviation, whole.deviation)
    assert resumed.inference == whole.inference
    with pytest.raises(lapis.FileError, match="belongs to another variational fit"):
        quick(model, (x, y), Gaussian(NOISE), checkpoint=path, **{**options, "rank": 3})
    for data, likelihood in (((x, y + 1), Gaussian(NOISE)), ((x, y), Gaussian(2 * NOISE))):
        with pytest.raises(lapis.FileError, match="belongs to another variational fit"):
            quick(model, data, likelihood, checkpoint=path, **options)


def test_bad_arguments_are_refused_before_any_work() -> None:
    model, data = classifier()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"steps": 0}, "Bad steps"),
        ({"draws": 0}, "Bad draws"),
        ({"rank": -1}, "Bad rank"),
        ({"batch_size": 2.5}, "Bad batch_size"),
        ({"learning_rate": -1}, "Bad learning_rate"),
        ({"noise": True}, "no noise to learn"),
        ({"mean": torch.ones(3)}, "Bad mean"),
        ({"deviation": -1.0}, "Bad deviation"),
        ({"deviation": torch.zeros(39)}, "Bad deviation"),
        ({"reparameterisation": "none"}, "Unknown reparameterisation"),
        ({"generator": 3}, "Bad generator"),
        ({"prior": -1.0}, "out of range"),
        ({"weights": "nobody"}, "No weight is called"),
        ({"rank": 1000, "memory_budget": 2**20}, "rank 1000 over 39 weights does not fit"),
    ]
    with untouched(model):
        for options, message in refused:
            with pytest.raises(lapis.LapisError, match=message):
                lapis.variational(model, data, "classification", **options)
        with pytest.raises(lapis.DataError, match="reads the data many times"):
            lapis.variational(model, iter([data]), "classification")


@pytest.mark.parametrize("reparameterisation", ["local", "weights"])
def test_activation_checkpointing_is_refused(reparameterisation: Any) -> None:
    """Layers that run again in the backward pass no longer have the drawn weights, and torch need not notice."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 5), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(lambda h: self.two(self.one(h).tanh()), x, use_reentrant=False)

    model, x = Checkpointed().double(), torch.randn(8, 3, dtype=torch.float64)
    with untouched(model), pytest.raises(lapis.ModelError, match="checkpointing off"):
        lapis.variational(model, (x, x[:, :1]), lapis.Gaussian(0.5), steps=2, reparameterisation=reparameterisation)
