"""Sections as one HTML page that needs nothing but itself: style, script, plotly's library and all data inside."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from html import escape
from importlib import import_module
from importlib.resources import files
from typing import Any

from torch import Tensor

from lapis.errors import OptionError
from lapis.reports.content import Chart, Picture, Section, Table

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The page may load nothing, from anywhere."""


def plotly_library() -> str:
    """plotly's JavaScript, from the installed package."""
    try:
        source: str = import_module("plotly.offline").get_plotlyjs()
    except ImportError as error:
        raise OptionError(
            "The plots of a page are drawn by plotly",
            expected="the package plotly",
            got="no such package",
            do="pip install 'lapis-bayes[report]'",
        ) from error
    return source


def asset(name: str) -> str:
    """A file of this room."""
    return files("lapis.reports").joinpath(name).read_text(encoding="utf-8")


def html(title: str, about: str, sections: Sequence[Section], library: str) -> str:
    """The page. All text is escaped here, and JSON cannot end its script."""
    charts = {chart.name: {"data": chart.traces, "layout": chart.layout} for part in sections for chart in part.charts}
    links = "".join(f'<a href="#{part.name}">{escape(part.title)}</a>' for part in sections)
    body = "\n".join(map(_section, sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{asset("page.css")}
</style>
</head>
<body>
<header>
<div><h1>{escape(title)}</h1><p>{escape(about)}</p></div>
<button id="theme" type="button" aria-label="Switch between light and dark">◐</button>
</header>
<nav aria-label="Sections">{links}</nav>
<main>
{body}
</main>
<footer>Made by Lapis. This page is complete: it loads nothing from anywhere.</footer>
<script type="application/json" id="charts">{_json(charts)}</script>
<script>{library}</script>
<script>
{asset("page.js")}
</script>
</body>
</html>
"""


def _json(value: Any) -> str:
    """JSON for a script element: names are escaped as plotly reads a little HTML; NaN is refused."""
    return json.dumps(_harmless(value), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def _harmless(value: Any) -> Any:
    if isinstance(value, str):
        return escape(value, quote=False)
    if isinstance(value, dict):
        return {key: _harmless(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_harmless(entry) for entry in value]
    return value


def _section(part: Section) -> str:
    facts = "".join(
        f"<div><dt>{escape(fact.label)}</dt><dd><b>{escape(fact.value)}</b><span>{escape(fact.meaning)}</span></dd></div>"
        for fact in part.facts
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in part.notes)
    return "\n".join(
        [
            f'<section id="{part.name}">',
            f"<h2>{escape(part.title)}</h2>",
            f"<p>{escape(part.lead)}</p>",
            f"<dl>{facts}</dl>" if facts else "",
            f'<ul class="notes">{notes}</ul>' if notes else "",
            "" if part.table is None else _table(part.table),
            *map(_chart, part.charts),
            f'<div class="pictures">{"".join(map(_picture, part.pictures))}</div>' if part.pictures else "",
            "</section>",
        ]
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    rows = []
    for number, row in enumerate(table.rows):
        cells = [f'<th scope="row">{escape(row[0])}</th>']
        for place, cell in enumerate(row[1:], 1):
            stressed = ' class="best"' if (number, place) in table.best else ""
            cells.append(f"<td{stressed}>{escape(cell)}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _chart(chart: Chart) -> str:
    return (
        f'<figure><h3>{escape(chart.title)}</h3><div class="chart" id="chart-{chart.name}" '
        f'style="height:{chart.height}px"></div><figcaption>{escape(chart.caption)}</figcaption></figure>'
    )


def _picture(picture: Picture) -> str:
    image = ""
    if picture.image is not None:
        image = f'<img alt="{escape(picture.title)}" src="{_png(picture.image)}">'
    lines = "".join(f"<span>{escape(line)}</span>" for line in picture.lines)
    return f"<div><b>{escape(picture.title)}</b>{image}{lines}</div>"


def _png(image: Tensor) -> str:
    """An image with values from 0 to 1 as a data URL."""
    from PIL import Image

    held = io.BytesIO()
    Image.fromarray((255 * image).round().byte().numpy()).save(held, format="PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
