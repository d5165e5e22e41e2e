"""Reports: what a page says, that it needs nothing but itself, and that no text of a user becomes HTML."""

from __future__ import annotations

import json
import re
import warnings
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import lapis
from lapis.cli import app
from lapis.posteriors import Posterior
from lapis.reports import fit, page, quality, writing
from lapis.reports.examples import as_image
from lapis.reports.judged import judged

F64 = torch.float64
Pair = tuple[Tensor, Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def images(n: int, seed: int) -> Pair:
    """Bright spots in one of three rows."""
    y = torch.arange(n) % 3
    x = normal(n, 1, 6, 6, seed=seed)
    x[torch.arange(n), 0, 2 * y] += 2.0
    return x, y


@cache
def classifier(structure: str = "dense") -> Posterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    x, y = images(60, 1)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return lapis.laplace(model, (x, y), "classification", structure=structure, weights="all").tune()  # type: ignore[attr-defined,arg-type,no-any-return]


def curve(n: int, seed: int) -> Pair:
    x = normal(n, 1, seed=seed)
    return x, x.sin() + 0.1 * normal(n, 1, seed=seed + 1)


@cache
def regression() -> Posterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return lapis.laplace(model, curve(30, 1), "regression", structure="dense").tune()  # type: ignore[attr-defined,no-any-return]


class Reader(HTMLParser):
    """Text, tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.charts = "", {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") or tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "charts":
            self.charts: dict[str, Any] = json.loads(data)
        elif not self._inside:
            self.text += data

    def ids(self, tag: str) -> list[str | None]:
        return [attributes.get("id") for name, attributes in self.tags if name == tag]


@pytest.fixture
def no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the drawing, which takes plotly and a browser."""
    monkeypatch.setattr(writing, "plotly_library", lambda: "var Plotly;")


@pytest.fixture
def written(no_plotly: None, tmp_path: Path) -> Any:
    def write(posterior: Any, **options: Any) -> Reader:
        return Reader(lapis.report(posterior, tmp_path / "page.html", **options).read_text(encoding="utf-8"))

    return write


def test_a_report_of_classifiers_has_every_section_and_says_what_was_computed(written: Any) -> None:
    posterior, test = classifier(), images(30, 5)
    both = {"dense": posterior, "diagonal": classifier("diagonal")}
    found = written(both, data=images(60, 1), test=test, out_of_distribution=5 * normal(20, 1, 6, 6))
    expected = ["summary", "scores", "calibration", "outside", "unsure", "evidence", "layers", "model"]
    assert found.ids("section") == expected
    numbers = posterior.diagnose(test).numbers
    for name in ("nll", "plain_nll", "accuracy", "ece", "brier"):
        assert f"{numbers[name]:.4f}" in found.text
    gamma = posterior.effective_parameters()  # type: ignore[attr-defined]
    assert f"{float(gamma):.1f} of 163" in found.text
    bars = {trace["name"]: trace for trace in found.charts["layers"]["data"]}
    assert sum(bars["dense"]["x"]) == pytest.approx(float(gamma))
    assert found.charts["climb-0"]["data"][0]["y"] == pytest.approx(posterior.tuning.trace)  # type: ignore[attr-defined]
    assert found.charts["targets"]["data"][0]["y"] == [20, 20, 20]
    assert sum(found.charts["doubt"]["data"][1]["y"]) == pytest.approx(1)
    pictures = [attributes for name, attributes in found.tags if name == "img"]
    assert len(pictures) == 12
    assert all((each["src"] or "").startswith("data:image/png;base64,") for each in pictures)
    doubts = [float(value) for value in re.findall(r"uncertainty (\d\.\d+)", found.text)]
    entropy = posterior.predict(test[0]).entropy  # type: ignore[attr-defined]
    assert doubts == pytest.approx(entropy.sort(descending=True).values[:12].tolist(), abs=6e-4)


def test_a_report_of_a_regression_has_bands_and_coverage(written: Any) -> None:
    posterior, test = regression(), curve(40, 7)
    found = written(posterior, test=test)
    assert found.ids("section") == [
        "summary",
        "scores",
        "calibration",
        "bands",
        "unsure",
        "evidence",
        "layers",
        "model",
    ]
    prediction = posterior.predict(test[0])
    claimed = found.charts["coverage"]["data"][1]
    place = claimed["x"].index(pytest.approx(0.8))
    lower, upper = prediction.interval(0.8)  # type: ignore[attr-defined]
    assert claimed["y"][place] == pytest.approx(float(lapis.metrics.coverage(lower, upper, test[1])))
    wide, narrow, mean, points = found.charts["band"]["data"]
    assert points["y"] == pytest.approx(test[1].flatten().tolist())
    grid = torch.tensor(mean["x"], dtype=F64)[:, None]
    band = posterior.predict(grid)
    assert wide["y"][:240] == pytest.approx((band.mean + 1.959964 * band.std).flatten().tolist())  # type: ignore[attr-defined]
    assert narrow["y"][0] < wide["y"][0]


def test_without_data_the_fit_alone_is_told_and_training_data_are_called_so(written: Any) -> None:
    posterior = regression()
    assert written(posterior).ids("section") == ["summary", "evidence", "layers", "model"]
    assert "These are training data" in written(posterior, data=curve(30, 1)).text


@pytest.mark.parametrize("name", ["dropout", "ensemble", "variational"])
def test_every_kind_of_posterior_has_a_report(name: str, written: Any) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2), nn.Linear(3, 2)).double() for _ in range(2)]
    data = (normal(12, 3), normal(12, 2, seed=1))
    likelihood = lapis.Gaussian(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)  # five steps are too few
        posterior: Any = {
            "dropout": lambda: lapis.dropout(models[0], likelihood, data),
            "ensemble": lambda: lapis.ensemble(models, data, likelihood),
            "variational": lambda: lapis.variational(models[0], data, likelihood, steps=5),
        }[name]()
    found = written(posterior, test=data, out_of_distribution=9 * data[0])
    assert ("evidence" in found.ids("section")) == (name == "variational")
    assert "against" in found.charts


