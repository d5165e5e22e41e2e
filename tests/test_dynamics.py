"""Linear-Gaussian dynamics against the joint Gaussian of all states and observations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lapis
from lapis.latent import LinearDynamics
from lapis.latent.dynamics.kalman import System
from lapis.latent.dynamics.model import DynamicsModel
from lapis.learning_rule import FullGaussian, step

DOUBLE = torch.float64
NAN = math.nan


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def matrices(states: int = 2, width: int = 2, seed: int = 0) -> dict[str, Tensor]:
    def covariance(offset: int, size: int) -> Tensor:
        root = normal(seed + offset, size, size)
        return root @ root.mT + 0.3 * torch.eye(size, dtype=DOUBLE)

    return {
        "A": 0.6 * normal(seed + 1, states, states), "C": normal(seed + 2, width, states), "Q": covariance(3, states),
        "R": covariance(4, width), "m": normal(seed + 5, states), "P": covariance(6, states),
    }  # fmt: skip


def joint(given: dict[str, Tensor], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and covariance of (x_1, ..., x_T), and C for all of them."""
    a, q = given["A"], given["G"] @ given["Q"] @ given["G"].mT if "G" in given else given["Q"]
    size = len(a)
    mean, marginal = [given["m"]], [given["P"]]
    for _ in range(steps - 1):
        mean.append(a @ mean[-1])
        marginal.append(a @ marginal[-1] @ a.mT + q)
    covariance = torch.zeros(steps * size, steps * size, dtype=DOUBLE)
    for s in range(steps):
        for t in range(s, steps):
            block = torch.linalg.matrix_power(a, t - s) @ marginal[s]
            covariance[t * size : (t + 1) * size, s * size : (s + 1) * size] = block
            covariance[s * size : (s + 1) * size, t * size : (t + 1) * size] = block.mT
    return torch.cat(mean), covariance, torch.block_diag(*[given["C"]] * steps)


def conditioned(given: dict[str, Tensor], y: Tensor, steps: int) -> tuple[Tensor, Tensor, float]:
    """Means (T, L) and covariances (T, L, L) of states given the y (t, D) there are, and log p(y)."""
    mean, covariance, c = joint(given, steps)
    noise = torch.block_diag(*[given["R"]] * steps)
    seen = torch.zeros(steps * y.shape[1], dtype=torch.bool)
    seen[: y.numel()] = ~y.isnan().flatten()
    c, noise, values = c[seen], noise[seen][:, seen], y.flatten()[~y.isnan().flatten()]
    spread = c @ covariance @ c.mT + noise
    gain = torch.linalg.solve(spread, c @ covariance).mT
    after = covariance - gain @ c @ covariance
    size = len(given["A"])
    log_p = float(torch.distributions.MultivariateNormal(c @ mean, spread).log_prob(values)) if len(values) else 0.0
    blocks = torch.stack([after[i : i + size, i : i + size] for i in range(0, steps * size, size)])
    return (mean + gain @ (values - c @ mean)).reshape(steps, size), blocks, log_p


def with_gaps(seed: int, steps: int, width: int) -> Tensor:
    y = normal(seed, steps, width)
    y[1, 0] = y[3] = NAN
    return y


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("missing", [False, True])
def test_filter_smoother_and_forecast_equal_conditionals_of_the_joint_gaussian(width: int, missing: bool) -> None:
    given = matrices(2, width)
    model = LinearDynamics(**given)
    y = with_gaps(10, 6, width) if missing else normal(10, 6, width)
    means, covariances, log_p = conditioned(given, y, 6)
    found = model.smooth(y)
    torch.testing.assert_close(found.means, means, atol=1e-9, rtol=0)
    torch.testing.assert_close(found.covariances, covariances, atol=1e-9, rtol=0)
    assert float(found.log_likelihood) == pytest.approx(log_p, abs=1e-9)
    assert float(model.log_likelihood(y)) == float(found.log_likelihood)
    filtered = model.filter(y)
    for t in (0, 3, 5):
        means, covariances, _ = conditioned(given, y[: t + 1], 6)
        torch.testing.assert_close(filtered.means[t], means[t], atol=1e-9, rtol=0)
        torch.testing.assert_close(filtered.covariances[t], covariances[t], atol=1e-9, rtol=0)
    means, covariances, _ = conditioned(given, y, 9)
    ahead = model.forecast(3, y)
    torch.testing.assert_close(ahead.means, means[6:] @ given["C"].mT, atol=1e-9, rtol=0)
    torch.testing.assert_close(ahead.covariances, given["C"] @ covariances[6:] @ given["C"].mT + given["R"])
    low, high = ahead.interval(0.9)
    half = 1.6448536269514722 * ahead.covariances.diagonal(dim1=1, dim2=2).sqrt()
    torch.testing.assert_close((high - low) / 2, half)


