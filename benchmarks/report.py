"""results.json as docs/benchmarks.md: tables and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.cases import CASES
from benchmarks.jobs import title
from benchmarks.peers import BACKENDS
from benchmarks.targets import TARGETS, Row

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = PAGE.parent / "figures"
REMARKS = ROOT / "benchmarks" / "remarks.md"
"""What a person has to say about the numbers; stands on the page as it is."""


INTRODUCTION = """
Written by `make bench`; do not edit. Lapis against laplace-torch and its backends, on the same torch, data and weights.
Every contender runs in processes of its own and they take turns; times are medians. Memory is the growth of the
resident set's peak over where it stood with libraries, network and data (and a fitted posterior, where the job starts
from one) in place, in a process whose allocator gives freed blocks back at once (glibc otherwise keeps some: up to
three times as much, and another amount each time). An epoch is a plain forward and backward pass over the same batches.
Biases have Kronecker blocks of their own, as the peers have it. An asterisk marks a peer whose answer differs from ours
by more than 2 %, because it defines its factors in another way. laplace-torch decomposes its Kronecker factors while
fitting, Lapis when they are first used: "fit and log evidence" compares both together.
""".strip()


def seconds(value: float) -> str:
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.0f} MB"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} x"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def cells(row: Row) -> list[str]:
    ours = row.ours
    found = [title(row.job), f"({row.case})"]
    if not ours.seconds:
        return [*found, *[""] * 8, row.target(), "; ".join(row.missed())]
    found += [seconds(ours.time), f"{row.epochs(ours):.2g}", megabytes(ours.memory)]
    if row.fastest and row.leanest:
        fastest, leanest = row.peers[row.fastest], row.peers[row.leanest]
        found += [f"{seconds(fastest.time)} ({row.marked(row.fastest)})", f"{row.epochs(fastest):.2g}"]
        found += [f"{megabytes(leanest.memory)} ({row.marked(row.leanest)})"]
    else:
        found += ["none", "", ""]
    missed = list(row.missed())
    found += [times(row.reached("speed")), times(row.reached("memory"))]
    return [*found, row.target(), "missed: " + "; ".join(missed) if missed else "met"]


HEADER = ["job", "case", "ours", "epochs", "memory", "fastest peer", "epochs", "leanest peer", "faster", "leaner"]
HEADER += ["target", ""]


def compared(rows: Sequence[Row]) -> str:
    """Why the numbers can be compared: how far each backend's answers are from ours."""
    lines = []
    for name in BACKENDS:
        answers = [row for row in rows if row.results[name].deviation is not None]
        other = [f"{title(row.job)} ({row.case})" for row in answers if not row.same(name)]
        worst = max((row.results[name].deviation or 0 for row in answers if row.same(name)), default=0)
        lines.append([name, str(len(answers)), f"{worst:.1e}", "; ".join(other)])
    header = ("backend", "answers compared", "largest relative difference", "other definition")
    return table(header, lines)


def failures(rows: Sequence[Row]) -> str:
    lines = [
        [f"({row.case})", title(row.job), name, f"`{result.error[:160]}`"]
        for row in rows
        for name, result in row.results.items()
        if result.error
    ]
    return table(("case", "job", "who", "error"), lines) if lines else "None."


def limits(rows: Sequence[Row]) -> str:
    lines = [
        [
            title(row.job),
            f"({row.case})",
            f"{row.flops / 1e9:.3g}",
            seconds(row.limit),
            seconds(row.ours.time),
            times(row.ours.time / row.limit),
            f"{row.limit / row.ours.time:.0%}",
        ]
        for row in rows
        if row.flops and row.limit and row.ours.seconds
    ]
    return table(("job", "case", "10^9 operations", "limit", "ours", "ours / limit", "share of the rate"), lines)


# growth --------------------------------------------------------------------------------------------------------------


