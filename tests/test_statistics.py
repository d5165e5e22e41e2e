"""Statistics as values: shards add up to the whole, come apart again, and refuse what does not belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapis

DOUBLE = torch.float64


def problem(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3))
    x = torch.randn(23, 2, 4, dtype=DOUBLE)
    return model.to(DOUBLE), x, torch.randint(3, (23,))


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker"])
def test_uneven_shards_add_up_to_the_whole_and_come_apart_again(structure: str, tmp_path: Path) -> None:
    model, x, y = problem()
    options: Any = {"likelihood": "categorical", "structure": structure}
    whole = lapis.laplace(model, (x, y), prior=2.0, weights="all", **options)
    cuts = [(0, 4), (4, 17), (17, 23)]
    shards = []
    for number, (start, stop) in enumerate(cuts):
        shard = lapis.statistics(model, (x[start:stop], y[start:stop]), **options)
        shard.save(tmp_path / f"{number}")
        shards.append(lapis.load_statistics(tmp_path / f"{number}", model))
    total = shards[2] + shards[0] + shards[1]
    posterior = sum(shards).posterior(prior=2.0)
    assert total.n_data == posterior.n_data == 23
    assert total.digest == whole.curvature.digest
    for made in (posterior, total.posterior(2.0)):
        torch.testing.assert_close(made.log_evidence(), whole.log_evidence(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(made.precision(), whole.precision(), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(made.predict(x).probs, whole.predict(x).probs, rtol=1e-9, atol=1e-10)
    rest = (total - shards[1]).posterior(2.0)
    kept = torch.tensor([*range(4), *range(17, 23)])
    without = lapis.laplace(model, (x[kept], y[kept]), prior=2.0, weights="all", **options)
    torch.testing.assert_close(rest.precision(), without.precision(), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(rest.log_evidence(), without.log_evidence(), rtol=1e-9, atol=1e-9)
    assert rest.n_data == 10


def test_a_sum_of_statistics_can_be_tuned() -> None:
    model, x, y = problem()
    parts = slice(0, 9), slice(9, 23)
    halves = [lapis.statistics(model, (x[part], y[part]), "categorical", structure="dense") for part in parts]
    whole = lapis.laplace(model, (x, y), "categorical", structure="dense", weights="all")
    ours, theirs = sum(halves).posterior().tune(), whole.tune()
    torch.testing.assert_close(ours.prior.precision, theirs.prior.precision, rtol=1e-6, atol=0)


def test_what_does_not_belong_together_is_refused() -> None:
    model, x, y = problem()
    part = lapis.statistics(model, (x[:9], y[:9]), "categorical", structure="diagonal")
    for other, words in (
        (lapis.statistics(model, (x[9:], y[9:]), "categorical", structure="dense"), "structure"),
        (
            lapis.statistics(model, (x[9:], y[9:]), "categorical", structure="diagonal", curvature="empirical"),
            "curvature",
        ),
        (lapis.statistics(problem(1)[0], (x[9:], y[9:]), "categorical", structure="diagonal"), "network"),
    ):
        with pytest.raises(lapis.OptionError, match=words):
            part + other
    with pytest.raises(lapis.DataError, match="same data"):
        part + part
    with pytest.raises(lapis.DataError, match="left"):
        part - part
    more = lapis.statistics(model, (x[9:12], y[9:12]), "categorical", structure="diagonal")
    with pytest.raises(TypeError):
        part + 3
    for structure in ("implicit", "lowrank", "ekfac"):
        with pytest.raises(lapis.LapisError, match="sum"):
            lapis.statistics(model, (x, y), "categorical", structure=structure)
    assert (part + more - part).n_data == 3