def test_singular_covariances_are_exact_too() -> None:
    given = matrices(3, 1)
    given["G"], given["Q"] = torch.eye(3, 1, dtype=DOUBLE), given["Q"][:1, :1]
    given["A"] = torch.tensor([[0.5, 0.2, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=DOUBLE)
    given["P"], given["R"] = torch.zeros(3, 3, dtype=DOUBLE), torch.zeros(1, 1, dtype=DOUBLE)
    given["P"][0, 0], given["P"][2, 2] = 1.0, 0.7  # the last state is forgotten, and nothing later tells of it
    given["C"] = torch.tensor([[1.0, 0.5, 0.0]], dtype=DOUBLE)
    y = normal(3, 5, 1)
    y[2] = NAN
    means, covariances, log_p = conditioned(given, y, 5)
    found = LinearDynamics(**given, fixed=("A",)).smooth(y)
    torch.testing.assert_close(found.means, means, atol=1e-9, rtol=0)
    torch.testing.assert_close(found.covariances, covariances, atol=1e-9, rtol=0)
    assert float(found.log_likelihood) == pytest.approx(log_p, abs=1e-9)


@pytest.mark.parametrize("missing", [False, True])
def test_sequences_of_different_lengths_equal_one_by_one(missing: bool) -> None:
    model = LinearDynamics(**matrices())
    sequences = [with_gaps(n, n, 2) if missing else normal(n, n, 2) for n in (4, 7, 5)]
    padded = torch.full((3, 7, 2), NAN, dtype=DOUBLE)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    each = [model.smooth(s) for s in sequences]
    together, array = model.smooth(sequences), model.smooth(padded)
    torch.testing.assert_close(array.log_likelihood, torch.stack([s.log_likelihood for s in each]))
    for b, (one, listed) in enumerate(zip(each, together, strict=True)):
        for name in ("means", "covariances", "log_likelihood"):
            torch.testing.assert_close(getattr(listed, name), getattr(one, name))
        torch.testing.assert_close(array.covariances[b, : len(one.means)], one.covariances)
    ahead = model.forecast(2, sequences)
    torch.testing.assert_close(ahead.covariances[1], model.forecast(2, sequences[1]).covariances)
    torch.testing.assert_close(ahead.means[0], model.forecast(2, sequences[0]).means)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"fixed": ("A", "C")}, {"state_noise": "diagonal", "noise": "diagonal"}, {"fixed": ("Q", "m", "P")},
        {"fixed": ("A", "R", "m"), "noise": "diagonal"},
    ],
)  # fmt: skip
def test_em_never_falls_and_holds_what_is_fixed(options: dict[str, Any]) -> None:
    for seed in range(2):
        given = matrices(seed=20 * seed)
        if "state_noise" in options:
            given |= {name: given[name].diagonal().diag() for name in "QR"}
        model = LinearDynamics(**given, **options)
        sequences = [with_gaps(seed + n, n, 2) for n in (5, 9, 6)]
        model.fit(sequences, rounds=15, tolerance=0.05)
        assert bool((torch.tensor(model.bounds_).diff() > -1e-9).all())
        assert model.bounds_[-1] > model.bounds_[0] + 0.1
        assert model.bounds_[-1] == pytest.approx(float(model.log_likelihood(sequences).sum()), abs=1e-8)
        for name in options.get("fixed", ()):
            assert torch.equal(getattr(model, name + "_"), given[name])
        if "state_noise" in options:
            assert model.Q_ is not None
            assert torch.equal(model.Q_, model.Q_.diagonal().diag())


def test_the_first_covariance_is_held_where_there_is_one_sequence() -> None:
    given = matrices()
    model = LinearDynamics(**given).fit(normal(5, 6, 2), rounds=2, tolerance=10.0)
    assert torch.equal(model.P_, given["P"])  # type: ignore[arg-type]


