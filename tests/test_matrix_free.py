"""Low-rank, implicit and drawn posteriors against dense float64 matrices, for every network of the table of cases.

Exact quantities must agree to 1e-8; estimates within three of their standard errors; draws pass chi-square tests. False
alarms: an estimate has three independent chances, each with at most 2 % (a t variable with seven degrees of freedom
beyond 3), so 1e-5 a case; each chi-square test has 1e-6.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn

import lapis
from cases import CASES
from lapis.posteriors import drawing
from reference import case_data, case_ggn, case_jacobians
from untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

F64 = torch.float64
PRECISION = 0.8
every_case = pytest.mark.parametrize("name", list(CASES))
MANY_OUTPUTS = 16
"""Variances, one solve an output, are checked for networks with at most this many outputs an example."""


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def implicit(name: str, space: str = "auto") -> lapis.ImplicitPosterior:
    if space != "auto":
        return implicit(name).with_solver(space=space)
    model, x, y, spec = case_data(name)
    prior = lapis.Prior(PRECISION, "parameter")
    posterior = lapis.laplace(model, (x, y), spec.build(), structure="implicit", prior=prior)
    return posterior.with_solver(tolerance=1e-12)


@functools.cache
def precision(name: str) -> Tensor:
    ggn = case_ggn(name)
    return ggn + PRECISION * torch.eye(len(ggn), dtype=F64)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * max(float(expected.abs().max()), 1e-12)


def small_problem(structure: str = "implicit", **options: Any) -> tuple[Any, nn.Module, Tensor, Tensor]:
    """A classifier with 68 weights and 30 examples."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, y = draw(1, 30, 3), torch.randint(4, (30,), generator=generator(2))
    return lapis.laplace(model, (x, y), "classification", structure=structure, **options), model, x, y


# ----------------------------------------------------------------------------------------------------------
# Every architecture


@every_case
def test_solves_and_variances_are_those_of_the_dense_matrix(name: str) -> None:
    exact = precision(name)
    vector = draw(1, len(exact))
    for space in ("weights", "outputs"):
        close(implicit(name, space).solve(vector), torch.linalg.solve(exact, vector))
    _, x, _, _ = case_data(name)
    if len(case_jacobians(name)[0]) > MANY_OUTPUTS:
        return
    latent, _ = implicit(name)._linearised(first_of(x), "full")
    rows = case_jacobians(name)[0].reshape(*latent.mean.shape[1:], -1)
    close(latent.covariance[0], torch.stack([row @ torch.linalg.solve(exact, row.T) for row in rows]))


def first_of(x: Any) -> Any:
    """One example."""
    if isinstance(x, dict):
        return {key: value[:1] for key, value in x.items()}
    return tuple(part[:1] for part in x) if isinstance(x, tuple) else x[:1]


@every_case
def test_draws_have_the_right_covariance_in_either_space(name: str) -> None:
    """G^T is G's adjoint and G^T G the GGN: so Lambda^1/2 e + G^T u has covariance A, and the solve A^-1."""
    exact, curvature = precision(name), implicit(name).curvature
    v, u = draw(2, 1, len(exact)), draw(3, 1, curvature.rows)
    close(curvature.root_transposed(curvature.root(v)), v @ case_ggn(name))
    close((curvature.root(v) * u).sum(), (curvature.root_transposed(u) * v).sum())
    e = draw(4, 1, len(exact))
    target = math.sqrt(PRECISION) * e + curvature.root_transposed(u)
    for space in ("weights", "outputs"):
        close(implicit(name, space).gaussian.draws(e, u).vectors, torch.linalg.solve(exact, target.T).T)
    white = implicit(name).draw(4, generator=generator(5)).deviations @ torch.linalg.cholesky(exact)
    total = float(white.square().sum())
    assert chi2.ppf(5e-7, white.numel()) < total < chi2.isf(5e-7, white.numel())


@every_case
def test_log_determinants_and_traces_lie_within_three_standard_errors(name: str) -> None:
    posterior, exact = implicit(name), precision(name)
    logdet = float(torch.logdet(exact)) - len(exact) * math.log(PRECISION)
    gamma = float(torch.trace(torch.linalg.solve(exact, case_ggn(name))))
    for seed in range(3):
        spectrum = posterior.gaussian.spectrum(8, 24, generator(seed), False)
        found = (spectrum.trace(torch.log), spectrum.trace(lambda t: 1 - 1 / t))
        errors = [abs(float(e.value) - x) for e, x in zip(found, (logdet, gamma), strict=True)]
        bounds = [3 * float(e.standard_error) + float(e.truncation) + 1e-8 for e in found]
        if all(error <= bound for error, bound in zip(errors, bounds, strict=True)):
            return
    pytest.fail(f"{found} against {logdet} and {gamma}")


@every_case
def test_both_objectives_have_the_draw_as_their_minimiser(name: str) -> None:
    """The mean of the minibatch gradients over an epoch is (I + F^T F) y - e - F^T u, zero at the draw."""
    posterior = implicit(name, "weights")
    exact = posterior.draw(2, generator=generator(7))
    root = posterior.gaussian.precision.sqrt()
    somewhere = draw(8, *exact.deviations.shape)
    for objective in ("noisy", "low_noise"):
        descent = drawing.Descent(posterior, objective, 2, exact.drawing.seed, 2)
        count = len(descent.parts)
        assert sorted(descent.place(step) for step in range(count)) == list(range(count))
        for y in (exact.deviations * root, somewhere):
            mean = torch.stack([descent.gradient(y, step) for step in range(count)]).mean(0)
            expected = (y / root) @ precision(name) / root - (exact.deviations @ precision(name)) / root
            assert float((mean - expected).abs().max()) <= 1e-8 * float(descent.target.abs().max())


@every_case
def test_low_rank_with_every_eigenpair_is_dense(name: str) -> None:
    model, x, y, spec = case_data(name)
    size = len(precision(name))
    prior = lapis.Prior(PRECISION, "parameter")
    with untouched(model):
        found = lapis.laplace(model, (x, y), spec.build(), structure="lowrank", rank=size, prior=prior)
        latent, _ = found._linearised(x, "full")
    close(found.precision(), precision(name))
    close(found._logdet(), torch.logdet(precision(name)))
    close(found.marginal_variance(), torch.linalg.inv(precision(name)).diagonal())
    covariance = latent.covariance.reshape(-1, *latent.covariance.shape[2:])
    rows = torch.cat([j.reshape(-1, latent.mean.shape[-1], size) for j in case_jacobians(name)])
    close(covariance, rows @ torch.linalg.solve(precision(name), rows.mT))
