"""The result of a diagnosis: findings in plain words, the numbers behind them, and a table of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Columns of the printed table."""


@dataclass(frozen=True)
class Line:
    """A line of the table: a score of the network alone and of the posterior, or a value and what it should be."""

    label: str
    cells: tuple[str, str]
    compares: bool


@dataclass(frozen=True)
class Diagnosis:
    """What was found. `print` shows it as a table.

    `findings` says in plain words what is wrong, with numbers and with what to do about it; it is empty when all is
    well. `numbers` holds what was measured by name: scores of the network alone begin with "plain_".
    """

    about: str
    """The posterior, and the data if there were any."""
    findings: list[str]
    numbers: dict[str, float]
    lines: tuple[Line, ...] = field(repr=False)

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=WIDTH, color_system=None, highlight=False)
        console.print(Text(self.about))
        for compares, head in ((True, ("", "plain network", "posterior")), (False, ("", "found", "compare with"))):
            chosen = [line for line in self.lines if line.compares == compares]
            if not chosen:
                continue
            table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
            table.add_column(head[0], no_wrap=True)
            table.add_column(head[1], justify="right", no_wrap=True)
            table.add_column(head[2], justify="right" if compares else "left")
            for line in chosen:
                table.add_row(line.label, *line.cells)
            console.print(Padding(table, (1, 0, 0, 0)))
        console.print()
        if not self.findings:
            console.print("Nothing to object to.")
        for number, finding in enumerate(self.findings, 1):
            mark = f"{number}. "
            row = Table.grid(padding=0)
            row.add_column(width=len(mark), no_wrap=True)
            row.add_column()
            row.add_row(mark, Text(finding))
            console.print(row)
        assert isinstance(console.file, StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


class Notes:
    """A diagnosis while it is made: every check adds its numbers, lines and findings."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.lines: list[Line] = []
        self.findings: list[str] = []

    def compare(self, name: str, label: str, plain: float, posterior: float) -> None:
        """A score of the network alone and of the posterior."""
        self.numbers |= {f"plain_{name}": plain, name: posterior}
        self.lines.append(Line(label, (f"{plain:.4f}", f"{posterior:.4f}"), True))

    def value(self, name: str, label: str, value: float, against: str) -> None:
        """A number, and what to hold it against."""
        self.numbers[name] = value
        self.lines.append(Line(label, (f"{value:,.4g}", against), False))

    def finding(self, what: str, do: str) -> None:
        """Something that is wrong, and what to do about it."""
        self.findings.append(f"{what} {do}")

    def diagnosis(self, about: str) -> Diagnosis:
        return Diagnosis(about, self.findings, self.numbers, tuple(self.lines))
