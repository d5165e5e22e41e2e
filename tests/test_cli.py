"""The command line: what it prints and writes, what it refuses, and that the experiment behind it is what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from typer.testing import CliRunner

import lapis
from lapis import plots
from lapis.cli import app, experiment, figure
from lapis.errors import DataError, OptionError

runner = CliRunner()


TINY = experiment.Setting(3, 0.2, per_class=10, steps=30, samples=4, test_per_class=10)


@pytest.fixture(scope="module")
def tiny() -> experiment.Result:
    return experiment.run(TINY)


def test_version_names_what_a_bug_report_needs() -> None:
    result = runner.invoke(app, ["version"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"lapis {lapis.__version__} (torch {torch.__version__}, Python ")


@pytest.mark.parametrize("command", ["version", "learning-rule", "demo"])
def test_other_commands_print_json_and_nothing_else(
    command: str, tiny: experiment.Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(experiment, "run", lambda setting: tiny)
    out = ["--out", str(tmp_path / "demo.png")] if command == "demo" else []
    result = runner.invoke(app, [command, *out, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    if command == "demo":
        alone = tiny.methods[0].scores(tiny.digits.test[1])
        assert found["scores"]["Test digits"]["Network alone"]["Accuracy"] == pytest.approx(alone["Accuracy"])
    elif command == "learning-rule":
        assert all(row["difference"] < 1e-6 for row in found)
    else:
        assert found["lapis"] == lapis.__version__


def test_demo_in_a_pipe_prints_every_method_and_metric_and_writes_the_figure(tmp_path: Path) -> None:
    """One run of the real command: plain text on standard output only."""
    command = [sys.executable, "-m", "lapis", "demo", "--quick", "--repeats", "1", "--label-noise", "0.2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=True)
    for words in ("Network alone", "Laplace, refined", "Laplace, last layer", "Laplace, sampled", "digits 8 and 9"):
        assert words in done.stdout
    for metric in ("Accuracy", "NLL", "ECE", "Brier", "OOD-AUROC", "20 % of the labels"):
        assert metric in done.stdout
    assert "…" not in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    assert (tmp_path / "lapis-demo.png").read_bytes().startswith(b"\x89PNG")
    assert max(len(line) for line in done.stdout.splitlines() if "demo.png" not in line) <= 80


def test_demo_says_how_far_its_splits_stray(
    tiny: experiment.Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(experiment, "run", lambda setting: seeds.append(setting.seed) or tiny)
    monkeypatch.setattr(figure, "draw", lambda *_: None)
    for repeats in (1, 2):
        options = ["--seed", "7", "--repeats", str(repeats), "--out", str(tmp_path / "demo.png")]
        result = runner.invoke(app, ["demo", *options])
        assert ("±" in result.stdout) == (repeats > 1)
    assert seeds == [7, 7, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "-1"], "--seed"),
        (["--seed", "many"], "--seed"),
        (["--label-noise", "1.5"], "--label-noise"),
        (["--repeats", "0"], "--repeats"),
        (["--out", "figure.txt"], ".png"),
        (["--out", "nowhere/figure.png"], "exist"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_bad_options_exit_with_2_and_a_message(options: list[str], message: str) -> None:
    result = runner.invoke(app, ["demo", *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_directory_is_no_figure(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "folder.png")])
    assert result.exit_code == 2
    assert "directory" in result.stderr


def test_an_error_of_the_library_is_a_message_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(setting: experiment.Setting) -> experiment.Result:
        raise DataError("No digits", got="a message that is longer than a terminal is wide", do="look for them")

    monkeypatch.setattr(experiment, "run", fail)
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "demo.png")])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: No digits.")
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "demo.png").exists()


def test_split_keeps_its_sets_apart_and_standardises_by_training_pixels_alone() -> None:
    digits = experiment.split(experiment.Setting(label_noise=0.0))
    sets = [{tuple(image.flatten().tolist()) for image in x} for x in (digits.train[0], digits.test[0])]
    assert not sets[0] & sets[1]
    assert len(digits.train[1]) + len(digits.test[1]) + len(digits.unknown[1]) == 1797
    assert digits.train[1].bincount().tolist() == [50] * 8
    assert digits.train[0].mean().item() == pytest.approx(0, abs=1e-5)
    assert digits.train[0].std().item() == pytest.approx(1, abs=1e-5)
    assert set(digits.test[1].tolist()) == set(experiment.KNOWN)
    assert set(digits.unknown[1].tolist()) == set(experiment.HELD_OUT)


def test_label_noise_redraws_its_share_of_labels_and_leaves_images_alone() -> None:
    clean, noisy = (experiment.split(experiment.Setting(label_noise=noise)) for noise in (0.0, 0.2))
    assert torch.equal(clean.test[0], noisy.test[0])
    # A redrawn label is right again one time in eight; 1,043 draws stray 5 standard errors (0.059) once in 1e6 at most.
    changed = (clean.test[1] != noisy.test[1]).double().mean().item()
    assert changed == pytest.approx(0.2 * 7 / 8, abs=0.059)


def test_run_repeats_itself_and_leaves_the_global_generator_and_threads_alone(tiny: experiment.Result) -> None:
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    second = experiment.run(TINY)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    for one, other in zip(tiny.methods, second.methods, strict=True):
        assert torch.equal(one.test, other.test)
        assert torch.equal(one.unknown, other.unknown)


def test_demo_shows_what_it_says() -> None:
    """Noisy labels: better scores everywhere; clean labels: no harm to test digits, the unknown told better."""
    noisy, clean = (experiment.run(experiment.Setting(20, noise, samples=2, test_per_class=60)) for noise in (0.2, 0.0))

    def score(result: experiment.Result, method: int, metric: str, corrupted: bool = False) -> float:
        return result.methods[method].scores(result.digits.test[1], corrupted=corrupted)[metric]

    assert score(noisy, 1, "NLL") < score(noisy, 0, "NLL")
    assert score(noisy, 1, "OOD-AUROC") > score(noisy, 0, "OOD-AUROC")
    for metric in ("NLL", "ECE", "Brier"):
        assert score(noisy, 1, metric, corrupted=True) < score(noisy, 0, metric, corrupted=True)
    for metric in ("NLL", "ECE"):
        assert score(clean, 1, metric) < score(clean, 0, metric) + 0.01
        assert score(clean, 1, metric, corrupted=True) < score(clean, 0, metric, corrupted=True)
    assert score(clean, 1, "OOD-AUROC") > score(clean, 0, "OOD-AUROC")


def test_style_is_left_behind_with_its_context() -> None:
    before = dict(mpl.rcParams)
    with plots.style():
        assert mpl.rcParams["axes.spines.top"] is False
    assert dict(mpl.rcParams) == before


def test_reliability_diagram_draws_a_series_for_each_prediction_and_names_its_ece() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]])
    axes = Figure().subplots()
    plots.reliability_diagram(axes, {"one": probs, "two": probs.flip(-1)}, torch.tensor([0, 0, 1, 1]), bins=2)
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["one  (ECE 0.350)", "two  (ECE 0.650)"]
    with pytest.raises(lapis.DataError, match="no predictions"):
        plots.reliability_diagram(axes, {}, torch.tensor([0, 0, 1, 1]))


def test_entropy_histogram_shows_shares_that_sum_to_one_with_the_extremes_inside() -> None:
    axes = Figure().subplots()
    plots.entropy_histogram(axes, torch.tensor([0.0, 0.1, 1.0]), torch.tensor([1.0, 1.0]), limit=1.0, bins=4)
    heights = [patch.get_height() for patch in axes.patches if isinstance(patch, Rectangle)]
    assert heights == pytest.approx([2 / 3, 0, 0, 1 / 3, 0, 0, 0, 1])


def test_regression_band_orders_points_and_has_the_stated_width() -> None:
    x = torch.tensor([2.0, 0.0, 1.0])
    axes = Figure().subplots()
    plots.regression_band(axes, x, 10 * x, torch.ones(3), torch.full((3,), 4.0), data=(x, x), level=0.95)
    assert axes.lines[0].get_xdata().tolist() == [0, 1, 2]
    assert axes.lines[0].get_ydata().tolist() == [0, 10, 20]
    total = axes.collections[0].get_paths()[0].vertices
    assert total[:, 1].max() == pytest.approx(20 + 2 * 1.95996, abs=1e-4)


def test_regression_band_refuses_several_outputs_and_bad_levels() -> None:
    x = torch.ones(3)
    with pytest.raises(DataError, match="pick one output"):
        plots.regression_band(Figure().subplots(), x, torch.ones(3, 2), torch.ones(3, 2), torch.ones(3, 2))
    with pytest.raises(OptionError, match="level"):
        plots.regression_band(Figure().subplots(), x, x, x, x, level=95)
