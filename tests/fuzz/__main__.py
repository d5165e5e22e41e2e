"""`python -m fuzz`: many calls in two processes, a table of what was called, and every finding with its seed."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from fuzz.watch import PROCESSES, Outcome, sequence, share


def table(outcomes: Sequence[Outcome]) -> str:
    """Calls by what was called: how many, returned, refused, and findings."""
    rows: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        short = outcome.target.removeprefix("lapis.") if outcome.target.startswith("lapis.") else outcome.target
        row = rows.setdefault(
            "." + short.split(".")[-1] if short.startswith(("<", "...")) or "()" in short else short, Counter()
        )
        row["calls"] += 1
        row["returned" if outcome.result == "returned" else "refused"] += 1
        row["findings"] += bool(outcome.finding)
    rows = dict(sorted(rows.items()))
    rows["total"] = sum(rows.values(), Counter())
    head = ("calls", "returned", "refused", "findings")
    width = max(map(len, rows))
    lines = [f"{'':{width}}" + "".join(f"{name:>10}" for name in head)]
    lines += [f"{name:{width}}" + "".join(f"{row[column]:>10,}" for column in head) for name, row in rows.items()]
    return "\n".join(lines)


def report(outcomes: Sequence[Outcome], seed: int) -> None:
    print(table(outcomes))
    valid = sum(outcome.valid for outcome in outcomes)
    networks = len({outcome.world for outcome in outcomes})
    print(f"\n{valid:,} calls with right arguments only; {networks} networks (case and dtype); seed {seed}")
    findings = [outcome for outcome in outcomes if outcome.finding]
    for outcome in findings:
        print("\n" + outcome.told(seed))
    print(f"\n{len(findings)} findings in {len(outcomes):,} calls")


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this one sequence, and show its calls and tracebacks")
    chosen = parser.parse_args()
    if chosen.only is not None:
        outcomes = sequence(chosen.seed, chosen.only)
        for outcome in outcomes:
            print(outcome.call, "->", outcome.result, outcome.finding, outcome.detail, sep="\n  ")
        return int(any(outcome.finding for outcome in outcomes))
    each = -(-chosen.calls // PROCESSES)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        shares = [pool.submit(share, chosen.seed, first, each) for first in range(PROCESSES)]
        try:
            outcomes = [outcome for part in shares for outcome in part.result()]
        except BrokenProcessPool:
            print(f"A process ended in the middle (out of memory, or a crash); seed {chosen.seed}", file=sys.stderr)
            return 1
    report(outcomes, chosen.seed)
    return int(any(outcome.finding for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
