"""The documentation site in a real browser, opened as files: what readers of a copy see, without a server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from browser import chromium, console_errors
from test_repository import ROOT

mkdocs: Any = pytest.importorskip("mkdocs.commands.build", reason="mkdocs is installed by `make test-extras` only")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of two pages, with the settings of all."""
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("documentation")
    shutil.copytree(ROOT / "docs" / "assets", folder / "docs" / "assets")
    (folder / "docs" / "index.md").write_text("# Home\n\nNothing here.\n", encoding="utf-8")
    (folder / "docs" / "other.md").write_text("# Elsewhere\n\n## Sets\n\nConformal sets.\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        pages = [{"Home": "index.md"}, {"Elsewhere": "other.md"}]
        places = {"docs_dir": str(folder / "docs"), "site_dir": str(folder / "site")}
        mkdocs.build(load_config(str(ROOT / "mkdocs.yml"), nav=pages, **places))
    return folder / "site"


def test_nothing_is_fetched_and_search_works_from_files(site: Path, tmp_path: Path) -> None:
    by = pytest.importorskip("selenium.webdriver.common.by").By
    wait: Any = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
    with chromium(tmp_path) as driver:
        driver.get((site / "index.html").as_uri())
        box = driver.find_element(by.CSS_SELECTOR, "input.md-search__input")
        box.click()
        box.send_keys("conformal")
        found = wait(driver, 20).until(lambda d: d.find_elements(by.CSS_SELECTOR, ".md-search-result__link"))
        assert "other.html" in found[-1].get_attribute("href")
        loaded = driver.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert [address for address in loaded if not address.startswith("file:")] == []
        assert console_errors(driver) == []
