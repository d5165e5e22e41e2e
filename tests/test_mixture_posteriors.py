"""Mixtures of posteriors: weights by evidence, by stacking or given; predictions, draws and files of all components."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.posteriors import stacking
from lapis.posteriors.stacking import stacked_weights
from untouched import untouched

F64 = torch.float64


def data(seed: int = 0, count: int = 30) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, dtype=F64, generator=source)
    return x, x[:, :1] - 0.5 * x[:, 1:] ** 2 + 0.3 * torch.randn(count, 1, dtype=F64, generator=source)


def net(width: int = 4, norm: bool = False) -> nn.Module:
    layers = [nn.Linear(2, width), *([nn.BatchNorm1d(width)] if norm else []), nn.Tanh(), nn.Linear(width, 1)]
    return nn.Sequential(*layers).double()


def laplaces(
    count: int = 3, noises: tuple[float, ...] = (0.3, 0.5, 0.9), **options: Any
) -> list[lapis.LaplacePosterior]:
    torch.manual_seed(0)
    nets = [net() for _ in range(count)]
    return [
        lapis.laplace(each, data(), lapis.Gaussian(noises[i % 3]), **{"structure": "dense", **options})
        for i, each in enumerate(nets)
    ]


def test_weights_by_the_evidence_are_probabilities_of_models() -> None:
    """Linear Gaussian models, whose evidence is a Gaussian density in closed form; uniform over models beforehand."""
    x, y = data()
    models = [nn.Linear(2, 1, bias=bias).double() for bias in (True, False)]
    with torch.no_grad():
        for model in models:
            for p in model.parameters():
                p.zero_()
    # the evidence is exact at the mode, and weights of zero are no mode: at_tangent_mode finds it
    posteriors = [
        lapis.laplace(m, (x, y), lapis.Gaussian(0.4), structure="dense").at_tangent_mode((x, y)) for m in models
    ]
    expected = []
    for features in (torch.cat([x, torch.ones_like(y)], 1), x):
        covariance = features @ features.T + 0.16 * torch.eye(len(x), dtype=F64)
        normal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=F64), covariance)
        expected.append(normal.log_prob(y[:, 0]))
    mixed = lapis.mixture(posteriors, weights="evidence")
    torch.testing.assert_close(mixed.weights, torch.stack(expected).softmax(0), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(mixed.log_evidence(), torch.stack(expected).logsumexp(0) - math.log(2))


def test_evidences_far_apart_neither_overflow_nor_vanish() -> None:
    posteriors = laplaces(noises=(1e-3, 1e-3, 3.0))
    evidences = torch.stack([each.log_evidence() for each in posteriors])
    assert float(evidences.max() - evidences.min()) > 1e5
    mixed = lapis.mixture(posteriors, weights="evidence")
    assert mixed.weights.tolist() == [0.0, 0.0, 1.0]
    torch.testing.assert_close(mixed.log_evidence(), evidences[2] - math.log(3))
    torch.testing.assert_close(mixed.predict(data(1)[0]).mean, posteriors[2].predict(data(1)[0]).mean)


@pytest.mark.parametrize("method", ["linearised", "sampled"])
def test_predictions_are_mixtures_of_the_components_each_with_its_noise(method: Any) -> None:
    posteriors, (x, y) = laplaces(), data(1, 7)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=F64)
    mixed = lapis.mixture(posteriors, weights=weights.tolist())
    with untouched(*(each.network.module for each in posteriors)):
        found = mixed.predict(x, method=method)
    source = torch.Generator().manual_seed(0)  # one for all components, in their order
    parts = [each.predict(x, method=method, generator=source) for each in posteriors]
    log_probs = torch.stack([part.log_prob(y) for part in parts])
    torch.testing.assert_close(found.log_prob(y), (log_probs + weights.log()[:, None]).logsumexp(0))
    mean = sum(w * part.mean for w, part in zip(weights, parts, strict=True))
    variance = sum(w * (part.variance + (part.mean - mean) ** 2) for w, part in zip(weights, parts, strict=True))
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.variance, variance)
    assert found.method == "mixture"
    low, high = found.interval(0.9)
    assert bool((low < high).all())


def test_a_joint_prediction_mixes_joint_densities() -> None:
    posteriors, (x, y) = laplaces(2), data(1, 5)
    found = lapis.mixture(posteriors).predict(x, joint=True).log_prob(y)
    parts = torch.stack([each.predict(x, joint=True).log_prob(y) for each in posteriors])
    torch.testing.assert_close(found, parts.logsumexp(0) - math.log(2))


def test_probabilities_are_the_average_of_what_the_components_predict() -> None:
    x, y = torch.randn(20, 2, dtype=F64), torch.randint(3, (20,))
    nets = [nn.Linear(2, 3).double() for _ in range(3)]
    posteriors = [lapis.laplace(each, (x, y), "classification") for each in nets]
    expected = torch.stack([each.predict(x).probs for each in posteriors]).mean(0)
    torch.testing.assert_close(lapis.mixture(posteriors).predict(x).probs, expected)
    other = [*posteriors[:2], lapis.laplace(nn.Linear(2, 4).double(), (x, y), "classification")]
    with pytest.raises(lapis.ModelError, match=r"Got:.* 4 outputs for number 2"):
        lapis.mixture(other)


def test_draws_come_from_components_by_their_weights() -> None:
    """Shares of 2000 draws within 4.5 standard errors: false alarms below 1e-5; means within 5 each of 17 weights."""
    posteriors = laplaces(2, prior=100.0)
    gap = posteriors[0].mean - posteriors[1].mean
    mixed = lapis.mixture(posteriors, weights=[0.3, 0.7])
    draws = mixed.sample(2000)
    assert torch.equal(draws, mixed.sample(2000, generator=torch.Generator().manual_seed(0)))
    first = (draws - posteriors[1].mean) @ gap / gap.square().sum() > 0.5
    assert abs(float(first.double().mean()) - 0.3) < 4.5 * math.sqrt(0.21 / 2000)
    for chosen, posterior in ((first, posteriors[0]), (~first, posteriors[1])):
        own = draws[chosen]
        error = (posterior.marginal_variance() / len(own)).sqrt()
        assert bool(((own.mean(0) - posterior.mean).abs() < 5 * error).all())


def score(weights: Tensor, log_probs: Tensor) -> Tensor:
    return (log_probs + weights.log()).logsumexp(1).mean()


def test_stacking_is_optimal_to_its_tolerance() -> None:
    """No other weights score higher: not on a fine grid, not at any corner, and not by the certificate."""
    source = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 30.0):
        log_probs = scale * torch.randn(200, 3, dtype=F64, generator=source) - 1e4  # far below exp's range
        log_probs[:, 2] -= 0.3 * scale
        weights, gap = stacked_weights(log_probs)
        assert 0 <= gap < 1e-8
        torch.testing.assert_close(weights.sum(), torch.ones((), dtype=F64))
        ticks = torch.linspace(0, 1, 101, dtype=F64)
        grid = torch.stack(torch.meshgrid(ticks, ticks, indexing="ij"), -1).reshape(-1, 2)
        grid = torch.cat([grid, 1 - grid.sum(1, keepdim=True)], 1)
        best = max(float(score(each, log_probs)) for each in grid[grid[:, 2] >= 0][::7])
        assert float(score(weights, log_probs)) >= best - 1e-9
    ahead = torch.tensor([[0.0, -1.0], [-2.0, -2.5]], dtype=F64)
    assert stacked_weights(ahead)[0].tolist() == [1.0, 0.0]  # one that is better everywhere gets all
    twins = torch.randn(50, 1, dtype=F64).expand(50, 4)
    assert stacked_weights(twins)[1] < 1e-8
    alone = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0], [0.0, -math.inf]], dtype=F64)
    torch.testing.assert_close(stacked_weights(alone)[0], torch.tensor([2 / 3, 1 / 3], dtype=F64))
    with pytest.raises(lapis.DataError, match="example 1"):
        stacked_weights(torch.tensor([[0.0, 0.0], [-math.inf, -math.inf]], dtype=F64))


def test_stacking_goes_on_by_em_where_the_first_search_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    log_probs = torch.randn(200, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    best, _ = stacked_weights(log_probs)
    monkeypatch.setattr(stacking, "minimize", lambda loss, start, **_: SimpleNamespace(x=start * math.nan))
    weights, gap = stacked_weights(log_probs)
    assert gap < 1e-6
    torch.testing.assert_close(weights, best, rtol=1e-3, atol=1e-3)


def test_stacking_learns_from_held_out_data() -> None:
    posteriors, held = laplaces(), data(3, 60)
    mixed = lapis.mixture(posteriors, weights="stacking", data=held, batch_size=16)
    log_probs = torch.stack([each.predict(held[0]).log_prob(held[1]) for each in posteriors], 1)  # linearised
    expected, _ = stacked_weights(log_probs)
    torch.testing.assert_close(mixed.weights, expected, rtol=1e-4, atol=1e-6)
    uniform = lapis.mixture(posteriors).predict(held[0]).log_prob(held[1]).mean()
    assert mixed.weighting.score is not None
    assert mixed.weighting.score > float(uniform)
    torch.testing.assert_close(mixed.predict(held[0]).log_prob(held[1]).mean().item(), mixed.weighting.score)
    with pytest.warns(lapis.LapisWarning, match="training data"):
        lapis.mixture(posteriors, weights="stacking", data=data())


def test_any_posteriors_of_one_task_mix() -> None:
    """MultiSWAG, an ensemble, dropout and Laplace, of different architectures; each alone predicts its part."""
    torch.manual_seed(0)
    x, _ = data(1, 6)
    first, second = net(), nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 1)).double()
    snapshots = []
    for model in (net(), net(6)):
        collector = lapis.SWAG(model, rank=2)
        for _ in range(4):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.01 * torch.randn_like(p))
            collector.collect()
        snapshots.append(collector.posterior(lapis.Gaussian(0.3)))
    others = [
        lapis.laplace(first, data(), lapis.Gaussian(0.4)),
        lapis.dropout(second, lapis.Gaussian(0.5)),
        lapis.ensemble([net(), net(3)], lapis.Gaussian(0.6)),
    ]
    posteriors = [*snapshots, *others]
    mixed = lapis.mixture(posteriors)
    assert mixed.methods == ("sampled",)
    source = torch.Generator().manual_seed(0)
    expected = torch.stack([each.predict(x, method="sampled", generator=source).mean for each in posteriors]).mean(0)
    torch.testing.assert_close(mixed.predict(x).mean, expected)
    with pytest.raises(lapis.ModelError, match="another architecture"):
        mixed.sample()
    with pytest.raises(lapis.OptionError, match="has no evidence"):
        lapis.mixture(posteriors, weights="evidence")
    with pytest.raises(lapis.OptionError, match="weights that are uniform"):
        mixed.log_evidence()


def test_mixtures_of_mixtures_are_mixtures_of_their_components() -> None:
    posteriors, x = laplaces(), data(1, 4)[0]
    inner = lapis.mixture(posteriors[:2], weights=[0.25, 0.75])
    outer = lapis.mixture([inner, posteriors[2]], weights=np.array([0.4, 0.6]))
    torch.testing.assert_close(outer.weights, torch.tensor([0.1, 0.3, 0.6], dtype=F64))
    plain = lapis.mixture(posteriors, weights=[0.1, 0.3, 0.6])
    torch.testing.assert_close(outer.predict(x).variance, plain.predict(x).variance)


def test_a_file_holds_all_components_and_their_networks(tmp_path: Path) -> None:
    """Two structures of one network, the last layer of another with its own batch norm, and an ensemble."""
    torch.manual_seed(0)
    one, two, x = net(norm=True), net(norm=True), data(1, 4)[0]
    for model in (one, two):
        model(data()[0])  # statistics of its own
    ensemble = lapis.ensemble([net(norm=True), net(norm=True)], lapis.Gaussian(0.6))
    posteriors = [
        lapis.laplace(one, data(), lapis.Gaussian(0.3), structure="dense"),
        lapis.laplace(one, data(), lapis.Gaussian(0.4), structure="kronecker"),
        lapis.laplace(two, data(), lapis.Gaussian(0.5), weights="last_layer"),
        ensemble,
    ]
    mixed = lapis.mixture(posteriors, weights=[0.1, 0.2, 0.3, 0.4])
    mixed.save(tmp_path / "mixture.lapis")
    held = [name for name in lapis.files.read(tmp_path / "mixture.lapis").tensors if ".network." in name]
    assert len({name.split(".")[2] for name in held}) == 3  # one, two, and the ensemble's first
    fresh = net(norm=True)
    with untouched(fresh):
        loaded = lapis.load(tmp_path / "mixture.lapis", fresh)
        torch.testing.assert_close(loaded.predict(x).mean, mixed.predict(x).mean)
        torch.testing.assert_close(loaded.predict(x).variance, mixed.predict(x).variance)
    assert [type(each) for each in loaded.components] == [type(each) for each in mixed.components]
    assert loaded.components[0].network.module is loaded.components[1].network.module
    assert loaded.weighting == mixed.weighting
    with pytest.raises(lapis.FileError, match="another network"):
        lapis.load(tmp_path / "mixture.lapis", net(7, norm=True))
    by_evidence = lapis.mixture(laplaces(), weights="evidence")
    by_evidence.save(tmp_path / "evidence.lapis")
    again = lapis.load(tmp_path / "evidence.lapis", net())
    torch.testing.assert_close(again.log_evidence(), by_evidence.log_evidence())
    torch.testing.assert_close(again.sample(3), by_evidence.sample(3))


def test_a_custom_likelihood_is_passed_to_load(tmp_path: Path) -> None:
    likelihood = lapis.Custom(lambda f, y: 0.5 * (f - y).square().sum(-1))
    torch.manual_seed(0)
    posteriors = [lapis.laplace(net(), data(), likelihood, structure="diagonal") for _ in range(2)]
    lapis.mixture(posteriors).save(tmp_path / "mixture.lapis")
    loaded = lapis.load(tmp_path / "mixture.lapis", net(), likelihood)
    x, y = data(1, 4)
    torch.testing.assert_close(loaded.predict(x).log_prob(y), lapis.mixture(posteriors).predict(x).log_prob(y))


def test_what_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    implicit = laplaces(1, structure="implicit")[0]
    with pytest.raises(lapis.FileError, match="needs its data"):
        lapis.mixture([implicit]).save(tmp_path / "mixture.lapis")
    different = [lapis.laplace(net(width), data(), lapis.Gaussian(0.3)) for width in (3, 4)]
    with pytest.raises(lapis.FileError, match="several architectures"):
        lapis.mixture(different).save(tmp_path / "mixture.lapis")


def test_a_change_of_any_component_is_noticed() -> None:
    posteriors = laplaces()
    mixed = lapis.mixture(posteriors)
    with torch.no_grad():
        posteriors[2].network.module[0].weight.add_(0.1)
    with pytest.raises(lapis.ModelError, match="has changed"):
        mixed.predict(data(1, 4)[0])


def test_mistakes_are_refused() -> None:
    posteriors, other = laplaces(2), copy.deepcopy(net())
    elsewhere = lapis.laplace(other, data(5), lapis.Gaussian(0.3), structure="dense")
    wide = nn.Linear(2, 2).double()
    two = lapis.laplace(wide, (data()[0], data()[0]), lapis.Gaussian(0.3))
    counts = lapis.laplace(net(), (data()[0], torch.ones(30, 1, dtype=F64)), "poisson")
    single = lapis.laplace(net().float(), tuple(t.float() for t in data()), lapis.Gaussian(0.3))
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "at least one"),
        (posteriors[0], {}, "Bad posteriors"),
        ([net()], {}, "Bad posteriors"),
        (posteriors, {"weights": "best"}, "Unknown weights"),
        (posteriors, {"weights": "stacking"}, "for stacking"),
        (posteriors, {"data": data()}, "for stacking"),
        (posteriors, {"weights": [0.5]}, "no weights of a mixture"),
        (posteriors, {"weights": [0.5, 0.6]}, "no weights of a mixture"),
        (posteriors, {"weights": [1.5, -0.5]}, "no weights of a mixture"),
        (posteriors, {"weights": [math.nan, 1.0]}, "no weights of a mixture"),
        (posteriors, {"weights": ["a", "b"]}, "no weights of a mixture"),
        (posteriors, {"weights": None}, "no weights of a mixture"),
        ([posteriors[0], elsewhere], {"weights": "evidence"}, "different data"),
        ([posteriors[0], posteriors[1].at_tangent_mode(data())], {"weights": "evidence"}, "different kinds"),
        ([posteriors[0], two], {}, "do not predict the same"),
        ([posteriors[0], counts], {}, "do not predict the same"),
        ([posteriors[0], single], {}, "do not predict the same"),
    ]
    for posterior, options, message in refused:
        with pytest.raises(lapis.LapisError, match=message):
            lapis.mixture(posterior, **options)
    last = lapis.mixture([lapis.laplace(net(), data(), lapis.Gaussian(0.3), weights="last_layer") for _ in range(2)])
    with pytest.raises(lapis.ModelError, match="other values in"):
        last.sample()


def test_components_keep_their_temperature_scaling() -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(2, 3).double(), data()
    posterior = lapis.laplace(model, (x, (y[:, 0] > 0).long()), "classification", structure="dense")
    pair = [posterior, replace(posterior, sharpness=3.0)]
    expected = torch.stack([each.predict(x, link="mean_field").probs for each in pair]).mean(0)
    torch.testing.assert_close(lapis.mixture(pair).predict(x, link="mean_field").probs, expected)
