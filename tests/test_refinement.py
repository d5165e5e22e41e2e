"""Refinement: the best Gaussian for the tangent model, against naive float64 references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.posteriors.laplace.matrix_free import direct
from lapis.predictions.expectations import expectations, hessian_factor

STRUCTURES = ("dense", "diagonal", "kronecker", "ekfac", "lowrank", "implicit")


def classes(n: int = 40, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A small trained classifier in float64, and its data."""
    torch.manual_seed(seed)
    x = torch.randn(n, 3, dtype=torch.float64)
    y = (x @ torch.randn(3, 3, dtype=torch.float64) + torch.randn(n, 3, dtype=torch.float64)).argmax(-1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return trained(model, x, lambda f: nn.functional.cross_entropy(f, y)), (x, y)


def trained(model: nn.Module, x: Tensor, loss: object, steps: int = 150) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(x)).backward()  # type: ignore[operator]
        optimiser.step()
    return model


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """J (N, C, P), one backward pass for each output."""
    rows = []
    for each in x:
        f = model(each[None])[0]
        grads = [torch.autograd.grad(one, list(model.parameters()), retain_graph=True) for one in f]
        rows.append(torch.stack([torch.cat([part.flatten() for part in grad]) for grad in grads]))
    return torch.stack(rows)


