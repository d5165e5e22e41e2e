"""What a report consists of, before it is HTML: sections of facts, charts, tables and pictures. All text is plain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY)
GREY = "#8A8A8A"
"""As in `lapis.plots`, without importing matplotlib; the page's script knows a lighter twin of each for the dark."""


@dataclass(frozen=True)
class Fact:
    """A number or word about the posterior, and what it means in plain words."""

    label: str
    value: str
    meaning: str


@dataclass(frozen=True)
class Chart:
    """A plotly figure: traces and layout as plotly's JSON has them, but for colours of axes and fonts."""

    name: str
    """Letters and hyphens; unique in a page."""
    title: str
    caption: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 380


@dataclass(frozen=True)
class Table:
    """Rows of words; `best` holds the (row, column) of cells to stress."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Picture:
    """One example: its image (H, W) or (H, W, 3) with values from 0 to 1, if it is one, and lines about it."""

    title: str
    lines: Sequence[str]
    image: Tensor | None = None


@dataclass(frozen=True)
class Section:
    """A part of the page, in this order: lead, facts, notes, table, charts, pictures."""

    name: str
    title: str
    lead: str
    facts: Sequence[Fact] = field(default_factory=tuple)
    notes: Sequence[str] = field(default_factory=tuple)
    table: Table | None = None
    charts: Sequence[Chart] = field(default_factory=tuple)
    pictures: Sequence[Picture] = field(default_factory=tuple)


def axis(title: str, **more: Any) -> dict[str, Any]:
    """The axis of a chart."""
    return {"title": {"text": title}, **more}


def class_name(value: int, classes: Sequence[str] | None) -> str:
    """A class by its name where it has one, else by its number."""
    return classes[value] if classes is not None and 0 <= value < len(classes) else str(value)


def faint(colour: str, alpha: float) -> str:
    """A colour with transparency, as plotly writes it."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"
