"""Shards as tasks of Ray: the sum is that of one process, and a killed worker costs its shard only."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis
import lapis.distributed.ray as on_ray

DOUBLE = torch.float64
CUTS = [(0, 4), (4, 17), (17, 23), (23, 31), (31, 33)]


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).to(DOUBLE).eval()
    return model, torch.randn(33, 3, dtype=DOUBLE), torch.randint(3, (33,))


def kept(
    part: Any, folder: Path, number: int, deaths: int, failure: type[Exception] | None = None
) -> Callable[[], Any]:
    """A shard that notes every call of it, and kills its process in the first so many, or raises."""

    def load() -> Any:
        note = folder / f"{number}-{len(list(folder.glob(f'{number}-*')))}"
        note.touch()
        if len(list(folder.glob(f"{number}-*"))) <= deaths:
            if failure is not None:
                raise failure("the file is not there yet")
            os.kill(os.getpid(), signal.SIGKILL)
        return part

    return load


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    model, x, y = problem()
    with pytest.raises(lapis.OptionError, match=r"lapis-bayes\[ray\]"):
        on_ray.statistics(model, [(x, y)], "classification")


@pytest.mark.parametrize("fan_in", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 9, 16, 23])
def test_the_tree_adds_every_term_once_with_few_terms_in_a_sum(fan_in: int, count: int) -> None:
    most: list[int] = []

    def add(parts: list[tuple[int, ...]]) -> tuple[int, ...]:
        most.append(len(parts))
        return tuple(sorted(sum(parts, ())))

    tree = on_ray._Tree(add, fan_in)
    for number in range(count):
        tree.add((number,))
    assert tree.total() == tuple(range(count))
    assert max(most, default=0) <= fan_in
    assert len(most) <= max(0, count - 1)


def test_no_shards_and_sums_of_one_term_are_refused() -> None:
    model, x, y = problem()
    with pytest.raises(lapis.DataError, match="no shards"):
        on_ray.statistics(model, [], "classification")
    with pytest.raises(lapis.OptionError, match="fan_in >= 2"):
        on_ray.statistics(model, [(x, y)], "classification", fan_in=1)
    with pytest.raises(lapis.OptionError, match="one basis only"):
        on_ray.statistics(model, [(x, y)], "classification", structure="ekfac")


PATIENCE = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",  # importing torch takes a minute beside much other work
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "300000",
    "RAY_memory_monitor_refresh_ms": "0",  # no worker is killed for what other programs take
}
"""Ray's own limits of time and memory, which a busy machine exceeds."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="an extra that `make test` does not install; `make test-extras` does")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATIENCE.items():
            patch.setenv(name, value)
        ray.init(num_cpus=1, object_store_memory=10**8, include_dashboard=False, log_to_driver=False)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
        yield ray
        ray.shutdown()


def test_a_killed_worker_costs_its_shard_only_and_the_sum_is_that_of_one_process(cluster: Any, tmp_path: Path) -> None:
    model, x, y = problem()
    deaths = [0, 1, 0, 0, 2]
    shards = [kept((x[a:b], y[a:b]), tmp_path, i, deaths[i]) for i, (a, b) in enumerate(CUTS)]
    total = on_ray.statistics(model, shards, "classification", structure="kronecker", fan_in=2)
    assert [len(list(tmp_path.glob(f"{i}-*"))) for i in range(5)] == [1, 2, 1, 1, 3]
    whole = lapis.laplace(model, (x, y), "classification", structure="kronecker", prior=2.0, weights="all")
    found = total.posterior(2.0)
    assert total.n_data == 33
    assert total.digest == whole.curvature.digest
    assert found.network.module is model
    torch.testing.assert_close(found.log_evidence(), whole.log_evidence(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.predict(x).probs, whole.predict(x).probs, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.tune().prior.precision, whole.tune().prior.precision, rtol=1e-6, atol=0)
    again = on_ray.statistics(model, shards, "classification", structure="kronecker", fan_in=2)
    assert torch.equal(again.posterior(2.0).log_evidence(), found.log_evidence())
    options: Any = {"structure": "ekfac", "fan_in": 4}
    within = on_ray.statistics(model, shards, "classification", basis=total, **options).posterior(2.0)
    whole = lapis.laplace(model, (x, y), "classification", structure="ekfac", prior=2.0, weights="all")
    torch.testing.assert_close(within.log_evidence(), whole.log_evidence(), rtol=1e-8, atol=1e-8)


def test_a_shard_that_fails_is_named_and_files_that_come_late_are_read_again(cluster: Any, tmp_path: Path) -> None:
    model, x, y = problem()
    late = [kept((x[:9], y[:9]), tmp_path, 0, 1, OSError), (x[9:], y[9:])]
    assert on_ray.statistics(model, late, "classification", structure="diagonal").n_data == 33
    with pytest.raises(lapis.DataError, match=r"Shard 1: .*NaN"):
        on_ray.statistics(model, [(x, y), (x[:5] * torch.nan, y[:5])], "classification")
    with pytest.raises(lapis.errors.RankError, match=r"Shard 1 failed.*Got: ZeroDivisionError"):
        on_ray.statistics(model, [(x, y), kept((x, y), tmp_path, 1, 9, ZeroDivisionError)], "classification")
    with pytest.raises(lapis.errors.RankError, match=r"Shard 0 was lost"):
        on_ray.statistics(model, [kept((x, y), tmp_path, 2, 9)], "classification", retries=1)
    assert len(list(tmp_path.glob("2-*"))) == 2
    with pytest.raises(lapis.DataError, match=r"same data"):
        on_ray.statistics(model, [(x, y), (x, y)], "classification")
