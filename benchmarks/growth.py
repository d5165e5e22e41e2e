"""How our time and memory grow with the number of examples and of outputs."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from benchmarks.measure import OURS, measure

EXAMPLES = (1000, 2000, 4000, 8000, 16000, 32000)
OUTPUTS = (2, 4, 8, 16, 32, 64, 128)
IN_EXAMPLES = (("a", "kron_fit"), ("a", "diag_fit"), ("a", "kron_predict_all"), ("b", "kron_fit"))
IN_OUTPUTS = ("kron_fit", "kron_sampled")
ROUNDS = 3


def grow(console: Console, busy: bool) -> dict[str, list[dict[str, Any]]]:
    """Points of each curve: {"examples" or "outputs": [{case, job, n, seconds, memory}]}."""

    def point(case: str, job: str, n: int, examples: int | None = None) -> dict[str, Any]:
        outcome = measure(case, job, [OURS], ROUNDS, busy, examples)[OURS]
        console.print(f"growth {case} {job} {n}: {outcome.error or f'{outcome.time:.3f} s'}")
        return {"case": case, "job": job, "n": n, "seconds": outcome.time, "memory": outcome.memory}

    return {
        "examples": [point(case, job, n, n) for case, job in IN_EXAMPLES for n in EXAMPLES],
        "outputs": [point(f"outputs-{n}", job, n) for job in IN_OUTPUTS for n in OUTPUTS],
    }
