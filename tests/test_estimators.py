"""Estimators in scikit-learn's manner: its own checks, units, files and pickles."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

import lapis
from lapis.estimators import Predictor, cross_validation, load_predictor
from lapis.estimators.cross_validation import LOOSER, Chosen, Trainer, held_out_logits, judged

pytestmark = pytest.mark.filterwarnings("ignore::lapis.LapisWarning")  # so few epochs do not converge, and it says so

CHEAP: dict[str, Any] = {
    "hidden": (4,), "epochs": 20, "every": 20, "learning_rate": 0.2, "structure": "diagonal", "random_state": 0,
}  # fmt: skip
X = np.random.default_rng(0).normal(size=(40, 3))
Y = X[:, 0] - 2 * X[:, 1] + 0.1 * np.random.default_rng(1).normal(size=40)
LABELS = np.where(X[:, 0] > 0, "yes", "no")


@pytest.mark.parametrize("kind", [lapis.LaplaceRegressor, lapis.LaplaceClassifier])
@pytest.mark.filterwarnings("ignore")  # the checks provoke warnings on purpose, and look for their own
def test_scikit_learn_accepts_the_estimator(kind: Any) -> None:
    results = check_estimator(kind(**CHEAP), on_skip=None)
    assert len(results) > 40


def test_predictions_are_in_the_units_of_the_targets() -> None:
    """Targets in other units: the same prediction in these units, standard deviations and intervals too."""
    one, other = (lapis.LaplaceRegressor(**CHEAP).fit(X, y) for y in (Y, 1000 * Y + 7))
    mean, std = one.predict(X, return_std=True)
    mean_there, std_there = other.predict(X, return_std=True)
    np.testing.assert_allclose(mean_there, 1000 * mean + 7, rtol=1e-8)
    np.testing.assert_allclose(std_there, 1000 * std, rtol=1e-8)
    lower, upper = one.predict_interval(X, level=0.95)
    np.testing.assert_allclose((upper - lower) / std, 2 * 1.959964, rtol=1e-6)
    prediction = one.predictor_.values(X, targets=torch.from_numpy(Y))
    there = other.predictor_.values(X, targets=torch.from_numpy(1000 * Y + 7))
    np.testing.assert_allclose(there.log_prob, prediction.log_prob - np.log(1000), rtol=1e-8)


def test_a_linear_truth_is_found_with_its_noise() -> None:
    regressor = lapis.LaplaceRegressor(hidden=5, epochs=400).fit(X, Y)
    assert regressor.score(X, Y) > 0.98
    assert float(np.median(regressor.predict(X, return_std=True)[1])) == pytest.approx(0.1, abs=0.05)


@pytest.mark.parametrize("kind", [lapis.LaplaceRegressor, lapis.LaplaceClassifier])
def test_a_weight_of_k_is_k_equal_rows_and_of_zero_none(kind: Any) -> None:
    y = Y if kind is lapis.LaplaceRegressor else LABELS
    counts = np.random.default_rng(2).integers(0, 4, len(X))
    weighted = kind(**CHEAP).fit(X, y, sample_weight=counts)
    repeated = kind(**CHEAP).fit(np.repeat(X, counts, 0), np.repeat(y, counts))
    plain = kind(**CHEAP).fit(X, y)
    predicted = [
        e.predict(X) if kind is lapis.LaplaceRegressor else e.predict_proba(X) for e in (weighted, repeated, plain)
    ]
    np.testing.assert_allclose(predicted[0], predicted[1], rtol=1e-9)
    assert np.abs(predicted[0] - predicted[2]).max() > 1e-3
    for bad, message in ((np.full(40, 0.5), "must count examples"), (np.eye(40)[0], "sum to 1")):
        with pytest.raises(ValueError, match=message):
            kind(**CHEAP).fit(X, y, sample_weight=bad)


def test_several_targets_have_several_columns() -> None:
    both = np.stack([Y, 10 * X[:, 2]], 1)
    mean, std = lapis.LaplaceRegressor(**CHEAP).fit(X, both).predict(X[:5], return_std=True)
    assert mean.shape == std.shape == (5, 2)


def test_pipelines_and_grid_search_take_it() -> None:
    pipeline = make_pipeline(PolynomialFeatures(2), lapis.LaplaceClassifier(**CHEAP))
    search = GridSearchCV(pipeline, {"laplaceclassifier__hidden": [(2,), (3,)]}, cv=2, scoring="neg_log_loss")
    search.fit(X, LABELS)
    assert search.best_params_["laplaceclassifier__hidden"] in [(2,), (3,)]
    assert search.predict_proba(X).shape == (40, 2)
    np.testing.assert_allclose(np.exp(search.predict_log_proba(X)), search.predict_proba(X))


def two_layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 3), nn.ReLU(), nn.Linear(3, outputs))


@pytest.mark.parametrize("module", [None, two_layers])
@pytest.mark.parametrize("kind", [lapis.LaplaceRegressor, lapis.LaplaceClassifier])
def test_pickles_and_files_bring_it_back(kind: Any, module: Any, tmp_path: Path) -> None:
    estimator = kind(**CHEAP, module=module).fit(X, Y if kind is lapis.LaplaceRegressor else LABELS)
    again = pickle.loads(pickle.dumps(estimator))
    path = tmp_path / "estimator.lapis"
    estimator.predictor_.save(path)
    if module is not None:
        with pytest.raises(lapis.FileError, match="never code"):
            load_predictor(path)
        with pytest.raises(lapis.FileError, match="belongs to another network"):
            load_predictor(path, nn.Linear(3, 2))
    loaded = load_predictor(path, None if module is None else module(3, 1 if kind is lapis.LaplaceRegressor else 2))
    assert isinstance(loaded, Predictor)
    assert loaded.classes == estimator.predictor_.classes
    if kind is lapis.LaplaceRegressor:
        mean, std = estimator.predict(X, return_std=True)
        np.testing.assert_array_equal(again.predict(X, return_std=True), (mean, std))
        np.testing.assert_allclose(loaded.values(X).std[:, 0], std, rtol=1e-12)
    else:
        np.testing.assert_array_equal(again.predict_proba(X), estimator.predict_proba(X))
        np.testing.assert_allclose(loaded.probabilities(X).probs, estimator.predict_proba(X), rtol=1e-12)
    assert type(estimator.posterior_) is lapis.LaplacePosterior


class Memory(nn.Module):
    """Says whether it was trained on a row, and the sum of its prior precisions so far."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.precisions = torch.empty(0, 2), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = (x[:, None] == self.seen).all(-1).any(-1)
        return torch.stack([known.double(), torch.full((len(x),), self.precisions)], 1)


