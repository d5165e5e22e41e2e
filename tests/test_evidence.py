"""Tuning by the evidence: MacKay's equations hold where it ends, and the tangent model's mode is its mode."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.batches import digest

METHODS = ("gradient", "fixed_point")


@pytest.fixture(autouse=True)
def _double() -> object:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def sine(n: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, n)[:, None]
    return x, (3 * x).sin() + 0.1 * torch.randn(n, 1)


def classes(n: int = 30) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3)
    return x, (x @ torch.randn(3, 3) + 0.5 * torch.randn(n, 3)).argmax(1)


def trained(model: nn.Sequential, x: Tensor, y: Tensor, steps: int = 100) -> nn.Sequential:
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    loss = nn.functional.mse_loss if y.is_floating_point() else nn.functional.cross_entropy
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    return model.eval()


def mlp(inputs: int = 1, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


def orthogonal_regression(n: int = 60, p: int = 4) -> tuple[Tensor, Tensor, float, float]:
    """X^T X = n I, so that the evidence's optimum has a closed form: (X, y, alpha, noise).

    X^T y / sqrt(n) ~ N(0, (n / alpha + noise^2) I_p), and the n - p other directions of y are noise alone.
    """
    x = torch.linalg.qr(torch.randn(n, p))[0] * n**0.5
    y = x @ torch.randn(p, 1) + 0.5 * torch.randn(n, 1)
    inside = float((x.T @ y).square().sum()) / n
    noise = (float(y.square().sum()) - inside) / (n - p)
    return x, y, n / (inside / p - noise), noise**0.5


def equations(posterior: lapis.LaplacePosterior) -> tuple[Tensor, Tensor]:
    """Both sides of alpha_g |theta_g - m_g|^2 = gamma_g and, last, of SSE / noise^2 = n - T gamma."""
    prior = posterior.weight_prior
    weights, statistics = posterior.evidence_point()
    left = [prior.precision * prior.squared_distance(weights)]
    gamma = posterior.effective_parameters(per_group=True)
    right = [gamma]
    if posterior.likelihood.noise is not None:
        errors, counts = statistics.chunk(2)
        left.append((errors.sum() / posterior.likelihood.noise**2).reshape(1))
        right.append((counts.sum() - posterior.temperature * gamma.sum()).reshape(1))
    return torch.cat(left), torch.cat(right)


# tuning at t ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", ["one", "layer", "parameter"])
@pytest.mark.parametrize("structure", ["dense", "kronecker", "ekfac", "diagonal"])
@pytest.mark.parametrize("method", METHODS)
def test_mackays_equations_hold_where_tuning_ends(method: str, structure: str, groups: str) -> None:
    posterior = lapis.laplace(mlp(), sine(), "regression", structure=structure).tune(method=method, groups=groups)
    left, right = equations(posterior)
    assert posterior.tuning is not None
    assert posterior.tuning.converged, posterior.tuning
    torch.testing.assert_close(left, right, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(torch.tensor(posterior.tuning.gamma), right[: len(posterior.tuning.gamma)])
    assert len(posterior.tuning.groups) == {"one": 1, "layer": 2, "parameter": 4}[groups]


@pytest.mark.parametrize("method", METHODS)
def test_equations_hold_for_classification_and_at_other_temperatures(method: str) -> None:
    cold = lapis.laplace(mlp(3, 3), classes(), "classification", temperature=0.5).tune(method=method, groups="layer")
    torch.testing.assert_close(*equations(cold), rtol=2e-5, atol=2e-5)
    warm = lapis.laplace(mlp(), sine(), "regression", temperature=2.0).tune(method=method)
    torch.testing.assert_close(*equations(warm), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_evidence_never_falls_and_the_record_agrees_with_the_posterior(method: str) -> None:
    start = lapis.laplace(mlp(), sine(), "regression", prior=lapis.Prior(1e3, groups="parameter"))
    tuned = start.tune(method=method)
    tuning = tuned.tuning
    assert tuning is not None
    assert list(tuning.trace) == sorted(tuning.trace)
    assert len(tuning.trace) == tuning.iterations + 1
    assert tuning.start == pytest.approx(float(start.log_evidence()))
    assert tuning.trace[-1] == pytest.approx(tuning.log_evidence)
    assert float(tuned.log_evidence()) == pytest.approx(tuning.log_evidence, abs=1e-9)


def test_both_methods_find_the_same_optimum() -> None:
    posterior = lapis.laplace(mlp(), sine(), "regression", prior=lapis.Prior(1.0, groups="layer"))
    one, two = (posterior.tune(method=method) for method in METHODS)
    torch.testing.assert_close(one.weight_prior.precision, two.weight_prior.precision, rtol=1e-4, atol=0)
    torch.testing.assert_close(one.likelihood.noise, two.likelihood.noise, rtol=1e-4, atol=0)


def test_noise_stays_when_it_is_not_to_be_tuned() -> None:
    posterior = lapis.laplace(mlp(), sine(), lapis.Gaussian(0.3)).tune(method="fixed_point", noise=False)
    assert float(posterior.likelihood.noise) == 0.3
    assert float(posterior.effective_parameters()) == pytest.approx(
        float(posterior.weight_prior.precision[0] * posterior.mean.square().sum()), rel=1e-6
    )


def test_new_groups_start_where_their_weights_have_the_expected_length() -> None:
    model = nn.Linear(2, 1)
    posterior = lapis.laplace(model, (torch.randn(9, 2), torch.randn(9, 1)), "regression")
    with pytest.warns(lapis.LapisWarning, match="before it converged"):
        tuned = posterior.tune(groups="parameter", max_iterations=1)
    start = torch.stack([2 / model.weight.detach().square().sum(), 1 / model.bias.detach().square().sum()])
    expected = posterior.with_prior(lapis.Prior(start, groups="parameter"))
    assert tuned.tuning is not None
    assert tuned.tuning.start == pytest.approx(float(expected.log_evidence()))


def test_stopping_early_is_told() -> None:
    posterior = lapis.laplace(mlp(), sine(), "regression", prior=1e4)
    with pytest.warns(lapis.LapisWarning, match="before it converged: still moving after 2 iterations"):
        tuned = posterior.tune(method="fixed_point", max_iterations=2)
    assert tuned.tuning is not None
    assert not tuned.tuning.converged


@pytest.mark.parametrize("options", [{"method": "newton"}, {"max_iterations": 0}, {"tolerance": -1.0}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    posterior = lapis.laplace(mlp(), sine(), "regression")
    with pytest.raises(lapis.OptionError):
        posterior.tune(**options)  # type: ignore[arg-type]


# degenerate cases ----------------------------------------------------------------------------------------------------


def assert_finite(posterior: lapis.LaplacePosterior) -> None:
    assert bool(torch.isfinite(posterior.weight_prior.precision).all())
    assert bool(torch.isfinite(posterior.log_evidence()))
    assert bool(torch.isfinite(posterior.likelihood.noise).all())
    assert bool(torch.isfinite(posterior.effective_parameters()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal"])
def test_perfect_fit_ends_finite_with_a_warning(method: str, structure: str) -> None:
    x = torch.randn(20, 3)
    model = nn.Linear(3, 1)
    posterior = lapis.laplace(model, (x, model(x).detach()), "regression", structure=structure)
    with pytest.warns(lapis.LapisWarning) as said:
        tuned = posterior.tune(method=method)
    assert_finite(tuned)
    assert any("fit is perfect" in str(one.message) for one in said), [str(one.message) for one in said]


@pytest.mark.parametrize("method", METHODS)
def test_zero_weights_end_finite_with_a_warning(method: str) -> None:
    model = mlp()
    nn.init.zeros_(model[2].bias)
    posterior = lapis.laplace(model, sine(), "regression")
    with pytest.warns(lapis.LapisWarning, match=r"'2.bias' has weights exactly at the prior's mean"):
        tuned = posterior.tune(method=method, groups="parameter")
    assert_finite(tuned)


@pytest.mark.parametrize("method", METHODS)
def test_weights_without_data_end_finite_with_a_warning(method: str) -> None:
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 1))
    x = torch.zeros(12, 2)
    posterior = lapis.laplace(model, (x, torch.randn(12, 1)), "regression")
    with pytest.warns(lapis.LapisWarning, match="'0' is not determined by the data"):
        tuned = posterior.tune(method=method, groups="layer")
    assert_finite(tuned)


@pytest.mark.parametrize("method", METHODS)
def test_weights_determined_by_data_alone_end_finite_with_a_warning(method: str) -> None:
    x = 1e5 * torch.randn(200, 2)
    y = x @ torch.tensor([[1.0], [2.0]]) + torch.randn(200, 1)
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    posterior = lapis.laplace(model, (x, y), "regression")
    with pytest.warns(lapis.LapisWarning, match="determined by the data alone"):
        tuned = posterior.tune(method=method)
    assert_finite(tuned)
    assert float(tuned.effective_parameters()) == pytest.approx(2.0, abs=1e-6)


# normalised weights --------------------------------------------------------------------------------------------------


class Standardised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean(1, True)) / self.weight.std(1, keepdim=True)
        return nn.functional.linear(x, weight, self.bias)


torch.manual_seed(0)  # unlucky weights make epsilon felt: not other ones in every run
NORMS = {
    "batch": (nn.Linear(4, 6), nn.BatchNorm1d(6), ["0.weight", "0.bias"]),
    "layer": (nn.Linear(4, 6), nn.LayerNorm(6), ["0.weight", "0.bias"]),
    "group": (nn.Linear(4, 6, bias=False), nn.GroupNorm(2, 6), ["0.weight"]),
    "rms": (nn.Linear(4, 6), nn.RMSNorm(6), ["0.weight", "0.bias"]),
    "standardised": (Standardised(4, 6), nn.Identity(), ["0.weight"]),
    "weight norm": (
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
        nn.Identity(),
        ["0.parametrizations.weight.original1"],
    ),
    "none": (nn.Linear(4, 6), nn.Tanh(), None),
}


@pytest.mark.parametrize("kind", list(NORMS))
def test_normalised_weights_are_found_and_others_are_not(kind: str) -> None:
    layer, norm, expected = NORMS[kind]
    model = nn.Sequential(layer, norm, nn.Tanh(), nn.Linear(6, 2)).double()
    before = copy.deepcopy(model.state_dict())
    groups = lapis.normalised_groups(model, torch.randn(12, 4))
    others = groups.pop("others")
    assert list(groups.values()) == ([] if expected is None else [expected])
    assert sorted([*others, *(expected or [])]) == sorted(dict(model.named_parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_residual_branches_are_not_scale_free_but_blocks_inside_them_are() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.outer, self.last = (
                nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)
            )  # fmt: skip
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.last(x + self.outer(self.norm(self.inner(x)).tanh())))

    assert set(lapis.normalised_groups(Block(), torch.randn(9, 4))) == {"inner", "others"}


def test_prior_takes_normalised_groups_by_name() -> None:
    model = nn.Sequential(nn.Linear(1, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1))
    by_name = lapis.laplace(model, sine(), "regression", prior=lapis.Prior(2.0, groups="normalised"))
    by_hand = lapis.laplace(model, sine(), "regression").tune(groups=lapis.normalised_groups(model, sine()[0]))
    assert by_name.weight_prior.labels == by_hand.weight_prior.labels == ("0", "others")


# the tangent model's mode --------------------------------------------------------------------------------------------


def explicit_gradient(
    model: nn.Module, x: Tensor, y: Tensor, theta: Tensor, posterior: lapis.LaplacePosterior
) -> Tensor:
    """Gradient of the tangent model's loss, with an explicit Jacobian by autograd."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(parameters)
    flat = torch.cat([part.reshape(*model(x).shape, -1) for part in jacobian.values()], -1)
    moved = theta.clone().requires_grad_()
    f = model(x).detach() + flat @ (moved - posterior.mean)
    canonical = posterior.likelihood.canonical(f)
    loss = posterior.likelihood.nll(canonical, posterior.likelihood.targets(y, canonical)).sum() / posterior.temperature
    loss = loss + 0.5 * (posterior.weight_prior.vector() * moved**2).sum()
    return torch.autograd.grad(loss, moved)[0]


