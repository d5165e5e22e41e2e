"""Fits divided among processes of torch.distributed: equal to one process, and ended by one that fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapis
from lapis import checkpoint as checkpoints
from lapis.ranks import Ranks
from ranks import run

DOUBLE = torch.float64
N = 23  # no multiple of 2 or 3: the ranks' parts differ in length


def problem(width: int = 5, classes: int = 3) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, classes)).to(DOUBLE)
    x = torch.randn(N, 4, dtype=DOUBLE)
    return model, x, torch.randint(classes, (N,))


def regression() -> tuple[nn.Module, Tensor, Tensor]:
    model, x, _ = problem(classes=2)
    return model, x, torch.stack([x[:, 0].sin(), x[:, 1]], 1)


def held_out(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Inputs far from the data, with classes drawn from the network's probabilities; some doubt predicts them best."""
    source = torch.Generator().manual_seed(2)
    x = 3 * torch.randn(N, 4, dtype=DOUBLE, generator=source)
    return x, torch.multinomial(model(x).softmax(1), 1, generator=source)[:, 0]


def fits(distributed: Any) -> dict[str, Any]:
    """Everything that must not depend on the number of processes."""
    found: dict[str, Any] = {}
    model, x, y = problem()
    options: Any = {"prior": 2.0, "weights": "all", "distributed": distributed, "batch_size": 6}
    for structure in ("dense", "diagonal", "kronecker", "ekfac", "lowrank", "implicit"):
        posterior = lapis.laplace(model, (x, y), "classification", structure=structure, **options)
        if isinstance(posterior, lapis.ImplicitPosterior):
            found["implicit evidence"] = posterior.log_evidence_estimate(probes=2, steps=3).value
        else:
            found[f"{structure} evidence"] = posterior.log_evidence()
        found[f"{structure} variance"] = posterior.functional_variance(x[:3])
        found[f"{structure} facts"] = torch.tensor([posterior.n_data, posterior.curvature.digest >> 2])
        if isinstance(posterior, lapis.LaplacePosterior):
            found[f"{structure} seen"] = posterior.curvature.seen.tensor()
        found[f"{structure} draws"] = posterior.sample(2)
    kronecker = lapis.laplace(model, (x, y), "classification", structure="kronecker", **options)
    within = lapis.laplace(model, (x, y), "classification", structure="ekfac", basis=kronecker, **options)
    found["ekfac in a basis"] = within.log_evidence()
    drawn = posterior.draw(2)  # type: ignore[attr-defined]
    found["draws by solves"] = drawn.deviations
    found["tuned by draws"] = posterior.tune(max_iterations=2, tolerance=10.0, samples=2).prior.precision  # type: ignore[union-attr]
    outputs = posterior.with_solver(space="outputs").draw(2)  # type: ignore[union-attr]
    found["draws in the space of outputs"] = outputs.deviations
    tuned = kronecker.tune()
    found["tuned"] = torch.tensor([float(tuned.weight_prior.precision), tuned.width])
    refined = kronecker.refine((x, y), distributed=distributed, max_rounds=3, tolerance=1.0, batch_size=6)
    found["refined"], found["elbo"] = refined.mean, refined.elbo()
    for name, inputs in (("tensor", x), ("data set", TensorDataset(x, y)), ("few", x[:1])):
        found[f"predicted {name}"] = kronecker.predict(inputs, distributed=bool(distributed)).probs
    found["sampled"] = kronecker.predict(x, "sampled", samples=3, distributed=bool(distributed)).probs
    held = held_out(model)
    options["memory_budget"] = 9999  # no room for all outputs under all candidates: each takes a pass
    passed = lapis.laplace(model, (x, y), "classification", structure="ekfac", **options)
    del options["memory_budget"]
    calibrated: list[Any] = [each.calibrate(held, distributed=distributed) for each in (kronecker, passed)]
    model, x, y = regression()
    for structure in ("dense", "kronecker"):  # whose outputs are kept apart, each with a noise of its own
        posterior = lapis.laplace(model, (x, y), "regression", structure=structure, **options)
        found[f"own noise, {structure}"] = posterior.tune().likelihood.noise
    held = x.flip(1), torch.stack([x[:, 3].sin(), x[:, 2]], 1)
    drawn = lapis.laplace(model, (x, y), "regression", structure="implicit").draw(3)  # type: ignore[attr-defined]
    calibrated.append(drawn.calibrate(TensorDataset(*held), distributed=distributed))
    for number, each in enumerate(calibrated):
        record, prediction = each.calibration, each.predict(held[0])
        found[f"calibrated {number}"] = prediction.probs if number < 2 else prediction.variance
        found[f"record {number}"] = torch.tensor([record.after, record.plain, record.before, record.n_data])
    for name, data in (
        ("loader", DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)),
        ("batches", [(x[:9], y[:9]), (x[9:11], y[9:11]), (x[11:], y[11:])]),
    ):
        options["batch_size"] = None
        found[f"from {name}"] = lapis.laplace(model, data, "regression", structure="diagonal", **options).log_evidence()
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return fits(False)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_processes_with_uneven_parts_equal_one_process_and_each_other(
    size: int, expected: dict[str, Any], tmp_path: Path
) -> None:
    every = run(lambda rank: fits(True), size, tmp_path)
    for found in every:
        assert isinstance(found, dict), found
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=2e-7, atol=2e-8, msg=lambda m, name=name: f"{name}: {m}"
            )
            assert torch.equal(found[name], every[0][name]), name


