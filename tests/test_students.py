"""Variances that are estimates from K draws: Student's t, with noise added, against scipy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import lapis
from lapis.predictions import LatentGaussian, LatentMixture, LatentSamples, join_latents, predict

DOUBLE = torch.float64
LEVELS = [0.5, 0.9, 0.95, 0.99]


def latent(degrees: int | None, variance: float = 2.0, batch: int = 3) -> LatentGaussian:
    mean = torch.arange(batch, dtype=DOUBLE).reshape(-1, 1, 1)
    return LatentGaussian(mean, torch.full_like(mean, variance), degrees=degrees)


@pytest.mark.parametrize("degrees", [1, 2, 4, 32, 1000])
def test_intervals_of_outputs_are_students(degrees: int) -> None:
    predicted: Any = predict(lapis.Gaussian(0.5), latent(degrees))
    for level in LEVELS:
        low, high = predicted.f_interval(level)
        width = stats.t.ppf((1 + level) / 2, degrees) * 2**0.5
        torch.testing.assert_close(high - predicted.f_mean, torch.full_like(high, width), rtol=1e-7, atol=0)
        torch.testing.assert_close(predicted.f_mean - low, high - predicted.f_mean)


@pytest.mark.parametrize("degrees", [1, 2, 6])
def test_targets_are_students_t_plus_noise(degrees: int) -> None:
    predicted: Any = predict(lapis.Gaussian(0.5), latent(degrees, batch=1))
    f, step = torch.linspace(-4000, 4000, 1_600_001, dtype=DOUBLE), 0.005  # the trapezoidal rule: noise is .5
    student = torch.from_numpy(stats.t.pdf(f.numpy() / 2**0.5, degrees)) / 2**0.5

    for y in (0.0, 1.3, -7.0):
        density = float((student * torch.exp(-2 * (y - f) ** 2)).sum()) * step / (0.5 * (2 * torch.pi) ** 0.5)
        found = predicted.log_prob(torch.tensor([[y]], dtype=DOUBLE)).exp()
        assert float(found) == pytest.approx(density, rel=1e-8)
    low, high = predicted.interval(0.9)
    inside = torch.special.ndtr(2 * (high - f)) - torch.special.ndtr(2 * (low - f))
    assert float((student * inside).sum()) * step == pytest.approx(0.9, abs=1e-5 if degrees > 1 else 1e-4)
    assert float(predicted._cumulative(high[None])) == pytest.approx(0.95, abs=1e-9)


def test_many_elements_have_the_intervals_of_each_alone() -> None:
    shares = torch.linspace(0, 3, 2000, dtype=DOUBLE).reshape(-1, 1, 1)
    many: Any = predict(lapis.Gaussian(0.7), LatentGaussian(torch.zeros_like(shares), shares, degrees=3))
    some = shares[::400]
    few: Any = predict(lapis.Gaussian(0.7), LatentGaussian(torch.zeros_like(some), some, degrees=3))
    torch.testing.assert_close(many.interval(0.95)[1][::400], few.interval(0.95)[1], rtol=1e-10, atol=0)
    known: Any = predict(lapis.Gaussian(0.7), LatentGaussian(torch.zeros_like(some), some))
    assert bool((few.interval(0.95)[1][1:] > known.interval(0.95)[1][1:]).all())
    torch.testing.assert_close(few.interval(0.95)[1][0], known.interval(0.95)[1][0])  # no variance: noise alone


def test_intervals_of_outputs_for_every_kind_of_latent() -> None:
    plain: Any = predict(lapis.Gaussian(0.5), latent(None))
    torch.testing.assert_close(plain.f_interval(0.95)[1], plain.f_mean + 1.959963985 * 2**0.5)
    values = torch.linspace(-1, 1, 2001, dtype=DOUBLE).reshape(-1, 1, 1, 1).expand(-1, 3, 1, 1)
    drawn: Any = predict(lapis.Gaussian(0.5), LatentSamples(values))
    torch.testing.assert_close(drawn.f_interval(0.9)[1], torch.full((3, 1), 0.9, dtype=DOUBLE))
    mixed: Any = predict(
        lapis.Gaussian(0.5), LatentMixture((latent(None), latent(None, 8.0)), torch.tensor([0.5, 0.5]))
    )
    low, high = mixed.f_interval(0.9)
    inside = [
        stats.norm.cdf(float(high[0]), scale=s) - stats.norm.cdf(float(low[0]), scale=s) for s in (2**0.5, 8**0.5)
    ]
    assert sum(inside) / 2 == pytest.approx(0.9, abs=1e-9)


def test_the_number_of_draws_survives_joining_and_scaling() -> None:
    assert join_latents([latent(4), latent(4)]).degrees == 4  # type: ignore[union-attr]
    assert latent(4).scaled(2.0).degrees == 4
    with pytest.raises(lapis.LapisError, match="draws behind"):
        join_latents([latent(4), latent(5)])


def test_drawn_networks_have_students_intervals(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.linspace(-1, 1, 20, dtype=DOUBLE)[:, None]
    implicit: Any = lapis.laplace(model, (x, x.sin()), lapis.Gaussian(0.1), structure="implicit", weights="all")
    drawn = implicit.draw(3)
    predicted: Any = drawn.predict(x)
    width: Tensor = predicted.f_interval(0.95)[1] - predicted.f_mean
    torch.testing.assert_close(width / predicted.f_variance.sqrt(), torch.full_like(width, stats.t.ppf(0.975, 3)))
    drawn.save(tmp_path / "drawn")
    again: Any = lapis.load(tmp_path / "drawn", model)
    torch.testing.assert_close(again.predict(x).interval(0.9)[1], predicted.interval(0.9)[1])
    calibrated: Any = drawn.calibrate((x, x.sin()))
    assert calibrated.predict(x).latent.degrees == 3  # as the search scored them
