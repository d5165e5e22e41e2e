"""Files that were changed are refused or give equal results; works that were killed go on as if they had not been.

A lean sample of the kits `tampering` (`make tamper`) and `killing` (`make kills`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lapis
import tampering


def test_changed_files_are_refused_or_equal() -> None:
    for level, verdicts in tampering.run(120, seed=1).items():
        assert set(verdicts) <= set(tampering.ALLOWED[level]), (level, verdicts)
        assert verdicts["refused"] > 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_killed_works_go_on() -> None:
    """In a process of its own, which can be forked."""
    kit = [sys.executable, str(Path(__file__).parent / "killing.py"), "2", "train", "draw"]
    ended = subprocess.run(kit, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("2 kills") == 2


@pytest.mark.parametrize(("name", "basis"), [("ekfac", "state.block.0.outputs"), ("lowrank", "state.block.0.vectors")])
def test_bases_that_are_not_orthonormal_are_refused_whoever_sealed_them(name: str, basis: str, tmp_path: Path) -> None:
    case = tampering.posterior_case(name, tmp_path)
    header, tensors = tampering.parts(case.path)
    tampering.rewrite(tmp_path / "same", header, tensors, "seal", case.key)
    case.use(tmp_path / "same")
    tensors[basis].reshape(-1)[0] += 0.1
    tampering.rewrite(tmp_path / "other", header, tensors, "seal", case.key)
    with pytest.raises(lapis.FileError, match="orthonormal"):
        case.use(tmp_path / "other")


@pytest.mark.parametrize("name", ["state.more", "more"])
def test_tensors_that_the_posterior_does_not_have_are_refused(name: str, tmp_path: Path) -> None:
    """As when an optional one has another name: it would be taken for missing."""
    case = tampering.posterior_case("swag", tmp_path)
    header, tensors = tampering.parts(case.path)
    tampering.rewrite(case.path, header, {**tensors, name: torch.zeros(3)}, "seal", case.key)
    with pytest.raises(lapis.FileError, match=name):
        case.use(case.path)