def pieces(rank: int) -> dict[str, Any]:
    """Examples that the ranks have of their own, shared eigendecompositions, draws by SGD; the refusals."""
    from lapis.curvature.blocks.kronecker import factors

    found: dict[str, Any] = {}
    model, x, y = problem()
    cut = slice(0, 5) if rank == 0 else slice(5, N)
    options: Any = {"prior": 2.0, "weights": "all", "structure": "kronecker"}
    factors.SHARED_WIDTH = 1
    own = x[cut], y[cut]
    for name, data, how in (("tensors", own, True), ("batches", [own], "shards")):
        posterior = lapis.laplace(model, data, "classification", distributed=how, **options)
        found[name] = posterior.log_evidence()
        found[f"variance, {name}"] = posterior.functional_variance(x[:3])
    found["sample"] = posterior.sample_of_data()[0].inputs
    options["structure"] = "implicit"
    implicit = lapis.laplace(model, (x, y), "classification", distributed=True, **options)
    drawn = implicit.draw(2, solver="sgd", epochs=25, batch_size=8)
    found["by SGD"], found["by CG"] = drawn.deviations, implicit.draw(2).deviations
    order = torch.randperm(N, generator=torch.Generator().manual_seed(rank))
    other, _, _ = problem()
    if rank:
        nn.init.zeros_(other[0].weight)  # type: ignore[index]
    sampler = torch.utils.data.DistributedSampler(TensorDataset(x, y), 2, rank)
    options["structure"] = "diagonal"
    broken = (x * torch.inf, y) if rank else (x, y)
    kept, new = lapis.laplace(model, (x, y), "classification", weights="all"), held_out(model)
    failures = {
        "calibrate": lambda: implicit.calibrate(new, distributed=True),
        "others": lambda: kept.with_prior(1.0 + rank).calibrate(new, distributed=True),
        "twice": lambda: kept.calibrate([new], distributed="shards"),
        "links": lambda: kept.calibrate(new, link="other", distributed=True),
        "bad": lambda: kept.calibrate(broken, distributed=True),
        "nothing": lambda: kept.calibrate([], distributed="shards"),
        "orders": lambda: lapis.laplace(model, (x[order], y[order]), "classification", distributed=True, **options),
        "same": lambda: lapis.laplace(model, [(x, y)], "classification", distributed="shards", **options),
        "networks": lambda: lapis.laplace(other, (x, y), "classification", distributed=True, **options),
        "sampler": lambda: lapis.laplace(
            model, DataLoader(TensorDataset(x, y), sampler=sampler), "classification", distributed=True, **options
        ),
        "lengths": lambda: lapis.laplace(
            model, TensorDataset(x[: N - rank], y[: N - rank]), "classification", distributed=True, **options
        ),
        "none": lambda: lapis.laplace(model, (x[:0], y[:0]), "classification", distributed=True, **options),
        "one fails": lambda: lapis.laplace(model, broken, "classification", distributed=True, **options),
        "update": lambda: implicit.update((x, y)),
        "refine": lambda: implicit.refine(max_rounds=1),
        "predict": lambda: implicit.predict(x, distributed=True),
        "joint": lambda: drawn.predict(x, joint=True, distributed=True),
        "iterator": lambda: lapis.laplace(model, iter([(x, y)]), "classification", distributed=True, **options),
    }
    for name, call in failures.items():
        try:
            call()
            found[name] = "no error"
        except lapis.LapisError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_each_rank_may_have_examples_of_its_own_and_all_end_together(tmp_path: Path) -> None:
    first, second = run(pieces, 2, tmp_path)
    assert isinstance(first, dict), first
    assert isinstance(second, dict), second
    model, x, y = problem()
    whole = lapis.laplace(model, (x, y), "classification", structure="kronecker", prior=2.0, weights="all")
    for name in ("tensors", "batches"):
        torch.testing.assert_close(first[name], whole.log_evidence(), rtol=1e-10, atol=0)
        torch.testing.assert_close(first[f"variance, {name}"], whole.functional_variance(x[:3]), rtol=1e-9, atol=0)
    assert sorted(first["sample"][:, 0].tolist()) == sorted(x[:, 0].tolist())
    error = (first["by SGD"] - first["by CG"]).norm() / first["by CG"].norm()
    assert error < 0.1  # residual of SGD; both draw from the same noise
    words = {
        "orders": "different orders", "same": "same examples", "networks": "agree on the network",
        "sampler": "DistributedSampler", "lengths": "different data", "none": "no data", "update": "cannot",
        "refine": "cannot be refined", "predict": "solve together", "joint": "joint", "iterator": "iterator",
        "calibrate": "solve together", "others": "agree on the posterior", "twice": "same examples", "links": "link",
        "bad": "finite", "nothing": "no data",
    }  # fmt: skip
    for name, word in words.items():
        assert word in first[name], (name, first[name])
        assert word in second[name], (name, second[name])
    assert first["one fails"].startswith("RankError: Rank 1 failed in its part of the")
    assert "not finite" in first["one fails"]
    assert "DataError" in second["one fails"]
    for name, value in first.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, second[name]), name


