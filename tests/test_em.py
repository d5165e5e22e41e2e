"""The driver of expectation-maximisation, on the lecture's two Gaussians with some labels known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lapis
from lapis.latent import Expected, LatentModel, em

DOUBLE = torch.float64


@dataclass(frozen=True)
class TwoGaussians(LatentModel):
    """y ~ N(mean_z, 1), z ~ Bernoulli(share); data are rows (y, z) with z NaN where it is not known."""

    share: Tensor
    means: Tensor

    def posterior(self, data: Tensor) -> Tensor:
        y, z = data.T
        log_odds = (self.share / (1 - self.share)).log() - 0.5 * ((y - self.means[1]) ** 2 - (y - self.means[0]) ** 2)
        return torch.where(z.isnan(), log_odds.sigmoid(), z)

    def expectation(self, data: Tensor) -> Expected:
        r = self.posterior(data)
        both = torch.stack([1 - r, r])
        sums = {"n": both.sum(1), "y": both @ data[:, 0], "yy": both @ data[:, 0] ** 2}
        return Expected(sums, -torch.xlogy(both, both).sum(), len(data))

    def maximisation(self, expected: Expected) -> TwoGaussians:
        n = expected.statistics["n"]
        return TwoGaussians(n[1] / n.sum(), expected.statistics["y"] / n)

    def log_joint(self, expected: Expected) -> Tensor:
        n, y, yy = (expected.statistics[name] for name in ("n", "y", "yy"))
        priors = torch.stack([1 - self.share, self.share]).log()
        squares = yy - 2 * self.means * y + self.means**2 * n
        return (n * priors).sum() - 0.5 * squares.sum() - 0.5 * n.sum() * math.log(2 * math.pi)

    def vector(self) -> Tensor:
        return torch.cat([self.share.logit().reshape(1), self.means])

    def with_vector(self, vector: Tensor) -> TwoGaussians:
        return TwoGaussians(vector[0].sigmoid(), vector[1:])


def start(low: float = 0.0, high: float = 1.0) -> TwoGaussians:
    return TwoGaussians(torch.tensor(0.5, dtype=DOUBLE), torch.tensor([low, high], dtype=DOUBLE))


def table(known: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    z = (torch.rand(60, generator=generator, dtype=DOUBLE) < 0.4).double()
    y = 4.0 + 2.2 * z + torch.randn(60, generator=generator, dtype=DOUBLE)
    hidden = torch.rand(60, generator=generator) >= known
    return torch.stack([y, torch.where(hidden, torch.nan, z)], 1)


def log_likelihood(model: TwoGaussians, data: Tensor) -> float:
    y, z = data.T
    each = torch.stack([1 - model.share, model.share]).log() - 0.5 * (y[:, None] - model.means) ** 2
    each = each - 0.5 * math.log(2 * math.pi)
    seen = torch.where(z.isnan(), each.logsumexp(1), each.gather(1, z.nan_to_num().long()[:, None])[:, 0])
    return float(seen.sum())


def test_all_labels_known_is_maximum_likelihood_in_one_step() -> None:
    data = torch.tensor([[4.3, 0], [6.0, 1], [7.2, 1]], dtype=DOUBLE)
    found = em(start(), data)
    assert found.rounds <= 2
    torch.testing.assert_close(found.model.means, torch.tensor([4.3, 6.6], dtype=DOUBLE))
    assert float(found.model.share) == pytest.approx(2 / 3)


@pytest.mark.parametrize("known", [0.0, 0.3])
@pytest.mark.parametrize("accelerate", [False, True])
def test_the_bound_touches_the_log_likelihood_and_never_falls(known: float, accelerate: bool) -> None:
    for seed in range(20):
        data = table(known, seed)
        found = em(start(3.0, 5.0), data, rounds=2000, tolerance=1e-9, accelerate=accelerate)
        steps = torch.tensor(found.half_steps, dtype=DOUBLE)
        assert bool((steps.diff() > -1e-9).all())
        assert found.bounds[-1] == pytest.approx(log_likelihood(found.model, data), abs=1e-9)
        assert found.converged


def test_single_precision_is_not_taken_for_a_bound_that_falls() -> None:
    for seed in range(5):
        data = table(0.3, seed)
        exact = em(start(3.0, 5.0), data, rounds=500, tolerance=1e-8)
        model = TwoGaussians(torch.tensor(0.5), torch.tensor([3.0, 5.0]))
        found = em(model, data.float(), rounds=500, tolerance=0.0)
        torch.testing.assert_close(found.model.means.double(), exact.model.means, atol=2e-3, rtol=0)


def test_the_tolerance_is_a_gain_for_each_datum() -> None:
    found = em(start(3.0, 5.0), table(0.0, 1), tolerance=1e-3)  # 60 data
    gains = torch.tensor(found.bounds).diff()
    assert float(gains[-1]) <= 0.06
    assert float(gains[-1]) > 1e-3
    assert bool((gains[:-1] > 0.06).all())


def test_acceleration_ends_where_em_does_in_fewer_rounds() -> None:
    data = table(0.0, 3)
    slow = em(start(3.0, 5.0), data, rounds=5000, tolerance=1e-12)
    fast = em(start(3.0, 5.0), data, rounds=5000, tolerance=1e-12, accelerate=True)
    assert fast.bounds[-1] >= slow.bounds[-1] - 1e-6
    assert 3 * fast.rounds < slow.rounds


def test_minibatches_come_close_to_the_optimum() -> None:
    data = table(0.2, 1).repeat(10, 1)
    exact = em(start(3.0, 5.0), data, rounds=2000, tolerance=1e-10)
    for tolerance, gap in ((1e-6, 1e-4), (1e-3, 1e-3)):
        found = em(start(3.0, 5.0), data, batch_size=50, tolerance=tolerance)
        assert found.converged
        assert log_likelihood(found.model, data) > exact.bounds[-1] - gap * len(data)
        assert found.rounds == len(found.bounds) < (40 if tolerance < 1e-5 else 12)
    with pytest.warns(lapis.LapisWarning, match="too few to judge"):
        assert not em(start(3.0, 5.0), data, rounds=5, batch_size=50).converged


def test_restarts_keep_the_best_and_tell_all() -> None:
    """Equal means are a saddle point, which EM does not leave: of three starts the second is the best."""
    data, gaps = table(0.0), iter((0.0, 2.0, 0.0))
    found = em(lambda source: start(5.0, 5.0 + next(gaps)), data, restarts=3, rounds=2000)
    assert len(found.restarts) == 3
    assert found.restarts[0] == found.restarts[2] < found.restarts[1] - 0.1
    assert found.bounds[-1] == max(found.restarts)
    assert float(found.model.means.diff()) > 1


@dataclass(frozen=True)
class Broken(TwoGaussians):
    def maximisation(self, expected: Expected) -> Any:
        return replace(self, means=self.means - 1)


@dataclass(frozen=True)
class Unbounded(TwoGaussians):
    def moved(self) -> float:
        return 1.0


def test_what_goes_wrong_is_said() -> None:
    data = table(0.2)
    with pytest.raises(lapis.DataError, match="bound fell"):
        em(Broken(**vars(start())), data)
    with pytest.warns(lapis.LapisWarning, match="still climbing"):
        em(start(3.0, 5.0), data, rounds=1, tolerance=1e-12)
    with pytest.raises(lapis.OptionError, match="same"):
        em(start(), data, restarts=2)
    with pytest.raises(lapis.DataError, match="finite"):
        em(start(), data * float("inf"))
    with pytest.raises(lapis.OptionError, match="model"):
        em(3, data)  # type: ignore[type-var]
    with pytest.raises(lapis.OptionError, match="start is no model"):
        em(lambda source: 3, data)  # type: ignore[type-var, arg-type, return-value]
    with pytest.raises(lapis.OptionError, match="accelerated"):
        em(start(), data, batch_size=5, accelerate=True)
    model = TwoGaussians(*vars(start()).values())
    for name, words in (("expectation", "an Expected"), ("maximisation", "a LatentModel"), ("log_joint", "log_joint")):
        wrong = type("Wrong", (TwoGaussians,), {name: lambda self, data: None})
        if name == "log_joint":
            wrong = type("Wrong", (TwoGaussians,), {name: LatentModel.log_joint})
        with pytest.raises(lapis.OptionError, match=words):
            em(wrong(model.share, model.means), data)
    with pytest.raises(lapis.OptionError, match="bound"):
        em(Unbounded(**vars(start())), data, batch_size=5)


@dataclass(frozen=True)
class RidgePrior(LatentModel):
    """y ~ N(X w, 1), w ~ N(0, 1 / precision): the weights are the latent variables, the precision the parameter."""

    precision: Tensor

    def expectation(self, data: Tensor) -> Expected:
        x, y = data[:, :-1], data[:, -1]
        covariance = torch.linalg.inv(x.T @ x + self.precision * torch.eye(x.shape[1], dtype=DOUBLE))
        mean = covariance @ x.T @ y
        sums = {
            "weights": torch.tensor(float(x.shape[1]), dtype=DOUBLE),
            "squares": mean.square().sum() + covariance.trace(),
            "errors": (y - x @ mean).square().sum() + (x @ covariance * x).sum(),
        }
        return Expected(sums, 0.5 * torch.logdet(2 * math.pi * math.e * covariance), len(y))

    def maximisation(self, expected: Expected) -> RidgePrior:
        return RidgePrior(expected.statistics["weights"] / expected.statistics["squares"])

    def log_joint(self, expected: Expected) -> Tensor:
        sums = expected.statistics
        weights = sums["weights"] * (self.precision / (2 * math.pi)).log() - self.precision * sums["squares"]
        return 0.5 * (weights - sums["errors"] - expected.count * math.log(2 * math.pi))


def test_em_over_weights_climbs_the_evidence_to_mackays_fixed_point() -> None:
    """The bound is log p(D), constants and all; `tune`, and rounds from draws on the same driver, end where it does."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(30, 20, generator=generator, dtype=DOUBLE)
    weights, errors = (torch.randn(n, generator=generator, dtype=DOUBLE) for n in (20, 30))
    y = x @ (0.4 * weights) + errors
    data = torch.cat([x, y[:, None]], 1)
    fit = em(RidgePrior(torch.tensor(1.0, dtype=DOUBLE)), data, rounds=3000, tolerance=1e-14)
    model = torch.nn.Linear(20, 1, bias=False).double()
    with torch.no_grad():  # the mean moves with the precision: the tangent mode follows it
        model.weight.copy_(torch.linalg.lstsq(x, y).solution)
    options: dict[str, Any] = {"likelihood": lapis.Gaussian(1.0), "prior": 1.0}
    exact = lapis.laplace(model, (x, y[:, None]), structure="dense", **options).at_tangent_mode((x, y[:, None]))
    tuned = exact.tune(noise=False)
    torch.testing.assert_close(fit.model.precision, tuned.prior.precision.squeeze(), rtol=1e-4, atol=0)
    assert fit.bounds[-1] == pytest.approx(float(tuned.log_evidence()), abs=1e-7)
    drawn = lapis.laplace(model, (x, y[:, None]), structure="implicit", **options).at_tangent_mode((x, y[:, None]))
    rounds = drawn.tune(method="draws", noise=False, samples=4000, solver="cg")
    # gamma from 4,000 draws has a relative error of about sqrt(2 / (4,000 x 12)) = 1 %
    torch.testing.assert_close(rounds.prior.precision.squeeze(), fit.model.precision, rtol=0.06, atol=0)


