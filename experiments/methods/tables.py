"""Means over seeds with their standard errors, in tables of which the best is bold."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from common import table

from methods.rows import Row

Score = Callable[[Row], float]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    centre = mean(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1) / len(values))


def cell(values: Sequence[float]) -> str:
    """Mean +- standard error over seeds."""
    centre, digits = mean(values), 4 if abs(mean(values)) < 0.0995 else 3
    if len(values) < 2 or math.isinf(centre):
        return f"{centre:.{digits}f}"
    return f"{centre:.{digits}f} ± {standard_error(values):.{digits}f}"


def by_column(rows: Sequence[Row], setting: str, columns: Collection[str]) -> dict[str, list[Row]]:
    """Rows with scores of a setting, in the order of the columns."""
    good = [row for row in rows if row["setting"] == setting and "error" not in row]
    found = {column: [row for row in good if row["column"] == column] for column in columns}
    return {column: each for column, each in found.items() if each}


def scored(
    found: Mapping[str, Sequence[Row]],
    scores: Mapping[str, Score],
    higher: Collection[str] = (),
    name: str = "method",
) -> str:
    """One line a column, one score each; best means in bold (the lowest, but for `higher`); and how many rows."""
    values = {column: {key: [of(row) for row in rows] for key, of in scores.items()} for column, rows in found.items()}
    best = {
        key: (max if key in higher else min)(mean(values[column][key]) for column in found) for key in scores
    }  # fmt: skip
    lines = []
    for column, rows in found.items():
        line = [column]
        for key in scores:
            text = cell(values[column][key])
            line.append(f"**{text}**" if mean(values[column][key]) == best[key] else text)
        lines.append([*line, len(rows)])
    return table([name, *scores, "runs"], lines)


def failures(rows: Sequence[Row]) -> str:
    """Why cells are missing."""
    lines = [
        f"- {row['setting']}, {row['column']}, seed {row['seed']}: {row['error']}" for row in rows if "error" in row
    ]
    return "\n\nMissing:\n\n" + "\n".join(lines) if lines else ""
