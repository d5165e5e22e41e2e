"""What `lapis.train` chooses by itself: budgets in steps, where noise and prior start, and whether it has converged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.network import Network
from lapis.training.budget import default_batch_size, plan_budget
from lapis.training.convergence import has_converged, remaining_nats
from lapis.training.data import survey
from lapis.training.run import Run


def steep(n: int, seed: int, noise: float = 0.05) -> tuple[Tensor, Tensor, Tensor]:
    """Yacht-like: few examples of six inputs, an exponential in one of them, little noise. Inputs, targets, truth."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 6, generator=generator) - 1
    truth = ((2.5 * x[:, :1]).exp() * (1 + 0.3 * x[:, 1:2]) - 3) / 4
    return 3**0.5 * x, truth + noise * torch.randn(n, 1, generator=generator), truth


def relu_network(inputs: int, hidden: int = 20) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def test_defaults_reach_the_noise_on_few_steep_data_and_do_not_warn() -> None:
    """A warning would be an error. 100 epochs at 2e-3 end far from it."""
    x, y, _ = steep(250, seed=0)
    posterior = lapis.train(relu_network(6), (x, y), "regression")
    record = posterior.training
    assert record is not None
    assert record.converged
    assert record.steps == 4000
    new, targets, truth = steep(1000, seed=1)
    prediction = posterior.predict(new)
    assert float((prediction.mean - truth).square().mean().sqrt()) < 0.08
    assert float(posterior.likelihood.noise) == pytest.approx(0.05, rel=0.5)
    lower, upper = prediction.interval(0.95)
    assert 0.85 < float(((targets >= lower) & (targets <= upper)).double().mean()) < 0.995


def test_defaults_reach_the_noise_on_a_sine_and_do_not_warn() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-3, 3, 60)[:, None]
    y = (2 * x).sin() + 0.1 * torch.randn(60, 1, generator=generator)
    torch.manual_seed(0)
    posterior = lapis.train(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)), (x, y), "regression")
    assert float(posterior.likelihood.noise) == pytest.approx(0.1, rel=0.3)
    assert float((posterior.predict(x).mean - (2 * x).sin()).square().mean().sqrt()) < 0.07


def test_run_cut_far_too_short_warns_and_says_what_to_do() -> None:
    x, y, _ = steep(250, seed=0)
    with pytest.warns(lapis.LapisWarning, match=r"far from converged: after 200 steps \(100 epochs\)") as told:
        posterior = lapis.train(relu_network(6), (x, y), "regression", epochs=100, batch_size=128, learning_rate=2e-3)
    assert any("Raise epochs or learning_rate" in str(each.message) for each in told)
    record = posterior.training
    assert record is not None
    assert not record.converged
    assert record.remaining > float(posterior.effective_parameters())


@pytest.mark.parametrize("structure", ["dense", "kronecker"])
def test_remaining_nats_of_a_linear_model_are_its_distance_from_the_minimum(structure: str) -> None:
    """1/2 g^T A^-1 g = L(t) - min L for a quadratic loss; a Kronecker block is exact for one layer."""
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(30, k, generator=generator, dtype=torch.float64) for k in (3, 1))
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    posterior = lapis.laplace(model, (x, y), lapis.Gaussian(0.7), structure=structure, prior=lapis.Prior(2.0, mean=0.3))
    features = torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], 1)
    weights = torch.cat([model.weight.detach()[0], model.bias.detach()])

    def loss(theta: Tensor) -> Tensor:
        return 0.5 * ((y[:, 0] - features @ theta) / 0.7).square().sum() + (theta - 0.3).square().sum()

    normal = features.T @ features / 0.49 + 2 * torch.eye(4, dtype=torch.float64)
    mode = torch.linalg.solve(normal, features.T @ y[:, 0] / 0.49 + 0.6)
    expected = float(loss(weights) - loss(mode))
    assert expected > 1
    for batch_size in (30, 7):
        assert remaining_nats(posterior, (x, y), batch_size) == pytest.approx(expected, rel=1e-9)
    assert all(p.grad is None for p in model.parameters())


def test_convergence_takes_neither_few_nats_nor_few_beside_the_gain_for_far() -> None:
    assert has_converged(remaining=40.0, gamma=50.0, gain=10.0)
    assert has_converged(remaining=80.0, gamma=50.0, gain=900.0)
    assert not has_converged(remaining=80.0, gamma=50.0, gain=700.0)
    assert not has_converged(remaining=1.0, gamma=0.5, gain=-3.0)