def test_words_of_users_never_become_html(written: Any) -> None:
    evil = '</script><script>alert("1")</script><img src=x onerror=alert(1)>'
    found = written({evil: classifier()}, test=images(9, 2), title=evil, classes=[evil, "two & three", "<b>"])
    assert sum(tag == "script" for tag, _ in found.tags) == 3
    assert all("onerror" not in attributes for _, attributes in found.tags)
    names = [trace["name"] for trace in found.charts["reliability"]["data"]]
    assert "&lt;/script&gt;" in names[-1]  # plotly itself reads a little HTML
    assert evil in found.text


def test_a_page_loads_nothing_from_anywhere(written: Any, tmp_path: Path) -> None:
    found = written(regression(), data=curve(30, 1))
    assert ("http-equiv", "Content-Security-Policy") in [
        item for tag, attributes in found.tags if tag == "meta" for item in attributes.items()
    ]
    for tag, attributes in found.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "http:" not in text
    assert "https:" not in text
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_what_cannot_be_reported_is_refused(no_plotly: None, tmp_path: Path) -> None:
    posterior = regression()
    with pytest.raises(lapis.DataError, match="about posteriors"):
        lapis.report({}, tmp_path / "page.html")
    with pytest.raises(lapis.FileError, match="Cannot write"):
        lapis.report(posterior, tmp_path / "nowhere" / "page.html")
    with pytest.raises(lapis.DataError, match="test or data"):
        lapis.report(posterior, tmp_path / "page.html", out_of_distribution=normal(3, 1))
    assert not list(tmp_path.iterdir())


def test_without_plotly_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(page, "import_module", missing)
    with pytest.raises(lapis.OptionError, match=r"pip install 'lapis-bayes\[report\]'"):
        lapis.report(regression(), tmp_path / "page.html")


@pytest.mark.parametrize("kind", ["real", "words"])
def test_the_command_writes_a_page_about_a_fitted_file(kind: str, no_plotly: None, tmp_path: Path) -> None:
    x, y = curve(40, 3)
    targets = [f"{value:.3f}" if kind == "real" else "<high>" if value > 0 else "low" for value in y[:, 0].tolist()]
    rows = ["a,y", *(f"{a:.3f},{b}" for a, b in zip(x[:, 0].tolist(), targets, strict=True))]
    table, strange, page_file = tmp_path / "table.csv", tmp_path / "strange.csv", tmp_path / "page.html"
    table.write_text("\n".join(rows))
    strange.write_text("a\n9\n-9\n")
    command = CliRunner()
    for name in ("one", "two"):
        options = ["--out", str(tmp_path / name), "--hidden", "3", "--epochs", "5"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lapis.LapisWarning)
            assert command.invoke(app, ["fit", str(table), "--target", "y", *options]).exit_code == 0
    options = [
        "--compare",
        str(tmp_path / "two"),
        "--data",
        str(table),
        "--unlike",
        str(strange),
        "--out",
        str(page_file),
    ]
    result = command.invoke(app, ["report", str(tmp_path / "one"), str(table), *options])
    assert result.exit_code == 0, result.output
    found = Reader(page_file.read_text(encoding="utf-8"))
    assert {"summary", "scores", "outside", "unsure", "layers", "model"} <= set(found.ids("section"))
    assert ("in the units of the network" in found.text) == (kind == "real")
    assert [trace["name"] for trace in found.charts["layers"]["data"]] == ["one", "size of the layer", "two"]
    assert kind == "real" or found.charts["targets"]["data"][0]["x"] == ["&lt;high&gt;", "low"]
    missing = command.invoke(app, ["report", str(tmp_path / "one"), str(strange), "--out", str(page_file)])
    assert missing.exit_code == 1
    assert "'y'" in missing.stderr


def test_inputs_are_images_where_they_look_like_images() -> None:
    assert as_image(normal(1, 1, 8, 8), None).shape == (8, 8)  # type: ignore[union-attr]
    assert as_image(normal(1, 3, 8, 9), None).shape == (8, 9, 3)  # type: ignore[union-attr]
    assert as_image(normal(1, 64), (8, 8)).shape == (8, 8)  # type: ignore[union-attr]
    assert as_image(torch.ones(1, 8, 8), None).max() == 0  # type: ignore[union-attr]
    for other in (normal(1, 64), normal(1, 3), normal(1, 2, 8, 8), normal(1, 2, 2), {"x": normal(1, 8, 8)}):
        assert as_image(other, None) is None


def test_effective_parameters_of_layers_are_those_of_the_posterior() -> None:
    posterior = classifier()
    found = fit.effective_by_parameter(posterior)
    assert found is not None
    total = posterior.effective_parameters()  # type: ignore[attr-defined]
    assert sum(found.values()) == pytest.approx(float(total), rel=1e-9)


def test_reliability_is_that_of_the_metrics() -> None:
    posterior, test = classifier(), images(30, 5)
    section = quality.calibration({"own": judged(posterior, test, 7, False)})
    assert section is not None
    trace = section.charts[0].traces[2]
    bins = lapis.metrics.reliability(posterior.predict(test[0]).probs, test[1])  # type: ignore[attr-defined]
    used = bins.count > 0
    assert trace["x"] == pytest.approx(bins.confidence[used].tolist())
    assert trace["y"] == pytest.approx(bins.accuracy[used].tolist())