def with_empty(distributed: bool, rank: int = 0) -> dict[str, Any]:
    """Fits of which one rank of three has no examples, in tensors, batches, or because there are fewer than ranks."""
    found: dict[str, Any] = {}
    model, x, y = problem()
    cut = slice((0, 7, 7)[rank], (7, 7, N)[rank]) if distributed else slice(0, N)
    batches = [(x[cut], y[cut])] if len(x[cut]) else []
    options: Any = {"prior": 2.0, "weights": "all"}
    for structure in ("dense", "diagonal", "kronecker", "ekfac", "lowrank", "implicit"):
        for name, data, how in (
            ("tensors", (x[cut], y[cut]), True), ("batches", batches, "shards"), ("few", (x[:2], y[:2]), True),
            ("few in a data set", TensorDataset(x[:2], y[:2]), True),
        ):  # fmt: skip
            fit = lapis.laplace(
                model, data, "classification", structure=structure, distributed=how if distributed else False, **options
            )
            found[f"{structure}, {name}"] = fit.functional_variance(x[:3])
            found[f"{structure}, {name}, size"] = torch.tensor(fit.n_data)
        if structure == "kronecker":
            whole = lapis.laplace(
                model, batches, "classification", structure=structure,
                distributed="shards" if distributed else False, **options,
            )  # fmt: skip
            found["tuned"] = torch.tensor([float(whole.tune().weight_prior.precision), whole.tune().width])
            refined = whole.refine(batches, distributed="shards" if distributed else False, max_rounds=2, tolerance=1.0)
            found["refined"], found["elbo"] = refined.mean, refined.elbo()
            new, classes = held_out(model)
            own: Any = [(new[cut], classes[cut])] if batches else []
            for name, data, how in (("shards", own, "shards"), ("few", (new[:2], classes[:2]), True)):
                calibrated = whole.calibrate(data, distributed=how if distributed else False)
                found[f"calibrated by {name}"] = calibrated.predict(x).probs
    implicit = lapis.laplace(
        model,
        batches,
        "classification",
        structure="implicit",
        distributed="shards" if distributed else False,
        **options,
    )
    found["drawn"] = implicit.draw(2).deviations
    by_sgd = implicit.draw(2, solver="sgd", epochs=25, batch_size=8).deviations
    wide, x, targets = regression()  # whose outputs are kept apart, and whose likelihood has several sums
    own = lapis.laplace(
        wide, (x[cut], targets[cut]), "regression", structure="dense", distributed=distributed, **options
    )
    found["noise"], found["evidence"] = own.tune().likelihood.noise, own.log_evidence()
    found["descended"] = (by_sgd - found["drawn"]).norm() < 0.1 * found["drawn"].norm()
    return found


