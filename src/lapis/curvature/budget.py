"""How much of a memory budget the arrays that are counted may take."""

from __future__ import annotations

WORK_BYTES = 64 * 2**20
"""Target for the arrays of one part of a pass: more at once is no faster."""

SHARE = 4
"""They take at most the budget's fourth part. Temporaries of torch, gaps that the allocator leaves between blocks, and
the first proof of a shortcut come on top, and together take up to three times as much.
"""


def work_bytes(memory_budget: int) -> int:
    """Bytes of arrays to work on at once, so that the peak of the process stays within the budget."""
    return max(1, min(WORK_BYTES, memory_budget // SHARE))
