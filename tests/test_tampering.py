"""Files that were changed are refused or give equal results: a lean sample of the kit `tampering` (`make tamper`)."""

from __future__ import annotations

import tampering


def test_changed_files_are_refused_or_equal() -> None:
    for level, verdicts in tampering.run(120, seed=1).items():
        assert set(verdicts) <= set(tampering.ALLOWED[level]), (level, verdicts)
        assert verdicts["refused"] > 0