def test_ranks_may_have_no_examples(tmp_path: Path) -> None:
    expected = with_empty(False)
    every = run(lambda rank: with_empty(True, rank), 3, tmp_path)
    for found in every:
        assert isinstance(found, dict), found
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=2e-7, atol=2e-8, msg=lambda m, name=name: f"{name}: {m}"
            )
            assert torch.equal(found[name], every[0][name]), name


def killed(rank: int, path: Path, moment: int, structure: str) -> Any:
    """A fit that rank 1 leaves in the midst of its pass, by SIGKILL; the moment 0 is never."""
    model, x, y = problem()
    checkpoints.SAVE_SECONDS = 0.0

    class Data(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if rank == 1 and moment and index == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    options: Any = {"structure": structure, "weights": "all", "batch_size": 1, "checkpoint": path}
    found = lapis.laplace(model, Data(x, y), "classification", distributed=True, **options)
    return {"evidence": found.log_evidence(), "mean": found.functional_variance(x), "n": found.n_data}


def test_a_killed_rank_ends_the_others_and_the_fit_goes_on_from_their_checkpoints(tmp_path: Path) -> None:
    structure = "ekfac"
    expected, _ = run(lambda rank: killed(rank, tmp_path / "alone", 0, structure), 2, tmp_path / "a")
    cut, gone = run(lambda rank: killed(rank, tmp_path / "cut", N - 1, structure), 2, tmp_path / "b")
    assert gone is None
    assert cut.startswith("RankError: Another process of the group died")
    assert [path.name for path in sorted(tmp_path.glob("cut.*"))] == ["cut.0of2", "cut.1of2"]
    resumed = run(lambda rank: killed(rank, tmp_path / "cut", 0, structure), 2, tmp_path / "c")
    for found in resumed:
        assert isinstance(found, dict), found
        assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name])) for name in expected)


def calibrated(rank: int, path: Path, most: int) -> Any:
    """Two calibrations of which the rank is cut short after so many of its files were written; 0: never."""
    model, x, y = problem()
    checkpoints.SAVE_SECONDS, written = 0.0, 0
    write = checkpoints.write

    def counted(*arguments: Any) -> None:
        nonlocal written
        write(*arguments)
        written += 1
        if written == most:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoints.write = counted
    fitted = lapis.laplace(model, (x, y), "classification", weights="all")
    held, options = held_out(model), {"distributed": True, "batch_size": 4}
    swept = fitted.calibrate(held, checkpoint=path, **options)  # type: ignore[arg-type]
    fitted = lapis.laplace(model, (x, y), "classification", weights="all", memory_budget=9999)
    passed = fitted.calibrate(held, checkpoint=path.with_suffix(".passes"), **options)  # type: ignore[arg-type]
    return swept.predict(x).probs, passed.predict(x).probs, written


def test_a_divided_calibration_goes_on_from_the_files_of_its_ranks(tmp_path: Path) -> None:
    (one, two, alone), _ = run(lambda rank: calibrated(rank, tmp_path / "alone", 0), 2, tmp_path / "a")
    cut, gone = run(lambda rank: calibrated(rank, tmp_path / "cut", 9 * rank), 2, tmp_path / "b")
    assert gone is None
    assert cut.startswith("RankError: Another process of the group died")
    for first, second, written in run(lambda rank: calibrated(rank, tmp_path / "cut", 0), 2, tmp_path / "c"):
        assert torch.equal(first, one)
        assert torch.equal(second, two)
        assert written < alone  # they went on


def test_ranks_are_needed() -> None:
    model, x, y = problem()
    for call in (
        lambda: lapis.laplace(model, (x, y), "classification", distributed=True),
        lambda: lapis.laplace(model, (x, y), "classification").predict(x, distributed=True),
        Ranks.joined,
    ):
        with pytest.raises(lapis.OptionError, match="no ranks"):
            call()
