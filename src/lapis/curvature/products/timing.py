"""Which mode of multiplication is the fastest on this machine, found by timing each on a few examples.

Only where it is asked for by `mode="fastest"`: the answer, and with it the rounding of products, depends on what else
the machine is doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lapis.batches import Batch, Inputs, batch_length, take
from lapis.curvature.products.modes import MODES_BY_MEMORY

TIMED_EXAMPLES, TIMED_VECTORS, TIMED_GRAPH_BYTES = 64, 8, 16 * 2**20
"""The most examples and vectors that modes are timed on, and the most bytes that these examples' graph may hold."""

ACCEPTED_SLOWDOWN_ONE = 1.25
"""For one vector: of the modes at most this many times slower than the fastest, the one with the least memory is
chosen.
"""

ACCEPTED_SLOWDOWN_SEVERAL, ACCEPTED_SLOWDOWN_WHOLE_BATCH, ACCEPTED_SLOWDOWN_FEW_EXAMPLES = 1.1, 1.05, 1.5
"""The same for several vectors: usually; where a whole batch was timed; and where fewer than `TIMED_EXAMPLES` examples
were timed because their graph is large. Batched modes look better on few examples than they are on a whole batch, whose
tangents leave the cache.
"""

WEIGHED_GRAPH_BYTES = (4 * 2**20, 16 * 2**20)
"""For one vector, "forward" is timed only if the graph of a batch holds more than the first and at most the second of
these: below, the memory that it saves does not matter; above, "one_pass" works on parts of the batch anyway.
"""

RETIMED_MODES, RETIMED_ROUNDS, RETIMED_SECONDS = 3, 5, 0.5
"""The fastest few modes are timed again in turns, for so many rounds or until so many seconds have passed, because
other programs disturb a single measurement.
"""


def timed_examples(batch: Batch, graph_bytes: int) -> Inputs:
    """The first examples of a batch, as many as modes are timed on; `graph_bytes` is what one example's graph holds."""
    return take(batch.inputs, 0, min(TIMED_EXAMPLES, max(1, TIMED_GRAPH_BYTES // max(1, graph_bytes))))


def worth_timing(mode: str, several: bool, batch_graph_bytes: int) -> bool:
    """Whether a mode can win at all; `batch_graph_bytes` is what the graph of a whole batch holds."""
    least, most = WEIGHED_GRAPH_BYTES
    return mode != "rows" and (several or mode != "forward" or least < batch_graph_bytes <= most)


def fastest(modes: Sequence[str], product: Callable[[str], object], slowdown: float) -> str:
    """Of the modes at most `slowdown` times slower than the fastest, the one that takes the least memory.

    Args:
        modes: modes that are known to work, at least one.
        product: runs the product to be timed in the given mode.
        slowdown: at least 1.
    """

    def timed(mode: str) -> float:
        start = time.perf_counter()
        product(mode)
        return max(0.0, time.perf_counter() - start)

    by_memory = sorted(modes, key=MODES_BY_MEMORY.index)
    seconds = {mode: timed(mode) for mode in by_memory}
    again = sorted(by_memory, key=seconds.__getitem__)[:RETIMED_MODES] if len(seconds) > 1 else []
    end = time.perf_counter() + RETIMED_SECONDS
    for turn in range(RETIMED_ROUNDS):
        if turn and time.perf_counter() > end:
            break
        for mode in again:
            seconds[mode] = min(seconds[mode], timed(mode))
    limit = slowdown * min(seconds.values())
    return next(mode for mode in by_memory if seconds[mode] <= limit)


def accepted_slowdown(several: bool, inputs: Inputs, batch: Batch) -> float:
    """The factor by which a mode that takes less memory may be slower, when timed on `inputs` of the batch."""
    if not several:
        return ACCEPTED_SLOWDOWN_ONE
    timed = batch_length(inputs)
    if timed == len(batch):
        return ACCEPTED_SLOWDOWN_WHOLE_BATCH
    return ACCEPTED_SLOWDOWN_FEW_EXAMPLES if timed < TIMED_EXAMPLES else ACCEPTED_SLOWDOWN_SEVERAL
