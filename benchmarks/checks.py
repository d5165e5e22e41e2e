"""`python -m benchmarks.checks`: what checks cost on the cases (a), (b) and (d) of `make bench`.

Each job runs in turns in one process, with checks and without: arguments (`check_arguments`), the data's fingerprint
(`example_digests`) and the network's (`Network.fingerprint`, `Network.holds`). Processor time, and the least of all
turns, so that a busy machine blurs it little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.cases import CASES, problem
from benchmarks.jobs import prepare
from lapis import batches, options
from lapis.network import Network

PAGE = Path(__file__).parent.parent / "docs" / "results" / "checks.md"
ALLOWED = 0.01
AT_LEAST = 0.05
"""Seconds of a turn: short jobs run several times in one."""
JOBS = (
    "a:kron_fit", "a:diag_fit", "a:kron_predict64", "a:kron_predict256", "b:kron_fit", "b:diag_fit",
    "b:kron_predict256", "d:dense_fit", "d:dense_predict256", "d:dense_tune",
)  # fmt: skip


class Switch:
    """Checks on and off. Functions are imported by name in many places, so their code is exchanged."""

    def __init__(self) -> None:
        self.fingerprints: dict[int, str] = {}
        self.pairs = [(options.check_arguments, _nothing), (batches.example_digests, _zeros)]
        self.codes = [(function.__code__, instead.__code__) for function, instead in self.pairs]
        self.holds, self.fingerprint = Network.holds, Network.fingerprint

    def on(self) -> None:
        for (function, _), (checked, _) in zip(self.pairs, self.codes, strict=True):
            function.__code__ = checked
        Network.holds, Network.fingerprint = self.holds, self.fingerprint  # type: ignore[method-assign]

    def off(self) -> None:
        def known(network: Network) -> str:
            key = id(network.module)
            if key not in self.fingerprints:
                self.fingerprints[key] = self.fingerprint(network)
            return self.fingerprints[key]

        for (function, _), (_, unchecked) in zip(self.pairs, self.codes, strict=True):
            function.__code__ = unchecked
        Network.holds, Network.fingerprint = lambda *_: True, known  # type: ignore[method-assign, assignment]


def _nothing(function: Any, values: Any, *, signed: Any = (), apart: Any = ()) -> None:
    return None


def _zeros(inputs: Any, targets: Tensor) -> Any:
    return np.zeros(targets.shape[0], np.uint64)


def seconds(run: Callable[[], Any], times: int) -> float:
    begun = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - begun) / times


def measure(name: str, switch: Switch, limit: float) -> dict[str, Any]:
    """The least processor seconds with checks and without, from turns within `limit` seconds."""
    case, job = name.split(":")
    run = prepare(job, problem(CASES[case])).run
    run()
    times = max(1, int(AT_LEAST / max(seconds(run, 1), 1e-4)))
    found: tuple[list[float], list[float]] = ([], [])
    begun = time.monotonic()
    while time.monotonic() - begun < limit or len(found[0]) < 5:
        for turns, turn in zip(found, (switch.on, switch.off), strict=True):
            turn()
            turns.append(seconds(run, times))
    switch.on()
    return {"checked": min(found[0]), "unchecked": min(found[1]), "turns": len(found[0])}


def page(record: dict[str, Any]) -> str:
    shares = {name: row["checked"] / row["unchecked"] - 1 for name, row in record.items()}
    kept = sum(share <= ALLOWED for share in shares.values())
    lines = [
        "# What the checks cost", "",
        "Made by `python -m benchmarks.checks --write`: processor seconds of one thread, the least of all turns, with",
        "checks of arguments and fingerprints of data and network, and without, in turns in one process. Cases, jobs",
        "as in `make bench`. Other work on the machine slows the reading of memory most.", "",
        f"At most {ALLOWED:.0%}: {kept} of {len(record)} jobs.", "",
        "| case and job | ms with checks | ms without | more | turns |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, row in record.items():
        case, job = name.split(":")
        times = f"{1e3 * row['checked']:.2f} | {1e3 * row['unchecked']:.2f}"
        lines.append(f"| ({case}) {job} | {times} | {shares[name]:+.1%} | {row['turns']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks", description=__doc__)
    parser.add_argument("jobs", nargs="*", default=JOBS, help="such as a:kron_fit; all by default")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each job")
    parser.add_argument("--write", action="store_true", help="store the rows, and write docs/results/checks.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    switch, console, store = Switch(), Console(width=160, markup=False, highlight=False), PAGE.with_suffix(".json")
    for name in chosen.jobs:
        row = measure(name, switch, chosen.limit)
        console.print(
            f"{name:<20} {row['checked']:.5f} {row['unchecked']:.5f} {row['checked'] / row['unchecked'] - 1:+.2%}"
        )
        if chosen.write:
            record: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
            record[name] = row
            record = {job: record[job] for job in JOBS if job in record}
            store.write_text(json.dumps(record, indent=1) + "\n")
            PAGE.write_text(page(record))


if __name__ == "__main__":
    main()
