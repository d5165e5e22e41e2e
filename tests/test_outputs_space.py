"""The tangent model in the outputs' space: kernel, factor and mode against explicit matrices in float64."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.batches import Batch
from lapis.curvature.products.jacobian import Jacobian
from lapis.curvature.products.kernel import KernelCholesky, OutputKernel
from lapis.evidence.dual import DualModel
from lapis.likelihoods import Likelihood
from lapis.priors import WeightPrior

F64 = torch.float64

PRIORS = {
    "one": lambda size: lapis.Prior(0.3),
    "layer": lambda size: lapis.Prior([0.3, 4.0], groups="layer"),
    "mean": lambda size: lapis.Prior([0.3, 4.0], groups="layer", mean=0.2),
    "scales": lambda size: lapis.Prior(0.3, scales=torch.linspace(0.5, 2, size)),
    "weight": lambda size: lapis.Prior(torch.linspace(0.2, 2, size), groups="weight"),
}
LIKELIHOODS = ["regression", "classification", "binary", "poisson"]


def problem(likelihood: str, dtype: torch.dtype = F64) -> tuple[nn.Module, Tensor, Tensor]:
    """Fewer outputs (12 to 36) than half the weights (102 and more)."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 3, generator=generator, dtype=F64)
    outputs = 3 if likelihood == "classification" else 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, outputs)).double()
    y = {
        "regression": x[:, :1].sin(),
        "classification": (4 * x).argmax(1),
        "binary": (x[:, :1] > 0).double(),
        "poisson": (x[:, :1].exp() * 2).round(),
    }[likelihood]
    return model.to(dtype), x.to(dtype), y.to(dtype) if y.is_floating_point() else y


def explicit_rows(model: nn.Module, x: Tensor) -> Tensor:
    """J, (M, P), by one backward pass for each output."""
    parameters = list(model.parameters())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(out, parameters, retain_graph=True)])
        for out in model(x).flatten()
    ]
    return torch.stack(rows)


def kernel_of(posterior: lapis.LaplacePosterior, x: Tensor, y: Tensor, budget: int = 2**30) -> OutputKernel:
    batches = [Batch(x[i : i + 5], y[i : i + 5], i) for i in range(0, len(x), 5)]
    return OutputKernel(Jacobian(posterior.network, posterior.likelihood.canonical, batches, memory_budget=budget))


