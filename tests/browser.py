"""A real Chromium without a window, for pages that people see; tests that need it are skipped where it is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--disable-dev-shm-usage",
)  # fmt: skip


@contextmanager
def chromium(folder: Path, width: int = 1200, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """A browser whose system theme is light or dark, with a new profile in `folder`."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install selenium)")
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if None in programs.values():
        pytest.skip("no chromium or chromedriver on this machine (Debian: apt install chromium chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = programs["chromium"]
    for flag in (*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options, selenium.ChromeService(programs["chromedriver"]))
    try:
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
        if width < 500:  # a window has a least width, a phone has not
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        yield driver
    finally:
        driver.quit()


def console_errors(driver: Any) -> list[str]:
    """What the page has complained about so far."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
