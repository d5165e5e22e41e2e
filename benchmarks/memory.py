"""`python -m benchmarks.memory`: whether `memory_budget` is kept, by the peak of a fresh process for every case.

A process builds its networks and data, runs the case once on a few examples, so that code is loaded, and then measures
one run: how far its resident memory rises above where it stood, with the allocator as every user has it. The promise
is the budget, 20 % more, and what the result itself takes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.memory_cases import CASES, MEGABYTE
from lapis.errors import MemoryBudgetError

PAGE = Path(__file__).parent.parent / "docs" / "results" / "memory.md"
RECORD = PAGE.with_suffix(".json")
ALLOWED = 1.2
"""Working memory in multiples of the budget, beside what the result takes."""
SLOWEST = 600
"""Seconds of processor time after which a case is cut off: on a busy machine the clock says little."""


def _status(key: str) -> int:
    """A line of /proc/self/status that counts kilobytes, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def peak_of(run: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `run`, and how far the resident memory rose above where it stood."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    result = run()
    return result, max(0, _status("VmHWM") - before)


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Memory of the distinct storages behind some tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measure(name: str, budget: int | None) -> dict[str, Any]:
    """One case, in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = CASES[name]
    row: dict[str, Any] = {"case": name, "title": case.title, "budget": budget or case.budget}
    try:
        case.task(row["budget"], True).run()
        task = case.task(row["budget"], False)
        result, peak = peak_of(task.run)
    except MemoryBudgetError as error:
        return row | {"refused": str(error).splitlines()[0]}
    return row | {"peak": peak, "result": bytes_of(task.kept(result))}


def in_process(name: str, budget: int | None = None) -> dict[str, Any]:
    """`measure` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.memory", "--run", name]
    command += [] if budget is None else ["--budget", str(budget // MEGABYTE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGXCPU:
        return {"case": name, "title": CASES[name].title, "budget": budget or CASES[name].budget, "failed": "too slow"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"case": name, "title": CASES[name].title, "budget": budget or CASES[name].budget, "failed": lines[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratio(row: dict[str, Any]) -> float:
    """Working memory beside the result, in multiples of the budget."""
    return max(0.0, (row["peak"] - row["result"]) / row["budget"])


def kept(row: dict[str, Any]) -> bool:
    return "refused" in row or ("peak" in row and ratio(row) <= ALLOWED)


def cells(row: dict[str, Any]) -> list[str]:
    """Budget, result, peak, ratio and verdict of a case, for the table."""
    budget = f"{row['budget'] // MEGABYTE}"
    if "peak" not in row:
        return [budget, "", "", "", "refused beforehand" if "refused" in row else row["failed"]]
    sizes = [f"{row[key] / MEGABYTE:.0f}" for key in ("result", "peak")]
    return [budget, *sizes, f"{ratio(row):.2f}", "yes" if kept(row) else "**no**"]


def write(record: dict[str, dict[str, Any]]) -> None:
    """The page, from the rows that were stored before and now."""
    lines = [
        "# Memory budgets, measured",
        "",
        "Made by `python -m benchmarks.memory --write after`. Every case runs in a fresh process, with one thread and",
        "the allocator as every user has it, after a run on a few examples that loads code. MB are 2^20 bytes. *Peak*:",
        "how far the resident memory rose while the case ran; *result*: what the result itself takes; *ratio*:",
        f"(peak - result) / budget, kept up to {ALLOWED}. A case may also be refused, before any long work.",
    ]
    for label, title in (("after", "Now"), ("before", "Before memory was counted (commit 5371a38)")):
        rows = [record[label][name] for name in CASES if name in record.get(label, {})]
        if not rows:
            continue
        lines += ["", f"## {title}: {sum(map(kept, rows))} of {len(rows)} kept", ""]
        missing = [CASES[name].title for name in CASES if name not in record[label]]
        if missing:
            lines += [f"Not measured yet ({len(missing)}): {'; '.join(missing)}.", ""]
        if label in record.get("notes", {}):
            lines += [record["notes"][label], ""]
        lines += ["| case | budget MB | result MB | peak MB | ratio | kept |", "|---|---:|---:|---:|---:|---|"]
        lines += [f"| {' | '.join([row['title'], *cells(row)])} |" for row in rows]
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("cases", nargs="*", help="names, all by default; a beginning of names will do")
    parser.add_argument("--budget", type=int, help="in MB, instead of each case's own")
    parser.add_argument("--run", metavar="CASE", help="measure one case in this process and print it as JSON")
    parser.add_argument("--write", choices=("before", "after"), help="store the rows, and write docs/results/memory.md")
    arguments = parser.parse_args()
    budget = arguments.budget and arguments.budget * MEGABYTE
    if arguments.run:
        resource.setrlimit(resource.RLIMIT_CPU, (SLOWEST, resource.RLIM_INFINITY))
        sys.stdout.write(json.dumps(measure(arguments.run, budget)) + "\n")
        return
    names = [name for name in CASES if not arguments.cases or any(map(name.startswith, arguments.cases))]
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    console = Console(width=200, markup=False, highlight=False)
    console.print(f"{'case':<26}  budget  result    peak  ratio  kept")
    for name in names:
        row = in_process(name, budget)
        console.print("{:<26}  {:>6}  {:>6}  {:>6}  {:>5}  {}".format(name, *cells(row)))
        if arguments.write:
            record.setdefault(arguments.write, {})[name] = row
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
            write(record)


if __name__ == "__main__":
    main()
