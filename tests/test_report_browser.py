"""Reports in a real browser: no errors, plots that answer, both themes, a phone. Skipped without plotly or Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lapis
from browser import chromium, console_errors
from test_report import classifier, curve, images, normal, regression

COLOURS = """
const chart = document.getElementById('chart-reliability');
return [getComputedStyle(document.body).backgroundColor, document.documentElement.dataset.drawn,
        chart._fullLayout.font.color, chart._fullData[2].line.color];
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("plotly", reason="plotly is not installed (pip install 'lapis-bayes[report]')")
    folder = tmp_path_factory.mktemp("pages")
    both = {"dense": classifier(), "<b>diagonal</b>": classifier("diagonal")}
    lapis.report(
        both,
        folder / "classes.html",
        data=images(60, 1),
        test=images(30, 5),
        out_of_distribution=5 * normal(20, 1, 6, 6),
        title="Bright & <dark>",
    )
    lapis.report(regression(), folder / "curve.html", data=curve(30, 1), test=curve(40, 7))
    return {name: (folder / f"{name}.html").as_uri() for name in ("classes", "curve")}


def hovered(driver: Any, chart: str) -> str:
    """Text that appears over the middle of the third trace's points."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    element = driver.find_element(By.ID, f"chart-{chart}")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    x, y = driver.execute_script(
        """const chart = arguments[0], trace = chart._fullData[chart._fullData.length - 1], layout = chart._fullLayout;
           const box = chart.getBoundingClientRect(), at = Math.floor(trace.x.length / 2);
           return [layout._size.l + layout.xaxis.l2p(trace.x[at]) - box.width / 2,
                   layout._size.t + layout.yaxis.l2p(trace.y[at]) - box.height / 2];""",
        element,
    )
    ActionChains(driver).move_to_element_with_offset(element, round(x), round(y)).perform()
    label = WebDriverWait(driver, 10).until(lambda _: element.find_elements(By.CSS_SELECTOR, ".hoverlayer .hovertext"))
    return " ".join(each.text for each in label)


@pytest.mark.parametrize("page", ["classes", "curve"])
def test_a_report_opens_without_complaint_and_its_plots_answer(
    pages: dict[str, str], page: str, tmp_path: Path
) -> None:
    with chromium(tmp_path) as driver:
        driver.get(pages[page])
        charts = driver.execute_script("return [...document.querySelectorAll('.chart')].map(c => c._fullData.length)")
        assert len(charts) >= 4
        assert min(charts) >= 1
        assert any(sign.isdigit() for sign in hovered(driver, "reliability" if page == "classes" else "band"))
        assert console_errors(driver) == []
        if page == "classes":
            assert driver.title == "Bright & <dark>"
            names = driver.execute_script("return document.getElementById('chart-reliability').textContent")
            assert "<b>diagonal</b>" in names


def test_a_report_follows_the_systems_theme_and_its_own_switch(pages: dict[str, str], tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    found = {}
    for dark in (False, True):
        with chromium(tmp_path / str(dark), dark=dark) as driver:
            driver.get(pages["classes"])
            found[dark] = driver.execute_script(COLOURS)
            driver.find_element(By.ID, "theme").click()
            assert driver.execute_script(COLOURS)[1] == ("light" if dark else "dark")
            found[dark, "switched"] = driver.execute_script(COLOURS)
            assert console_errors(driver) == []
    assert found[False][1] == "light"
    assert found[True][1] == "dark"
    assert found[False, "switched"] == found[True]
    assert found[True, "switched"] == found[False]
    assert all(light != dark for light, dark in zip(found[False], found[True], strict=True))


def test_a_phone_need_not_scroll_sideways(pages: dict[str, str], tmp_path: Path) -> None:
    with chromium(tmp_path, width=360, height=740) as driver:
        for page in pages.values():
            driver.get(page)
            width, inner = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
            assert inner == 360
            assert width <= 360
            assert console_errors(driver) == []
