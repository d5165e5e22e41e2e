"""The playground in a real browser: points come and go, numbers follow. Skipped without plotly or Chromium."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import chromium, console_errors
from lapis.playground import serve

STATE = """
const text = (id) => document.getElementById(id).textContent, plot = document.getElementById('plot');
return {evidence: text('log_evidence'), gamma: text('effective_parameters'), message: text('message'),
        error: document.getElementById('message').classList.contains('error'),
        drawn: document.documentElement.dataset.drawn,
        kinds: plot._fullData.map((trace) => trace.type), points: plot._fullData[plot._fullData.length - 1].x.length,
        width: document.documentElement.scrollWidth, changes: document.getElementById('history')._fullData[0].x.length};
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    pytest.importorskip("plotly", reason="plotly is not installed (pip install 'lapis-bayes[report]')")
    with serve(0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.address
        server.shutdown()
        thread.join()


def after(driver: Any, changes: int) -> dict[str, Any]:
    """The page's state after so many answers."""
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(driver, 60).until(lambda d: d.execute_script(STATE)["changes"] >= changes)
    found: dict[str, Any] = driver.execute_script(STATE)
    return found


def click(driver: Any, x: float, y: float) -> None:
    """Click at a place of the plot, by its axes."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    plot = driver.find_element(By.ID, "plot")
    left, top = driver.execute_script(
        """const plot = arguments[0], all = plot._fullLayout, box = plot.getBoundingClientRect();
           return [all._size.l + all.xaxis.l2p(arguments[1]) - box.width / 2,
                   all._size.t + all.yaxis.l2p(arguments[2]) - box.height / 2];""",
        plot, x, y,
    )  # fmt: skip
    ActionChains(driver).move_to_element_with_offset(plot, round(left), round(top)).click().perform()


def choose(driver: Any, name: str, value: str) -> None:
    driver.execute_script(
        """const field = document.querySelector(`[name=${arguments[0]}]`); field.value = arguments[1];
           field.dispatchEvent(new Event('input', {bubbles: true}));""",
        name, value,
    )  # fmt: skip


def test_points_are_drawn_and_removed_and_numbers_follow(address: str, tmp_path: Path) -> None:
    with chromium(tmp_path, height=1100) as driver:
        driver.get(address)
        first = after(driver, 1)
        assert first["points"] == 24
        assert not first["error"]
        click(driver, -0.5, 2.0)
        more = after(driver, 2)
        assert more["points"] == 25
        assert more["evidence"] != first["evidence"]
        click(driver, -0.5, 2.0)
        assert after(driver, 3)["points"] == 24
        choose(driver, "structure", "diagonal")
        other = after(driver, 4)
        assert other["gamma"] != first["gamma"]
        choose(driver, "task", "classification")
        plane = after(driver, 1)
        assert "heatmap" in plane["kinds"]
        assert not plane["error"]
        assert console_errors(driver) == []


def test_a_refusal_is_shown_and_the_page_goes_on(address: str, tmp_path: Path) -> None:
    with chromium(tmp_path, dark=True) as driver:
        driver.get(address)
        assert after(driver, 1)["drawn"] == "dark"
        driver.execute_script("document.querySelector('[name=structure]').add(new Option('poetry'))")
        choose(driver, "structure", "poetry")
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(driver, 60).until(lambda d: d.execute_script(STATE)["error"])
        assert "structure" in driver.execute_script(STATE)["message"]
        choose(driver, "structure", "dense")
        assert not after(driver, 2)["error"]


def test_a_phone_need_not_scroll_sideways(address: str, tmp_path: Path) -> None:
    with chromium(tmp_path, width=360, height=740) as driver:
        driver.get(address)
        assert after(driver, 1)["width"] <= 360
        assert console_errors(driver) == []
