"""The documentation's promises: links lead somewhere, pages are in the navigation, public names in the reference."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import lapis

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"(?:\]\(|src=\")(?!https?:|mailto:|#)([^)#\s\"]+)(?:#[^)\s]*)?[)\"]")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
ROOMS = (
    *("metrics", "optim", "decisions", "decisions.active", "lifelong", "latent", "learning_rule", "solvers"),
    *("predictions", "function_space", "distributed", "training", "plots", "estimators", "export", "data"),
    *("imaging", "errors"),
)
"""Rooms that are shown whole."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    links = LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_no_page_holds_both_sides_of_a_merge() -> None:
    marked = re.compile(r"^(<{7} |={7}$|>{7} )", re.MULTILINE)
    assert [name(page) for page in PAGES if marked.search(page.read_text(encoding="utf-8"))] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:", 1)[1]
    listed = re.findall(r"([\w./-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    entries = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    assert {f"lapis.{room}" for room in ROOMS} <= entries
    members = {id(value) for room in ROOMS for value in vars(importlib.import_module(f"lapis.{room}")).values()}
    missing = [n for n in lapis.__all__ if f"lapis.{n}" not in entries and id(getattr(lapis, n)) not in members]
    assert missing == []
