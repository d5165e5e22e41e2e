"""Each output has its own noise: curvature kept apart by outputs, its sums, and tuning."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import lapis
from lapis.errors import LapisWarning
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.posteriors.laplace.tuning.own_noise import gamma_of_outputs

F64 = torch.float64
TRUE = torch.tensor([0.05, 0.5], dtype=F64)


def waves(n: int, model: nn.Module, steps: int) -> tuple[Tensor, Tensor]:
    """Two noisy functions, one of them ten times as noisy, and the network trained on them."""
    x = torch.rand(n, 1, dtype=F64) * 4 - 2
    y = torch.cat([torch.sin(2 * x), torch.cos(2 * x)], 1) + TRUE * torch.randn(n, 2, dtype=F64)
    optimiser = torch.optim.LBFGS(model.double().parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = (model(x) - y).div(TRUE).square().sum() + sum(p.square().sum() for p in model.parameters())
        value.backward()
        return value

    optimiser.step(loss)  # type: ignore[arg-type]
    return x, y


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 2))


def noise_of(posterior: LaplacePosterior) -> Tensor:
    noise = posterior.likelihood.noise
    assert noise is not None
    return noise


CASES: list[tuple[str, Any]] = [
    *((structure, "regression") for structure in ("dense", "kronecker", "diagonal", "ekfac")),
    ("dense", lapis.Gaussian(torch.tensor([2.0, 0.1]))),
]


@pytest.mark.parametrize(("structure", "likelihood"), CASES)
def test_each_outputs_noise_is_found(structure: str, likelihood: Any) -> None:
    """Within 10 % of the truth, which is three standard errors of a deviation from 500 examples; stationary in each."""
    model = mlp()
    x, y = waves(500, model, steps=120)
    start = lapis.laplace(model, (x, y), likelihood, structure=structure)
    tuned = start.tune()
    assert tuned.tuning is not None
    assert tuned.tuning.converged
    assert bool(((noise_of(tuned) / TRUE - 1).abs() < 0.1).all())
    torch.testing.assert_close(gamma_of_outputs(tuned).sum(), tuned.effective_parameters())
    best = float(tuned.log_evidence())
    assert best == pytest.approx(tuned.tuning.log_evidence, rel=1e-12)
    for output in range(2):
        for factor in (0.97, 1.03):
            other = noise_of(tuned).clone()
            other[output] *= factor
            assert float(tuned.with_noise(other).log_evidence()) < best
    assert tuned.fitted_likelihood.noise is not None
    assert start.fitted_likelihood is start.likelihood  # a value: left as it was


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal"])
@pytest.mark.parametrize("n", [6, 40])
def test_noises_of_other_proportions_are_a_refit(structure: str, n: int, tmp_path: Path) -> None:
    """Also where rows are few beside the weights, after an update, and from a file."""
    model = mlp()
    x, y = waves(n, model, steps=5)
    other = torch.tensor([0.3, 1.7], dtype=F64)
    refit = lapis.laplace(model, (x, y), lapis.Gaussian(other), structure=structure)
    changed = lapis.laplace(model, (x, y), lapis.Gaussian(0.7), structure=structure).with_noise(other)
    half = lapis.laplace(model, (x[: n // 2], y[: n // 2]), "regression", structure=structure).with_noise(2 * other)
    updated = half.update((x[n // 2 :], y[n // 2 :])).with_noise(other)
    half.save(tmp_path / "half")
    loaded = lapis.load(tmp_path / "half", model)
    assert isinstance(loaded, LaplacePosterior)
    reloaded = loaded.update((x[n // 2 :], y[n // 2 :])).with_noise(other)
    for found in (changed, updated, reloaded):
        torch.testing.assert_close(found.log_evidence(), refit.log_evidence(), rtol=1e-9, atol=0)
        torch.testing.assert_close(found.predict(x).variance, refit.predict(x).variance, rtol=1e-8, atol=0)


def test_the_optimum_of_a_linear_model_is_that_of_its_exact_evidence() -> None:
    """y_c ~ N(0, X X^T / alpha + sigma_c^2 I), maximised directly."""
    x = torch.randn(25, 3, dtype=F64)
    y = x @ torch.randn(3, 2, dtype=F64) + TRUE * torch.randn(25, 2, dtype=F64)
    model = nn.Linear(3, 2, bias=False).double()

    def negative(logs: np.ndarray) -> float:
        value = 0.0
        for output in range(2):
            covariance = x @ x.mT / math.exp(logs[0]) + math.exp(2 * logs[1 + output]) * torch.eye(25, dtype=F64)
            normal = torch.distributions.MultivariateNormal(torch.zeros(25, dtype=F64), covariance)
            value -= float(normal.log_prob(y[:, output]))
        return value

    exact = minimize(negative, np.zeros(3), method="BFGS", options={"gtol": 1e-6})
    tuned = lapis.laplace(model, (x, y), "regression", structure="dense").at_tangent_mode((x, y)).tune()
    assert float(tuned.log_evidence()) == pytest.approx(-exact.fun, rel=1e-8)
    np.testing.assert_allclose(noise_of(tuned).log().numpy(), exact.x[1:], atol=1e-3)
    assert float(tuned.weight_prior.precision.log()) == pytest.approx(exact.x[0], abs=1e-3)


def test_an_output_that_fits_perfectly_is_no_obstacle() -> None:
    x = torch.randn(30, 2, dtype=F64)
    model = nn.Linear(2, 2).double()
    y = model(x).detach() + torch.tensor([0.0, 0.3], dtype=F64) * torch.randn(30, 2, dtype=F64)
    posterior = lapis.laplace(model, (x, y), "regression", structure="dense")
    with pytest.warns(LapisWarning, match="noise of output 0 ran to the end"):
        tuned = posterior.tune()
    assert float(noise_of(tuned)[1]) == pytest.approx(0.3, rel=0.3)
    assert float(noise_of(tuned)[0]) < 1e-3
    assert bool(torch.isfinite(tuned.predict(x).variance).all())


def test_a_structure_with_one_factor_for_all_says_where_that_misleads() -> None:
    model = mlp()
    x, y = waves(60, model, steps=60)
    posterior = lapis.laplace(model, (x, y), "regression", structure="lowrank")
    with pytest.warns(LapisWarning, match="each output's own"):
        posterior.tune()
    own = lapis.laplace(model, (x, y), lapis.Gaussian(TRUE), structure="lowrank")
    own.tune()  # these proportions are right
