"""Formulas of the pages as MathML, which browsers draw without a script: the site can be read offline."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[2] == "[" else "inline"
    formula = html.unescape(found[3]).strip()
    drawn = convert(formula, display=display)
    if "\\" in drawn:  # a command that the converter does not know stays as it was written
        raise ValueError(f"This formula cannot be drawn: {formula}")
    return f'<div class="formula">{drawn}</div>' if display == "block" else drawn


def on_page_content(text: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of a page's Markdown."""
    return FORMULA.sub(_mathml, text)
