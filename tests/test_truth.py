"""experiments/truth.py: its sampler is right, and the refined posterior is near the chain where Laplace is not."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

F64 = torch.float64


ROOT = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.5, 0.0], [-0.3, 0.4, 2.0]], dtype=F64)
MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=F64)


def log_density(z: Tensor) -> tuple[Tensor, Tensor]:
    """Of N(MEAN, ROOT ROOT^T), and its gradient."""
    slope = -(z - MEAN) @ torch.linalg.inv(ROOT @ ROOT.T)
    return 0.5 * ((z - MEAN) * slope).sum(1), slope


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "experiments"))
    return importlib.import_module("truth")


def test_the_sampler_draws_from_a_correlated_gaussian(truth: ModuleType) -> None:
    """Means and second moments within 5.5 standard errors over 512 chains: 12 tests, false-alarm rate below 1e-6."""
    root, mean = ROOT, MEAN
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(512, 3, dtype=F64, generator=generator)
    run = truth.hamiltonian(log_density, start, 1000, generator)
    centred = run.draws - mean
    for values, expected in (
        (centred, torch.zeros(3, dtype=F64)),
        (centred.unsqueeze(-1) * centred.unsqueeze(-2), root @ root.T),
    ):
        each = values.mean(0)
        error = each.std(0) / math.sqrt(512)
        assert bool(((each.mean(0) - expected).abs() < 5.5 * error).all())
        assert float(error.max()) < 0.02
    assert float(truth.split_r_hat(run.draws).max()) < 1.02
    assert 0.6 < run.acceptance < 0.97


def test_trajectories_can_be_reversed_and_keep_their_energy(truth: ModuleType) -> None:
    """What makes the chain right, with the acceptance rule. Half the step has a quarter of the error in energy."""
    generator = torch.Generator().manual_seed(0)
    q, p = torch.randn(2, 50, 3, dtype=F64, generator=generator)
    value, gradient = log_density(q)
    errors = []
    for step, steps in ((0.1, 20), (0.05, 40)):
        there, momentum, new, slope = truth.leapfrog(log_density, q, p, gradient, step, steps)
        back, reverse, _, _ = truth.leapfrog(log_density, there, -momentum, slope, step, steps)
        torch.testing.assert_close(back, q, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(reverse, -p, rtol=1e-9, atol=1e-9)
        errors.append((new - 0.5 * momentum.square().sum(1) - value + 0.5 * p.square().sum(1)).abs().mean())
    assert 3.5 < float(errors[0] / errors[1]) < 4.5


def test_r_hat_notices_chains_that_disagree_or_drift(truth: ModuleType) -> None:
    values = torch.randn(400, 8, 1, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert float(truth.split_r_hat(values)) < 1.02
    assert float(truth.split_r_hat(values + torch.arange(8, dtype=F64)[:, None])) > 1.5
    assert float(truth.split_r_hat(values + torch.linspace(0, 3, 400, dtype=F64)[:, None, None])) > 1.2


def test_the_chain_is_the_integral_of_a_logistic_regression(truth: ModuleType) -> None:
    """Against integration on a grid: probabilities within five standard errors of the chain, and all errors small."""
    exact = importlib.import_module("logistic_regression")
    task, x = exact.problem(), exact.square(points=7)
    probs, _ = exact.integrate(task, x)
    problem = truth.Problem("2-D", task.model, "bernoulli", (task.x, task.y), (task.x, task.y), exact.PRIOR)
    found = truth.chain(problem, x, 300, 32, 0)
    assert found.r_hat < 1.02
    assert bool(((found.probs[:, 1] - probs).abs() < 5 * found.error[:, 1] + 1e-12).all())
    assert float(found.error.max()) < 0.01


def test_refined_probabilities_are_near_the_chain_where_laplace_is_not(
    truth: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick run: separable classes, where the curvature at the mode says little."""
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "FIGURES", tmp_path)
    monkeypatch.setattr("sys.argv", ["truth.py", "--quick"])
    found = []
    plain = truth.side_by_side
    monkeypatch.setattr(truth, "side_by_side", lambda *args: found.append(plain(*args)) or found[-1])
    threads = torch.get_num_threads()
    try:
        truth.main()
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 2
    for _, errors, chain in found:
        assert chain.r_hat < 1.05
        assert errors["refined, quasi"] < 0.2 * errors["Laplace, quasi"]
        assert errors["refined, quasi"] < errors["plain"]
        assert errors["Laplace, quasi"] < errors["Laplace, probit"]
    assert "Largest R-hat" in (tmp_path / "truth_quick.md").read_text(encoding="utf-8")
    assert (tmp_path / "truth_quick.png").read_bytes()[:4] == b"\x89PNG"
