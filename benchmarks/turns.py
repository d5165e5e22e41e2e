"""Contenders side by side on a busy machine: each has a process of its own on one thread, and they take turns.

Times are the processor's, and the lower quartile of all turns counts. Memory is the peak above where a process stood
before it got ready.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from benchmarks.memory import peak_of

Step = Callable[[], Any]


def _contend(ready: Callable[[], Step], pipe: Connection) -> None:
    """A contender's process: sends its memory, then the seconds of a step whenever it is asked."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    threadpool_limits(1)
    torch.manual_seed(0)
    step, memory = peak_of(ready)
    pipe.send(memory)
    while pipe.recv():
        started = time.process_time()
        step()
        pipe.send(time.process_time() - started)


def measure(contenders: Mapping[str, Callable[[], Step]], turns: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step and megabytes, by contender.

    Args:
        contenders: by name, a function (found by import: it goes to another process) that makes a step, and runs it
            often enough to be warm.
    """
    context = multiprocessing.get_context("spawn")
    pipes, workers, memory = {}, [], {}
    for name, ready in contenders.items():
        pipes[name], theirs = context.Pipe()
        workers.append(context.Process(target=_contend, args=(ready, theirs), daemon=True))
        workers[-1].start()
        memory[name] = pipes[name].recv()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name in contenders:
            pipes[name].send(True)
            seconds[name].append(pipes[name].recv())
    for name, worker in zip(contenders, workers, strict=True):
        pipes[name].send(False)
        worker.join()
    return {
        name: {"milliseconds": 1e3 * sorted(seconds[name])[turns // 4], "megabytes": memory[name] / 2**20}
        for name in contenders
    }
