"""Sums over eigenvalues on a grid are exact, and so are the evidence's closed-form derivatives and their maximum."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.curvature.blocks import spectrum as grid
from lapis.evidence import evaluate, gradient
from lapis.posteriors.laplace.tuning.by_evidence import candidates, maximised, spectral_evidence

F64 = torch.float64


def sums(values: Tensor, counts: Tensor, scale: float, precision: float) -> Tensor:
    shifted = scale * values + precision
    determined = scale * values / shifted
    return torch.stack([counts @ shifted.log(), counts @ determined, counts @ (precision / shifted * determined)])


def assert_same_sums(found: grid.Spectrum, values: Tensor, shift: float = 0.0) -> None:
    flat = values.reshape(-1)
    assert float(found.counts.sum()) == pytest.approx(flat.numel(), rel=1e-12)
    for scale, precision in itertools.product((1e-3, 1.0, 1e4), (1e-12, 1e-4, 1.0, 300.0, 1e12)):
        expected = sums(flat, torch.ones_like(flat), scale, precision + scale * shift)
        got = sums(found.values, found.counts, scale, precision + scale * shift)
        torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-14 * flat.numel())  # may cancel
        torch.testing.assert_close(got[1:], expected[1:], rtol=1e-12, atol=0)


def lognormal(*shape: int, spread: float, seed: int = 0) -> Tensor:
    return (spread * torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)) - 3).exp()


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0, 20.0])
def test_few_grid_points_stand_for_many_eigenvalues(spread: float) -> None:
    values = lognormal(40_000, spread=spread)
    values[:100] = 0
    values[100:105] = 1e-150
    found = grid.spectrum(values)
    assert len(found.values) < 4000
    assert_same_sums(found, values)


def test_negative_eigenvalues_stay_as_they_are() -> None:
    values = torch.cat([lognormal(5000, spread=3.0), -lognormal(50, spread=0.5)])
    assert_same_sums(grid.spectrum(values), values, shift=1.0)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_spectrum_of_a_kronecker_product_is_that_of_its_products(spread: float, groups: int) -> None:
    left, right = lognormal(groups, 60, spread=spread), lognormal(groups, 90, spread=spread, seed=1)
    left[0, :5] = 0
    assert_same_sums(grid.product_spectrum(left, right), left[:, :, None] * right[:, None, :])


def test_a_factor_of_zeros_is_no_trouble() -> None:
    left, right = torch.zeros(1, 60, dtype=F64), lognormal(1, 90, spread=1.0)
    found = grid.product_spectrum(left, right)
    assert float(found.counts @ (found.values + 2.0).log()) == pytest.approx(60 * 90 * np.log(2.0))


# closed forms ---------------------------------------------------------------------------------------------------------


def posterior_of(structure: str, groups: str, likelihood: str, temperature: float) -> lapis.LaplacePosterior:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(30, 3, dtype=F64)
    y = torch.randn(30, 2, dtype=F64) if likelihood == "regression" else torch.randint(2, (30,))
    bias = {"separate": "separate", "kronecker": "joint", "ekfac": "joint"}.get(structure)
    return lapis.laplace(
        model, (x, y), likelihood, structure={"separate": "kronecker"}.get(structure, structure),
        bias=bias, prior=lapis.Prior(0.7, groups=groups, mean=0.1), temperature=temperature,
    )  # fmt: skip


def naive_evidence(posterior: lapis.LaplacePosterior, noise: bool) -> Any:
    """The evidence as a function of logarithms, with an explicit matrix and autograd."""
    prior = posterior.weight_prior
    curvature = posterior.precision() - torch.diag(prior.vector())
    index = prior.group_index()
    count = len(prior.precision)

    def value(logs: Tensor) -> Tensor:
        alpha = logs[:count].exp()[index]
        factor = logs[count].exp() if noise else torch.ones((), dtype=F64)
        changed = posterior.likelihood.with_noise(posterior.likelihood.noise * factor) if noise else None
        fit = (changed or posterior.likelihood).log_likelihood(posterior.curvature.statistics) / posterior.temperature
        distance = (alpha * (posterior.mean - prior.mean) ** 2).sum()
        return fit + 0.5 * (alpha.log().sum() - distance - torch.logdet(curvature / factor**2 + torch.diag(alpha)))

    return value


CASES = [
    (structure, groups, likelihood, temperature)
    for structure, groups, (likelihood, temperature) in itertools.product(
        ("dense", "kronecker", "separate", "diagonal", "ekfac"),
        ("one", "layer", "parameter", "weight"),
        (("regression", 1.0), ("regression", 0.3), ("classification", 2.0)),
    )
    if groups != "weight" or structure in ("dense", "diagonal")
]


def mixed(structure: str, groups: str) -> bool:
    """Whether groups share eigenvectors, so that eigenvalues do not tell the log-determinant."""
    return (structure == "dense" and groups != "one") or (structure in ("kronecker", "ekfac") and groups == "parameter")


@pytest.mark.parametrize("kept", [0, 4096], ids=["grid", "kept"])
@pytest.mark.parametrize(("structure", "groups", "likelihood", "temperature"), CASES)
def test_closed_form_derivatives_are_those_of_autograd(
    structure: str, groups: str, likelihood: str, temperature: float, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "MOST_EXACT", kept)
    posterior = posterior_of(structure, groups, likelihood, temperature)
    noise = likelihood == "regression"
    closed = spectral_evidence(posterior, noise)
    if mixed(structure, groups):
        assert closed is None
        return
    assert closed is not None
    count = len(posterior.weight_prior.precision)
    logs = torch.linspace(-1.0, 1.5, count + noise, dtype=F64)
    naive = naive_evidence(posterior, noise)
    point = closed(logs.numpy())
    assert point is not None
    assert point.spread is not None
    assert point.value == pytest.approx(float(naive(logs)), rel=1e-12)
    slope = torch.autograd.functional.jacobian(naive, logs)
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    close(torch.from_numpy(point.slope), slope)
    hessian = -torch.diag(torch.from_numpy(0.5 * (point.spread + point.penalty)))
    if noise:
        assert point.errors is not None
        across = -torch.from_numpy(point.spread)[:, None]
        corner = torch.full((1, 1), -2 * (point.spread.sum() + point.errors), dtype=F64)
        hessian = torch.cat([torch.cat([hessian, across], 1), torch.cat([across.T, corner], 1)])
    close(hessian, torch.autograd.functional.hessian(naive, logs))


@pytest.mark.parametrize("groups", ["one", "layer", "parameter"])
@pytest.mark.parametrize("structure", ["dense", "kronecker", "separate", "diagonal", "ekfac"])
def test_log_evidence_can_be_differentiated_twice(structure: str, groups: str) -> None:
    posterior = posterior_of(structure, groups, "regression", 0.8)

    def value(precision: Tensor, noise: Tensor) -> Tensor:
        return posterior.with_prior(lapis.Prior(precision, groups=groups)).with_noise(noise).log_evidence()

    precision = torch.linspace(0.5, 2.0, len(posterior.weight_prior.precision), dtype=F64, requires_grad=True)
    noise = torch.tensor(0.8, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(value, (precision, noise))
    assert torch.autograd.gradgradcheck(value, (precision, noise))


@pytest.mark.parametrize(
    ("structure", "groups", "likelihood", "temperature"), [case for case in CASES if not mixed(case[0], case[1])]
)
def test_newton_ends_where_l_bfgs_does(structure: str, groups: str, likelihood: str, temperature: float) -> None:
    posterior = posterior_of(structure, groups, likelihood, temperature)
    noise = likelihood == "regression"
    tuned, _ = maximised(posterior, "gradient", noise, 200, None)  # one factor of all noises
    assert tuned.tuning is not None
    assert tuned.tuning.reason.startswith("Newton")
    assert tuned.tuning.iterations <= 15
    by_slope = partial(evaluate, candidates(posterior, len(posterior.weight_prior.precision), noise))
    start = posterior.weight_prior.precision.log().numpy()
    first = by_slope(np.append(start, 0.0) if noise else start)
    assert first is not None
    other = gradient.ascend(by_slope, first, max_iterations=200, tolerance=1e-8)
    assert tuned.tuning.log_evidence >= other.point.value - 1e-9
    np.testing.assert_allclose(
        tuned.weight_prior.precision.log().numpy(), other.point.logs[: len(start)], rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("method", ["gradient", "fixed_point"])
def test_tuning_a_precision_for_every_weight_ends_finite_and_higher(method: str) -> None:
    posterior = posterior_of("diagonal", "weight", "regression", 1.0)
    tuned = posterior.tune(method=method)
    assert tuned.tuning is not None
    assert tuned.tuning.converged, tuned.tuning
    assert list(tuned.tuning.trace) == sorted(tuned.tuning.trace)
    assert tuned.tuning.log_evidence > tuned.tuning.start
    assert bool(torch.isfinite(tuned.weight_prior.precision).all())


@pytest.mark.filterwarnings("ignore:Prior group 'all' is switched off")
def test_curvature_with_negative_eigenvalues_never_leaves_its_range() -> None:
    """The evidence then has no upper limit: it grows towards the precision that makes the posterior singular."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.randn(20, 2, dtype=F64)
    data = x, (2 * x[:, :1]).sin() + 2
    posterior = lapis.laplace(model, data, "regression", curvature="hessian", prior=500.0)
    lowest = float(torch.linalg.eigvalsh(posterior.precision())[0]) - 500
    assert lowest < -1
    with pytest.warns(lapis.LapisWarning, match="before it converged"):
        tuned = posterior.tune(noise=False)
    assert tuned.tuning is not None
    assert list(tuned.tuning.trace) == sorted(tuned.tuning.trace)
    assert tuned.tuning.log_evidence > tuned.tuning.start
    assert float(torch.linalg.eigvalsh(tuned.precision())[0]) > 0
