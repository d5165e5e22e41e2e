"""Diagnoses: numbers against naive ones, each finding where it belongs and only there, and the warning of tune."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis import metrics
from lapis.batches import Batch
from lapis.curvature import sample as sample_of_data
from lapis.curvature.sample import MOST_BYTES, Sample
from test_contract import EXAMPLES, POSTERIORS, PROBLEMS, fitted
from untouched import untouched

F64 = torch.float64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=generator(seed))


def linear_data(n: int, seed: int, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    x = normal(n, 4, seed=seed)
    return x, x @ normal(4, 2, seed=99) + noise * normal(n, 2, seed=seed + 1)


def linear_posterior(n: int = 60, noise: float = 0.3, **options: Any) -> Any:
    """A linear model at its least-squares solution: all that Lapis assumes is true."""
    x, y = linear_data(n, 0)
    model = nn.Linear(4, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_((torch.linalg.pinv(x) @ y).T)
    return lapis.laplace(model, (x, y), lapis.Gaussian(noise), **options)


def classifier(steps: int = 150) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A network trained until classes that overlap little are separated."""
    x = normal(120, 4, seed=0)
    y = (3 * x[:, :3] + 0.3 * normal(120, 3, seed=1)).argmax(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    optimiser = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model, (x, y)


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return classifier()


# numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [7, None])
def test_scores_of_classes_are_those_of_all_predictions_together(trained: Any, batch_size: int | None) -> None:
    model, data = trained
    x = normal(50, 4, seed=5)
    y = (3 * x[:, :3] + normal(50, 3, seed=6)).argmax(1)
    posterior = lapis.laplace(model, data, "classification")
    found = posterior.diagnose((x, y), batch_size=batch_size).numbers
    for prefix, probs in (("plain_", model(x).softmax(-1).detach()), ("", posterior.predict(x).probs)):
        for name in ("nll", "accuracy", "ece", "brier"):
            assert found[prefix + name] == pytest.approx(float(getattr(metrics, name)(probs, y)), rel=1e-9)
        assert found[prefix + "confidence"] == pytest.approx(float(probs.amax(-1).mean()), rel=1e-9)


def test_scores_of_regression_and_counts_are_those_of_all_predictions_together() -> None:
    posterior = linear_posterior()
    x, y = linear_data(50, 5)
    found = posterior.diagnose((x, y), batch_size=9).numbers
    prediction = posterior.predict(x)
    assert found["nll"] == pytest.approx(-float(prediction.log_prob(y).mean()))
    assert found["rmse"] == pytest.approx(float(metrics.rmse(prediction.mean, y)))
    assert found["coverage"] == pytest.approx(float(metrics.coverage(*prediction.interval(0.95), y)))
    half = 1.959964 * 0.3
    inside = (posterior.network.module(x) - y).abs() <= half
    assert found["plain_coverage"] == pytest.approx(float(inside.double().mean()))
    counts, model, _ = fitted("dense", "counts")
    x, y = PROBLEMS["counts"].inputs(9), PROBLEMS["counts"].targets(9)
    found = counts.diagnose((x, y)).numbers
    rate = model.eval()(x).exp().detach()
    assert found["plain_nll"] == pytest.approx(-float(torch.distributions.Poisson(rate).log_prob(y).mean()))
    assert found["rmse"] == pytest.approx(float(metrics.rmse(counts.predict(x).mean, y)))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_doubt_at_the_training_data_is_what_exact_posteriors_allow(trained: Any, temperature: float) -> None:
    """sum tr(H V) = T gamma and S^T V S < T, written naively; the data may come in another order."""
    model, (x, y) = trained
    posterior = lapis.laplace(model, (x, y), "classification", structure="dense", temperature=temperature)
    order = torch.randperm(len(x), generator=generator(0))
    numbers = posterior.diagnose((x[order], y[order]), batch_size=50).numbers
    assert numbers["trace"] == pytest.approx(float(posterior.effective_parameters()), rel=1e-6)
    p, v = model(x).softmax(-1).detach(), posterior.functional_variance(x)
    h = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    assert numbers["trace"] == pytest.approx(float((h * v).sum()) / temperature, rel=1e-6)
    largest = float(torch.linalg.eigvals(h @ v).real.max()) / temperature
    assert numbers["largest_eigenvalue"] == pytest.approx(largest, rel=1e-6)
    assert numbers["largest_eigenvalue"] < 1
    assert "trace" not in posterior.diagnose((x[:-1], y[:-1])).numbers


# findings ----------------------------------------------------------------------------------------------


def test_all_is_well_where_the_model_is_right() -> None:
    posterior = linear_posterior().tune()
    for data in (None, linear_data(60, 0), linear_data(400, 5)):
        diagnosis = posterior.diagnose(data)
        assert diagnosis.findings == []
        assert "Nothing to object to" in str(diagnosis)


def matching(posterior: Any, data: Any, *words: str) -> None:
    """Exactly one finding has each of these words."""
    findings = posterior.diagnose(data).findings
    for word in words:
        assert sum(word in finding for finding in findings) == 1, (word, findings)


def test_a_posterior_that_is_worse_than_its_network_is_found(trained: Any) -> None:
    model, data = trained
    posterior = lapis.laplace(model, data, "classification", structure="diagonal", prior=1e-2)
    x = normal(200, 4, seed=5)
    y = (3 * x[:, :3] + 0.3 * normal(200, 3, seed=6)).argmax(1)
    matching(posterior, (x, y), "worse than the network alone", "too cautious")
    matching(posterior, data, "worse than the network alone", "not what they allow")
    sure = lapis.laplace(model, data, "classification", prior=1e9)
    matching(sure, (x, (y + 1) % 3), "too sure", "prior precision is extreme", "none of the weights")


def test_noise_and_intervals_are_held_against_residuals() -> None:
    x, y = linear_data(400, 5)
    matching(linear_posterior(noise=0.05), (x, y), "The noise", "hold only")
    matching(linear_posterior(noise=2.0), (x, y), "The noise", "too cautious")
    uneven = linear_posterior().with_noise(0.3)
    sums = replace(uneven.curvature, statistics=uneven.curvature.statistics * torch.tensor([1.0, 9.0, 1.0, 1.0]))
    matching(replace(uneven, curvature=sums), None, "The noise of output 1")


def test_searches_that_did_not_end_well_are_found(trained: Any) -> None:
    model, data = trained
    posterior: Any = lapis.laplace(model, data, "classification", prior=lapis.Prior(1.0, groups="layer"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)
        tuned = posterior.tune()
        refined = posterior.refine(data, max_rounds=1)
    tuning = replace(tuned.tuning, converged=False, at_bound=("0",), reason="an accident")
    matching(
        replace(tuned, tuning=tuning), None, "end of its range for 0", "Tuning stopped before it converged: an acc"
    )
    matching(refined, None, "Refinement stopped before")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)
        x = normal(30, 4, seed=5)
        plain = posterior.calibrate((x, model(x).argmax(1)))
    matching(plain, None, "no prior better than the network alone")


def test_inputs_and_outputs_that_are_not_as_expected_are_found() -> None:
    x, y = normal(100, 3, seed=0), (normal(100, seed=1) > 0).long()
    wide = x * torch.tensor([1.0, 1e-6, 1.0], dtype=F64)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    posterior = lapis.laplace(model, (x, y), "classification")
    matching(posterior, (x + torch.tensor([0.0, 300.0, 0.0]), y), "feature 1 has mean 299.9")
    matching(posterior, (wide, y), "very different scales")
    numbers = posterior.diagnose((torch.cat([x[:, :2], torch.ones(100, 1)], 1), y), batch_size=30).numbers
    assert numbers["constant_features"] == 1
    assert numbers["input_size"] == pytest.approx(float(x[:, :2].square().mean(0).sqrt().max().clamp(min=1)))
    softmax = nn.Sequential(model, nn.Softmax(-1))
    with pytest.warns(lapis.LapisWarning, match="look like probabilities"):
        posterior = lapis.laplace(softmax, (x, y), "classification")
    matching(posterior, (x, y), "look like probabilities")


def test_effective_parameters_close_to_all_are_found() -> None:
    x = normal(4000, 60, seed=0)
    posterior = lapis.laplace(nn.Linear(60, 1).double(), (x, x[:, :1]), lapis.Gaussian(0.1), prior=1e-3)
    matching(posterior, None, "nearly every weight")


# every posterior, every problem -------------------------------------------------------------------------


CASES = [*((name, "classification") for name in POSTERIORS), *(("dense", problem) for problem in PROBLEMS)]


@pytest.mark.parametrize(("name", "problem"), CASES)
def test_every_posterior_has_a_diagnosis_that_fits_a_terminal(name: str, problem: str) -> None:
    posterior, model, _ = fitted(name, problem)
    chosen = PROBLEMS[problem]
    for data in (None, (chosen.inputs(EXAMPLES), chosen.targets(EXAMPLES))):
        with untouched(model):
            diagnosis = posterior.diagnose(data, batch_size=5, progress=False)
        assert all(isinstance(finding, str) for finding in diagnosis.findings)
        assert all(isinstance(number, float) for number in diagnosis.numbers.values())
        lines = str(diagnosis).splitlines()
        assert max(map(len, lines)) <= 80
        assert ("plain_nll" in diagnosis.numbers) == (data is not None) == any("plain network" in s for s in lines)
        flat = " ".join(str(diagnosis).split())
        assert all(" ".join(finding.split()) in flat for finding in diagnosis.findings)


# the warning of tune -----------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["dense", "kronecker", "implicit", "lowrank"])
def test_tune_warns_of_a_posterior_that_foretells_its_training_data_worse(
    trained: Any, structure: str, tmp_path: Path
) -> None:
    model, data = trained
    posterior: Any = lapis.laplace(model, data, "classification", structure=structure, batch_size=50)
    with pytest.warns(lapis.LapisWarning, match="own training data worse .* on 120 of them") as caught:
        tuned = posterior.tune(tolerated_loss=None)
    assert [each.filename for each in caught if "training data" in str(each.message)] == [__file__]
    if structure != "implicit":
        posterior.save(tmp_path / "file")  # whose data are not in the file: there is nothing to warn by
        assert torch.equal(
            lapis.load(tmp_path / "file", model).tune(tolerated_loss=None).weight_prior.precision,
            tuned.weight_prior.precision,
        )


def test_a_sample_is_uniform_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 40 seeds, 64 of 400 examples each in uneven batches; a z-score beyond 4.5 happens once in 400 such tests."""
    monkeypatch.setattr(sample_of_data, "MOST_EXAMPLES", 64)
    hits = torch.zeros(400, dtype=F64)
    numbers = torch.arange(400)
    for seed in range(40):
        sample = Sample()
        sample._random = type(sample._random)(type(sample._random.bit_generator)(seed))
        for start, stop in ((0, 10), (10, 200), (200, 201), (201, 400)):
            sample.add(Batch(numbers[start:stop, None].double(), numbers[start:stop], 0))
        (batch,) = sample.batches()
        assert len(batch) == 64 == len(batch.targets.unique())
        assert torch.equal(batch.inputs[:, 0].long(), batch.targets)
        hits[batch.targets] += 1
    p = 64 / 400
    assert float(((hits - 40 * p) / (40 * p * (1 - p)) ** 0.5).abs().max()) < 4.5
    wide = Sample()
    wide.add(Batch(torch.zeros(9, MOST_BYTES // 16), torch.zeros(9), 0))
    assert sum(map(len, wide.batches())) == 3