def softmax_moments(mean: Tensor, covariance: Tensor, y: int, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E[log p], E[gradient], E[Hessian] by brute force over white draws."""
    values, vectors = torch.linalg.eigh(covariance)
    f = mean + draws @ (vectors * values.clamp_min(0).sqrt()).T
    p = f.softmax(-1)
    hessian = torch.diag(p.mean(0)) - p.T @ p / len(p)
    return f.log_softmax(-1)[:, y].mean(), p.mean(0) - nn.functional.one_hot(torch.tensor(y), len(mean)), hessian


# expectations --------------------------------------------------------------------------------------


def test_expectations_of_a_gaussian_likelihood_are_exact() -> None:
    torch.manual_seed(0)
    root = torch.randn(4, 1, 2, 2, dtype=torch.float64)
    mean, cov, y = torch.randn(4, 1, 2).double(), root @ root.mT, torch.randn(4, 1, 2).double()
    noise = torch.tensor([0.3, 0.7], dtype=torch.float64)
    found = expectations(lapis.Gaussian(noise), mean, cov, y)
    variance = cov.diagonal(dim1=-2, dim2=-1)
    exact = -0.5 * (((y - mean) ** 2 + variance) / noise**2 + (2 * math.pi * noise**2).log()).sum(-1)
    torch.testing.assert_close(found.log_likelihood, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.gradient, (mean - y) / noise**2, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.hessian, torch.diag(noise**-2).expand(4, 1, 2, 2), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_expectations_of_softmax_agree_with_brute_force(spread: float) -> None:
    """Fixed points against 400,000 draws; the error of the points themselves is below 0.03 in these cases."""
    torch.manual_seed(1)
    root = spread * torch.randn(3, 1, 4, 4, dtype=torch.float64)
    mean, cov, y = 2 * torch.randn(3, 1, 4).double(), root @ root.mT, torch.tensor([[0], [1], [3]])
    found = expectations(lapis.Categorical(), mean, cov, y)
    draws = torch.randn(400_000, 4, dtype=torch.float64)
    for n in range(3):
        log_p, gradient, hessian = softmax_moments(mean[n, 0], cov[n, 0], int(y[n]), draws)
        torch.testing.assert_close(found.log_likelihood[n, 0], log_p, atol=0.05 * spread, rtol=0.02)
        torch.testing.assert_close(found.gradient[n, 0], gradient, atol=0.03, rtol=0)
        torch.testing.assert_close(found.hessian[n, 0], hessian, atol=0.03, rtol=0)
    factor = hessian_factor(found.hessian)
    assert factor.shape[-1] == 3  # a softmax does not feel a common shift
    torch.testing.assert_close(factor @ factor.mT, found.hessian, atol=1e-10, rtol=0)


def test_expectations_of_one_logit_are_those_of_a_fine_grid() -> None:
    z = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    density = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    for mean, variance in ((0.3, 0.5), (-2.0, 9.0)):
        f = mean + math.sqrt(variance) * z
        at = (torch.tensor([[[mean]]]).double(), torch.tensor([[[[variance]]]]).double())
        found = expectations(lapis.Bernoulli(), *at, torch.ones(1, 1, 1).double())
        for value, exact in (
            (found.log_likelihood, (density * nn.functional.logsigmoid(f)).sum()),
            (found.gradient, (density * (f.sigmoid() - 1)).sum()),
            (found.hessian, (density * f.sigmoid() * (-f).sigmoid()).sum()),
        ):
            torch.testing.assert_close(value.squeeze(), exact, atol=2e-4, rtol=1e-3)


# linear Gaussian models ----------------------------------------------------------------------------


def linear(at_mode: bool) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    x = torch.randn(25, 3, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.3 * torch.randn(25, 1, dtype=torch.float64)
    model = nn.Linear(3, 1).double()
    if at_mode:
        design = torch.cat([x, torch.ones(25, 1, dtype=torch.float64)], 1)
        solution = torch.linalg.solve(design.T @ design / 0.09 + torch.eye(4).double(), design.T @ y / 0.09)
        with torch.no_grad():
            model.weight.copy_(solution[:3].T)
            model.bias.copy_(solution[3])
    return model, (x, y)


@pytest.mark.parametrize("structure", STRUCTURES[:-1])
def test_linear_gaussian_model_at_its_mode_is_left_as_it_was(structure: str) -> None:
    model, data = linear(at_mode=True)
    posterior = lapis.laplace(model, data, lapis.Gaussian(0.3), structure=structure)
    refined = posterior.refine(data)
    assert torch.equal(refined.mean, posterior.mean)
    assert torch.equal(refined.precision(), posterior.precision())
    if structure == "dense":
        torch.testing.assert_close(refined.elbo(), posterior.log_evidence(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(refined.log_evidence(), refined.elbo())


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal", "implicit"])
def test_linear_gaussian_model_off_its_mode_moves_to_the_exact_mean(structure: str) -> None:
    model, data = linear(at_mode=False)
    posterior = lapis.laplace(model, data, lapis.Gaussian(0.3), structure=structure)
    refined = posterior.refine(data, tolerance=1e-9)
    exact, _ = linear(at_mode=True)
    weights = torch.cat([part.detach().flatten() for part in exact.parameters()])
    torch.testing.assert_close(refined.mean, weights, rtol=1e-4, atol=1e-4)
    x = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(refined.predict(x).mean, exact(x).detach(), rtol=1e-4, atol=1e-4)


# classification ------------------------------------------------------------------------------------


def test_dense_refinement_solves_the_variational_equations() -> None:
    """A = sum J^T E[H] J + Lambda and sum J^T E[gradient] + Lambda m = 0, with E by 100,000 draws, J by autograd."""
    model, (x, y) = classes()
    posterior = lapis.laplace(model, (x, y), "classification", structure="dense", prior=0.7)
    refined = posterior.refine((x, y), tolerance=1e-8, max_rounds=60)
    j, f = jacobian(model, x), model(x).detach()
    covariance = torch.linalg.inv(refined.precision())
    draws = torch.randn(100_000, 3, dtype=torch.float64)
    precision = 0.7 * torch.eye(posterior.n_weights, dtype=torch.float64)
    gradient, value = 0.7 * refined.mean, 0.0
    for n in range(len(x)):
        mean, own = f[n] + j[n] @ (refined.mean - posterior.point), j[n] @ covariance @ j[n].T
        log_p, slope, hessian = softmax_moments(mean, own, int(y[n]), draws)
        precision, gradient, value = precision + j[n].T @ hessian @ j[n], gradient + slope @ j[n], value + float(log_p)
    scale = refined.precision().diagonal()
    assert float(((precision - refined.precision()).abs() / (scale[:, None] * scale).sqrt()).max()) < 0.05
    assert float(gradient @ covariance @ gradient) < 0.05
    divergence = 0.5 * (
        0.7 * (covariance.trace() + refined.mean @ refined.mean)
        - len(scale)
        - len(scale) * math.log(0.7)
        + torch.linalg.slogdet(refined.precision()).logabsdet
    )
    assert float(refined.elbo()) == pytest.approx(value - float(divergence), abs=0.3)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_refinement_raises_the_elbo_and_foretells_the_data_better(structure: str) -> None:
    model, data = classes(24)
    posterior = lapis.laplace(model, data, "classification", structure=structure, prior=0.2)
    refined = posterior.refine(data)
    record = refined.refinement
    assert record is not None
    assert record.converged
    assert record.elbo > record.start + 1
    assert all(later >= earlier for earlier, later in zip(record.trace, record.trace[1:], strict=False))
    before, after = (-p.predict(data[0]).log_prob(data[1]).mean() for p in (posterior, refined))
    assert after < before
    assert not torch.equal(refined.mean, refined.point)


@pytest.mark.parametrize("likelihood", ["binary", "poisson", "heteroscedastic", "custom"])
def test_refinement_takes_every_likelihood(likelihood: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(30, 2, dtype=torch.float64)
    outputs = 2 if likelihood == "heteroscedastic" else 1
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    y = {
        "binary": (x.sum(-1, keepdim=True) > 0).double(),
        "poisson": torch.poisson(torch.ones(30, 1)).double(),
    }.get(likelihood, torch.randn(30, 1, dtype=torch.float64))
    given = lapis.Custom(lambda f, t: (f - t).abs().square().sum(-1)) if likelihood == "custom" else likelihood
    posterior = lapis.laplace(model, (x, y), given, structure="dense")
    refined = posterior.refine((x, y))
    assert refined.refinement is not None
    assert refined.refinement.converged
    assert refined.refinement.elbo > refined.refinement.start


def test_elbo_is_a_lower_bound_of_the_exact_evidence_and_close_to_it() -> None:
    """Logistic regression with two weights: the evidence by a fine grid."""
    torch.manual_seed(4)
    x = torch.randn(15, 1, dtype=torch.float64)
    y = (x + 0.5 * torch.randn(15, 1, dtype=torch.float64) > 0).double()
    model = nn.Linear(1, 1).double()
    refined = lapis.laplace(model, (x, y), "binary", structure="dense").refine((x, y), tolerance=1e-7)
    grid = torch.linspace(-8, 8, 401, dtype=torch.float64)
    w, b = torch.meshgrid(grid, grid, indexing="ij")
    f = w[..., None] * x[:, 0] + b[..., None]
    log_p = (y[:, 0] * nn.functional.logsigmoid(f) + (1 - y[:, 0]) * nn.functional.logsigmoid(-f)).sum(-1)
    log_p = log_p - 0.5 * (w**2 + b**2) - math.log(2 * math.pi)
    evidence = float(log_p.flatten().logsumexp(0)) + 2 * math.log(float(grid[1] - grid[0]))
    assert evidence - 0.05 < float(refined.elbo()) < evidence + 1e-3


def test_batches_do_not_matter() -> None:
    model, (x, y) = classes()
    posterior = lapis.laplace(model, (x, y), "classification", structure="kronecker")
    one = posterior.refine((x, y))
    split = posterior.refine([(x[:7], y[:7]), (x[7:30], y[7:30]), (x[30:], y[30:])])
    torch.testing.assert_close(split.mean, one.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(split.elbo(), one.elbo(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["few weights", "few outputs", "positions", "noise"])
@pytest.mark.parametrize("tune", [False, True])
def test_implicit_refinement_is_the_dense_one(kind: str, tune: bool) -> None:
    """Factorised in the space of weights or of outputs."""
    torch.manual_seed(5)
    width, count, positions = {"few weights": (3, 40, ()), "positions": (40, 9, (4,))}.get(kind, (12, 14, ()))
    x = torch.randn(count, *positions, 3, dtype=torch.float64)
    y = x.sin() if kind == "noise" else (x @ torch.randn(3, 3, dtype=torch.float64)).argmax(-1)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 3)).double()
    parts = [(x[:5], y[:5]), (x[5:], y[5:])]
    likelihood = "regression" if kind == "noise" else "classification"
    dense, implicit = (lapis.laplace(model, parts, likelihood, structure=s, prior=0.5) for s in ("dense", "implicit"))
    view = implicit._with_view(True).view
    assert view is not None
    assert (view.kernel is None) == (kind == "few weights")
    one, other = (posterior.refine(parts, tune=tune, max_rounds=60) for posterior in (dense, implicit))
    for refined in (one, other):
        assert torch.equal(refined.log_evidence(), refined.elbo())
        assert f"{float(refined.elbo()):.4f}" in refined.summary()
        with pytest.raises(lapis.LapisError, match="refined posterior cannot take its evidence elsewhere"):
            refined.at_tangent_mode(parts)
    close = {"rtol": 1e-7, "atol": 1e-8}
    torch.testing.assert_close(other.mean, one.mean, **close)
    torch.testing.assert_close(other.weight_prior.precision, one.weight_prior.precision, **close)
    torch.testing.assert_close(other.elbo(), one.elbo(), **close)
    assert other.view is None
    spreads = [posterior.gaussian_process().kernel(x[:3]) for posterior in (other, one)]
    torch.testing.assert_close(*spreads, rtol=1e-6, atol=1e-7)


def test_implicit_refinement_solves_where_no_matrix_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """log |A| is then by quadrature, and what is kept is so near the dense answer only as it allows."""
    monkeypatch.setattr(direct, "MOST_WEIGHTS", 0)
    monkeypatch.setattr(direct, "MOST_OUTPUTS", 0)
    model, data = classes(10)
    dense, implicit = (
        lapis.laplace(model, data, "classification", structure=s, prior=0.5) for s in ("dense", "implicit")
    )
    assert implicit._with_view(True).view is None
    one, other = (posterior.refine(data).predict(data[0]).probs for posterior in (dense, implicit))
    torch.testing.assert_close(other, one, rtol=0, atol=0.03)


def test_prior_tuned_by_the_elbo_solves_mackays_equation() -> None:
    model, data = classes()
    tuned = lapis.laplace(model, data, "classification", structure="dense").tune()
    refined = tuned.refine(data, tolerance=1e-6, max_rounds=100)
    assert refined.refinement is not None
    assert refined.refinement.tuned
    gamma, distance = refined.effective_parameters(), refined.mean.square().sum()
    assert float(refined.weight_prior.precision) == pytest.approx(float(gamma / distance), rel=0.15)
    fixed = tuned.refine(data, tune=False)
    assert torch.equal(fixed.weight_prior.precision, tuned.weight_prior.precision)
    assert refined.elbo() >= fixed.elbo() - 1e-3


def test_files_hold_a_refined_posterior(tmp_path: object) -> None:
    model, data = classes()
    refined = lapis.laplace(model, data, "classification", structure="kronecker").refine(data)
    refined.save(f"{tmp_path}/refined.lapis")
    again = lapis.load(f"{tmp_path}/refined.lapis", model)
    assert again.refinement == refined.refinement  # type: ignore[attr-defined]
    torch.testing.assert_close(again.predict(data[0]).probs, refined.predict(data[0]).probs)


def test_what_a_refined_posterior_refuses() -> None:
    model, data = classes()
    posterior = lapis.laplace(model, data, "classification", structure="dense")
    with pytest.raises(lapis.OptionError, match="refine"):
        posterior.elbo()
    refined = posterior.refine(data)
    for call in (refined.tune, lambda: refined.update(data), lambda: refined.at_tangent_mode(data)):
        with pytest.raises(lapis.OptionError, match="refined"):
            call()
    with pytest.raises(lapis.OptionError, match="changed since"):
        refined.with_prior(3.0).elbo()
    with pytest.raises(lapis.DataError, match="not the data"):
        posterior.refine((data[0][:10], data[1][:10]))
    with pytest.raises(lapis.OptionError, match="GGN"):
        lapis.laplace(model, data, "classification", structure="dense", curvature="empirical").refine(data)
    with pytest.warns(lapis.LapisWarning, match="did not converge"):
        posterior.refine(data, max_rounds=1, tolerance=1e-9)