def test_tuning_from_draws_is_a_model_on_em_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks and linear models: `tune` hands a model of two functions to `em`, and keeps what `em` found."""
    runs: list[tuple[LatentModel, Any]] = []

    def seen(model: Any, data: Any, **options: Any) -> Any:
        runs.append((model, em(model, data, **options)))
        return runs[-1][1]

    monkeypatch.setattr("lapis.posteriors.laplace.tuning.by_draws.em", seen)
    monkeypatch.setattr("lapis.linear_models.tuning.em", seen)
    generator = torch.Generator().manual_seed(3)
    x, errors = (torch.randn(30, n, generator=generator, dtype=DOUBLE) for n in (5, 1))
    y = x.sum(1, keepdim=True) + errors
    implicit = lapis.laplace(
        torch.nn.Linear(5, 1).double(), (x, y), lapis.Gaussian(1.0), structure="implicit"
    ).at_tangent_mode((x, y))
    linear = lapis.linear(x, y, lapis.Gaussian(1.0), samples=50)
    results = implicit.tune(samples=50, max_iterations=30), linear.tune(max_iterations=30)
    for (model, fit), tuned in zip(runs, results, strict=True):
        assert isinstance(model, LatentModel)
        assert fit.converged
        assert fit.rounds == tuned.tuning.iterations > 1
        assert torch.equal(fit.model.posterior.prior.precision, tuned.prior.precision)
        again = model
        for _ in range(fit.rounds):  # the two functions, by hand
            again = again.maximisation(again.expectation(_data_of(again, y)))
        torch.testing.assert_close(again.posterior.prior.precision, tuned.prior.precision, rtol=1e-2, atol=0)  # type: ignore[attr-defined]
    for tune in (partial(implicit.tune, samples=50), linear.tune):
        with pytest.warns(lapis.LapisWarning, match="max_iterations") as caught:
            tune(max_iterations=1, tolerance=1e-9)
        assert {each.filename for each in caught} == {__file__}


def _data_of(model: Any, y: Tensor) -> Tensor:
    """What each kind of model takes: the groups of weights, or the targets."""
    return model.posterior.weight_prior.group_index() if hasattr(model, "sampler") else y.reshape(-1)