CASES = {
    "regression": lambda: (mlp(), *sine()),
    "classification": lambda: (mlp(3, 3), *classes()),
    "binary": lambda: (mlp(3, 1), (x := classes()[0]), (x[:, :1] > 0).double()),
    "poisson": lambda: (mlp(), (x := sine()[0]), torch.poisson((2 * x).exp())),
}


@pytest.mark.parametrize("structure", ["dense", "kronecker", "ekfac", "diagonal"])
@pytest.mark.parametrize("likelihood", list(CASES))
def test_gradient_vanishes_at_the_tangent_mode(likelihood: str, structure: str) -> None:
    model, x, y = CASES[likelihood]()
    prior = lapis.Prior(0.1, groups="layer")
    posterior = lapis.laplace(model, (x, y), likelihood, structure=structure, prior=prior, temperature=0.7)
    found = posterior.at_tangent_mode((x, y), batch_size=7)
    assert found.tangent is not None
    assert found.tangent.converged, found.tangent
    assert found.mode is not None
    scale = explicit_gradient(model, x, y, posterior.mean, posterior).norm()
    assert explicit_gradient(model, x, y, found.mode, posterior).norm() < 1e-5 * scale
    torch.testing.assert_close(found.mean, posterior.mean)
    torch.testing.assert_close(found.predict(x).f_mean, model(x).detach())