def loss(posterior: lapis.LaplacePosterior, j: Tensor, model: nn.Module, x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    f = posterior.likelihood.canonical((model(x).flatten() + j @ (theta - posterior.mean)).reshape(model(x).shape))
    targets = posterior.likelihood.targets(y, f.detach())
    prior = posterior.weight_prior
    penalty = 0.5 * (prior.vector() * (theta - prior.mean) ** 2).sum()
    return posterior.likelihood.nll(f, targets).sum() / posterior.temperature + penalty


@pytest.mark.parametrize("name", list(PRIORS))
@pytest.mark.parametrize("budget", [2**30, 0])  # with the groups' parts kept, and without
def test_kernel_is_that_of_explicit_rows(name: str, budget: int) -> None:
    model, x, y = problem("classification")
    posterior = lapis.laplace(model, (x, y), "classification", prior=PRIORS[name](143))
    kernel, j = kernel_of(posterior, x, y, budget), explicit_rows(model, x)
    prior = posterior.weight_prior
    for changed in (prior, prior.with_precision(prior.precision * 3)):
        torch.testing.assert_close(kernel.under(changed), j / changed.vector() @ j.T)
    assert (kernel.parts(prior) is None) == (budget == 0 or name == "weight")
    v, u = torch.randn(143, dtype=F64), torch.randn(36, dtype=F64)
    torch.testing.assert_close(kernel.forward(v), j @ v)
    torch.testing.assert_close(kernel.backward(u), j.T @ u)


def test_kernel_of_other_groups_is_not_that_of_the_first() -> None:
    model, x, y = problem("classification")
    posterior = lapis.laplace(model, (x, y), "classification")
    kernel, j = kernel_of(posterior, x, y), explicit_rows(model, x)
    for name in PRIORS:
        prior: WeightPrior = PRIORS[name](143).resolve(posterior.network)
        torch.testing.assert_close(kernel.under(prior), j / prior.vector() @ j.T)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_factor_gives_the_dense_posterior(likelihood: str) -> None:
    """log |A|, gamma of each group, and the covariance of the outputs are those of the dense precision."""
    model, x, y = problem(likelihood)
    prior = lapis.Prior([0.3, 4.0], groups="layer")
    posterior = lapis.laplace(model, (x, y), likelihood, structure="dense", prior=prior)
    kernel, j = kernel_of(posterior, x, y), explicit_rows(model, x)
    likely: Likelihood = posterior.likelihood
    outputs = kernel.jacobian.outputs
    targets = [likely.targets(batch.targets, f) for batch, f in zip(kernel.jacobian.batches, outputs, strict=True)]
    k = kernel.under(posterior.weight_prior)
    cholesky = KernelCholesky(k, [likely.factor(f, t) for f, t in zip(outputs, targets, strict=True)])
    precision = posterior.precision()
    logdet = 2 * cholesky.lower.diagonal().log().sum()
    torch.testing.assert_close(logdet + posterior.weight_prior.logdet(), torch.logdet(precision))
    parts = kernel.parts(posterior.weight_prior)
    assert parts is not None
    inner = cholesky.solve(torch.eye(len(k), dtype=k.dtype))
    gamma = torch.stack([(inner * part).sum() for part in parts]) / posterior.weight_prior.precision
    torch.testing.assert_close(gamma, posterior.effective_parameters(per_group=True))
    torch.testing.assert_close(k - k @ cholesky.solve(k), j @ torch.linalg.solve(precision, j.T))


@pytest.mark.parametrize("name", list(PRIORS))
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_mode_is_that_of_plain_descent(likelihood: str, name: str) -> None:
    """The reference is torch's L-BFGS on the loss itself, over the weights."""
    model, x, y = problem(likelihood)
    prior = PRIORS[name](sum(p.numel() for p in model.parameters()))
    posterior = lapis.laplace(model, (x, y), likelihood, structure="diagonal", prior=prior, temperature=0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = posterior.at_tangent_mode((x, y), batch_size=5)
    mode = found.tangent
    assert mode is not None
    assert mode.dual is not None, "the outputs are few"
    assert mode.converged
    assert mode.products == 1
    j = explicit_rows(model, x)
    theta = posterior.mean.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([theta], 1.0, 1000, 5000, 1e-13, 1e-16, 50, "strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(posterior, j, model, x, y, theta)
        value.backward(inputs=[theta])
        return value

    optimiser.step(closure)  # type: ignore[arg-type]
    torch.testing.assert_close(mode.weights, theta.detach(), rtol=1e-6, atol=1e-6)
    at = mode.weights.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(posterior, j, model, x, y, at), at)
    assert float(gradient.norm()) < 1e-7 * float(posterior.weight_prior.vector().norm() * mode.weights.norm())
    f = posterior.likelihood.canonical((model(x).flatten() + j @ (mode.weights - posterior.mean)).reshape_as(model(x)))
    expected = posterior.likelihood.statistics(f, posterior.likelihood.targets(y, f.detach()))
    torch.testing.assert_close(mode.statistics, expected)


def test_saturated_network_takes_few_newton_steps() -> None:
    """At t the curvature is next to nothing; the steps are taken under that of the present iterate."""
    model, x, y = problem("classification")
    with torch.no_grad():
        model[2].weight *= 60  # type: ignore[operator, union-attr]
        model[2].bias *= 60  # type: ignore[operator, union-attr]
        y = model(x).argmax(1)
    posterior = lapis.laplace(model, (x, y), "classification", structure="diagonal", prior=1.0)
    mode = posterior.at_tangent_mode((x, y)).tangent
    assert mode is not None
    assert mode.converged
    assert mode.iterations <= 15


def test_start_from_the_mode_of_another_prior_changes_nothing() -> None:
    model, x, y = problem("classification")
    posterior = lapis.laplace(model, (x, y), "classification", prior=1.0)
    kernel = kernel_of(posterior, x, y)
    targets = [
        posterior.likelihood.targets(batch.targets, f)
        for batch, f in zip(kernel.jacobian.batches, kernel.jacobian.outputs, strict=True)
    ]
    dual = DualModel(kernel, targets, posterior.mean)
    first = dual.minimise(posterior.likelihood, posterior.weight_prior, 1.0, 1e-16)
    for factor in (1e-4, 0.1, 1.1, 1e3):
        prior = posterior.weight_prior.with_precision(posterior.weight_prior.precision * factor)
        warm = dual.minimise(posterior.likelihood, prior, 1.0, 1e-16, first.dual)
        cold = dual.minimise(posterior.likelihood, prior, 1.0, 1e-16)
        assert warm.converged
        torch.testing.assert_close(dual.weights(warm.dual, prior), dual.weights(cold.dual, prior), rtol=1e-7, atol=1e-9)
        if factor == 1.1:
            assert warm.iterations < cold.iterations


@pytest.mark.filterwarnings("ignore:Prior group .* is switched off")
def test_tuning_at_the_mode_makes_no_pass_over_the_data() -> None:
    model, x, y = problem("classification")
    posterior = lapis.laplace(model, (x, y), "classification", structure="kronecker").at_tangent_mode((x, y))
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    handle = model.register_forward_hook(count)
    tuned = posterior.tune(groups="layer")
    handle.remove()
    assert calls == 0
    assert tuned.tuning is not None
    assert tuned.tuning.evaluations > 3
    assert tuned.tangent is not None
    assert tuned.tangent.converged


def test_float32_network_has_the_mode_of_its_double() -> None:
    model, x, y = problem("classification")
    exact = lapis.laplace(model, (x, y), "classification", prior=0.1).at_tangent_mode((x, y))
    model, x, y = problem("classification", torch.float32)
    found = lapis.laplace(model, (x, y), "classification", prior=0.1).at_tangent_mode((x, y), tolerance=1e-12)
    assert found.tangent is not None
    assert found.tangent.converged
    torch.testing.assert_close(found.mode, exact.mode, rtol=1e-4, atol=1e-4)


def test_outputs_space_is_used_while_it_fits() -> None:
    model, x, y = problem("classification")
    posterior = lapis.laplace(model, (x, y), "classification")

    def jacobian(budget: int, copies: int = 1) -> Jacobian:
        batches = [Batch(x.repeat(copies, 1), y.repeat(copies), 0)]
        return Jacobian(posterior.network, posterior.likelihood.canonical, batches, memory_budget=budget)

    needed = OutputKernel.bytes_needed(jacobian(2**30))
    assert needed == 36 * 143 * 8 + 4 * 8 * 36**2
    assert OutputKernel.suits(jacobian(needed))
    assert not OutputKernel.suits(jacobian(needed - 1))
    assert not OutputKernel.suits(jacobian(2**30, copies=2)), "72 outputs, 143 weights"


@pytest.mark.parametrize("outputs_space", [True, False])
def test_start_at_the_mode_ends_there_at_once(outputs_space: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not outputs_space:
        monkeypatch.setattr(OutputKernel, "suits", lambda jacobian: False)
    model, x, y = problem("classification")
    posterior = lapis.laplace(model, (x, y), "classification")
    first = posterior.at_tangent_mode((x, y))
    assert first.tangent is not None
    assert first.mode is not None
    assert (first.tangent.dual is not None) == outputs_space
    assert first.tangent.iterations > 1
    again = posterior.at_tangent_mode((x, y), start=first.mode)
    assert again.tangent is not None
    assert again.tangent.iterations <= 1
    torch.testing.assert_close(again.mode, first.mode, rtol=1e-6, atol=1e-8)
    away = posterior.at_tangent_mode((x, y), start=first.mode + 1.0)
    torch.testing.assert_close(away.mode, first.mode, rtol=1e-6, atol=1e-7)
    for wrong in (first.mode[1:], first.mode * torch.nan):
        with pytest.raises(lapis.OptionError, match="cannot start there"):
            posterior.at_tangent_mode((x, y), start=wrong)
