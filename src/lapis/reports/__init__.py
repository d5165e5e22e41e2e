"""One self-contained HTML page about one posterior or several: readable offline, with plots to hover over and zoom.

Sections are made of plain values (`content`), from which `page` makes HTML; plotly draws, in the reader's browser.
"""

from __future__ import annotations

from lapis.reports.writing import report

__all__ = ["report"]
