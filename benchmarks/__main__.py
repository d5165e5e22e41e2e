"""`python -m benchmarks`: measure, store in results.json, write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks import report
from benchmarks.cases import CASES, find, problem
from benchmarks.growth import grow
from benchmarks.jobs import split, title
from benchmarks.limits import flops, matrix_product_rate
from benchmarks.measure import CONTENDERS, EPOCH, OURS, THREADS, Outcome, measure
from benchmarks.targets import Row

PACKAGES = ("torch", "laplace-torch", "curvlinops-for-pytorch", "backpack-for-pytorch", "asdfghjkl")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def machine(busy: bool) -> dict[str, Any]:
    threads = 1 if busy else THREADS
    torch.set_num_threads(threads)
    return {
        "processor": processor(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "rate": matrix_product_rate(time.process_time if busy else time.perf_counter),
    }


def deviation(answer: np.ndarray | None, ours: np.ndarray | None) -> float | None:
    """Largest relative difference; entries far below the largest are measured against a thousandth of it."""
    if answer is None or ours is None:
        return None
    if answer.shape != ours.shape:
        return float("inf")
    return float(np.max(np.abs(answer - ours) / (np.abs(ours) + 1e-3 * np.abs(ours).max())))


def as_row(case: str, job: str, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    tuning = split(job)[1] == "tune"
    ours = outcomes[OURS].answer
    results = {
        name: {
            "seconds": outcome.seconds,
            "memory": outcome.memory,
            "error": outcome.error,
            "deviation": None if name == OURS else deviation(outcome.answer, ours),
            "value": float(outcome.answer[0]) if tuning and outcome.answer is not None else None,
        }
        for name, outcome in outcomes.items()
    }
    return {"case": case, "job": job, "flops": flops(job, problem(find(case))), "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="letters, comma separated")
    parser.add_argument("--jobs", help="names such as kron_fit, comma separated; all by default")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every contender")
    parser.add_argument("--growth", action="store_true", help="growth alone (part of a run of everything)")
    parser.add_argument("--quick", action="store_true", help="two rounds, no growth, nothing written")
    parser.add_argument("--busy", action="store_true", help="CPU seconds of one thread, nothing written")
    arguments = parser.parse_args()
    console = Console(width=200, markup=False, highlight=False)
    everything = arguments.jobs is None and arguments.cases == ",".join(CASES)
    results = report.load()
    results["machine"] = machine(arguments.busy)
    rate = results["machine"]["rate"]
    console.print(f"matrix-product rate {rate / 1e9:.0f} x 10^9 operations a second")
    stored = {(row["case"], row["job"]): row for row in results["rows"]}

    def keep() -> None:
        if arguments.quick or arguments.busy:
            return
        results["rows"] = [stored[case, job] for case in CASES for job in CASES[case].jobs if (case, job) in stored]
        report.store(results)

    for case in [] if arguments.growth else arguments.cases.split(","):
        unfit: dict[tuple[str, str], str] = {}
        for job in CASES[case].jobs:
            if arguments.jobs and job not in arguments.jobs.split(","):
                continue
            structure, action = split(job)
            able = [name for name in CONTENDERS if (name, structure) not in unfit]
            outcomes = measure(case, job, (EPOCH, *able), 2 if arguments.quick else arguments.rounds, arguments.busy)
            outcomes |= {
                name: Outcome(error=unfit[name, structure]) for name in CONTENDERS if (name, structure) in unfit
            }
            if action == "fit":
                unfit |= {(name, structure): outcome.error for name, outcome in outcomes.items() if outcome.error}
            stored[case, job] = as_row(case, job, outcomes)
            keep()
            console.print(" | ".join(report.cells(Row.load(stored[case, job], rate))))
            for name, outcome in outcomes.items():
                if outcome.error:
                    console.print(f"    {title(job)}, {name}: {outcome.error}")
    if arguments.quick or arguments.busy:
        return
    if everything or arguments.growth:
        results["growth"] = grow(console, arguments.busy)
    keep()
    report.write(results)
    console.print(f"written: {report.RESULTS}, {report.PAGE}")


if __name__ == "__main__":
    main()
