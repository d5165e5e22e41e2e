"""experiments/trust.py: its quick run leaves rows, table and figures behind, and its bars are judged by the rows."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
QUICK = ("plain", "temperature", "README", "refined", "calibrated", "last layer")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`python experiments/trust.py --quick ...`, without the seconds that a new interpreter would take to import."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    spec = importlib.util.spec_from_file_location("trust_command", EXPERIMENTS / "trust.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["trust.py", "--quick", *options])
        threads = torch.get_num_threads()
        module.main()
        torch.set_num_threads(threads)

    return run


def test_quick_run_scores_every_column_and_goes_on_from_its_rows(command: Callable[..., None], tmp_path: Path) -> None:
    output = ("--output", str(tmp_path))
    command(*output)
    held = (tmp_path / "trust_quick.json").read_text(encoding="utf-8")
    rows = {(row["setting"], row["column"]): row for row in json.loads(held)}
    assert set(rows) == {(setting, column) for setting in ("tiny_clean", "tiny_noisy") for column in QUICK}
    assert not [row for row in rows.values() if "error" in row]
    assert rows["tiny_clean", "plain"]["accuracy"] > 0.85
    text = (tmp_path / "trust_quick.md").read_text(encoding="utf-8")
    plain = rows["tiny_clean", "plain"]["nll"]
    assert f"{plain:.3f}" in text
    assert {path.name for path in tmp_path.glob("*.png")} == {"trust_quick.png", "trust_quick_last_layer.png"}
    command(*output, "--columns", "plain;README")
    assert (tmp_path / "trust_quick.json").read_text(encoding="utf-8") == held  # nothing was measured twice
    command(*output, "--columns", "plain", "--settings", "tiny_clean", "--again")
    assert (tmp_path / "trust_quick.json").read_text(encoding="utf-8") != held  # that cell was: its row is the last now


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import trust.table

    return trust.table


def invented(setting: str, column: str, seed: int = 0, **scores: float) -> dict[str, Any]:
    usual = {"nll": 0.5, "ece": 0.05, "ood_auroc": 0.8, "shifted_nll": 1.0, "shifted_ece": 0.1, "brier": 0.2}
    return {"setting": setting, "column": column, "seed": seed, "accuracy": 0.9, "seconds": 1.0} | usual | scores


def test_bars_are_met_only_where_the_rows_say_so(table: ModuleType) -> None:
    from trust.settings import QUICK as SETTINGS

    def judged(**clean: float) -> str:
        rows = [invented(setting, column) for setting in SETTINGS for column in ("plain", "temperature")]
        good = {"nll": 0.48, "ece": 0.04, "ood_auroc": 0.82, "shifted_nll": 0.9}
        rows += [invented(setting, column, **good) for setting in SETTINGS for column in ("README", "refined")]
        rows += [invented("tiny_clean", column, **(good | clean)) for column in ("README", "refined")]
        return str(table.bars(table.Rows.of(rows, SETTINGS)))

    met = judged()
    assert "- README: **met**" in met
    assert "- refined: **met**" in met
    assert "- calibrated: not measured" in met
    within_slack = judged(nll=0.509, ece=0.059)
    assert "- README: **met**" in within_slack
    assert "- refined: **not met**" in within_slack
    for worse in ({"nll": 0.511}, {"ece": 0.061}, {"ood_auroc": 0.799}):
        assert "- README: **not met**" in judged(**worse)
    assert "`tiny_clean` +0.0110" in judged(nll=0.511)
    assert "- refined: **not met**" in judged(shifted_nll=1.2)


def test_seeds_are_compared_in_pairs(table: ModuleType) -> None:
    """A column that has not been measured for every seed is compared with the same seeds of the network alone."""
    from trust.settings import QUICK as SETTINGS

    rows = [invented("tiny_clean", "plain", seed, nll=1.0 + seed) for seed in range(3)]
    rows += [invented("tiny_clean", "README", seed, nll=0.9 + seed) for seed in (1, 2)]
    found = table.Rows.of(rows, SETTINGS).gain("tiny_clean", "README", "nll")
    assert found == pytest.approx(-0.1)
    assert table.cell([1.0, 2.0, 3.0]) == "2.000 ± 0.577"
