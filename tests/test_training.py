"""Training by the evidence: it keeps the best epoch, survives being killed, and comparisons are of like with like."""

from __future__ import annotations

import importlib
import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapis
from lapis.training.constant import constant_log_likelihood
from untouched import untouched

OPTIONS: dict[str, Any] = {"epochs": 9, "burn_in": 3, "every": 2, "batch_size": 8, "learning_rate": 0.02}


short = pytest.mark.filterwarnings("ignore:Training (found nothing|is far from converged):lapis.LapisWarning")
"""For runs too short to fit: what they are told is tested below."""


def sine(n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None]
    return x, (3 * x).sin() + 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1)).double()


def same(one: lapis.LaplacePosterior, two: lapis.LaplacePosterior) -> None:
    assert torch.equal(one.mean, two.mean)
    assert torch.equal(one.weight_prior.precision, two.weight_prior.precision)
    assert torch.equal(one.likelihood.noise, two.likelihood.noise)
    assert one.training == two.training


@short
def test_posterior_is_that_of_the_last_epoch_or_with_patience_of_the_best() -> None:
    model = network()
    posterior = lapis.train(model, sine(), "regression", **OPTIONS)
    record = posterior.training
    assert record is not None
    assert record.evaluated == (3, 5, 7, 9)
    assert record.epochs == len(record.loss) == record.best_epoch == 9
    assert record.steps == 9 * 5
    assert float(posterior.log_evidence()) == pytest.approx(record.log_evidence[-1], abs=1e-4)
    assert posterior.tuning is not None
    assert posterior.tuning.converged
    options = {**OPTIONS, "epochs": 30, "every": 1, "learning_rate": 0.1, "schedule": "constant"}
    best = lapis.train(network(), sine(), "regression", patience=50, **options)
    assert best.training is not None
    evidence = best.training.log_evidence
    assert evidence[-1] < max(evidence) - 1
    assert best.training.best_epoch == best.training.evaluated[max(range(len(evidence)), key=evidence.__getitem__)]
    assert float(best.log_evidence()) == pytest.approx(max(evidence), abs=1e-4)
    torch.testing.assert_close(posterior.mean, torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert posterior.weight_prior.labels == ("0", "1", "4")
    assert model.training
    assert all(p.requires_grad and (p.grad is None) for p in model.parameters())


@short
def test_network_trains_in_train_mode_and_comes_back_in_its_own() -> None:
    model = network().eval()
    model[1].train()
    modes = []
    model.register_forward_pre_hook(lambda module, _: modes.append((module.training, torch.is_grad_enabled())))
    lapis.train(model, sine(), "regression", **OPTIONS)
    assert (True, True) in modes
    assert not model.training
    assert model[1].training
    assert not model[3].training


@short
def test_same_seed_gives_the_same_result_and_another_seed_another() -> None:
    one, two, three = (lapis.train(network(), sine(), "regression", seed=s, **OPTIONS) for s in (0, 0, 1))
    same(one, two)
    assert not torch.equal(one.mean, three.mean)


@short
def test_global_random_numbers_are_left_alone() -> None:
    model = network()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    lapis.train(model, sine(), "regression", **OPTIONS)
    assert torch.equal(torch.rand(3), expected)


@short
@pytest.mark.parametrize("form", ["dataset", "loader"])
def test_other_forms_of_data_train_too_and_do_not_depend_on_global_randomness(form: str) -> None:
    def data() -> Any:
        dataset = TensorDataset(*sine())
        return dataset if form == "dataset" else DataLoader(dataset, batch_size=8, shuffle=True)

    one = lapis.train(network(), data(), "regression", **OPTIONS)
    torch.rand(7)
    same(one, lapis.train(network(), data(), "regression", **OPTIONS))


class Interrupted(list):  # type: ignore[type-arg]
    """Batches that raise after so many passes."""

    def __init__(self, batches: list[Any], passes: int) -> None:
        super().__init__(batches)
        self.passes = passes

    def __iter__(self) -> Any:
        self.passes -= 1
        if self.passes < 0:
            raise KeyboardInterrupt
        return super().__iter__()


@short
def test_run_that_was_interrupted_anywhere_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    x, y = sine()
    parts = list(zip(x.split(8), y.split(8), strict=True))
    whole = lapis.train(network(), parts, "regression", **OPTIONS)
    for passes in (2, 9):
        path = tmp_path / f"{passes}.run"
        with pytest.raises(KeyboardInterrupt):
            lapis.train(network(), Interrupted(parts, passes), "regression", checkpoint=path, **OPTIONS)
        torch.rand(11)
        same(lapis.train(network(), parts, "regression", checkpoint=path, **OPTIONS), whole)
        same(lapis.train(network(), parts, "regression", checkpoint=path, **OPTIONS), whole)
        assert [p.name for p in tmp_path.glob("*.partial")] == []


@short
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_run_that_was_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, lapis
from test_training import OPTIONS, network, sine
torch.set_num_threads(1)
steps = torch.optim.Adam.step
def step(self, *args):
    step.count += 1
    if step.count == 5 * 6 + 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return steps(self, *args)
step.count = 0
torch.optim.Adam.step = step
lapis.train(network(), sine(), "regression", checkpoint={str(tmp_path / "run")!r}, **OPTIONS)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    resumed = lapis.train(network(), sine(), "regression", checkpoint=tmp_path / "run", **OPTIONS)
    same(resumed, lapis.train(network(), sine(), "regression", **OPTIONS))


@short
def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    lapis.train(network(), sine(), "regression", checkpoint=path, **OPTIONS)
    with pytest.raises(lapis.FileError, match="learning_rate"):
        lapis.train(network(), sine(), "regression", checkpoint=path, **{**OPTIONS, "learning_rate": 0.5})
    wider = nn.Sequential(nn.Linear(1, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    with pytest.raises(lapis.FileError, match="n_weights="):
        lapis.train(wider, sine(), "regression", checkpoint=path, **OPTIONS)
    with pytest.raises(lapis.FileError, match="prior="):
        lapis.train(network(), sine(), "regression", checkpoint=path, prior=lapis.Prior(2.0, groups="layer"), **OPTIONS)
    x, y = sine()
    other = x.clone()
    other[3] += 1e-3
    likelihood = lapis.Gaussian(0.3)
    for model, data, meaning, changes, says in (
        (network(), (other, y), "regression", {}, "data="),
        (network(), (x, y), likelihood, {}, "likelihood="),
        (network(), (x, y), "regression", {"optimiser": "sgd"}, "optimiser="),
        (network(), (x, y), "regression", {"optimiser": lambda p, r: torch.optim.Adam(p, r, (0.8, 0.9))}, "optimiser="),
        (network().float(), (x.float(), y.float()), "regression", {}, "network="),
    ):
        with pytest.raises(lapis.FileError, match=says), untouched(model):
            lapis.train(model, data, meaning, checkpoint=path, **{**OPTIONS, **changes})
    model = network()
    model[2] = nn.ReLU()  # the same weights, another function
    with pytest.raises(lapis.FileError, match="from the same weights"), untouched(model):
        lapis.train(model, sine(), "regression", checkpoint=path, **OPTIONS)
    contents = bytearray(path.read_bytes())
    contents[-3] ^= 1
    path.write_bytes(contents)
    with pytest.raises(lapis.FileError, match="not an unchanged Lapis checkpoint of a training run"):
        lapis.train(network(), sine(), "regression", checkpoint=path, **OPTIONS)
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(lapis.FileError, match="not a whole Lapis checkpoint"):
        lapis.train(network(), sine(), "regression", checkpoint=path, **OPTIONS)
    lapis.laplace(network(), sine(), "regression").save(path)
    with pytest.raises(lapis.FileError, match="holds a posterior"):
        lapis.train(network(), sine(), "regression", checkpoint=path, **OPTIONS)


def test_a_checkpoint_that_cannot_be_written_is_refused_before_the_first_epoch(tmp_path: Path) -> None:
    model = network()
    before = [p.clone() for p in model.parameters()]
    for path in (tmp_path, tmp_path / "no folder" / "run"):
        with pytest.raises(lapis.FileError, match="Cannot write"):
            lapis.train(model, sine(), "regression", checkpoint=path, **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert list(tmp_path.iterdir()) == []


@short
def test_training_stops_when_the_evidence_has_stopped_rising() -> None:
    options = {**OPTIONS, "epochs": 60, "every": 1, "learning_rate": 0.3, "schedule": "constant"}
    posterior = lapis.train(network(), sine(), "regression", patience=2, **options)
    record = posterior.training
    assert record is not None
    assert record.epochs < 60
    assert "not risen for 2 evaluations" in record.reason
    later = [epoch for epoch in record.evaluated if epoch > record.best_epoch and epoch not in record.held]
    assert len(later) == 2


@short
@pytest.mark.parametrize("optimiser", ["sgd", lambda p, rate: torch.optim.RMSprop(p, lr=rate)])
def test_optimisers_resume(tmp_path: Path, optimiser: Any) -> None:
    x, y = sine()
    parts = list(zip(x.split(8), y.split(8), strict=True))
    options = {**OPTIONS, "optimiser": optimiser, "learning_rate": 1e-3}
    with pytest.raises(KeyboardInterrupt):
        lapis.train(network(), Interrupted(parts, 6), "regression", checkpoint=tmp_path / "run", **options)
    resumed = lapis.train(network(), parts, "regression", checkpoint=tmp_path / "run", **options)
    same(resumed, lapis.train(network(), parts, "regression", **options))


@short
def test_classification_trains_with_grouped_prior() -> None:
    x = torch.randn(60, 2, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).double()
    prior = lapis.Prior(1.0, groups="normalised")
    posterior = lapis.train(model, (x, y), "classification", prior=prior, **{**OPTIONS, "epochs": 25})
    assert posterior.weight_prior.labels == ("0", "others")
    assert float((posterior.predict(x).probs.argmax(1) == y).double().mean()) > 0.8  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong", [{"epochs": 0}, {"every": 0}, {"schedule": "step"}, {"optimiser": "lion"}, {"learning_rate": -1.0}]
)
def test_bad_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(lapis.OptionError):
        lapis.train(network(), sine(), "regression", **{**OPTIONS, **wrong})


def test_data_that_can_be_read_once_are_refused() -> None:
    with pytest.raises(lapis.DataError, match="many times"):
        lapis.train(network(), iter([sine()]), "regression", **OPTIONS)


def test_divergence_is_an_error() -> None:
    options = {**OPTIONS, "optimiser": "sgd", "learning_rate": 1e8}
    with pytest.raises(lapis.ModelError, match="diverged"):
        lapis.train(network(), (sine()[0], torch.ones(40)), "poisson", **options)


# comparisons ---------------------------------------------------------------------------------------------------------


def test_table_agrees_with_the_posteriors_and_names_the_best() -> None:
    x, y = sine()
    models = {
        "line": nn.Linear(1, 1).double(),
        "wide": nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double(),
    }
    posteriors = {name: lapis.laplace(model, (x, y), "regression") for name, model in models.items()}
    table = lapis.compare(posteriors)
    evidence = {name: float(p.log_evidence()) for name, p in posteriors.items()}
    assert dict(zip(table.names, table.log_evidence, strict=True)) == pytest.approx(evidence)
    assert table.best == max(evidence, key=evidence.__getitem__)
    assert max(table.difference) == 0.0
    assert sum(table.probability) == pytest.approx(1.0)
    assert str(table).splitlines()[1].startswith(table.best)
    assert lapis.compare(list(posteriors.values())).names == ("0", "1")


def test_posteriors_of_other_data_are_refused() -> None:
    x, y = sine()
    model = nn.Linear(1, 1).double()
    one = lapis.laplace(model, (x, y), "regression")
    with pytest.raises(lapis.DataError, match="different data"):
        lapis.compare([one, lapis.laplace(model, (x, y + 0.01), "regression")])
    with pytest.raises(lapis.DataError, match="different data"):
        lapis.compare([one, lapis.laplace(model, (x[:-1], y[:-1]), "regression")])
    order = torch.randperm(len(x))
    lapis.compare([one, lapis.laplace(model, (x[order], y[order]), "regression", batch_size=7)])
    lapis.compare([one, lapis.laplace(nn.Linear(1, 1), (x.float(), y.float()), "regression")])


def test_updated_posteriors_compare_with_those_fitted_at_once() -> None:
    x, y = sine()
    model = nn.Linear(1, 1).double()
    parts = lapis.laplace(model, (x[:9], y[:9]), "regression").update((x[9:], y[9:]))
    assert lapis.compare([parts, lapis.laplace(model, (x, y), "regression")]).difference == pytest.approx((0, 0))


def test_evidences_of_other_kinds_are_refused() -> None:
    x, y = sine()
    one = lapis.laplace(nn.Linear(1, 1).double(), (x, y), "regression")
    for other in (one.with_temperature(0.5), one.at_tangent_mode((x, y))):
        with pytest.raises(lapis.OptionError, match="different kinds"):
            lapis.compare([one, other])
    with pytest.raises(lapis.OptionError):
        lapis.compare([])


# -- collapse --------------------------------------------------------------------------------------------


def wave(n: int = 30) -> tuple[Tensor, Tensor]:
    """Three half periods: little of it is linear, so that a prior of 1 squashes the weights before they fit it."""
    x = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None]
    generator = torch.Generator().manual_seed(0)
    return x, (1.5 * math.pi * x).sin() + 0.2 * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def narrow() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()


EARLY: dict[str, Any] = {
    "epochs": 300, "burn_in": 30, "every": 15, "batch_size": 30, "learning_rate": 0.03, "hyper_steps": 10,
    "structure": "dense",
}  # fmt: skip


def test_tuning_before_the_network_fits_does_not_switch_it_off() -> None:
    posterior = lapis.train(narrow(), wave(), lapis.Gaussian(0.3), **EARLY)
    record = posterior.training
    assert record is not None
    assert record.held[0] == 30
    assert max(record.held) <= 150
    assert max(record.log_evidence) > record.constant + 5
    assert float(posterior.effective_parameters()) > 5
    assert float(posterior.likelihood.noise) < 0.3


def test_without_the_guard_the_same_run_collapses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The premise of the test above; the result says what happened."""
    monkeypatch.setattr(importlib.import_module("lapis.training.run").Run, "_loosen", _adopt)
    with pytest.warns(lapis.LapisWarning) as told:
        posterior = lapis.train(narrow(), wave(), lapis.Gaussian(0.3), **EARLY)
    assert float(posterior.effective_parameters()) < 1e-2
    assert any("nothing that the evidence prefers to a constant prediction" in str(each.message) for each in told)


def test_patience_does_not_count_evaluations_that_were_held() -> None:
    posterior = lapis.train(narrow(), wave(), lapis.Gaussian(0.3), patience=1, **EARLY)
    record = posterior.training
    assert record is not None
    assert len(record.held) > 1
    assert max(record.log_evidence) > record.constant


def test_warnings_of_others_pass_through() -> None:
    class Talkative(nn.Linear):
        silent = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.training and not self.silent:  # once, in the first fit
                self.silent = True
                warnings.warn("heard", UserWarning, stacklevel=1)
            return super().forward(x)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lapis.train(Talkative(1, 1).double(), sine(), "regression", **OPTIONS)
    assert any(str(each.message) == "heard" for each in told)


def _adopt(run: Any, tuned: lapis.LaplacePosterior) -> None:
    run.prior, run.likelihood = run.prior.with_precision(tuned.weight_prior.precision.detach()), tuned.likelihood


def test_data_without_signal_end_in_a_warning_not_in_an_overfit() -> None:
    x, _ = wave()
    y = torch.randn(30, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with pytest.warns(lapis.LapisWarning) as told:
        posterior = lapis.train(narrow(), (x, y), "regression", **EARLY)
    assert any("constant prediction" in str(each.message) for each in told)
    assert posterior.training is not None
    assert posterior.training.constant == pytest.approx(_gaussian(y - y.mean(), float(y.std(correction=0))), rel=1e-6)
    assert float(posterior.effective_parameters()) < 5
    assert float(posterior.likelihood.noise) > 0.9 * float(y.std())


@short
def test_held_run_resumes_too(tmp_path: Path) -> None:
    parts = [wave()]
    options = {**EARLY, "epochs": 100, "burn_in": 20}
    whole = lapis.train(narrow(), parts, lapis.Gaussian(0.3), **options)
    assert whole.training is not None
    assert whole.training.held
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        lapis.train(narrow(), Interrupted(parts, 28), lapis.Gaussian(0.3), checkpoint=path, **options)
    other = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    same(lapis.train(other, parts, lapis.Gaussian(0.3), checkpoint=path, **options), whole)


def _gaussian(residual: Tensor, sigma: float) -> float:
    return float(torch.distributions.Normal(0.0, sigma).log_prob(residual).sum())


def test_constant_prediction_is_the_best_there_is() -> None:
    generator = torch.Generator().manual_seed(5)
    y = 3 + 2 * torch.randn(50, 1, 2, generator=generator, dtype=torch.float64)
    parts = list(y.split(7))
    residual = y - y.mean((0, 1))
    found = constant_log_likelihood(lapis.Gaussian(0.5), parts, 2, noise=False)
    assert 50 * found == pytest.approx(_gaussian(residual, 0.5), rel=1e-6)
    found = constant_log_likelihood(lapis.Gaussian(0.5), parts, 2, noise=True)
    assert 50 * found == pytest.approx(_gaussian(residual, float(residual.square().mean().sqrt())), rel=1e-6)
    labels = torch.randint(0, 4, (60, 1), generator=generator)
    share = labels.flatten().bincount(minlength=4).double() / 60
    found = constant_log_likelihood(lapis.Categorical(), list(labels.split(9)), 4, noise=True)
    assert found == pytest.approx(float((share * share.log()).sum()), rel=1e-6)
    same_everywhere = torch.ones(10, 1, 1, dtype=torch.float64)
    assert math.isfinite(constant_log_likelihood(lapis.Gaussian(), [same_everywhere], 1, noise=True))


def exchanged(model: nn.Sequential, c: float) -> nn.Sequential:
    """The first layer times c, the second by it: the same function, for ReLU and no biases."""
    other = nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)).double()
    with torch.no_grad():
        other[0].weight.copy_(model[0].weight * c)
        other[2].weight.copy_(model[2].weight / c)
    return other


@pytest.mark.parametrize("structure", ["dense", "kronecker"])
def test_scale_that_layers_can_exchange_is_invisible_to_layerwise_evidence_but_not_to_the_posterior_mode(
    structure: str,
) -> None:
    """Why layerwise precisions drift in training: evidence leaves c free, the penalty has slope gamma_1 - gamma_2."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    data = x, torch.cat([x, -x[:, :1]], 1).argmax(1)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)).double()
    optimiser = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), data[1]).backward()
        optimiser.step()

    def tuned(c: float, groups: str) -> lapis.LaplacePosterior:
        posterior = lapis.laplace(exchanged(model, c), data, "classification", structure=structure)
        return posterior.tune(groups=groups)

    here, there = tuned(1.0, "layer"), tuned(3.0, "layer")
    assert float(there.log_evidence()) == pytest.approx(float(here.log_evidence()), abs=1e-5)
    ratio = there.weight_prior.precision / here.weight_prior.precision
    torch.testing.assert_close(ratio, torch.tensor([1 / 9, 9.0]).to(ratio), rtol=1e-3, atol=0)
    torch.testing.assert_close(there.functional_variance(x), here.functional_variance(x), rtol=1e-3, atol=0)
    gamma = here.effective_parameters(per_group=True)
    log_c = torch.zeros((), dtype=torch.float64, requires_grad=True)
    first, second = here.weight_prior.precision
    penalty = 0.5 * first * (model[0].weight.detach() * log_c.exp()).square().sum()
    penalty = penalty + 0.5 * second * (model[2].weight.detach() / log_c.exp()).square().sum()
    (slope,) = torch.autograd.grad(penalty, log_c)
    assert float(slope) == pytest.approx(float(gamma[0] - gamma[1]), rel=1e-3)
    assert abs(float(slope)) > 1
    assert abs(float(tuned(3.0, "one").log_evidence() - tuned(1.0, "one").log_evidence())) > 1
