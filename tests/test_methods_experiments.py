"""The comparisons of methods: quick runs leave rows, tables and figures behind, and go on from their rows."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """`python experiments/<name>.py --quick ...`; returns the rows."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))

    def run(name: str, output: Path, *options: str) -> list[dict[str, Any]]:
        spec = importlib.util.spec_from_file_location(f"{name}_command", EXPERIMENTS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick", "--output", str(output), *options])
        threads = torch.get_num_threads()
        module.main()
        torch.set_num_threads(threads)
        rows: list[dict[str, Any]] = json.loads((output / f"{name}_quick.json").read_text(encoding="utf-8"))
        return rows

    return run


def test_shift_scores_every_method_at_every_shift(command: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    chosen = ("--settings", "rotated_digits")
    rows = {row["column"]: row for row in command("shift", tmp_path, *chosen)}
    assert set(rows) == {"plain", "last layer", "subnetwork, by SWAG", "SWAG", "dropout", "ensemble"}
    assert not [row for row in rows.values() if "error" in row]
    for row in rows.values():
        assert len(row["nll"]) == len(row["ece"]) == len(row["accuracy"]) == 13
        assert row["accuracy"][0] > 0.75
        assert row["nll"][6] > row["nll"][0]  # 90 degrees
    for column in set(rows) - {"plain"}:  # a subnetwork of weights that reach no output would change nothing
        assert max(abs(a - b) for a, b in zip(rows[column]["nll"], rows["plain"]["nll"], strict=True)) > 1e-3
    text = (tmp_path / "shift_quick.md").read_text(encoding="utf-8")
    assert f"{rows['plain']['nll'][0]:.3f}" in text
    assert (tmp_path / "shift_quick.png").exists()
    held = (tmp_path / "shift_quick.json").read_text(encoding="utf-8")
    command("shift", tmp_path, *chosen, "--columns", "plain")
    assert (tmp_path / "shift_quick.json").read_text(encoding="utf-8") == held  # nothing was measured twice


def test_regression_methods_on_standard_and_gap_splits(
    command: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    found = command("uci_methods", tmp_path, "--columns", "plain;linearised")
    rows = {(row["setting"], row["column"]): row for row in found}
    assert set(rows) == {
        (f"waves/{kind}", column) for kind in ("standard", "gap") for column in ("plain", "linearised")
    }
    assert not [row for row in rows.values() if "error" in row]
    for column in ("plain", "linearised"):
        assert rows["waves/standard", column]["rmse"] < 0.4
        assert rows["waves/gap", column]["rmse"] > rows["waves/standard", column]["rmse"]
    # the gap is where the network has seen nothing: doubt about the weights is worth most there
    gains = {
        kind: rows[f"waves/{kind}", "linearised"]["log_likelihood"] - rows[f"waves/{kind}", "plain"]["log_likelihood"]
        for kind in ("standard", "gap")
    }
    assert gains["gap"] > gains["standard"]
    text = (tmp_path / "uci_methods_quick.md").read_text(encoding="utf-8")
    assert "## Gap splits" in text
    assert f"{rows['waves/gap', 'plain']['rmse']:.3f}" in text


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from Linux's /proc")
def test_costs_are_multiples_of_an_epoch(command: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    chosen = ("plain", "last layer", "ensemble", "subnetwork of 200")
    rows = {row["column"]: row for row in command("costs", tmp_path, "--columns", ";".join(chosen))}
    assert set(rows) == set(chosen)
    assert not [row for row in rows.values() if "error" in row]
    assert rows["ensemble"]["training"] > 3 * rows["plain"]["training"]
    assert rows["last layer"]["fit"] > rows["plain"]["fit"]


def test_segmentation_doubts_every_pixel(command: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    rows = {row["column"]: row for row in command("segmentation", tmp_path, "--columns", "plain;last layer")}
    assert set(rows) == {"plain", "last layer"}
    assert not [row for row in rows.values() if "error" in row]
    assert rows["plain"]["mutual_ground"] == pytest.approx(0, abs=1e-6)  # one network has no doubt about its weights
    assert rows["last layer"]["mutual_ground"] > 1e-6
    for row in rows.values():
        assert row["entropy_edges"] > row["entropy_ground"]
        assert row["risk"][-1] == pytest.approx(1 - row["accuracy"])  # all pixels kept
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "segmentation_quick.png",
        "segmentation_quick_errors.png",
    }


def test_linearised_and_sampled_share_a_posterior(command: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    chosen = ("plain", "sampled, tuned", "linearised, tuned")
    rows = {row["column"]: row for row in command("linearised", tmp_path, "--columns", ";".join(chosen))}
    assert set(rows) == set(chosen)
    assert not [row for row in rows.values() if "error" in row]
    text = (tmp_path / "linearised_quick.md").read_text(encoding="utf-8")
    lower = rows["linearised, tuned"]["nll"] < rows["plain"]["nll"]
    assert f"- tuned: NLL below plain's: {'yes' if lower else 'no'}" in text
    assert (tmp_path / "linearised_quick.png").exists()


def test_active_learning_and_bandits_leave_curves(command: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    rows = command("active", tmp_path, "--settings", "digits_dropout", "--columns", "bald")
    assert rows[0]["labels"] == [20, 30, 40, 50]
    assert len(rows[0]["error_rate"]) == 4
    rows = command("bandits", tmp_path, "--settings", "breast cancer", "--columns", "greedy;Thompson")
    assert all(0 < row["total"] < 70 for row in rows)  # of 110 rounds; chance loses 55
    assert (tmp_path / "bandits_quick.png").exists()
