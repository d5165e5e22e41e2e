"""Threads that use one model through Lapis take turns: results are those of one thread, and the model is untouched."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.network import Network, held
from untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::lapis.errors.LapisWarning")  # trainings are far too short

F64 = torch.float64
X = torch.randn(40, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = torch.sin(X[:, :1])


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def side_by_side(*works: Callable[[], Any]) -> list[Any]:
    """Results of works that run in threads, all beginning at the same time; the first error of any."""
    barrier, found, errors = threading.Barrier(len(works)), [None] * len(works), []

    def run(number: int) -> None:
        barrier.wait()
        try:
            found[number] = works[number]()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def test_fits_of_different_weights_side_by_side_are_those_of_one_thread() -> None:
    model = network().train()
    choices = ["all", "last_layer", ["0.*"], "all"]
    alone = [lapis.laplace(model, (X, Y), "regression", weights=weights) for weights in choices]
    with untouched(model):
        for _ in range(3):
            together = side_by_side(
                *(lambda weights=weights: lapis.laplace(model, (X, Y), "regression", weights=weights)  # type: ignore[misc]
                  for weights in choices)
            )  # fmt: skip
            for one, other in zip(alone, together, strict=True):
                assert one.n_weights == other.n_weights
                assert torch.equal(one.precision(), other.precision())


@pytest.mark.parametrize("structure", ["kronecker", "implicit"])
def test_predictions_side_by_side_leave_batch_norm_as_it_was(structure: str) -> None:
    model = network().train()
    posterior = lapis.laplace(model, (X, Y), "regression", structure=structure)
    expected = posterior.predict(X[:4]).variance
    with untouched(model):
        for _ in range(2):
            fresh = lapis.laplace(model, (X, Y), "regression", structure=structure)
            for found in side_by_side(*[lambda fresh=fresh: fresh.predict(X[:4]).variance] * 3):  # type: ignore[misc]
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_posteriors_of_one_fit_under_other_priors_side_by_side() -> None:
    """They share blocks, which complete their sums on first use."""
    model = network().eval().float()
    x, y = X.float(), Y.float()
    fitted = lapis.laplace(model, (x, y), "regression", structure="kronecker", bias="separate")
    expected = [fitted.with_prior(float(p)).log_evidence() for p in (1, 2, 3)]
    for _ in range(3):
        fresh = lapis.laplace(model, (x, y), "regression", structure="kronecker", bias="separate")
        found = side_by_side(*(lambda p=p: fresh.with_prior(float(p)).log_evidence() for p in (1, 2, 3)))  # type: ignore[misc]  # noqa: B023
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_predictions_wait_for_training_and_then_notice_it() -> None:
    model = network().train()
    posterior = lapis.laplace(model, (X, Y), "regression", structure="diagonal")
    expected, begun = posterior.predict(X).mean, threading.Event()

    class Data(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            begun.set()
            return super().__iter__()

    told: list[Any] = []

    def predict() -> None:
        begun.wait()
        for _ in range(20):
            try:
                told.append(posterior.predict(X).mean)
            except lapis.ModelError as error:
                told.append(error)

    options: dict[str, Any] = {"epochs": 3, "burn_in": 1, "structure": "diagonal", "progress": False}
    side_by_side(predict, lambda: lapis.train(model, Data([(X, Y)]), "regression", **options))
    values = [each for each in told if isinstance(each, Tensor)]
    assert all(torch.equal(value, expected) for value in values)
    assert len(values) < len(told)


def test_trainings_of_different_models_side_by_side_are_those_of_one_thread() -> None:
    """They draw from torch's global generator, which is left as it was."""
    options: dict[str, Any] = {"epochs": 3, "burn_in": 3, "batch_size": 8, "structure": "diagonal", "progress": False}

    def train() -> Tensor:
        return lapis.train(model_of.pop(), (X, Y), "regression", **options).mean

    model_of = [network() for _ in range(4)]
    alone = train()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    assert all(torch.equal(found, alone) for found in side_by_side(train, train, train))
    assert torch.equal(torch.get_rng_state(), state)


def test_hooks_of_all_modules_come_back_after_the_last_thread() -> None:
    calls: list[int] = []
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: calls.append(1))
    try:
        models = [network().eval() for _ in range(3)]
        options = {"structure": "kronecker"}
        side_by_side(*(lambda model=model: lapis.laplace(model, (X, Y), "regression", **options) for model in models))  # type: ignore[misc, arg-type]
        assert calls == []
        models[0](X.clone().requires_grad_()).sum().backward()
        assert calls
    finally:
        handle.remove()


def test_a_lock_goes_with_its_model_and_is_no_part_of_it() -> None:
    model = network()
    Network(model)
    pickle.loads(pickle.dumps(model))
    copy.deepcopy(model)
    gone = weakref.ref(model)
    with held(model), held(model):  # re-entrant
        pass
    del model
    gc.collect()
    assert gone() is None