def _curves(axes: Axes, points: Sequence[dict[str, Any]], value: Any, label: str) -> None:
    keys = dict.fromkeys((p["case"] if p["case"] in CASES else "", p["job"]) for p in points)
    for case, job in keys:
        chosen = [p for p in points if p["job"] == job and (not case or p["case"] == case)]
        name = f"({case}) {title(job)}" if case else title(job)
        axes.plot([p["n"] for p in chosen], [value(p) for p in chosen], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def plots(growth: dict[str, list[dict[str, Any]]]) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "lapis"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    _curves(left, growth["examples"], lambda p: 1e6 * p["seconds"] / p["n"], "microseconds an example")
    _curves(right, growth["examples"], lambda p: p["memory"] / 2**20, "peak memory growth, MB")
    for axes in (left, right):
        axes.set_xlabel("examples")
    left.legend(fontsize=7)
    figure.savefig(FIGURES / "growth-examples.svg", metadata={"Date": None})
    figure, axes = plt.subplots(figsize=(5, 3.8), layout="constrained")
    _curves(axes, growth["outputs"], lambda p: 1e3 * p["seconds"], "milliseconds")
    axes.set_xscale("linear")
    axes.set_xlabel("outputs")
    axes.legend(fontsize=7)
    figure.savefig(FIGURES / "growth-outputs.svg", metadata={"Date": None})


def growth_table(points: Sequence[dict[str, Any]]) -> str:
    """For each curve: the first and last point, and by how much the cost of an example, or of a fit, changed."""
    lines = []
    for case, job in dict.fromkeys((p["case"], p["job"]) for p in points):
        curve = [p for p in points if (p["case"], p["job"]) == (case, job) and not math.isnan(p["seconds"])]
        first, last = curve[0], curve[-1]
        change = last["seconds"] / last["n"] / (first["seconds"] / first["n"])
        span = [f"{title(job)} ({case})", f"{first['n']} to {last['n']}", f"{change:.2f} x"]
        lines.append([*span, megabytes(first["memory"]), megabytes(last["memory"])])
    return table(("job", "examples", "time an example, last / first", "memory, first", "memory, last"), lines)


# the page ------------------------------------------------------------------------------------------------------------


def write(results: dict[str, Any]) -> None:
    """The page and its figures, from what is stored."""
    machine = results["machine"]
    rows = [Row.load(row, machine["rate"]) for row in results["rows"]]
    wanted = [row for row in rows if (row.case, row.job) in TARGETS]
    rest = [row for row in rows if (row.case, row.job) not in TARGETS]
    missed = sum(1 for row in rows if any(row.missed()))
    cases = [[f"({name})", case.title, str(case.examples), str(case.batch_size)] for name, case in CASES.items()]
    parts = [
        "# Benchmarks",
        INTRODUCTION,
        f"{machine['processor']}, {machine['threads']} threads, Python {machine['python']}; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + f". Measured float32 matrix-product rate: {machine['rate'] / 1e9:.0f} x 10^9 operations a second.",
        table(("case", "network", "examples", "batch size"), cases),
        f"{len(rows) - missed} of {len(rows)} jobs meet their targets. Of every job: no peer faster by more than 10 %, "
        "none leaner by more than 20 % (growth below 4 MB counts as 4 MB, and within 2 % as equal). How the numbers "
        "were taken, and why targets were missed, stands at the end.",
        "## Targets",
        table(HEADER, [cells(row) for row in wanted]),
        "## All other jobs",
        table(HEADER, [cells(row) for row in rest]),
        "## The same answers",
        compared(rows),
        "## Distance from the physical limit",
        "The limit is the time of a job's forward passes, backward passes and factor products at the measured "
        "matrix-product rate (`benchmarks/limits.py`).",
        limits(rows),
    ]
    if results["growth"]:
        plots(results["growth"])
        parts += [
            "## Growth",
            growth_table(results["growth"]["examples"]),
            "![time and memory against the number of examples](figures/growth-examples.svg)",
            "Exact curvature is linear in the number of outputs, sampled curvature flat:",
            "![time against the number of outputs](figures/growth-outputs.svg)",
        ]
    parts += ["## Who failed", failures(rows)]
    if REMARKS.exists():
        parts.append(REMARKS.read_text(encoding="utf-8").strip())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def load() -> dict[str, Any]:
    """What earlier runs stored."""
    if not RESULTS.exists():
        return {"machine": {}, "rows": [], "growth": {}}
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def store(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
