"""Files that were changed are refused or give equal results; works that were killed go on as if they had not been.

A lean sample of the kits `tampering` (`make tamper`) and `killing` (`make kills`).
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

import killing
import tampering


def test_changed_files_are_refused_or_equal() -> None:
    for level, verdicts in tampering.run(120, seed=1).items():
        assert set(verdicts) <= set(tampering.ALLOWED[level]), (level, verdicts)
        assert verdicts["refused"] > 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("name", ["train", "draw"])
def test_killed_works_go_on(name: str, tmp_path: Path) -> None:
    killing.kill_and_compare(name, 1, tmp_path, random.Random(2))
