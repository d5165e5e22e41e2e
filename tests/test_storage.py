"""A posterior that was saved and loaded is the same posterior; a file that is not whole and unchanged is refused.

Loading goes into a model built anew, from a file that is deleted before anything is asked of the posterior.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import lapis
from cases import CASES, F64
from lapis import files
from lapis.errors import FileError, LapisError, ModelError
from untouched import untouched

every_structure = pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker", "ekfac"])


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_same(one: Any, other: Any, x: Any) -> None:
    """Everything that can be asked of two posteriors, bit by bit."""
    assert torch.equal(one.precision(), other.precision())
    assert torch.equal(one.mean, other.mean)
    assert one.mean.dtype == other.mean.dtype
    assert torch.equal(one.log_evidence(), other.log_evidence())
    assert torch.equal(one.effective_parameters(per_group=True), other.effective_parameters(per_group=True))
    assert torch.equal(one.marginal_variance(), other.marginal_variance())
    assert torch.equal(one.sample(3, generator=generator()), other.sample(3, generator=generator()))
    assert torch.equal(one.log_prob(one.mean + 0.1), other.log_prob(one.mean + 0.1))
    assert_same_predictions(one, other, x)
    assert one.summary() == other.summary()
    assert repr(one) == repr(other)
    assert one.choices == other.choices
    assert one.tuning == other.tuning
    assert (one.n_data, one.n_weights, one.temperature) == (other.n_data, other.n_weights, other.temperature)


def assert_same_predictions(one: Any, other: Any, x: Any) -> None:
    for options in ({}, {"method": "sampled", "samples": 3, "generator": generator()}):
        first = one.predict(x, **options)
        if "generator" in options:
            options["generator"] = generator()
        second = other.predict(x, **options)
        assert type(first) is type(second)
        assert torch.equal(first.f_mean, second.f_mean)
        assert torch.equal(first.f_variance, second.f_variance)
        for name in ("mean", "variance", "probs", "mutual_information"):
            if hasattr(first, name):
                assert torch.equal(getattr(first, name), getattr(second, name))
    assert torch.equal(one.functional_variance(x), other.functional_variance(x))


def reloaded(posterior: Any, model: nn.Module, folder: Path, likelihood: Any = None) -> Any:
    """Saved, loaded into a copy of the model in another mode, and the file gone."""
    path = folder / "posterior.lapis"
    posterior.save(path)
    fresh = copy.deepcopy(model).train(not model.training)
    with untouched(fresh):
        loaded = lapis.load(path, fresh, likelihood=likelihood)
    path.unlink()
    return loaded


# ----------------------------------------------------------------------------------------------------------
# Round trips


@pytest.mark.parametrize(
    "name",
    ["mlp_gaussian", "mlp_gaussian_per_output", "mlp_categorical", "mlp_soft_labels", "mlp_bernoulli", "mlp_poisson",
     "mlp_heteroscedastic", "mlp_custom", "conv2d_grouped", "conv_transpose2d_grouped", "embedding_padding",
     "batch_norm2d", "self_attention", "attention_separate", "lstm", "tied_linears", "raw_parameters",
     "transposed_tie", "weight_norm", "frozen_weights", "pixels_categorical", "dictionary_input"],
)  # fmt: skip
@every_structure
def test_a_loaded_posterior_is_the_saved_one(name: str, structure: str, tmp_path: Path) -> None:
    """For every likelihood and kind of layer; and it goes on learning as the saved one does."""
    case = CASES[name]
    model, batch, likelihood = case.make_model(), case.make_batch(), case.likelihood.build()
    posterior = lapis.laplace(model, [batch], likelihood, structure=structure, prior=0.4)
    custom = likelihood if likelihood.name == "custom" else None
    loaded = reloaded(posterior, model, tmp_path, custom)
    assert_same(posterior, loaded, batch[0])
    assert loaded.likelihood.to_config() == likelihood.to_config()
    assert torch.equal(posterior.update([batch]).precision(), loaded.update([batch]).precision())
    assert torch.equal(posterior.update([batch]).log_evidence(), loaded.update([batch]).log_evidence())


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(F64)


X, Y = torch.randn(7, 3, generator=generator(0), dtype=F64), torch.randn(7, 2, generator=generator(1), dtype=F64)

PRIORS: dict[str, Any] = {
    "a number": 0.3,
    "layer": lapis.Prior([0.3, 2.0], groups="layer"),
    "parameter": lapis.Prior([0.3, 2.0, 0.7, 5.0], groups="parameter"),
    "weight": lapis.Prior(torch.linspace(0.1, 3.0, 26), groups="weight"),
    "patterns": lapis.Prior({"weights": 0.3, "biases": 4.0}, groups={"weights": "*.weight", "biases": ["*.bias"]}),
    "function": lapis.Prior([0.3, 4.0], groups=lambda name: name.rpartition(".")[2]),
    "numbered groups": lapis.Prior([0.3, 4.0], groups=lambda name: len(name) // 8),  # type: ignore[arg-type, return-value]
    "mean": lapis.Prior(0.3, mean=0.25),
    "mean vector": lapis.Prior(0.3, mean=torch.linspace(-1, 1, 26)),
    "mean dictionary": lapis.Prior(0.3, mean={n: torch.ones_like(p) for n, p in network().named_parameters()}),
    "differentiable": lapis.Prior(torch.tensor(0.3, requires_grad=True)),
}


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        (name, structure)
        for name, structure in itertools.product(PRIORS, ("dense", "diagonal", "kronecker", "ekfac"))
        if name != "weight" or structure in ("dense", "diagonal")
    ],
)
def test_every_prior_survives(name: str, structure: str, tmp_path: Path) -> None:
    model, prior = network(), PRIORS[name]
    posterior = lapis.laplace(model, (X, Y), "gaussian", structure=structure, prior=prior)
    loaded = reloaded(posterior, model, tmp_path)
    assert_same(posterior, loaded, X)
    again = loaded.with_prior(loaded.prior)
    assert torch.equal(again.log_evidence(), posterior.log_evidence())
    assert [str(label) for label in posterior.weight_prior.labels] == list(loaded.weight_prior.labels)


OPTIONS: dict[str, dict[str, Any]] = {
    "reduced, bias apart": {"structure": "kronecker", "sharing": "reduce", "bias": "separate"},
    "ekfac, reduced, bias apart": {"structure": "ekfac", "sharing": "reduce", "bias": "separate"},
    "empirical": {"curvature": "empirical"},
    "sampled": {"curvature": "sampled", "fisher_samples": 3},
    "hessian": {"curvature": "hessian", "structure": "dense", "prior": 50.0},
    "cold": {"temperature": 0.1},
    "last layer": {"weights": "last_layer"},
    "some weights": {"weights": ["*.bias"]},
    "little memory": {"structure": "diagonal", "memory_budget": 10_000},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_survives(options: dict[str, Any], tmp_path: Path) -> None:
    model = network()
    posterior = lapis.laplace(model, (X, Y), lapis.Gaussian(0.5), **options)
    loaded = reloaded(posterior, model, tmp_path)
    assert_same(posterior, loaded, X)
    assert loaded.facts == posterior.facts
    one, other = (p.update((X, Y), generator=generator(3)) for p in (posterior, loaded))
    assert torch.equal(one.precision(), other.precision())


@every_structure
def test_changes_since_the_fit_survive(structure: str, tmp_path: Path) -> None:
    """Tuned prior and noise, temperature, more data; and the loaded posterior can be changed further alike."""
    model = network()
    prior = lapis.Prior(1.0, groups="layer")
    fitted = lapis.laplace(model, (X, Y), lapis.Gaussian(0.5), structure=structure, prior=prior)
    posterior = fitted.update((X, Y)).with_temperature(0.5).tune()
    loaded = reloaded(posterior, model, tmp_path)
    assert loaded.tuning is not None
    assert_same(posterior, loaded, X)
    assert bool((loaded.likelihood.noise != 0.5).all())
    assert torch.equal(posterior.with_noise(0.3).log_evidence(), loaded.with_noise(0.3).log_evidence())
    assert torch.equal(posterior.tune().log_evidence(), loaded.tune().log_evidence())
    twice = reloaded(loaded, model, tmp_path)
    assert_same(posterior, twice, X)


def test_the_way_positions_share_weights_survives(tmp_path: Path) -> None:
    """It matters when more data come."""
    case = CASES["deep_linear_pooled"]
    model, batch = case.make_model(), case.make_batch()
    posterior, other = (
        lapis.laplace(model, [batch], case.likelihood.build(), structure="kronecker", sharing=sharing)
        for sharing in ("reduce", "expand")
    )
    loaded = reloaded(posterior, model, tmp_path)
    assert torch.equal(loaded.update([batch]).precision(), posterior.update([batch]).precision())
    assert not torch.equal(loaded.update([batch]).precision(), other.update([batch]).precision())


def test_a_large_raw_parameter_survives(tmp_path: Path) -> None:
    """In a Kronecker posterior it is a diagonal block."""
    case = CASES["raw_matrix_of_520"]
    model, batch = case.make_model(), case.make_batch()
    posterior = lapis.laplace(model, [batch], case.likelihood.build(), structure="kronecker")
    assert_same(posterior, reloaded(posterior, model, tmp_path), batch[0])


def test_float32_survives(tmp_path: Path) -> None:
    model = network().float()
    posterior = lapis.laplace(model, (X.float(), Y.float()), "gaussian", structure="kronecker")
    assert_same(posterior, reloaded(posterior, model, tmp_path), X.float())


def test_a_path_may_be_text_and_a_file_is_overwritten(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "p.lapis"
    lapis.laplace(model, (X, Y), "gaussian").save(str(path))
    later = lapis.laplace(model, (X, Y), "gaussian", prior=3.0)
    later.save(path)
    assert torch.equal(lapis.load(str(path), model).log_evidence(), later.log_evidence())
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.lapis"]


# ----------------------------------------------------------------------------------------------------------
# What a file is


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module]:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).to(F64)
    path = tmp_path / "posterior.lapis"
    lapis.laplace(model, (X, Y), lapis.Gaussian(0.5), structure="kronecker").save(path)
    return path, model


def test_files_are_numbers_and_json_never_code(saved: tuple[Path, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = saved

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("no pickle")

    for place, names in ((pickle, ("load", "loads", "dump", "dumps", "Unpickler")), (torch, ("load", "save"))):
        for name in names:
            monkeypatch.setattr(place, name, refuse)
    lapis.load(path, model).save(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
        names = list(file.keys())
    config = json.loads(header["lapis"])
    assert config["posterior"] == "laplace"
    assert config["state"]["structure"] == "kronecker"
    assert config["likelihood"] == {"name": "gaussian", "channels": "last", "noise": 0.5}
    assert set(header) == {"format", "lapis", "digest", "seal"}
    assert "state.mean" in names


def refused(path: Path, model: nn.Module, *says: str, **options: Any) -> None:
    with untouched(model), pytest.raises(FileError) as caught:
        lapis.load(path, model, **options)
    message = str(caught.value)
    assert all(part in message for part in ("Expected: ", "Got: ", "Do: ", *says)), message


def test_a_truncated_file_is_refused(saved: tuple[Path, nn.Module]) -> None:
    path, model = saved
    whole = path.read_bytes()
    for kept in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:kept])
        refused(path, model, "not a whole Lapis posterior")
    path.write_bytes(whole + b"\0")
    refused(path, model)
    path.write_bytes(whole)
    lapis.load(path, model)


def test_a_changed_bit_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    model, path = nn.Linear(1, 1), tmp_path / "posterior.lapis"
    x = torch.linspace(-1, 1, 5)[:, None]
    lapis.laplace(model, (x, x), "gaussian", structure="diagonal").save(path)
    whole = path.read_bytes()
    for place in [*range(8), *range(8, len(whole), 7)]:
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        with pytest.raises(FileError):
            lapis.load(path, model)


def rewrite(path: Path, **header: str) -> None:
    """The file with other entries in its header."""
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **header}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata=metadata)


def test_a_newer_format_is_refused_by_its_name(saved: tuple[Path, nn.Module]) -> None:
    """Whatever else has changed in it, its digest included."""
    path, model = saved
    newer = files.FORMAT + 1
    rewrite(path, format=str(newer), digest="of another kind", lapis="no JSON at all")
    refused(path, model, "newer Lapis", f"format {files.FORMAT}", f"format {newer}", "upgrade")


def test_an_older_format_is_refused_by_its_name(saved: tuple[Path, nn.Module]) -> None:
    path, model = saved
    rewrite(path, format="1")
    refused(path, model, "older Lapis", f"format {files.FORMAT}", "format 1", "fit again")


def test_another_file_is_refused(tmp_path: Path) -> None:
    model = network()
    other = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(3)}, other)
    refused(other, model, "another kind")
    text = tmp_path / "notes.txt"
    text.write_text("not a posterior, and long enough to look like one")
    refused(text, model, "not a whole Lapis posterior")
    pickled = tmp_path / "model.pt"
    torch.save(model.state_dict(), pickled)
    refused(pickled, model, "not a whole Lapis posterior")
    refused(tmp_path, model, "not a whole Lapis posterior")
    refused(tmp_path / "nothing", model, "There is no file")


# ----------------------------------------------------------------------------------------------------------
# Whose posterior it is


def test_another_network_is_refused(saved: tuple[Path, nn.Module]) -> None:
    path, model = saved
    refused(path, nn.Sequential(nn.Linear(3, 2)).to(F64), "another network", "'1.weight'", "no such parameter")
    wider = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 3)).to(F64)
    refused(path, wider, "another network", "'2.weight' of shape (2, 2)", "(3, 2)")
    longer = nn.Sequential(*copy.deepcopy(model), nn.Linear(2, 2)).to(F64)
    refused(path, longer, "does not hold the weights", "load_state_dict")


def test_a_network_with_other_values_is_refused_by_name(saved: tuple[Path, nn.Module]) -> None:
    path, model = saved
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[2].weight[1, 1] += 1e-12
    refused(path, changed, "other values in '2.weight'", "load_state_dict")
    drifted = copy.deepcopy(model)
    drifted[1].running_mean += 1e-12
    refused(path, drifted, "parameter and buffer", "'1.running_mean'")
    drifted.load_state_dict(model.state_dict())
    lapis.load(path, drifted)


def test_a_network_in_another_state_is_refused(saved: tuple[Path, nn.Module]) -> None:
    path, model = saved
    frozen = copy.deepcopy(model)
    frozen[2].bias.requires_grad_(False)
    refused(path, frozen, "'2.bias'", "frozen")
    refused(path, copy.deepcopy(model).float(), "torch.float64", "torch.float32")
    with pytest.raises(ModelError, match="no trainable weights"):
        lapis.load(path, copy.deepcopy(model).requires_grad_(False))
    with pytest.raises(ModelError, match="no network"):
        lapis.load(path, "model.pt")  # type: ignore[arg-type]


def test_weights_outside_the_posterior_count_too(tmp_path: Path) -> None:
    """The last layer's posterior depends on the features: other features are another network."""
    model, path = network(), tmp_path / "posterior.lapis"
    lapis.laplace(model, (X, Y), "gaussian", weights="last_layer").save(path)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0].weight += 1e-9
    refused(path, changed, "other values in '0.weight'")


