"""docs/results/trust.md from the rows of docs/results/trust.json: the bars, averages, and a table for every setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from methods.rows import Row
from methods.tables import cell, mean

from trust.columns import COLUMNS
from trust.scores import CLASSIFICATION, REGRESSION
from trust.settings import Setting

NAMES = {
    "nll": "NLL", "ece": "ECE", "brier": "Brier", "accuracy": "accuracy", "ood_auroc": "OOD-AUROC",
    "shifted_nll": "NLL, shifted", "shifted_ece": "ECE, shifted", "rmse": "RMSE", "coverage": "95 % cover",
    "shifted_coverage": "95 % cover, shifted", "seconds": "CPU s",
}  # fmt: skip
HIGHER = {"accuracy", "ood_auroc"}
SLACK = 0.01
"""By which NLL and ECE of the README recipe may be above those of the network alone."""
SHARE = 0.8
"""Of the settings in which refined and calibrated must have a lower NLL than the network alone."""


@dataclass(frozen=True)
class Rows:
    """All rows with scores, by setting, column and seed; rows that failed are apart."""

    settings: dict[str, Setting]
    found: dict[tuple[str, str, int], Row]
    failed: dict[tuple[str, str, int], Row]

    @classmethod
    def of(cls, rows: Sequence[Row], settings: dict[str, Setting]) -> Rows:
        keyed = {(row["setting"], row["column"], row["seed"]): row for row in rows if row["setting"] in settings}
        good = {key: row for key, row in keyed.items() if "error" not in row}
        return cls(settings, good, {key: row for key, row in keyed.items() if "error" in row})

    def seeds(self, setting: str, *columns: str) -> list[int]:
        """Seeds for which all of these columns are there."""
        of_each = [{s for name, c, s in self.found if (name, c) == (setting, column)} for column in columns]
        return sorted(set.intersection(*of_each))

    def values(self, setting: str, column: str, score: str, seeds: Sequence[int] | None = None) -> list[float]:
        chosen = self.seeds(setting, column) if seeds is None else seeds
        return [float(self.found[setting, column, seed][score]) for seed in chosen]

    def gain(self, setting: str, column: str, score: str, over: str = "plain") -> float | None:
        """Mean difference of a column's score to another's, over the seeds that both have."""
        seeds = self.seeds(setting, column, over)
        if not seeds:
            return None
        return mean(self.values(setting, column, score, seeds)) - mean(self.values(setting, over, score, seeds))

    def gains(self, column: str, score: str, over: str = "plain") -> dict[str, float]:
        """`gain` of every classification setting that has it."""
        every = {name: self.gain(name, column, score, over) for name in self.classifications()}
        return {name: gain for name, gain in every.items() if gain is not None}

    def classifications(self) -> list[str]:
        return [name for name, setting in self.settings.items() if setting.classification]

    def columns(self) -> list[str]:
        return [column for column in COLUMNS if any(c == column for _, c, _ in self.found)]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def best(rows: Rows, setting: str, score: str, columns: Sequence[str]) -> set[str]:
    """The column with the best mean, and those as good to the digits shown."""
    means = {column: mean(rows.values(setting, column, score)) for column in columns}
    if score.endswith("coverage"):
        quality = {column: abs(value - 0.95) for column, value in means.items()}
    else:
        quality = {column: -value if score in HIGHER else value for column, value in means.items()}
    least = min(quality.values())
    return {column for column, value in quality.items() if value <= least + 5e-5}


def setting_table(rows: Rows, setting: str) -> str:
    """One line a column, its scores, the best of each in bold; below, why columns are missing."""
    scores = CLASSIFICATION if rows.settings[setting].classification else REGRESSION
    columns = [column for column in COLUMNS if rows.seeds(setting, column)]
    if not columns:
        return ""
    winners = {score: best(rows, setting, score, columns) for score in scores}
    lines = []
    for column in columns:
        line = [column]
        for score in scores:
            text = cell(rows.values(setting, column, score))
            line.append(f"**{text}**" if column in winners[score] else text)
        seconds = rows.values(setting, column, "seconds")
        lines.append([*line, f"{mean(seconds):.3g}", str(len(seconds))])
    text = markdown(["column", *(NAMES[score] for score in scores), "CPU s", "seeds"], lines)
    notes = []
    for column in COLUMNS:
        failed = {seed: row for (name, c, seed), row in rows.failed.items() if (name, c) == (setting, column)}
        reasons = {row["error"] for row in failed.values() if not row.get("absent")}
        notes += [f"- {column}, seed {', '.join(map(str, sorted(failed)))}: {reason}" for reason in sorted(reasons)]
        remarks = {rows.found[setting, column, seed].get("note") for seed in rows.seeds(setting, column)}
        notes += [f"- {column}: {remark}" for remark in sorted(filter(None, remarks)) if "only" in remark]
    title = f"### {rows.settings[setting].title} (`{setting}`)\n\n"
    return title + text + ("\n\nMissing or limited:\n\n" + "\n".join(notes) if notes else "")


def averages(rows: Rows) -> str:
    """Mean difference to the network alone over the classification settings that a column has."""
    scores = ("nll", "ece", "brier", "accuracy", "ood_auroc", "shifted_nll", "shifted_ece")
    lines = []
    for column in rows.columns():
        if column == "plain" or not rows.gains(column, "nll"):
            continue
        cells = [f"{mean(list(rows.gains(column, score).values())):+.4f}" for score in scores]
        lines.append([column, *cells, f"{len(rows.gains(column, 'nll'))}"])
    return markdown(["column", *(NAMES[score] for score in scores), "settings"], lines)


def verdict(met: bool) -> str:
    return "**met**" if met else "**not met**"


def listed(gains: dict[str, float]) -> str:
    return ", ".join(f"`{name}` {gain:+.4f}" for name, gain in gains.items()) or "nowhere"


def first_bar(rows: Rows, column: str) -> list[str]:
    """In every setting NLL and ECE at most plain + .01, OOD-AUROC no lower; better on average in all three."""
    total = len(rows.classifications())
    lines, every = [], True
    for score in ("nll", "ece", "ood_auroc"):
        gains = rows.gains(column, score)
        sign, slack = (-1, 0.0) if score in HIGHER else (1, SLACK)
        over = {name: gain for name, gain in gains.items() if sign * gain > slack}
        average = mean(list(gains.values())) if gains else float("nan")
        each, whole = not over and len(gains) == total, sign * average < 0
        every = every and each and whole
        allowed = "no lower than plain" if score in HIGHER else f"no higher than plain + {SLACK}"
        lines.append(
            f"    - {NAMES[score]} {allowed} in every setting: {verdict(each)} ({len(gains) - len(over)} of {total}, "
            f"{len(gains)} measured; not in: {listed(over)}); on average {average:+.4f}, better: {verdict(whole)}"
        )
    return [f"- {column}: {verdict(every)}", *lines]


def second_bar(rows: Rows, column: str) -> list[str]:
    """NLL below plain in 8 of 10 settings, and below temperature scaling on shifted inputs on average."""
    total = len(rows.classifications())
    gains, shifted = rows.gains(column, "nll"), rows.gains(column, "shifted_nll", "temperature")
    below = sum(gain < 0 for gain in gains.values())
    above = {name: gain for name, gain in gains.items() if gain >= 0}
    average = mean(list(shifted.values())) if shifted else float("nan")
    enough, less = below >= SHARE * total, average < 0
    return [
        f"- {column}: {verdict(enough and less)}",
        f"    - NLL below plain in {below} of {total} settings ({len(gains)} measured), at least "
        f"{math.ceil(SHARE * total)} wanted: {verdict(enough)} (not in: {listed(above)})",
        f"    - NLL on shifted inputs, on average over settings, less that of temperature scaling: {average:+.4f}: "
        f"{verdict(less)}",
    ]


def bars(rows: Rows) -> str:
    columns = rows.columns()
    lines = ["1. README recipe, without validation data, against the network alone:", ""]
    for column in ("README", "last layer", "all weights"):
        lines += first_bar(rows, column) if column in columns else [f"- {column}: not measured"]
    lines += ["", "2. Refined and calibrated, NLL against the network alone and temperature scaling:", ""]
    steps = ("refined", "calibrated", "calibrated with temperature", "refined, calibrated")
    for column in (*steps, "refined, calibrated with temperature", "last layer, refined", "last layer, calibrated"):
        lines += second_bar(rows, column) if column in columns else [f"- {column}: not measured"]
    return "\n".join(lines)


def document(rows: Rows) -> str:
    seeds = sorted({seed for _, _, seed in rows.found})
    parts = [
        f"Classification settings: {len(rows.classifications())}; seeds {', '.join(map(str, seeds))}. Means over seeds "
        "± their standard error; the best of a setting in bold. ECE with 15 bins; OOD-AUROC by the entropy of the "
        "prediction. Shifted: images turned by 30 degrees (digits and CIFAR-10: noisy pixels), words dropped, noisy "
        "inputs. Temperature scaling, grid and calibrated use a validation set, the others training data only. "
        "CPU seconds are of fit and prediction.",
        "## The bars",
        bars(rows),
        "## Mean difference to the network alone, over classification settings",
        averages(rows),
        "## Every setting",
        *filter(None, (setting_table(rows, name) for name in rows.settings)),
    ]
    return "\n\n".join(parts)
