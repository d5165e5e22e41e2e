"""A kit that runs work in several processes of torch.distributed (gloo), forked: importing torch takes longer.

`found = run(work, size, folder)` gives what `work(rank)` returned on each rank. A rank that fails, or is killed, is in
`found` as the exception's text, or as None.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed


def run(work: Callable[[int], Any], size: int, folder: Path, timeout: float = 60.0) -> list[Any]:
    """The results of all ranks, in order; of things that `torch.save` can write."""
    folder.mkdir(parents=True, exist_ok=True)
    processes = [_start(work, rank, size, folder, timeout) for rank in range(size)]
    for process in processes:
        os.waitpid(process, 0)
    found = []
    for rank in range(size):
        out = folder / f"{rank}.pt"
        found.append(torch.load(out, weights_only=False) if out.exists() else None)
    return found


def _start(work: Callable[[int], Any], rank: int, size: int, folder: Path, timeout: float) -> int:
    process = os.fork()
    if process == 0:
        try:
            torch.set_num_threads(1)
            distributed.init_process_group(
                "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size,
                timeout=timedelta(seconds=timeout),
            )  # fmt: skip
            try:
                result = work(rank)
            except BaseException as error:  # noqa: BLE001  (what a rank ends with is its result)
                result = f"{type(error).__name__}: {error}"
            torch.save(result, folder / f"{rank}.new")
            (folder / f"{rank}.new").rename(folder / f"{rank}.pt")
        finally:
            os._exit(0)
    return process
