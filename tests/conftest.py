"""What all tests share: one thread per worker, no windows, a fixed seed, and where the data sets are."""

from __future__ import annotations

import os
from pathlib import Path

# Two pytest workers on two cores: a second thread in either would only wait for the other. The libraries read
# these variables when they are imported, hence the imports below.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ["MPLBACKEND"] = "Agg"

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

TESTS = Path(__file__).parent

# Helpers are imported by the tests that use them; collecting them for doctests would import each twice.
collect_ignore = [path.name for path in TESTS.glob("*.py") if not path.name.startswith("test_")] + ["cases", "fuzz"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one architecture follow each other: its naive reference, which is cached, is computed by one worker."""
    from cases import CASES

    order = {name: place for place, name in enumerate(CASES)}
    of_cases = {item: order.get(getattr(item, "callspec", None) and item.callspec.params.get("name")) for item in items}
    first = next((place for place, item in enumerate(items) if of_cases[item] is not None), 0)
    together = sorted((item for item in items if of_cases[item] is not None), key=lambda item: of_cases[item])
    others = [item for item in items if of_cases[item] is None]
    items[:] = others[:first] + together + others[first:]


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    """Torch draws initial weights from its global generator: start it alike, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_rules_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that a test, or an example in a docstring, registers for layers of its own hold for the whole process."""
    from lapis.curvature.recording.listener import MODULE_RULES

    for kind in list(MODULE_RULES):
        monkeypatch.delitem(MODULE_RULES, kind)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of data sets: $LAPIS_DATA, or ../shared/data; a test that needs it is skipped without it."""
    named = os.environ.get("LAPIS_DATA")
    folder = Path(named) if named else TESTS.parents[1] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"No data sets in {folder}: set LAPIS_DATA to the folder that holds them.")
    return folder
