"""The data view: which examples a posterior rests on, and what leaving each one out would change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.function_space import kernels
from lapis.function_space.kernels import DIRECTED

F64 = torch.float64


def linear(n: int = 14, noise: float = 0.4, prior: float = 0.8) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A linear model with two outputs at the mode of its data."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, dtype=F64, generator=generator)
    y = x @ torch.randn(3, 2, dtype=F64, generator=generator) + torch.randn(n, 2, dtype=F64, generator=generator)
    return at_mode(x, y, noise, prior), (x, y)


def at_mode(x: Tensor, y: Tensor, noise: float, prior: float) -> nn.Module:
    """The linear model whose weights are the posterior mean, in closed form."""
    features = torch.cat([x, torch.ones(len(x), 1, dtype=F64)], 1)
    matrix = features.mT @ features / noise**2 + prior * torch.eye(features.shape[1], dtype=F64)
    weights = torch.linalg.solve(matrix, features.mT @ y / noise**2)
    model = nn.Linear(x.shape[1], y.shape[1]).double()
    with torch.no_grad():
        model.weight.copy_(weights[:-1].mT)
        model.bias.copy_(weights[-1])
    return model


def trained(n: int = 60, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A classifier of three blobs with some labels drawn anew, at its mode under a prior precision of 0.5."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = (torch.randn(n, 2, generator=generator) + 2 * torch.eye(3)[y][:, :2]).double()
    y = torch.where(torch.rand(n, generator=generator) < 0.1, torch.randint(3, (n,), generator=generator), y)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    descend(model, x, y)
    return model, (x, y)


def descend(model: nn.Module, x: Tensor, y: Tensor, steps: int = 30) -> None:
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        total = nn.functional.cross_entropy(model(x), y, reduction="sum")
        total = total + 0.25 * sum(p.square().sum() for p in model.parameters())
        total.backward()
        return total

    for _ in range(4):
        optimiser.step(loss)


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal"])
def test_memorable_examples_have_the_largest_curvature_of_their_class(structure: str) -> None:
    model, (x, y) = trained()
    posterior = lapis.laplace(model, (x, y), "classification", structure=structure, prior=0.5)
    p = model(x).softmax(-1).detach()
    expected: list[int] = []
    for label in range(3):
        scores = {n: float((p[n] * (1 - p[n])).sum()) for n in range(len(y)) if int(y[n]) == label}
        expected += sorted(scores, key=lambda n: -scores[n])[:4]
    assert posterior.memorable((x, y), per_class=4).tolist() == expected
    assert posterior.memorable((x, y), per_class=4, batch_size=7).tolist() == expected
    assert sorted(posterior.memorable((x, y), per_class=1000).tolist()) == list(range(len(y)))


def test_memorable_examples_of_a_regression_have_the_largest_leverage() -> None:
    model, (x, y) = linear()
    posterior = lapis.laplace(model, (x, y), lapis.Gaussian(0.4), structure="dense", prior=0.8)
    leverage = posterior.functional_variance(x).diagonal(dim1=1, dim2=2).sum(-1) / 0.4**2
    assert posterior.memorable((x, y), per_class=5).tolist() == leverage.argsort(descending=True)[:5].tolist()


def test_examples_that_do_not_count_are_not_memorable() -> None:
    model, (x, y) = trained()
    y = y.clone()
    y[::4] = -100
    posterior = lapis.laplace(model, (x, y), "classification", structure="dense")
    assert not set(posterior.memorable((x, y), per_class=100).tolist()) & set(range(0, len(y), 4))


@pytest.mark.parametrize("structure", ["dense", "kronecker"])
def test_sensitivity_is_error_times_variance(structure: str) -> None:
    model, (x, y) = trained()
    posterior = lapis.laplace(model, (x, y), "classification", structure=structure, prior=0.5)
    variance, p = posterior.functional_variance(x), model(x).softmax(-1).detach()
    outputs, predictions = [], []
    for n in range(len(y)):
        change = variance[n] @ (p[n] - torch.eye(3, dtype=F64)[y[n]])
        outputs.append(change.norm())
        predictions.append(((torch.diag(p[n]) - torch.outer(p[n], p[n])) @ change).norm())
    torch.testing.assert_close(posterior.sensitivity((x, y)), torch.stack(outputs))
    torch.testing.assert_close(posterior.sensitivity((x, y), batch_size=9), torch.stack(outputs))
    torch.testing.assert_close(posterior.sensitivity((x, y), of="predictions"), torch.stack(predictions))


def test_leave_one_out_of_linear_gaussian_models_is_exact() -> None:
    model, (x, y) = linear()
    likelihood = lapis.Gaussian(0.4)
    posterior = lapis.laplace(model, (x, y), likelihood, structure="dense", prior=0.8)
    changes, densities = [], []
    for n in range(len(x)):
        rest = torch.arange(len(x)) != n
        other = at_mode(x[rest], y[rest], 0.4, 0.8)
        changes.append((other(x[n]) - model(x[n])).norm().detach())
        fit = lapis.laplace(other, (x[rest], y[rest]), likelihood, structure="dense", prior=0.8)
        densities.append(fit.predict(x[n : n + 1]).log_prob(y[n : n + 1])[0])
    torch.testing.assert_close(posterior.sensitivity((x, y), exact=True), torch.stack(changes), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(posterior.leave_one_out((x, y)), torch.stack(densities), rtol=1e-8, atol=1e-10)


def test_sensitivity_foretells_true_leave_one_out_of_a_small_network() -> None:
    """The estimated changes of the outputs have a correlation above .8 with those of networks trained again."""
    model, (x, y) = trained(40)
    posterior = lapis.laplace(model, (x, y), "classification", structure="dense", prior=0.5, curvature="exact")
    estimate = posterior.sensitivity((x, y), exact=True)
    truth = []
    for n in range(0, 40, 3):
        rest = torch.arange(40) != n
        other = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        other.load_state_dict(model.state_dict())
        descend(other, x[rest], y[rest])
        truth.append((other(x[n]) - model(x[n])).norm().detach())
    found = torch.corrcoef(torch.stack([estimate[::3], torch.stack(truth)]))[0, 1]
    assert float(found) > 0.8


def test_an_overstated_doubt_is_said() -> None:
    model, (x, y) = trained()
    posterior = lapis.laplace(model, (x, y), "classification", structure="diagonal", prior=1e-3)
    with pytest.warns(lapis.LapisWarning, match="leverage of one or more"):
        posterior.leave_one_out((x, y))


def test_bad_input_to_the_data_view_is_refused() -> None:
    model, (x, y) = trained()
    posterior = lapis.laplace(model, (x, y), "classification", structure="dense")
    refused: list[tuple[type[Exception], Callable[[], Any]]] = [
        (lapis.OptionError, lambda: posterior.memorable((x, y), per_class=0)),
        (lapis.DataError, lambda: posterior.memorable(x)),
        (lapis.DataError, lambda: posterior.sensitivity((x, y + 5))),
        (lapis.OptionError, lambda: posterior.sensitivity((x, y), of="weights")),  # type: ignore[arg-type]
        (lapis.DataError, lambda: posterior.leave_one_out((x[:, :1], y))),
    ]
    for error, call in refused:
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker", "ekfac", "lowrank"])
@pytest.mark.parametrize("of", ["outputs", "predictions"])
def test_sensitivity_by_differentiating_twice_is_that_of_all_covariances(structure: Any, of: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3),
    ).double()  # fmt: skip
    x, y = torch.randn(11, 2, 8, 8, dtype=F64), torch.arange(11) % 3
    posterior = lapis.laplace(model, (x, y), "classification", structure=structure, prior=0.3, temperature=0.7)
    quick = posterior.sensitivity((x, y), of=of, batch_size=4)
    assert DIRECTED not in posterior.network.proofs.refused
    posterior.network.proofs.refused.add(DIRECTED)
    torch.testing.assert_close(quick, posterior.sensitivity((x, y), of=of, batch_size=4), rtol=1e-9, atol=1e-12)


def test_a_wrong_direction_is_found_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(11, 2, dtype=F64), torch.arange(11) % 3
    posterior = lapis.laplace(model, (x, y), "classification", structure="kronecker")
    true = kernels.directed
    monkeypatch.setattr(kernels, "directed", lambda *given: 1.01 * true(*given))
    found = posterior.sensitivity((x, y))
    assert DIRECTED in posterior.network.proofs.refused
    monkeypatch.undo()
    fresh = lapis.laplace(copy.deepcopy(model), (x, y), "classification", structure="kronecker")
    torch.testing.assert_close(found, fresh.sensitivity((x, y)))