class Recorder:
    """Trains memories."""

    seed = 3

    def train(self, network: Memory, x: torch.Tensor, y: torch.Tensor, precision: float, share: float) -> None:
        assert len(x) == len(y)
        network.seen, network.precisions = x, network.precisions + precision


def test_no_example_is_judged_by_a_network_that_saw_it_or_an_equal_row() -> None:
    x = torch.arange(20.0).repeat(3)[:, None].expand(60, 2)
    recorder: Any = Recorder()
    found = held_out_logits(8.0, x, torch.zeros(60).long(), lambda seed: Memory(), recorder)
    assert found is not None
    assert found.shape == (len(LOOSER), 60, 2)
    assert not found[..., 0].any()
    np.testing.assert_allclose(found[:, :, 1], np.cumsum(8 * np.array(LOOSER))[:, None].repeat(60, 1))
    only = Memory()
    assert held_out_logits(8.0, x, torch.zeros(60).long(), lambda seed: only, recorder) is None
    assert held_out_logits(8.0, x[:15], torch.zeros(15).long(), lambda seed: Memory(), recorder) is None


def test_no_batch_of_one_example_is_left_for_batch_normalisation() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    Trainer(2, None, 0).train(network, torch.randn(201, 2), torch.arange(201) % 2, 1.0, 1.0)


def test_held_out_logits_keep_the_order_of_the_examples() -> None:
    class Idle(Recorder):
        def train(self, *arguments: Any) -> None:
            pass

    x, trainer = torch.randperm(40, generator=torch.Generator().manual_seed(0)).double()[:, None], Idle()
    found = held_out_logits(1.0, x, torch.zeros(40).long(), lambda seed: nn.Sequential(nn.Identity()), trainer)  # type: ignore[arg-type]
    assert found is not None
    np.testing.assert_array_equal(found, x.expand(len(LOOSER), 40, 1))


def test_the_sharpness_is_found_and_a_looser_prior_must_win_beyond_chance() -> None:
    source = torch.Generator().manual_seed(0)
    f = torch.randn(2000, 4, dtype=torch.float64, generator=source)
    y = torch.multinomial((2 * f).softmax(1), 1, generator=source)[:, 0]
    chosen = judged(torch.stack([f, f, f]), y)
    assert chosen.looser == 1
    assert chosen.sharpness == pytest.approx(2.0, rel=0.1)
    noise = torch.randn(2000, 4, dtype=torch.float64, generator=source)
    assert judged(torch.stack([f + noise, f + noise, f]), y).looser == LOOSER[2]
    doubtful = torch.cat([torch.zeros(2, 4, dtype=torch.float64), f[:38]])
    better = doubtful.clone()
    better[[0, 1], y[:2]] += torch.tensor([2e-3, -5e-4], dtype=torch.float64)  # on average, by chance
    assert judged(torch.stack([doubtful, better, doubtful]), torch.cat([y[:2], y[:38]])).looser == 1


def test_training_on_under_a_looser_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lapis.LaplaceClassifier(**CHEAP)
    monkeypatch.setattr(cross_validation, "judged", lambda logits, y: Chosen(1.0, 1.0))
    before = plain.fit(X, LABELS).posterior_
    monkeypatch.setattr(cross_validation, "judged", lambda logits, y: Chosen(1 / 16, 2.0))
    after = plain.fit(X, LABELS).posterior_
    assert (before.sharpness, after.sharpness) == (1.0, 2.0)
    assert after.training == before.training
    assert float(after.mean.norm()) > 1.05 * float(before.mean.norm())
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(plain)).predict_proba(X), plain.predict_proba(X))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": (0,)}, "hidden"),
        ({"activation": "step"}, "activation"),
        ({"module": lambda inputs, outputs: 3}, "Bad module"),
        ({"structure": "implicit"}, "gradient"),
    ],
)
def test_bad_options_are_refused_at_the_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(lapis.OptionError, match=message):
        lapis.LaplaceRegressor(**{**CHEAP, **options}).fit(X, Y)
