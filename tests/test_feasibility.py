"""Searches meet points where nothing can be factorised: they go on, and errors are Lapis' own."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.curvature.products.kernel import KernelCholesky
from lapis.errors import LapisError, LapisWarning, NotPositiveDefiniteError
from lapis.evidence.point import Point
from lapis.evidence.tuning import tune


def sine(n: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, n, dtype=torch.float64)[:, None]
    return x, torch.sin(2 * x) + 0.1 * torch.randn(n, 1, dtype=torch.float64)


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        (model(x) - y).square().mean().backward()
        optimiser.step()
    return model.eval()


@pytest.mark.parametrize("method", ["gradient", "fixed_point"])
def test_tuning_at_the_tangent_mode_passes_points_that_cannot_be_factorised(method: str) -> None:
    """Normalised groups of a network with two batch norms: an early step asks for precisions far too small."""
    x, y = sine()
    layers = (nn.Linear(1, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Tanh())
    model = trained(nn.Sequential(*layers, nn.Linear(20, 1)).double(), x, y, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapisWarning)  # of groups that are only roughly free of scale
        prior = lapis.Prior(1.0, groups="normalised")
        start = lapis.laplace(model, (x, y), "regression", structure="dense", prior=prior).at_tangent_mode((x, y))
        tuned = start.tune(method=method)  # type: ignore[arg-type]
    assert tuned.tuning is not None
    assert tuned.tuning.converged
    assert float(tuned.log_evidence().detach()) > float(start.log_evidence().detach()) + 50
    assert float(tuned.likelihood.noise or 0) == pytest.approx(0.1, rel=0.2)


def test_a_search_begins_at_larger_precisions_where_it_can_begin() -> None:
    """-(log alpha - 8)^2, known above log alpha = 3 only, from a start far below."""

    def evaluate(logs: np.ndarray) -> Point | None:
        if logs[0] < 3:
            return None
        gap = logs - 8
        return Point(logs, -float(gap @ gap), -2 * gap, np.ones(1), None)

    best, record, _ = tune(evaluate, torch.tensor([1e-6]), ["all"], torch.full((1,), 3.0))
    assert float(best.log()) == pytest.approx(8, abs=1e-5)
    assert record.converged
    with pytest.raises(NotPositiveDefiniteError, match="whatever the prior"):
        tune(lambda logs: None, torch.ones(1), ["all"], torch.ones(1))


def test_factorisations_that_fail_are_explained() -> None:
    rows = torch.randn(6, 3, dtype=torch.float64)
    kernel = 1e30 * rows @ rows.mT
    with pytest.raises(NotPositiveDefiniteError, match=r"Expected.*Got.*Do"):
        KernelCholesky(kernel, [torch.eye(1, dtype=torch.float64).expand(6, 1, 1, 1)])
    x, y = torch.randn(30, 4), torch.randn(30, 1)
    posterior = lapis.laplace(nn.Linear(4, 1), (x, y), "regression", structure="lowrank")
    (block,) = posterior.curvature.blocks
    block.load({"values": block.values, "vectors": block.vectors[:1].expand_as(block.vectors)})  # type: ignore[attr-defined]
    with pytest.raises(NotPositiveDefiniteError, match=r"Expected.*Got.*Do"):
        posterior.with_prior(1e-20).predict(x)


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal", "ekfac", "lowrank"])
def test_curvature_that_overflows_is_an_error_of_the_fit(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # small ones do not: they use float64
    for name in ("dense.gram.EXACT_SIZE", "kronecker.factors.EXACT_WIDTH", "leading.FEW"):
        monkeypatch.setattr(f"lapis.curvature.blocks.{name}", 0)
    x, y = 1e30 * torch.randn(20, 3), torch.randn(20, 1)
    with pytest.raises(LapisError, match=r"finite.*Do"):
        lapis.laplace(
            nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), (x, y), "regression", structure=structure
        )


def test_a_custom_likelihood_without_second_derivatives_says_so() -> None:
    likelihood = lapis.likelihoods.Custom(lambda f, y: ((f - y).abs() ** 1.5).sum())
    x = torch.randn(5, 2)
    model = nn.Linear(2, 1)
    with pytest.raises(LapisError, match="not finite"):
        lapis.laplace(model, (x, model(x).detach()), likelihood, structure="dense")


def test_a_low_rank_posterior_without_eigenpairs_is_its_prior() -> None:
    x, y = 1e-3 * torch.randn(10, 2, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Tanh(), nn.Linear(3, 1, bias=False)).double()
    posterior = lapis.laplace(model, (x, y), "regression", structure="lowrank", prior=1e4)
    assert not len(posterior.curvature.blocks[0].state()["values"])
    jacobian = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(model(row)[0], list(model.parameters()))]) for row in x]
    )
    torch.testing.assert_close(posterior.predict(x).latent.variance[:, 0, 0], jacobian.square().sum(1) / 1e4)


EVERY = ["dense", "kronecker", "diagonal", "ekfac", "lowrank", "implicit"]


@pytest.mark.parametrize("structure", EVERY)
@pytest.mark.parametrize("case", ["perfect fit", "one example", "weights at the prior's mean"])
def test_tuning_always_returns_a_posterior(structure: str, case: str) -> None:
    """Where the data leave hyperparameters undetermined there are warnings, and predictions all the same."""
    x, y = torch.randn(8, 2, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    if case == "perfect fit":
        y = model(x).detach()
    elif case == "one example":
        x, y = x[:1], y[:1]
    else:
        with torch.no_grad():
            model[2].weight.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapisWarning)
        posterior = lapis.laplace(model, (x, y), "regression", structure=structure, prior=lapis.Prior(1.0, "layer"))
        found = [posterior.tune()]
        if case == "perfect fit" and structure in ("dense", "implicit"):
            found.append(posterior.at_tangent_mode((x, y)).tune())
        for tuned in found:
            assert bool(torch.isfinite(tuned.predict(x).variance).all())


def test_a_tuned_posterior_can_be_factorised() -> None:
    """Inputs of 1e9: at the precision of highest evidence the condition number is 1e19, too much for float64."""
    x = 1e9 * torch.randn(3, 8, dtype=torch.float64)
    model = nn.Linear(8, 1).double()
    y = model(x).detach() + torch.randn(3, 1, dtype=torch.float64)
    posterior = lapis.laplace(model, (x, y), "regression", structure="dense")
    with pytest.warns(LapisWarning, match="raised by a factor"):
        tuned = posterior.tune(noise=False)
    assert bool(torch.isfinite(tuned.predict(x).variance).all())
    assert tuned.tuning is not None
    assert tuned.tuning.log_evidence == pytest.approx(float(tuned.log_evidence()))


def test_the_mode_is_reached_where_curvature_is_the_fisher_information() -> None:
    """Steps with it are no Newton steps: they converge linearly, not to rounding."""
    x, y = sine()
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    posterior = lapis.laplace(model, (x, y), "heteroscedastic", structure="dense").at_tangent_mode((x, y))
    assert posterior.tangent is not None
    assert posterior.tangent.converged


def test_the_mode_is_found_where_the_posterior_cannot_be_factorised() -> None:
    """And tuning from there begins at larger precisions."""
    x = 1e4 * torch.randn(40, 12, dtype=torch.float64)[:, [*range(6), *range(6)]]  # every input twice: rank 6
    model = nn.Linear(12, 1).double()
    y = model(x).detach() + torch.randn(40, 1, dtype=torch.float64)
    posterior = lapis.laplace(model, (x, y), "regression", structure="dense", prior=1e-9)
    with pytest.raises(NotPositiveDefiniteError):
        posterior.predict(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapisWarning)
        found = posterior.at_tangent_mode((x, y), max_products=200)
        tuned = found.tune()
    assert found.tangent is not None
    assert float(tuned.weight_prior.precision) > 1e-9
    assert bool(torch.isfinite(tuned.predict(x).variance).all())
