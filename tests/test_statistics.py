"""Statistics as values: shards add up to the whole, come apart again, and refuse what does not belong together."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.curvature import seen
from lapis.curvature.blocks import lowrank
from lapis.curvature.seen import Seen

DOUBLE = torch.float64


def problem(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3))
    x = torch.randn(23, 2, 4, dtype=DOUBLE)
    return model.to(DOUBLE), x, torch.randint(3, (23,))


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker", "ekfac"])
def test_uneven_shards_add_up_to_the_whole_and_come_apart_again(structure: str, tmp_path: Path) -> None:
    model, x, y = problem()
    options: Any = {"likelihood": "categorical", "structure": structure}
    whole = lapis.laplace(model, (x, y), prior=2.0, weights="all", **options)
    cuts = [(0, 4), (4, 17), (17, 23)]
    shards, basis = [], None
    if structure == "ekfac":
        parts = [lapis.statistics(model, (x[start:stop], y[start:stop]), "categorical") for start, stop in cuts]
        options["basis"] = basis = sum(parts)
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
    if basis is not None:
        options["basis"] = basis.fit
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
    with pytest.raises(lapis.LapisError, match=r'holds its data.*distributed="shards"'):
        lapis.statistics(model, (x, y), "categorical", structure="implicit")
    assert (part + more - part).n_data == 3


def test_weights_chosen_by_the_data_of_a_part_are_told_apart() -> None:
    model, x, y = problem()
    chosen = lapis.Subnetwork(40)
    with pytest.raises(lapis.OptionError, match=r"from_="):
        sum(lapis.statistics(model, (x[part], y[part]), "categorical", weights=chosen) for part in ([0, 1], [2, 3, 4]))
    diagonal = lapis.statistics(model, (x, y), "categorical", structure="diagonal").posterior()
    chosen = lapis.Subnetwork(6, from_=diagonal)
    parts = [lapis.statistics(model, (x[part], y[part]), "categorical", weights=chosen) for part in ([0, 1], [2, 3])]
    assert sum(parts).fit.n_weights == 6


def test_ekfac_sums_are_of_one_basis() -> None:
    model, x, y = problem()
    halves = (x[:9], y[:9]), (x[9:], y[9:])
    one, two = (lapis.statistics(model, half, "categorical", structure="ekfac") for half in halves)
    with pytest.raises(lapis.OptionError, match=r"another basis.*basis="):
        one + two
    again = one + lapis.statistics(model, halves[1], "categorical", structure="ekfac", basis=one)
    batches = iter(list(halves))  # read once
    whole = lapis.laplace(model, batches, "categorical", structure="ekfac", weights="all", basis=one.fit)
    torch.testing.assert_close(again.posterior().precision(), whole.precision(), rtol=1e-10, atol=1e-10)
    basis = lapis.statistics(model, (x, y), "categorical")
    for change, words in (
        ({"structure": "kronecker"}, "basis has no meaning"),
        ({"weights": "last_layer"}, "another choice of weights"),
        ({"basis": lapis.statistics(problem(1)[0], (x, y), "categorical")}, "another network"),
        ({"basis": lapis.statistics(model, (x, y), "categorical", structure="dense")}, "another structure.*dense"),
    ):
        options: Any = {"structure": "ekfac", "basis": basis} | change
        with pytest.raises(lapis.OptionError, match=words):
            lapis.statistics(model, halves[0], "categorical", **options)
    separate = lapis.laplace(model, (x, y), "categorical", structure="kronecker", weights="all", bias="separate")
    with pytest.raises(lapis.OptionError, match="treatment of positions and biases"):
        lapis.laplace(model, (x, y), "categorical", structure="ekfac", weights="all", basis=separate)


def test_low_rank_sums_keep_what_each_part_kept_and_know_what_they_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, y = problem()

    @cache
    def part(start: int, stop: int, structure: str = "lowrank", rank: int | None = None) -> lapis.Statistics:
        return lapis.statistics(model, (x[start:stop], y[start:stop]), "categorical", structure=structure, rank=rank)

    def missing(found: lapis.Statistics, start: int, stop: int) -> Tensor:
        exact = part(start, stop, "dense").posterior()
        return torch.linalg.eigvalsh(exact.precision() - found.posterior().precision())

    full = part(0, 8, rank=40) + part(8, 23, rank=60)
    assert full.omitted < 1e-10
    assert missing(full, 0, 23).abs().max() < 1e-9
    full.save(tmp_path / "sum")
    rest = lapis.load_statistics(tmp_path / "sum", model) - part(0, 8, rank=40)
    assert missing(rest, 8, 23).abs().max() < 1e-9
    few = part(0, 8, rank=3) + part(8, 23, rank=5)
    assert few.fit.choices[-1] == f"rank 8: a sum, without curvature up to {few.omitted:.3g}"
    with pytest.warns(lapis.LapisWarning, match="leave out curvature up to"):
        left = missing(few, 0, 23)
    assert left.min() > -1e-9
    assert 0.2 * few.omitted < left.max() <= few.omitted
    monkeypatch.setattr(lowrank, "MOST_ADAPTIVE", 6)
    with pytest.warns(lapis.LapisWarning, match="cut at rank 6"):
        cut = part(0, 8, rank=3) + part(8, 23, rank=5)
    assert few.omitted < cut.omitted
    with pytest.warns(lapis.LapisWarning):
        assert missing(cut, 0, 23).max() <= cut.omitted
    with pytest.raises(lapis.DataError, match="in the other already"):
        full + part(8, 23, rank=60)


def test_examples_that_are_shared_or_not_there_are_noticed(tmp_path: Path) -> None:
    model, x, y = problem()

    def part(start: int, stop: int) -> lapis.Statistics:
        found = lapis.statistics(
            model, (x[start:stop], y[start:stop]), "categorical", structure="diagonal", batch_size=5
        )
        found.save(tmp_path / f"{start}-{stop}")
        return lapis.load_statistics(tmp_path / f"{start}-{stop}", model)

    a, b, c = part(0, 8), part(8, 16), part(16, 23)
    total = a + b
    with pytest.raises(lapis.DataError, match="in the other already"):
        total + b
    with pytest.raises(lapis.DataError, match="in the other already"):
        b + (a + c + b)
    with pytest.warns(lapis.LapisWarning, match="share examples.*2 of 10"):
        part(0, 10) + part(8, 23)
    with pytest.raises(lapis.DataError, match="cannot be taken out"):
        total - c
    with pytest.raises(lapis.DataError, match="cannot be taken out"):
        (total + c) - b - b
    assert (total + c - part(3, 12)).n_data == 14
    assert ((total + c) - b + b).n_data == 23


def test_a_few_fingerprints_tell_what_all_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "KEPT", 64)
    source = np.random.default_rng(0)
    hashes = source.integers(0, 2**64, 3000, dtype=np.uint64)
    one, two = Seen.none().add(hashes[:1000]).add(hashes[1000:2000]), Seen.none().add(hashes[1500:])
    shared, mine, theirs = one.shared(two)
    assert 30 <= mine <= 64
    assert len(one.hashes) <= 64
    exact = np.sort(hashes[:2000])
    assert (one.hashes == exact[: len(one.hashes)]).all()
    # of the 2,000 and 1,500 examples 500 are shared: the shares are binomial, within five standard errors
    assert abs(shared / mine - 1 / 4) < 5 * (3 / 16 / mine) ** 0.5
    assert abs(shared / theirs - 1 / 3) < 5 * (2 / 9 / theirs) ** 0.5
    both = one.plus(Seen.none().add(hashes[2000:]))
    assert both.missing(two) == 0
    assert one.missing(two) > 0
    left = both.minus(two)
    assert (left.hashes == np.sort(hashes[:1500])[: len(left.hashes)]).all()
    assert len(left.hashes) > 10
    again = Seen.none().add(np.repeat(hashes[:1], 100))
    assert again.limit == 0  # one example a hundred times: nothing can be said
    assert one.shared(Seen.unknown()) == (0, 0, 0)
