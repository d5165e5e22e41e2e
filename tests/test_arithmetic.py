"""Data taken out of posteriors, and posteriors added up: exact where the model is linear and its noise Gaussian."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from test_data_view import at_mode, descend, linear, trained

F64 = torch.float64
NOISE, PRIOR = lapis.Gaussian(0.4), 0.8
GONE, LEFT = torch.tensor([1, 5, 6]), torch.tensor([0, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_same(one: lapis.LaplacePosterior, two: lapis.LaplacePosterior, x: Tensor) -> None:
    """The same distribution over weights, of the same data, with the same evidence where both are at one t."""
    torch.testing.assert_close(one.mean, two.mean, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(one.precision(), two.precision(), rtol=1e-9, atol=1e-9)
    found, expected = one.predict(x), two.predict(x)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.variance, expected.variance, rtol=1e-9, atol=1e-10)
    assert (one.n_data, one.curvature.digest) == (two.n_data, two.curvature.digest)
    torch.testing.assert_close(one.curvature.statistics[2:], two.curvature.statistics[2:])


@pytest.mark.parametrize("structure", ["dense", "implicit"])
def test_a_linear_gaussian_model_without_data_is_a_fit_to_the_rest(structure: str) -> None:
    model, (x, y) = linear()
    fit = lapis.laplace(model, (x, y), NOISE, structure=structure, prior=PRIOR)
    refit = at_mode(x[LEFT], y[LEFT], 0.4, 0.8)
    expected = lapis.laplace(refit, (x[LEFT], y[LEFT]), NOISE, structure="dense", prior=PRIOR)
    found = fit.without((x[GONE], y[GONE]))
    twice = fit.without((x[GONE[:1]], y[GONE[:1]])).without((x[GONE[1:]], y[GONE[1:]]))
    for each in (found, twice):
        torch.testing.assert_close(each.mean, expected.mean, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(each.predict(x).variance, expected.predict(x).variance, rtol=1e-7, atol=1e-8)
        assert (each.n_data, each.curvature.digest) == (11, expected.curvature.digest)
        if structure == "dense":
            assert_same(each, expected, x)
    assert torch.equal(found.point, fit.point)
    assert fit.n_data == 14
    # putting them back
    back = replace(found, mean=found.point).update((x[GONE], y[GONE]))
    torch.testing.assert_close(
        back.log_evidence(), fit.log_evidence(), rtol=1e-4 if structure == "implicit" else 1e-10, atol=0
    )


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker", "ekfac"])
def test_what_is_left_is_the_curvature_of_the_rest(structure: str) -> None:
    """Also of the outputs apart, so that the noise can change: exactly, but for the bases of EKFAC."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(14, 3, dtype=F64, generator=generator), torch.randn(14, 2, dtype=F64, generator=generator)
    fit = lapis.laplace(model, (x, y), NOISE, structure=structure, prior=PRIOR)
    found = fit.without((x[GONE], y[GONE]))
    part = replace(fit, curvature=fit.curvature.cleared()).update((x[LEFT], y[LEFT]))  # in the same bases
    refit = (
        part
        if structure == "ekfac"
        else lapis.laplace(model, (x[LEFT], y[LEFT]), NOISE, structure=structure, prior=PRIOR)
    )
    noise = torch.tensor([0.3, 0.7], dtype=F64)
    for one, two in ((found, refit), (found.with_noise(noise), refit.with_noise(noise))):
        torch.testing.assert_close(one.precision(), two.precision(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one.log_evidence(), two.log_evidence(), rtol=1e-10, atol=1e-10)
    sample = found.sample_of_data()[0]
    assert sorted(sample.inputs[:, 0].tolist()) == sorted(x[LEFT][:, 0].tolist())


def test_a_convex_model_without_data_is_near_the_one_trained_without_them() -> None:
    """One Newton step goes most of the way; repeated ones, at the tangent mode, all of it."""
    _, (x, y) = trained()
    torch.manual_seed(0)
    model = nn.Linear(2, 3).double()
    descend(model, x, y)
    fit = lapis.laplace(model, (x, y), "classification", structure="dense", prior=0.5)
    gone, left = slice(0, 6), slice(6, None)
    other = copy.deepcopy(model)
    descend(other, x[left], y[left])
    found = fit.without((x[gone], y[gone]))
    missed, whole = (found.mean - flat(other)).norm(), (fit.mean - flat(other)).norm()
    assert float(missed) < 0.15 * float(whole)
    mode = found.at_tangent_mode((x[left], y[left])).mode
    assert mode is not None
    torch.testing.assert_close(mode, flat(other), rtol=1e-5, atol=1e-6)
    with pytest.raises(lapis.DataError, match="not the data"):
        found.at_tangent_mode((x, y))


@pytest.mark.parametrize("split", [[7, 14], [4, 9, 14]])
def test_merged_linear_gaussian_models_are_a_fit_to_all_data(split: list[int]) -> None:
    _, (x, y) = linear()
    spans = [slice(a, b) for a, b in zip([0, *split[:-1]], split, strict=True)]
    fits = [
        lapis.laplace(at_mode(x[s], y[s], 0.4, 0.8), (x[s], y[s]), NOISE, structure="dense", prior=PRIOR) for s in spans
    ]
    merged = lapis.merge(fits)
    expected = lapis.laplace(at_mode(x, y, 0.4, 0.8), (x, y), NOISE, structure="dense", prior=PRIOR)
    torch.testing.assert_close(merged.mean, expected.mean, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(merged.precision(), expected.precision(), rtol=1e-9, atol=1e-9)
    new = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(9))
    for attribute in ("mean", "variance"):
        torch.testing.assert_close(getattr(merged.predict(new), attribute), getattr(expected.predict(new), attribute))
    assert (merged.n_data, merged.curvature.digest) == (14, expected.curvature.digest)
    # it belongs to a network of its own, at the merged weights
    module = merged.network.module
    torch.testing.assert_close(flat(module), expected.mean)
    assert all(module is not fit.network.module for fit in fits)
    for fit in fits:
        fit.check_network()


def test_a_prior_with_a_mean_counts_once() -> None:
    _, (x, y) = linear()
    centre = torch.linspace(-1, 1, 8, dtype=F64)
    prior = lapis.Prior(PRIOR, mean=centre)
    models = []
    for s in (slice(0, 6), slice(6, 14), slice(0, 14)):
        fit = lapis.laplace(nn.Linear(3, 2).double(), (x[s], y[s]), NOISE, structure="dense", prior=prior)
        mode = fit.at_tangent_mode((x[s], y[s])).mode
        assert mode is not None
        model = nn.Linear(3, 2).double()
        torch.nn.utils.vector_to_parameters(mode, model.parameters())
        models.append(lapis.laplace(model, (x[s], y[s]), NOISE, structure="dense", prior=prior))
    merged = lapis.merge(models[:2])
    torch.testing.assert_close(merged.mean, models[2].mean, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker"])
def test_parts_of_one_fit_add_up_to_it(structure: str) -> None:
    model, (x, y) = trained()
    parts = [
        lapis.laplace(model, (x[s], y[s]), "classification", structure=structure, prior=0.5)
        for s in (slice(0, 20), slice(20, 60))
    ]
    whole = lapis.laplace(model, (x, y), "classification", structure=structure, prior=0.5)
    merged = lapis.merge(parts)
    assert torch.equal(merged.mean, whole.mean)
    torch.testing.assert_close(merged.precision(), whole.precision(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(merged.log_evidence(), whole.log_evidence(), rtol=1e-10, atol=1e-10)
    assert merged.network is parts[0].network


def test_the_mean_of_merged_kronecker_posteriors_solves_the_sum_of_their_precisions(tmp_path: Any) -> None:
    fits = []
    for seed in (0, 1):
        model, data = trained(seed=seed)
        fits.append(lapis.laplace(model, data, "classification", structure="kronecker", prior=0.5))
    merged = lapis.merge(fits)
    total = sum(fit.precision() for fit in fits) - 0.5 * torch.eye(merged.n_weights, dtype=F64)
    pull = sum(fit.precision() @ fit.mean for fit in fits)
    torch.testing.assert_close(merged.mean, torch.linalg.solve(total, pull), rtol=1e-7, atol=1e-8)
    merged.save(tmp_path / "merged.lapis")
    again = lapis.load(tmp_path / "merged.lapis", merged.network.module)
    x = torch.randn(3, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(again.predict(x).probs, merged.predict(x).probs)


def test_single_weights_can_be_merged() -> None:
    model, (x, y) = trained()
    other = copy.deepcopy(model)
    mask = torch.arange(33) % 3 == 0
    with torch.no_grad():
        vector = flat(other)
        torch.nn.utils.vector_to_parameters(vector + 0.1 * mask, other.parameters())
    fits = [
        lapis.laplace(each, (x[s], y[s]), "classification", structure="dense", weights=mask)
        for each, s in ((model, slice(0, 30)), (other, slice(30, 60)))
    ]
    merged = lapis.merge(fits)
    assert merged.n_weights == int(mask.sum())
    torch.testing.assert_close(flat(merged.network.module)[~mask], vector[~mask])


def test_data_and_posteriors_that_do_not_belong_are_refused() -> None:
    model, (x, y) = linear()
    fit = lapis.laplace(model, (x, y), NOISE, structure="dense", prior=PRIOR)
    half = lapis.laplace(model, (x[:7], y[:7]), NOISE, structure="dense", prior=PRIOR)
    low = lapis.laplace(model, (x, y), NOISE, structure="lowrank", prior=PRIOR)
    ekfac = lapis.laplace(model, (x[:7], y[:7]), NOISE, structure="ekfac", prior=PRIOR)
    sampled = lapis.laplace(model, (x, y), NOISE, structure="dense", curvature="sampled")
    held = lapis.laplace(model, (x, y), NOISE, structure="implicit", prior=PRIOR)
    large = replace(fit, curvature=replace(fit.curvature, sample=type(fit.curvature.sample)()))  # as read from a file
    frozen = copy.deepcopy(model)
    frozen.bias.requires_grad_(False)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (lapis.DataError, "not part of the fit", lambda: fit.without((x[:2] + 1, y[:2]))),
        (lapis.DataError, "not part of the fit", lambda: fit.without((x[:2], y[:2] + 1))),
        (lapis.DataError, "not part of the fit", lambda: fit.without((x[[0, 0]], y[[0, 0]]))),
        (lapis.DataError, "not part of the fit", lambda: held.without((x[:2] + 1, y[:2]))),
        (lapis.DataError, "not part of the fit", lambda: half.without((x, y))),
        (lapis.DataError, "Nothing would be left", lambda: fit.without((x, y))),
        (lapis.NotPositiveDefiniteError, "more curvature", lambda: large.without((10 * x[:2], y[:2]))),
        (lapis.StructureError, "no sum over data", lambda: low.without((x[:2], y[:2]))),
        (lapis.OptionError, "sampled", lambda: sampled.without((x[:2], y[:2]))),
        (lapis.OptionError, "refined", lambda: fit.refine((x, y)).without((x[:2], y[:2]))),
        (lapis.OptionError, "two or more", lambda: lapis.merge([fit])),
        (lapis.OptionError, "stored curvature", lambda: lapis.merge([fit, held])),
        (lapis.DataError, "same data", lambda: lapis.merge([fit, fit])),
        (lapis.OptionError, "another prior", lambda: lapis.merge([fit, half.with_prior(2.0)])),
        (lapis.OptionError, "another likelihood", lambda: lapis.merge([fit, half.with_noise(1.0)])),
        (
            lapis.OptionError,
            "another structure",
            lambda: lapis.merge([half, lapis.laplace(model, (x, y), NOISE, structure="diagonal", prior=PRIOR)]),
        ),
        (lapis.StructureError, "several fits", lambda: lapis.merge([ekfac, fit])),
        (lapis.OptionError, "posteriors", lambda: lapis.merge(fit)),  # type: ignore[arg-type]
        (
            lapis.LapisError,
            "another",
            lambda: lapis.merge([half, lapis.laplace(frozen, (x, y), NOISE, structure="dense", prior=PRIOR)]),
        ),
    ]
    for error, match, call in refused:
        with pytest.raises(error, match=match):
            call()