def test_evidence_at_the_tangent_mode_of_a_linear_model_is_exact_wherever_it_was_trained_to() -> None:
    x, y = torch.randn(25, 3), torch.randn(25, 1)
    posterior = lapis.laplace(nn.Linear(3, 1, bias=False), (x, y), lapis.Gaussian(0.7), prior=2.0)
    covariance = x @ x.T / 2.0 + 0.49 * torch.eye(25)
    exact = torch.distributions.MultivariateNormal(torch.zeros(25), covariance).log_prob(y[:, 0])
    torch.testing.assert_close(posterior.at_tangent_mode((x, y)).log_evidence(), exact)
    assert float(posterior.log_evidence()) < float(exact) - 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", ["dense", "kronecker"])
def test_linear_regression_reaches_the_analytic_optimum(method: str, structure: str) -> None:
    x, y, alpha, noise = orthogonal_regression()
    posterior = lapis.laplace(nn.Linear(4, 1, bias=False), (x, y), "regression", structure=structure, prior=30.0)
    tuned = posterior.at_tangent_mode((x, y)).tune(method=method)
    assert float(tuned.weight_prior.precision[0]) == pytest.approx(alpha, rel=1e-6)
    assert float(tuned.likelihood.noise) == pytest.approx(noise, rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_joint_iteration_ends_stationary_in_mode_prior_and_noise(likelihood: str, method: str) -> None:
    model, x, y = CASES[likelihood]()
    posterior = lapis.laplace(trained(model, x, y), (x, y), likelihood)
    tuned = posterior.at_tangent_mode((x, y)).tune(method=method)
    assert tuned.tuning is not None
    assert tuned.tuning.converged, tuned.tuning
    torch.testing.assert_close(*equations(tuned), rtol=1e-4, atol=1e-4)
    assert tuned.mode is not None
    scale = explicit_gradient(model, x, y, tuned.mean, tuned).norm()
    assert explicit_gradient(model, x, y, tuned.mode, tuned).norm() < 1e-4 * scale


def rescaled(model: nn.Sequential, k: float) -> nn.Sequential:
    """The same function: a normalised layer's weights, and what batch norm remembers of them, times k."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight *= k
        other[0].bias *= k
        if isinstance(other[1], nn.BatchNorm1d):
            other[1].running_mean *= k
            other[1].running_var *= k * k
    return other


@pytest.mark.filterwarnings("ignore:Prior group .* is switched off")  # and stays so at any scale
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_rescaling_a_normalised_group_is_felt_unless_it_has_its_own_precision(norm: str) -> None:
    x, y = sine()
    y = y + 0.5 * (7 * x).cos()
    layer = nn.BatchNorm1d(12, eps=1e-12) if norm == "batch" else nn.LayerNorm(12, eps=1e-12)
    model = trained(nn.Sequential(nn.Linear(1, 12), layer, nn.Tanh(), nn.Linear(12, 1)), x, y)
    at = torch.linspace(-1.5, 1.5, 7)[:, None]

    def variance(k: float, groups: str) -> Tensor:
        network = rescaled(model, k)
        torch.testing.assert_close(network(at), model(at))
        posterior = lapis.laplace(network, (x, y), "regression").at_tangent_mode((x, y))
        return posterior.tune(groups=groups).functional_variance(at, diagonal=True)

    for k in (0.1, 10.0):
        torch.testing.assert_close(variance(k, "normalised"), variance(1.0, "normalised"), rtol=1e-3, atol=0)
        change = (variance(k, "one") / variance(1.0, "one") - 1).abs().max()
        assert float(change) > 0.05, "one precision should have felt the scale"


def test_mode_that_was_not_reached_is_told() -> None:
    model, x, y = CASES["classification"]()
    posterior = lapis.laplace(model, (x, y), "classification", structure="diagonal")
    with pytest.warns(lapis.LapisWarning, match="mode was not reached: 3 passes"):
        found = posterior.at_tangent_mode((x, y), max_products=3)
    assert found.tangent is not None
    assert not found.tangent.converged


def test_a_far_start_does_not_excuse_a_far_end() -> None:
    """The tolerance is relative to the loss that is left, not to that of the start, here 10^12 times as large."""
    x = torch.randn(60, 30) @ torch.diag(torch.linspace(0.01, 1.0, 30)) @ torch.randn(30, 30)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(60, 1)
    model = nn.Linear(30, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(3e5)
    posterior = lapis.laplace(model, (x, y), lapis.Gaussian(1.0), structure="diagonal", prior=0.01)
    found = posterior.at_tangent_mode((x, y), tolerance=1e-7)
    precision = x.T @ x + 0.01 * torch.eye(30)
    error = found.mode - torch.linalg.solve(precision, x.T @ y)[:, 0]
    assert found.tangent.converged
    assert float(0.5 * error @ precision @ error) < 1e-3


def test_other_data_than_those_of_the_fit_are_refused() -> None:
    x, y = sine()
    posterior = lapis.laplace(mlp(), (x, y), "regression")
    with pytest.raises(lapis.DataError, match="not the data"):
        posterior.at_tangent_mode((x, y + 1e-3))
    shuffled = torch.randperm(len(x))
    posterior.at_tangent_mode((x[shuffled], y[shuffled]))


def test_changing_prior_noise_or_data_takes_the_evidence_back_to_t() -> None:
    x, y = sine()
    posterior = lapis.laplace(mlp(), (x, y), "regression").at_tangent_mode((x, y))
    for changed in (posterior.with_prior(2.0), posterior.with_noise(0.5), posterior.update((x, y))):
        assert changed.mode is None


def test_files_keep_the_tangent_mode(tmp_path: Path) -> None:
    x, y = sine()
    model = mlp()
    posterior = lapis.laplace(model, (x, y), "regression").at_tangent_mode((x, y)).tune()
    posterior.save(tmp_path / "p.lapis")
    loaded = lapis.load(tmp_path / "p.lapis", model)
    torch.testing.assert_close(loaded.log_evidence(), posterior.log_evidence())
    assert loaded.tuning == posterior.tuning
    assert loaded.tangent is not None
    assert loaded.tangent.reason == posterior.tangent.reason  # type: ignore[union-attr]
    with pytest.raises(lapis.OptionError, match="data are not at hand"):
        loaded.tune()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.at_tangent_mode((x, y)).tune()


def test_fingerprint_of_data_ignores_order_batching_layout_and_precision_and_nothing_else() -> None:
    x, y = torch.randn(10, 2, 3), torch.randint(0, 4, (10,))
    whole = digest(x, y)
    order = torch.randperm(10)
    assert digest(x[order], y[order]) == whole
    assert (digest(x[:4], y[:4]) + digest(x[4:], y[4:])) % 2**64 == whole
    assert digest(x.reshape(10, 6).float(), y[:, None]) == whole
    assert digest(x, y.roll(1)) != whole
    assert digest(x.flip(2), y) != whole
    assert digest(torch.cat([x, x]), torch.cat([y, y])) != whole