# ----------------------------------------------------------------------------------------------------------
# Likelihoods that no file can hold


def absolute(f: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.huber_loss(f, y, reduction="none").sum(-1)


def test_a_custom_likelihood_is_asked_for(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "posterior.lapis"
    likelihood = lapis.Custom(absolute, name="huber")
    posterior = lapis.laplace(model, (X, Y), likelihood)
    posterior.save(path)
    refused(path, model, "custom likelihood", "likelihood=")
    refused(path, model, "not the likelihood", "huber", likelihood=lapis.Custom(absolute, name="other"))
    refused(path, model, "not the likelihood", likelihood=lapis.Gaussian())
    loaded = lapis.load(path, model, likelihood=likelihood)
    assert_same(posterior, loaded, X)


def test_a_likelihood_that_is_given_must_be_the_one_in_the_file(saved: tuple[Path, nn.Module]) -> None:
    """Not taken and ignored."""
    path, model = saved
    refused(path, model, "not the likelihood", likelihood=lapis.Gaussian(0.6))
    lapis.load(path, model, likelihood=lapis.Gaussian(0.5))


# ----------------------------------------------------------------------------------------------------------
# Writing


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_file_is_whole_or_not_there(
    saved: tuple[Path, nn.Module], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A write that fails half-way leaves the old file as it was, and no other."""
    path, model = saved
    before = path.read_bytes()

    def fail(file: Any, tensors: Any, header: Any) -> None:
        file.write(b"half a file")
        raise error

    posterior = lapis.load(path, model).with_prior(7.0)
    monkeypatch.setattr(files, "_store", fail)
    with pytest.raises((LapisError, KeyboardInterrupt)):
        posterior.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_path_that_cannot_be_written_is_named(saved: tuple[Path, nn.Module], tmp_path: Path) -> None:
    path, model = saved
    posterior = lapis.load(path, model)
    for target in (tmp_path / "no" / "such" / "folder", path / "below a file"):
        with pytest.raises(FileError, match="Cannot write") as caught:
            posterior.save(target)
        assert all(part in str(caught.value) for part in ("Expected: ", "Got: ", "Do: "))
    shutil.rmtree(tmp_path / "folder", ignore_errors=True)
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="Cannot write"):
        posterior.save(tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []


def test_what_is_not_a_regular_file_is_never_replaced(saved: tuple[Path, nn.Module], tmp_path: Path) -> None:
    path, model = saved
    posterior, before = lapis.load(path, model), path.read_bytes()
    link, pipe, dangling = tmp_path / "link", tmp_path / "pipe", tmp_path / "dangling"
    link.symlink_to(path)
    os.mkfifo(pipe)
    dangling.symlink_to(tmp_path / "nothing")
    for target, got in ((link, "symbolic link"), (pipe, "a pipe"), (dangling, "symbolic link")):
        with pytest.raises(FileError, match=got):
            posterior.with_prior(3.0).save(target)
    assert link.is_symlink()
    assert path.read_bytes() == before
    assert torch.equal(lapis.load(link, model).mean, posterior.mean)
    refused(pipe, model, "no regular file")  # and does not wait for a writer
    for target in ("", "\0", 3, None, b"x"):
        with pytest.raises(FileError):
            posterior.save(target)  # type: ignore[arg-type]


def test_partial_files_of_processes_that_were_killed_are_removed_by_the_next(
    saved: tuple[Path, nn.Module], tmp_path: Path
) -> None:
    path, model = saved
    script = f"""
import os, signal
from lapis import files
import torch
files._store = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
files.write({str(path)!r}, {{}}, {{"x": torch.zeros(3)}})
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    (abandoned,) = tmp_path.glob("*.partial")
    mine = path.with_name(re.sub(r"-\d+-", f"-{os.getppid()}-", abandoned.name))  # of a process that still runs
    mine.touch()
    other = tmp_path / "posterior.lapis.other.partial"
    other.touch()
    lapis.load(path, model).save(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([path.name, mine.name, other.name])


def test_two_writers_and_a_reader_meet_whole_files_only(tmp_path: Path) -> None:
    path, ended = tmp_path / "file", []

    def write(value: float) -> None:
        for _ in range(25):
            files.write(path, {"value": value}, {"x": torch.full((1000,), value)})
        ended.append(value)

    writers = [threading.Thread(target=write, args=(value,)) for value in (1.0, 2.0)]
    files.write(path, {"value": 0.0}, {"x": torch.zeros(1000)})
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        contents = files.read(path)
        assert bool((contents.tensors["x"] == contents.config["value"]).all())
    assert len(ended) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_mode_of_a_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, {}, {"x": torch.zeros(1)})
    path.chmod(0o640)
    files.write(path, {}, {"x": torch.ones(1)})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
