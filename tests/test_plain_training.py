"""Plain training: a maximum of the likelihood or of the posterior density, reproducible, nothing else changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lapis
from lapis.training.plain import fit_network

F64 = torch.float64


def line(n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, dtype=F64, generator=generator)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=F64) + 0.1 * torch.randn(
        n, 1, dtype=F64, generator=generator
    )


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_linear_model_reaches_the_ridge_solution(decay: float) -> None:
    """mean |y - x w|^2 / (2 noise^2) + decay / 2 |w|^2 has its minimum in closed form."""
    x, y = line()
    model, noise = nn.Linear(3, 1, bias=False).double(), 0.5
    fit_network(model, (x, y), lapis.Gaussian(noise), epochs=400, learning_rate=0.05, weight_decay=decay, batch_size=40)
    normal = x.T @ x / (len(x) * noise**2) + decay * torch.eye(3, dtype=F64)
    expected = torch.linalg.solve(normal, x.T @ y / (len(x) * noise**2))
    torch.testing.assert_close(model.weight.detach(), expected.T, rtol=1e-5, atol=1e-6)


def test_training_depends_on_the_generator_only_and_leaves_modes_and_global_randomness() -> None:
    def run(seed: int | None, data: Any) -> tuple[tuple[float, ...], Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)).double()
        model.eval()
        model[1].train()
        torch.manual_seed(11 if seed is None else 100 + seed)  # of no influence
        before, told = torch.random.get_rng_state(), []
        modes: set[bool] = set()
        model.register_forward_pre_hook(lambda module, _: modes.add(module.training))
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        losses = fit_network(
            model, data, "regression", epochs=5, batch_size=16, generator=generator,
            on_epoch=lambda epoch, loss: told.append((epoch, loss)),
        )  # fmt: skip
        assert told == list(enumerate(losses, start=1))
        assert torch.equal(before, torch.random.get_rng_state())
        assert modes == {True}
        assert [module.training for module in model] == [False, True, False, False]
        assert all(p.grad is None for p in model.parameters())
        return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    for data in (line(), TensorDataset(*line())):
        assert run(None, data)[0] == run(0, data)[0]
        assert torch.equal(run(1, data)[1], run(1, data)[1])
        assert run(1, data)[0] != run(2, data)[0]


def test_mistakes_are_named_before_training_and_divergence_when_it_happens() -> None:
    x, y = line()
    model = nn.Linear(3, 1).double()
    before = model.weight.detach().clone()
    for options, message in (
        ({"epochs": 0}, "Bad epochs"),
        ({"learning_rate": 0.0}, "Bad learning_rate"),
        ({"weight_decay": -1.0}, "Bad weight_decay"),
        ({"optimiser": "lbfgs"}, "Unknown optimiser"),
        ({"schedule": "step"}, "Unknown schedule"),
        ({"batch_size": 0}, "Bad batch_size"),
        ({"generator": 3}, "Bad generator"),
    ):
        with pytest.raises(lapis.OptionError, match=message):
            fit_network(model, (x, y), "regression", **options)
    with pytest.raises(lapis.DataError, match="reads the data many times"):
        fit_network(model, iter([(x, y)]), "regression")
    assert torch.equal(model.weight, before)
    with pytest.raises(lapis.ModelError, match="Training diverged in epoch"):
        fit_network(model, (x, y), "regression", epochs=2000, learning_rate=1e9, optimiser="sgd", schedule="constant")
    assert model.training
