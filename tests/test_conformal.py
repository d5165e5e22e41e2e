"""Conformal prediction: the coverage that is promised, for models that are wrong, and the sets that formulas give."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.posteriors import Posterior
from lapis.posteriors.conformal import Conformal, ConformalIntervals, ConformalSets

F64 = torch.float64
Pair = tuple[Tensor, Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def posterior_of(outputs: int, likelihood: lapis.Likelihood | str, y: Tensor, x: Tensor) -> Posterior:
    """An untrained linear network: as wrong as can be."""
    torch.manual_seed(0)
    return lapis.laplace(nn.Linear(x.shape[1], outputs).double(), (x, y), likelihood, structure="dense")


def real(n: int, seed: int) -> Pair:
    """Noise that grows with x, which the likelihood denies."""
    x = normal(n, 2, seed=seed)
    return x, x.sin() + x.abs() * normal(n, 2, seed=seed + 1)


def classes(n: int, seed: int) -> Pair:
    x = normal(n, 2, seed=seed)
    return x, ((x[:, 0] > 0).long() + (x[:, 1] + normal(n, seed=seed + 1) > 0).long())


def regression() -> Posterior:
    return posterior_of(2, lapis.Gaussian(0.5), *real(10, 0)[::-1])


def classification() -> Posterior:
    return posterior_of(3, "classification", *classes(10, 0)[::-1])


def inside(found: ConformalIntervals | ConformalSets, y: Tensor) -> Tensor:
    if isinstance(found, ConformalIntervals):
        return (found.lower <= y) & (y <= found.upper)
    return found.members.gather(-1, y.unsqueeze(-1))[..., 0]


REPEATS, CALIBRATION, NEW = 50, 10, 200
PLACE = math.ceil((CALIBRATION + 1) * 0.9)
PROMISED = PLACE / (CALIBRATION + 1)
"""10 / 11: the mean coverage if scores are continuous, of a Beta(10, 1) distribution."""


def error_of_the_mean() -> float:
    """Standard deviation of the mean share of covered examples over all repeats: a beta-binomial variable's."""
    beta = PROMISED * (1 - PROMISED) / (CALIBRATION + 2)
    within = (PROMISED * (1 - PROMISED) - beta) / NEW
    return math.sqrt((beta + within) / REPEATS)


@pytest.mark.parametrize("case", ["each output", "all outputs at once", "classes"])
def test_coverage_is_what_was_promised_though_the_model_is_wrong(case: str) -> None:
    """Within 5 standard errors, upwards for classes not (ties are covered too): a false alarm once in 1.7e6 runs.

    Without the finite-sample correction, k = ceil(n coverage), coverage falls by 1/11: 7.5 standard errors.
    """
    of_classes = case == "classes"
    posterior, draw = (classification(), classes) if of_classes else (regression(), real)
    shares = []
    for repeat in range(REPEATS):
        x, y = draw(CALIBRATION + NEW, 100 + 2 * repeat)
        calibrated = posterior.conformal((x[:CALIBRATION], y[:CALIBRATION]), simultaneous=case == "all outputs at once")
        covered = inside(calibrated.predict(x[CALIBRATION:], 0.9), y[CALIBRATION:]).double()
        if case == "each output":
            covered = covered[:, 0]
        shares.append(float(covered.reshape(NEW, -1).amin(1).mean()))
    gap = (sum(shares) / REPEATS - PROMISED) / error_of_the_mean()
    assert gap > -5
    assert of_classes or gap < 5


def test_intervals_are_the_mean_and_q_standard_deviations() -> None:
    posterior, (x, y) = regression(), real(40, 7)
    calibrated = posterior.conformal((x, y))
    prediction = posterior.predict(x)
    scores = ((y - prediction.mean).abs() / prediction.std).sort(0).values  # type: ignore[attr-defined]
    for coverage, place in ((0.55, 23), (0.9, 37), (0.975, 40)):  # 41 * 0.55 = 22.55, 36.9, 39.975
        torch.testing.assert_close(calibrated.quantile(coverage), scores[place - 1][None])
        found = calibrated.predict(x, coverage)
        assert isinstance(found, ConformalIntervals)
        reach = scores[place - 1] * prediction.std  # type: ignore[attr-defined]
        torch.testing.assert_close(found.upper, prediction.mean + reach)  # type: ignore[attr-defined]
        torch.testing.assert_close(found.lower, prediction.mean - reach)  # type: ignore[attr-defined]
    assert "40 calibration examples, score 'deviation'" in repr(calibrated)


def test_a_coverage_is_taken_as_written() -> None:
    """100 * 0.55 is 55.000000000000007 in floating point: the 55th score, not the 56th."""
    calibrated = regression().conformal(real(99, 3))
    torch.testing.assert_close(calibrated.quantile(0.55), calibrated.scores[54])


def naive_set(p: list[float], q: float, score: str) -> list[bool]:
    order = sorted(range(len(p)), key=lambda c: -p[c])
    members = [False] * len(p)
    for rank, c in enumerate(order):
        value = 1 - p[c] if score == "probability" else sum(p[k] for k in order[: rank + 1])
        members[c] = rank == 0 or value <= q
    return members


@pytest.mark.parametrize("score", ["probability", "cumulative"])
def test_sets_are_those_of_the_definition(score: str) -> None:
    posterior, data = classification(), classes(30, 5)
    calibrated = posterior.conformal(data, score)  # type: ignore[arg-type]
    x = normal(50, 2, seed=9)
    sizes = set()
    for coverage in (0.2, 0.5, 0.9):
        found = calibrated.predict(x, coverage)
        assert isinstance(found, ConformalSets)
        q, probs = float(calibrated.quantile(coverage)), found.prediction.probs.tolist()
        assert found.members.tolist() == [naive_set(p, q, score) for p in probs]
        assert torch.equal(found.size, found.members.sum(-1))
        assert int(found.size.min()) >= 1
        sizes |= set(found.size.tolist())
    assert len(sizes) > 1


