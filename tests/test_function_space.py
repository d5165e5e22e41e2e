"""Networks as Gaussian processes: function space equals weight space, for every posterior with linearised outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
import reference
from cases import CASES, Case
from lapis.function_space import GaussianProcess, kernels
from lapis.function_space.tangent import Tangent
from lapis.posteriors import LinearisedPosterior
from test_contract import fitted

F64 = torch.float64
LINEARISED = (
    "dense",
    "diagonal",
    "kronecker",
    "ekfac",
    "last layer",
    "lowrank",
    "implicit",
    "drawn",
    "moved mean",
    "single weights",
    "subnetwork",
    "variational",
)
ARCHITECTURES = (
    "mlp_gaussian_per_output",
    "mlp_categorical",
    "mlp_poisson",
    "mlp_heteroscedastic",
    "conv2d_strided_padded",
    "conv2d_grouped",
    "deep_linear_pooled",
    "batch_norm2d",
    "embedding_repeated",
    "lstm",
    "tied_language_model",
    "pixels_categorical",
)


def weight_space(made: Case, precision: float) -> Tensor:
    """J Sigma J^T of the dense posterior at new inputs, naively."""
    model, (x, y) = made.make_model(), made.make_batch()
    ggn = reference.ggn(model, x, y, made.likelihood)
    jacobian = torch.cat(reference.jacobians(model, made.make_inputs(3, seed=7), made.likelihood))
    return jacobian @ torch.linalg.solve(ggn + precision * torch.eye(len(ggn), dtype=F64), jacobian.mT)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_function_space_is_weight_space(name: str) -> None:
    made = CASES[name]
    expected = weight_space(made, 2.0)
    for dtype, tolerance in ((F64, 1e-9), (torch.float32, 1e-5)):
        model, likelihood = made.make_model(dtype), made.likelihood.build()
        fit = lapis.laplace(model, made.make_batch(dtype), likelihood, structure="dense", prior=2.0, curvature="exact")
        process, inputs = fit.gaussian_process(), made.make_inputs(3, dtype, seed=7)
        conditioned = process.prior().given(made.make_batch(dtype))
        for found in (process, conditioned):
            kernel = found.kernel(inputs)
            matrix = kernel.reshape(expected.shape).double()
            assert float((matrix - expected).abs().max()) <= tolerance * float(expected.abs().max())
            assert kernel.dim() % 2 == 0
            assert kernel.shape[0] == 3
        if dtype == F64:
            torch.testing.assert_close(process.mean(inputs), fit.predict(inputs, covariance="diagonal").f_mean)
            evidence = process.prior().log_evidence(made.make_batch(dtype))
            torch.testing.assert_close(evidence, fit.log_evidence(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LINEARISED)
def test_kernels_of_every_posterior_are_j_sigma_j(name: str) -> None:
    posterior, model, new = fitted(name, "classification")
    model.eval().requires_grad_(False)
    assert isinstance(posterior, LinearisedPosterior)
    network, point = posterior.network, posterior.point.double()

    def outputs(weights: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, network.unflatten(weights), (x,))

    def jacobian(x: Tensor) -> Tensor:
        return torch.func.jacrev(outputs)(point, x).flatten(0, 1)

    if name == "drawn":
        covariance = posterior.deviations.mT @ posterior.deviations / len(posterior)
    elif name == "variational":
        covariance = posterior.covariance_product(torch.eye(network.size, dtype=F64))
    else:
        covariance = posterior.solve(torch.eye(network.size, dtype=F64))
    one, two = new[:3], new[3:5]
    expected = jacobian(one) @ covariance @ jacobian(two).mT
    process = posterior.gaussian_process()
    found = process.kernel(one, two)
    assert found.shape == (3, 4, 2, 4)
    scale = float(expected.abs().max())
    assert float((found.reshape(expected.shape) - expected).abs().max()) <= 1e-8 * scale
    moved = outputs(point, one) + (jacobian(one) @ (posterior.mean - point)).reshape(3, 4)
    torch.testing.assert_close(process.mean(one), moved, rtol=1e-9, atol=1e-9)
    # by products, without the matrix
    vectors = torch.randn(2, 12, dtype=F64, generator=torch.Generator().manual_seed(0))
    products = process.operator(one)(vectors)
    whole = process.kernel(one).reshape(12, 12)
    torch.testing.assert_close(products, vectors @ whole, rtol=1e-7, atol=1e-7 * scale)
    # functions are those of drawn weights
    draws = list(posterior.draws(4, torch.Generator().manual_seed(3)))
    expected = torch.stack([outputs(point, one) + (jacobian(one) @ (w - point)).reshape(3, 4) for w in draws])
    found = process.sample(one, 4, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    # through the link, to first order
    p = outputs(point, one).softmax(-1) if name != "moved mean" else moved.softmax(-1)
    slope = torch.block_diag(*(torch.diag(each) - torch.outer(each, each) for each in p))
    linked = posterior.gaussian_process(link=True)
    torch.testing.assert_close(linked.mean(one), p, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(linked.kernel(one).reshape(12, 12), slope @ whole @ slope.mT, rtol=1e-8, atol=1e-10)


def problem(likelihood: str, n: int = 24) -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    """A small network, data, and inputs that it has not seen."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 2, dtype=F64, generator=generator)
    y = (x[:, 0] > 0.3 * torch.randn(n, generator=generator)).long()
    targets: Tensor = y if likelihood == "categorical" else torch.sin(2 * x[:, :1]) + 0.1 * x[:, 1:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2 if likelihood == "categorical" else 1)).double()
    return model, (x, targets), torch.randn(5, 2, dtype=F64, generator=generator)


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_a_subset_of_the_data_gives_its_own_posterior(likelihood: str) -> None:
    model, (x, y), new = problem(likelihood)
    chosen = torch.tensor([1, 4, 7, 8, 15, 20])
    prior = lapis.laplace(model, (x, y), likelihood, prior=0.7).gaussian_process().prior()
    subset = x[chosen], y[chosen]
    fit = lapis.laplace(model, subset, likelihood, structure="dense", prior=0.7)
    mode = fit.at_tangent_mode(subset)
    assert mode.mode is not None
    jacobian = torch.func.jacrev(lambda w: torch.func.functional_call(model, fit.network.unflatten(w), (new,)))
    moved = model(new) + jacobian(fit.point) @ (mode.mode - fit.point)
    for steps in (1 if likelihood == "gaussian" else 12, None):
        found = prior.given(subset, steps=steps)
        torch.testing.assert_close(found.mean(new), moved, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(prior.given(subset).kernel(new), fit.functional_covariance(new), rtol=1e-8, atol=1e-10)
    variance = fit.functional_variance(new)
    torch.testing.assert_close(
        prior.given(subset).predict(new).latent.covariance[:, 0], variance, rtol=1e-8, atol=1e-10
    )
    # the evidence, at t and at the mode
    torch.testing.assert_close(prior.log_evidence(subset), fit.log_evidence(), rtol=1e-9, atol=1e-9)
    if likelihood == "gaussian":
        at_mode = prior.log_evidence(subset, at_mode=True)
        torch.testing.assert_close(at_mode, mode.log_evidence(), rtol=1e-8, atol=1e-8)
    # conditioning a posterior on more data is an update of it
    rest = x[9:12], y[9:12]
    updated = lapis.laplace(model, subset, likelihood, structure="dense", prior=0.7).update(rest)
    more = fit.gaussian_process().given(rest).kernel(new)
    torch.testing.assert_close(more, updated.functional_covariance(new), rtol=1e-8, atol=1e-10)


def test_a_network_that_is_too_sure_has_a_mode_all_the_same() -> None:
    """There H is next to nothing: the first step of Newton's method goes far beyond the mode."""
    model, (x, y), new = problem("categorical")
    with torch.no_grad():
        model[2].weight.mul_(60)  # type: ignore[union-attr,operator]
    few = x[:8], y[:8]
    prior = lapis.laplace(model, few, "categorical", prior=0.7).gaussian_process().prior()
    found = prior.given(few, steps=None)
    gradient = found.observed.gradient(found.observed.at(found.dual)).reshape(-1)
    torch.testing.assert_close(found.dual, -gradient, rtol=0, atol=1e-6)  # stationary: a = -g
    assert found.observed.loss(found.dual) < 0.7 * found.observed.loss(torch.zeros_like(found.dual))
    one = prior.given(few)
    assert one.observed.loss(one.dual) > 10 * found.observed.loss(found.dual)
    torch.testing.assert_close(prior.given(few, steps=40).mean(new), found.mean(new), rtol=1e-5, atol=1e-5)


def test_drawn_functions_have_the_mean_and_covariance_of_the_conditioned_process() -> None:
    """Each of 5 + 15 statistics within 4.5 standard errors: false alarms in about 1 of 7,000 seeds."""
    model, (x, y), new = problem("gaussian")
    process = lapis.laplace(model, (x, y), lapis.Gaussian(0.3), prior=1.0).gaussian_process().prior()
    conditioned = process.given((x[:8], y[:8]))
    count = 1500
    draws = conditioned.sample(new, count, generator=torch.Generator().manual_seed(2))[..., 0]
    mean, covariance = conditioned.mean(new)[:, 0], conditioned.kernel(new).reshape(5, 5)
    variance = covariance.diagonal()
    assert bool(((draws.mean(0) - mean).abs() <= 4.5 * (variance / count).sqrt()).all())
    errors = ((covariance.square() + torch.outer(variance, variance)) / count).sqrt()
    assert bool(((draws.mT.cov() - covariance).abs() <= 4.5 * errors).all())


@pytest.mark.parametrize("structure", ["dense", "kronecker", "implicit"])
def test_kernels_in_tiles_are_those_of_one_piece(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y), new = problem("categorical")
    process = lapis.laplace(model, (x, y), "categorical", structure=structure).gaussian_process()
    before = process.kernel(x), process.kernel(new, x)
    monkeypatch.setattr(kernels, "PART", 3)
    monkeypatch.setattr(kernels, "KEPT_SHARE", 10**12)  # no features are kept
    for found, expected in zip((process.kernel(x), process.kernel(new, x)), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    small = replace(process, covariance=process.covariance, tangent=process.tangent)
    small.covariance.tangent = replace(process.tangent, memory_budget=48 * 48 * 8 - 1)
    with pytest.raises(lapis.MemoryBudgetError, match="48 x 48 outputs"):
        small.kernel(x)


def test_a_process_is_made_of_any_mean_and_variances() -> None:
    """As of the state of an optimiser: weights N(m, diag(v)), linearised at m, which the module does not hold."""
    model, (x, y), new = problem("categorical")
    network = lapis.laplace(model, (x, y), "categorical").network
    generator = torch.Generator().manual_seed(0)
    mean = network.flat() + 0.1 * torch.randn(network.size, dtype=F64, generator=generator)
    variance = torch.rand(network.size, dtype=F64, generator=generator) + 0.1
    tangent = Tangent(network, lapis.Categorical(), mean, True, "", 2**30, lambda: None)
    process = GaussianProcess.of_diagonal(tangent, variance)

    def outputs(weights: Tensor) -> Tensor:
        return torch.func.functional_call(model, network.unflatten(weights), (new,))

    jacobian = torch.func.jacrev(outputs)(mean).flatten(0, 1)
    torch.testing.assert_close(process.mean(new), outputs(mean))
    torch.testing.assert_close(process.kernel(new).reshape(10, 10), (jacobian * variance) @ jacobian.mT)
    with pytest.raises(lapis.OptionError, match="no prior"):
        process.prior()


def test_bad_input_is_refused() -> None:
    model, (x, y), new = problem("gaussian")
    posterior = lapis.laplace(model, (x, y), "gaussian")
    process = posterior.gaussian_process()
    refused: list[tuple[type[Exception], Callable[[], Any]]] = [
        (lapis.DataError, lambda: process.mean(new.float())),
        (lapis.DataError, lambda: process.kernel(new, new[:0])),
        (lapis.OptionError, lambda: process.sample(new, 0)),
        (lapis.OptionError, lambda: process.prior().given((x, y), steps=0)),
        (lapis.DataError, lambda: process.prior().given((x, y[:3]))),
        (lapis.DataError, lambda: process.prior().given((x, y)).log_evidence((x, y))),
        (lapis.OptionError, lambda: posterior.gaussian_process(link="yes")),  # type: ignore[arg-type]
    ]
    for error, call in refused:
        with pytest.raises(error):
            call()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(lapis.ModelError, match="changed since the fit"):
        process.kernel(new)


def test_the_state_of_an_optimiser_is_a_process() -> None:
    model, (x, y), new = problem("categorical")
    optimiser = lapis.optim.Adam(model.parameters(), lr=0.01, data_size=len(x), prior_precision=2.0)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    posterior = optimiser.posterior(model, "categorical")
    process = posterior.gaussian_process()

    def outputs(weights: Tensor) -> Tensor:
        return torch.func.functional_call(model, posterior.network.unflatten(weights), (new,))

    jacobian = torch.func.jacrev(outputs)(posterior.mean).flatten(0, 1)
    expected = (jacobian * posterior.marginal_variance()) @ jacobian.mT
    torch.testing.assert_close(process.kernel(new).reshape(10, 10), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(process.mean(new), model(new).detach())