def test_expected_log_joint_has_the_gradient_of_the_log_likelihood() -> None:
    """Fisher's identity: at the parameters of the E-step the bound touches, so both have one slope in every matrix."""
    given = matrices()
    data = [with_gaps(n, n, 2) for n in (8, 5)]
    leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
    LinearDynamics(**leaves).log_likelihood(data).sum().backward()
    eye = torch.eye(2, dtype=DOUBLE)
    held = DynamicsModel(System(**given, G=eye), frozenset(), frozenset())
    expected = held.expectation(LinearDynamics(**given)._series(data, DOUBLE)[0])
    again = {name: value.clone().requires_grad_() for name, value in given.items()}
    DynamicsModel(System(**again, G=eye), frozenset(), frozenset()).log_joint(expected).backward()
    for name in given:
        slopes = [leaf[name].grad for leaf in (leaves, again)]
        both = [(slope + slope.mT) / 2 if name in "QRP" else slope for slope in slopes if slope is not None]
        torch.testing.assert_close(*both, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(held.with_vector(held.vector()).vector(), held.vector())


def test_gradients_are_those_of_finite_differences() -> None:
    given = matrices()
    y = [with_gaps(1, 4, 2), normal(2, 3, 2)]
    leaves = [value.clone().requires_grad_() for value in given.values()]

    def outputs(*values: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(given, values, strict=True))
        named |= {name: (named[name] + named[name].mT) / 2 for name in "QRP"}
        model = LinearDynamics(**named)
        return model.log_likelihood(y), model.smooth(y)[0].means

    assert torch.autograd.gradcheck(outputs, leaves)


def test_float32_is_near_float64() -> None:
    given, y = matrices(), with_gaps(0, 60, 2)
    exact, single = LinearDynamics(**given).smooth(y), LinearDynamics(**given, dtype=torch.float32).smooth(y)
    assert single.means.dtype == torch.float32
    torch.testing.assert_close(single.means.double(), exact.means, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(single.covariances.double(), exact.covariances, atol=1e-4, rtol=1e-4)


def test_an_observation_is_a_step_of_the_learning_rule() -> None:
    given = matrices(2, 1)
    y = normal(4, 4, 1)
    found = LinearDynamics(**given).filter(y)
    mean, covariance = given["m"], given["P"]
    for t in range(4):
        prior = FullGaussian(mean, torch.linalg.inv(covariance))

        def loss(x: Tensor, t: int = t, prior: FullGaussian = prior) -> Tensor:
            return (y[t] - given["C"] @ x).square().sum() / (2 * given["R"][0, 0]) - prior.log_prob(x)

        q = step(prior, loss, 1)
        torch.testing.assert_close(found.means[t], q.mean)
        torch.testing.assert_close(found.covariances[t], q.covariance)
        mean, covariance = given["A"] @ q.mean, given["A"] @ q.covariance @ given["A"].mT + given["Q"]


@pytest.mark.parametrize("waves", [None, 1])
def test_trend_and_season_are_recovered_and_forecast(waves: int | None) -> None:
    steps = torch.arange(60, dtype=DOUBLE)
    truth = 300 + 0.5 * steps + 3 * torch.sin(2 * math.pi * steps / 4)
    y = truth + 0.3 * normal(7, 60)
    y[20:23] = NAN
    model = LinearDynamics.structural(season=4, harmonics=waves).fit(y[:48], rounds=15, tolerance=2e-2)
    ahead = model.forecast(12)
    assert float((ahead.means[:, 0] - truth[48:]).abs().max()) < 1.5
    low, high = ahead.interval(0.999)
    assert bool(((y[48:] > low[:, 0]) & (y[48:] < high[:, 0])).all())
    assert torch.equal(model.A_, LinearDynamics.structural(season=4, harmonics=waves).A_)  # type: ignore[arg-type]


@pytest.mark.parametrize(("season", "waves"), [(4, None), (7, None), (7, 3), (8, 4), (12, 2)])
def test_a_season_comes_back_after_its_steps_and_sums_to_zero(season: int, waves: int | None) -> None:
    """All of them, with and without a trend: C A^t repeats, with a wave of each frequency."""
    for trend in (True, False):
        model, base = LinearDynamics.structural(trend=trend, season=season, harmonics=waves), 2 if trend else 1
        assert model.A_ is not None
        assert model.C_ is not None
        a, c = model.A_[base:, base:], model.C_[:, base:]
        values = torch.stack([c @ torch.linalg.matrix_power(a, t) for t in range(2 * season)])[:, 0]
        torch.testing.assert_close(values[season:], values[:season])
        torch.testing.assert_close(values[:season].sum(0), torch.zeros(len(a), dtype=DOUBLE))
        assert torch.linalg.matrix_rank(values) == len(a)  # no state is without effect
        assert len(a) == (season - 1 if waves is None else min(2 * waves, season - 1))
        strengths = torch.fft.rfft(values[:season], dim=0).abs().amax(1)
        assert (strengths > 1e-9).sum() == (season // 2 if waves is None else waves)
        level = torch.eye(2, dtype=DOUBLE) + torch.diag(torch.ones(1, dtype=DOUBLE), 1)
        assert torch.equal(model.A_[:base, :base], level[:base, :base])
        assert model.G.sum(0).tolist() == [1.0] * (base + (1 if waves is None else len(a)))


def test_without_matrices_the_data_give_a_start() -> None:
    y = matrices(2, 3)["C"] @ normal(0, 40, 2).cumsum(0).mT + 0.1 * normal(1, 3, 40)
    model = LinearDynamics(4).fit([y.mT, y.mT[:9]], rounds=10, tolerance=1e-1)
    assert model.A_ is not None
    assert model.A_.shape == (4, 4)
    alone = torch.distributions.MultivariateNormal(y.mean(1), torch.cov(y)).log_prob(y.mT).sum()
    assert float(model.log_likelihood(y.mT)) > float(alone)


def test_constant_columns_are_fitted_to_the_floor() -> None:
    """The states tell them exactly: their noise, and that of their state, would go to zero, and with it the density."""
    y = torch.stack([normal(3, 15).cumsum(0), torch.full((15,), 7.0, dtype=DOUBLE)], 1)
    with pytest.warns(lapis.LapisWarning, match=r"Columns \[1\]"):
        model = LinearDynamics(2).fit(y, rounds=40, tolerance=0.3)
    assert torch.tensor(model.bounds_).diff().min() > -1e-6
    torch.testing.assert_close(model.forecast(3).means[:, 1], torch.full((3,), 7.0, dtype=DOUBLE), atol=1e-3, rtol=0)
    with pytest.warns(lapis.LapisWarning, match="constant"):
        alone = LinearDynamics(1).fit(y[:, 1], rounds=40, tolerance=0.3)
    assert float(alone.forecast(1).interval()[1]) == pytest.approx(7.0, abs=1e-2)


def test_a_list_of_rows_is_one_sequence_where_there_are_columns() -> None:
    model, y = LinearDynamics(**matrices()), normal(0, 5, 2)
    torch.testing.assert_close(model.filter(y.tolist()).means, model.filter(y).means)


def test_bad_input_is_refused() -> None:
    given = matrices()
    model = LinearDynamics(**given)
    for bad in (normal(0, 4, 3), [[0.0, math.inf]], torch.full((3, 2), NAN), [], "y"):
        with pytest.raises(lapis.DataError):
            model.filter(bad)
    for options in ({"Q": torch.eye(3)}, {"R": torch.tensor([[1.0, 0.5], [0.0, 1.0]])}, {"fixed": ("B",)},
                    {"m": torch.tensor([NAN, 0.0])}, {"G": torch.ones(2, 2)}):  # fmt: skip
        with pytest.raises(lapis.OptionError):
            LinearDynamics(**{**given, **options})  # type: ignore[arg-type]
    with pytest.raises(lapis.OptionError, match="no covariance"):
        LinearDynamics(**{**given, "P": -torch.eye(2)}).filter(normal(0, 3, 2))
    with pytest.raises(lapis.OptionError, match="singular"):
        LinearDynamics(**{**given, "Q": torch.zeros(2, 2)}).fit(normal(0, 3, 2))
    with pytest.raises(lapis.DataError, match="no variance"):
        LinearDynamics(**{**given, "C": torch.zeros(2, 2), "R": torch.zeros(2, 2)}).filter(normal(0, 3, 2))
    with pytest.raises(lapis.OptionError, match="no parameters"):
        LinearDynamics(2).smooth(normal(0, 3, 2))
    for wrong in ({"harmonics": 2}, {"season": 7, "harmonics": 4}, {"season": 1}, {"season": 4, "harmonics": 0}):
        with pytest.raises(lapis.OptionError):
            LinearDynamics.structural(**wrong)
    with pytest.raises(lapis.DataError, match="overflow"):
        LinearDynamics(1).fit([1e200, 0.0, 1.0])
    with pytest.raises(lapis.DataError, match="never observed"):
        LinearDynamics(1).fit([[[0.0, NAN], [1.0, NAN]]])
    with pytest.raises(lapis.OptionError, match="go on"):
        model.forecast(2)
    with pytest.raises(lapis.OptionError, match="states"):
        LinearDynamics()
    with pytest.raises(lapis.OptionError, match="left to fit"):
        LinearDynamics(**given, fixed=tuple("ACQRmP")).fit(normal(0, 3, 2))


def test_gradients_of_a_trend_and_a_season_are_those_of_finite_differences() -> None:
    """The next state tells most of this one exactly: the season only moves on."""
    shape = LinearDynamics.structural(season=4)
    y = normal(3, 9, 1)
    fixed = {"A": shape.A_, "C": shape.C_, "G": torch.eye(5, 3, dtype=DOUBLE), "m": torch.zeros(5, dtype=DOUBLE)}

    def outputs(noises: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        given = {"Q": noises.exp().diag(), "R": noise.exp(), "P": 5 * torch.eye(5, dtype=DOUBLE)}
        model = LinearDynamics(**fixed, **given, fixed=("A",))  # type: ignore[arg-type]
        return model.log_likelihood(y), model.smooth(y).means

    leaves = (
        torch.full((3,), -2.0, dtype=DOUBLE, requires_grad=True),
        torch.zeros(1, 1, dtype=DOUBLE, requires_grad=True),
    )
    assert torch.autograd.gradcheck(outputs, leaves)