def test_labels_have_sets_of_no_and_yes() -> None:
    x = normal(40, 2)
    y = (x > 0).double()
    posterior = posterior_of(2, "binary", y[:10], x[:10])
    found = posterior.conformal((x[10:], y[10:])).predict(x[:5], 0.8)
    assert isinstance(found, ConformalSets)
    assert found.members.shape == (5, 2, 2)
    probs = found.prediction.probs
    assert bool(found.members.gather(-1, (probs > 0.5).long().unsqueeze(-1)).all())
    assert torch.equal(found.size, found.members.sum(-1))


def test_counts_have_intervals_from_zero_on() -> None:
    x = normal(40, 2)
    y = torch.poisson(x.sum(-1, keepdim=True).exp(), generator=torch.Generator().manual_seed(0))
    posterior = posterior_of(1, "poisson", y[:10], x[:10])
    found = posterior.conformal((x[10:], y[10:])).predict(x[:5])
    assert isinstance(found, ConformalIntervals)
    assert float(found.lower.min()) == 0
    assert bool((found.upper > found.prediction.mean).all())  # type: ignore[attr-defined]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def test_ignored_positions_do_not_count_and_lengths_may_differ_if_all_are_covered_at_once() -> None:
    torch.manual_seed(0)
    x, y = normal(30, 4, 2), torch.randint(3, (30, 4), generator=torch.Generator().manual_seed(0))
    y[:12, 3] = -100
    posterior = lapis.laplace(
        Tokens().double(), (x[:5], y[:5]), lapis.Categorical(ignore_index=-100), structure="diagonal"
    )
    each = posterior.conformal((x, y))
    assert each.counts.flatten().tolist() == [30, 30, 30, 18]
    counted = 1 - posterior.predict(x[12:]).probs[:, 3].gather(-1, y[12:, 3, None])  # type: ignore[attr-defined]
    torch.testing.assert_close(each.quantile(0.9)[3, 0], counted[:, 0].sort().values[math.ceil(19 * 0.9) - 1])
    batches = [(x[:15], y[:15]), (x[15:, :3], y[15:, :3])]
    with pytest.raises(lapis.DataError, match="simultaneous=True"):
        posterior.conformal(batches)
    with pytest.raises(lapis.DataError, match="simultaneous=True"):
        each.predict(x[:, :2])
    together = posterior.conformal(batches, simultaneous=True).predict(x[:, :2])
    assert isinstance(together, ConformalSets)
    assert together.members.shape == (30, 2, 3)


def test_what_cannot_be_promised_is_refused() -> None:
    posterior = regression()
    eight: Conformal = posterior.conformal(real(8, 3))
    with pytest.raises(lapis.DataError, match=r"9 at least.*Got: 8\..*0.8889 at most"):
        eight.predict(normal(3, 2), 0.9)
    assert isinstance(eight.predict(normal(3, 2), 8 / 9 - 1e-12), ConformalIntervals)
    with pytest.raises(lapis.OptionError, match="coverage"):
        eight.predict(normal(3, 2), 90)
    with pytest.raises(lapis.DataError, match="those of the fit"):
        posterior.conformal(real(10, 0))
    with pytest.raises(lapis.OptionError, match="no meaning for regression"):
        posterior.conformal(real(20, 3), "probability")
    with pytest.raises(lapis.OptionError, match="Unknown score"):
        posterior.conformal(real(20, 3), "margin")  # type: ignore[arg-type]
    custom = posterior_of(1, lapis.Custom(lambda f, y: (f - y).square().sum()), normal(10, 1), normal(10, 2))
    with pytest.raises(lapis.LikelihoodError, match="no score"):
        custom.conformal(real(20, 3))
    soft = torch.full((20, 3), 1 / 3, dtype=F64)
    with pytest.raises(lapis.DataError, match="about classes"):
        classification().conformal((normal(20, 2), soft))


@pytest.mark.parametrize("make", [regression, classification])
def test_a_calibration_comes_back_from_its_file_for_its_own_posterior_only(
    make: Callable[[], Posterior], tmp_path: Path
) -> None:
    posterior, data = make(), real(40, 7) if make is regression else classes(40, 7)
    calibrated = posterior.conformal(data, simultaneous=make is regression)
    path = tmp_path / "calibration.lapis"
    calibrated.save(path)
    posterior.save(tmp_path / "posterior.lapis")
    loaded = Conformal.load(path, lapis.load(tmp_path / "posterior.lapis", posterior.network.module))
    torch.testing.assert_close(loaded.scores, calibrated.scores, rtol=0, atol=0)
    one, two = (each.predict(data[0], 0.8) for each in (calibrated, loaded))
    if isinstance(one, ConformalSets):
        assert isinstance(two, ConformalSets)
        assert torch.equal(one.members, two.members)
    else:
        assert isinstance(two, ConformalIntervals)
        torch.testing.assert_close(two.upper, one.upper, rtol=0, atol=0)
    assert isinstance(posterior, lapis.LaplacePosterior)
    with pytest.raises(lapis.FileError, match="calibration of another posterior"):
        Conformal.load(path, posterior.with_prior(7.0))
    with pytest.raises(lapis.FileError):
        Conformal.load(tmp_path / "posterior.lapis", posterior)