def test_budget_is_in_steps_and_grows_with_the_data() -> None:
    steps = []
    for n_data, batch in ((50, 50), (1000, 1000), (1000, 128), (4000, 2048), (60_000, 128)):
        n_batches = -(-n_data // batch)
        found = plan_budget(n_data, n_batches, 500)
        steps.append(found.epochs * n_batches)
        evaluations = [epoch for epoch in range(1, found.epochs + 1) if found.evaluates(epoch)]
        assert 12 <= len(evaluations) <= 15
        assert evaluations[0] == pytest.approx(0.1 * found.epochs, abs=1)
        assert evaluations[-1] == found.epochs
    assert steps[:3] == [4000, 4000, 4000]
    assert steps[3:] == pytest.approx([8000, 4000 * 60**0.5], rel=0.02)
    assert plan_budget(10**8, 10**6, 10**6).epochs == 10


def test_what_is_given_is_kept_and_the_rest_follows() -> None:
    given = plan_budget(100, 1, 500, epochs=40, burn_in=7, every=3, learning_rate=0.2)
    assert (given.epochs, given.burn_in, given.every, given.learning_rate) == (40, 7, 3, 0.2)
    assert plan_budget(100, 1, 500, epochs=40).burn_in == 4
    rates = [plan_budget(100, 1, weights).learning_rate for weights in (10, 500, 50_000, 10**8)]
    assert rates[0] == 0.03
    assert rates[-1] == 0.001
    assert rates == sorted(rates, reverse=True)
    assert [default_batch_size(weights) for weights in (10, 5000, 10**8)] == [2048, 500, 128]


def first_epoch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Noise and precisions with which the first epoch of every run begins."""
    seen: list[tuple[Any, Any]] = []
    train = Run.one_epoch

    def note(run: Run, *arguments: Any) -> None:
        if run.epoch == 0:
            seen.append((run.likelihood.noise, run.prior.precision))
        train(run, *arguments)

    monkeypatch.setattr(Run, "one_epoch", note)
    return seen


@pytest.mark.filterwarnings("ignore::lapis.LapisWarning")
def test_noise_starts_below_the_spread_of_the_targets_and_prior_where_the_weights_are_a_typical_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = first_epoch(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 2, generator=generator)
    y = 40 + 7 * torch.randn(50, 1, generator=generator)
    model = relu_network(2)
    squares = [sum(float(p.detach().square().sum()) for p in model[i].parameters()) for i in (0, 2)]
    lapis.train(model, (x, y), "regression", epochs=1)
    lapis.train(relu_network(2), (x, y), lapis.Gaussian(0.3), epochs=1, prior=lapis.Prior(5.0))
    lapis.train(relu_network(2), (x, y), "regression", epochs=1, noise=False)
    assert float(seen[0][0]) == pytest.approx(0.3 * float(y.std(correction=0)), rel=1e-5)
    assert seen[0][1].tolist() == pytest.approx([60 / squares[0], 21 / squares[1]], rel=1e-5)
    assert [float(part) for part in seen[1]] == [pytest.approx(0.3), 5.0]
    assert float(seen[2][0]) == 1.0


def test_survey_counts_examples_and_steps_and_measures_each_output_about_its_own_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 2, generator=generator)
    y = torch.tensor([1000.0, 0.0]) + torch.tensor([3.0, 1.0]) * torch.randn(50, 2, generator=generator)
    network = Network(nn.Linear(2, 2))
    for data, steps in (((x, y), 4), ([(x[:30], y[:30]), (x[30:], y[30:])], 2)):
        found = survey(data, network, batch_size=16)
        assert (found.n_data, found.n_batches) == (50, steps)
        assert found.spread == pytest.approx(np.sqrt(y.double().numpy().var(0).mean()), rel=1e-9)
    assert survey((x, torch.full((50, 2), 1e8)), network, 16).spread == 1.0
    ragged = [(x[:30], y[:30]), (x[30:], y[30:, :1])]
    assert survey(ragged, network, 16).spread == pytest.approx(np.sqrt(y[:30].double().numpy().var(0).mean()))
