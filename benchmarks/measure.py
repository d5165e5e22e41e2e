"""Time and memory of one job: every contender in a process of its own, taking turns.

A fork server that has imported everything, and computed nothing, gives each contender a fresh process in milliseconds,
one for memory and answer and another for time. There it builds the problem and whatever the job starts from, and runs
the job on request. Only one process computes at any moment. Where memory is measured the allocator gives large blocks
back at once: the peak is what was in use together, not what the allocator had kept from before.
"""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from benchmarks import jobs, peers
from benchmarks.cases import find, problem

THREADS = 2
OURS, EPOCH = "lapis", "epoch"
CONTENDERS = (OURS, *peers.BACKENDS)

MEMORY_LIMIT = 8 * 2**30
M_MMAP_THRESHOLD, LARGE_BLOCK = -3, 128 * 2**10
"""glibc's option and its initial value, which otherwise grows with what is freed."""
BUSY = 5.0
"""How much longer than the case's `patience` a run may take on a busy machine."""
SLOW = 8.0
"""A run longer than this is not repeated: its first time counts."""
SHORTEST = 0.25
"""Runs shorter than this are timed several at once."""
PAUSE = 0.25
"""Seconds before a turn: threads of the contender before may still spin, waiting for work."""
TURN_SECONDS = 5.0
"""A contender that has been timed this long has had enough turns."""

Clock = Callable[[], float]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.measure"])


@dataclass
class Outcome:
    """What one contender did: seconds of each run, bytes that its memory grew by, its answer, or why there is none."""

    seconds: list[float] = field(default_factory=list)
    memory: int | None = None
    answer: np.ndarray | None = None
    error: str | None = None

    @property
    def time(self) -> float:
        return float(np.median(self.seconds)) if self.seconds else math.nan


class Failed(Exception):
    """A contender did not do its job; the message is for the table."""


# in the contender's process ------------------------------------------------------------------------------------------


def _status(key: str) -> int:
    """A line of /proc/self/status that counts kilobytes, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _growth(task: jobs.Task, clock: Clock) -> tuple[Any, float, int]:
    """Result, seconds, and how far the resident memory rose above where it stood."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    start = clock()
    result = task.run()
    return result, clock() - start, max(0, _status("VmHWM") - before)


def _prepare(contender: str, case: str, job: str, examples: int | None) -> jobs.Task:
    made = problem(find(case), examples)
    if contender == EPOCH:
        return jobs.Task(made.epoch, lambda _: None)
    if contender == OURS:
        return jobs.prepare(job, made)
    return peers.prepare(job, made, contender)


def _serve(connection: Connection, busy: bool, weighed: bool, *what: Any) -> None:
    if weighed:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    threads = 1 if busy else THREADS
    torch.set_num_threads(threads)
    threadpool_limits(threads)  # the other linear algebra libraries
    clock = time.process_time if busy else time.perf_counter
    warnings.simplefilter("ignore")
    try:
        task = _prepare(*what)
        connection.send(None)
        while (repeats := connection.recv()) is not None:
            if repeats == 0:
                result, seconds, memory = _growth(task, clock)
                answer = task.answer(result)
                del result
                connection.send((seconds, memory, None if answer is None else jobs.thin(answer).numpy()))
                continue
            start = clock()
            for _ in range(repeats):
                task.run()
            connection.send((clock() - start) / repeats)
    except Exception as error:
        connection.send(Failed(_message(error)))
        raise


def _message(error: Exception) -> str:
    """The first line, for the table."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MemoryError) or "can't allocate memory" in first:
        return f"needs more than {MEMORY_LIMIT // 2**30} GB of memory"
    return f"{type(error).__name__}: {first}"


# in the parent -------------------------------------------------------------------------------------------------------


class Worker:
    """A contender's process, ready to run its job."""

    def __init__(self, contender: str, case: str, job: str, examples: int | None, *, busy: bool, weighed: bool) -> None:
        self.connection, theirs = _context.Pipe()
        self.limit = find(case).patience * (BUSY if busy else 1)
        arguments = (theirs, busy, weighed, contender, case, job, examples)
        self.process = _context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self._receive("preparing")

    def _receive(self, doing: str) -> Any:
        if not self.connection.poll(self.limit):
            self.close()
            raise Failed(f"cut off after {self.limit:.0f} s of {doing}")
        try:
            answer = self.connection.recv()
        except EOFError:
            self.close()
            raise Failed(f"the process died while {doing}") from None
        if isinstance(answer, Failed):
            self.close()
            raise answer
        return answer

    def memory(self) -> tuple[float, int, np.ndarray | None]:
        self.connection.send(0)
        return self._receive("running")

    def time(self, repeats: int) -> float:
        self.connection.send(repeats)
        return self._receive("running")

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def weigh(worker: Worker, outcome: Outcome) -> None:
    """Answer and memory; the lower of two runs if they are short, because the first also loads code."""
    seconds, outcome.memory, outcome.answer = worker.memory()
    if seconds < SLOW:
        _, memory, _ = worker.memory()
        outcome.memory = min(outcome.memory, memory)
    worker.close()


def measure(
    case: str, job: str, contenders: Sequence[str], rounds: int, busy: bool, examples: int | None = None
) -> dict[str, Outcome]:
    """Every contender's outcome; those that still run take turns, each round starting with another one.

    On a busy machine the clock counts the CPU seconds of one thread, which other processes hardly change.
    """
    outcomes = {contender: Outcome() for contender in contenders}
    workers: dict[str, Worker] = {}
    for contender, outcome in outcomes.items():
        try:
            weigh(Worker(contender, case, job, examples, busy=busy, weighed=True), outcome)
            workers[contender] = Worker(contender, case, job, examples, busy=busy, weighed=False)
        except Failed as failure:
            outcome.error = str(failure)
    repeats: dict[str, int] = {}
    for turn in range(rounds):
        waiting = [name for name in workers if not outcomes[name].seconds or outcomes[name].seconds[0] < SLOW]
        for name in waiting[turn % max(1, len(waiting)) :] + waiting[: turn % max(1, len(waiting))]:
            seconds = outcomes[name].seconds
            if sum(seconds) * repeats.get(name, 1) > TURN_SECONDS:
                continue
            try:
                time.sleep(PAUSE)
                if name not in repeats:
                    first = workers[name].time(1)  # also loads code
                    if first > SLOW:
                        seconds.append(first)
                        continue
                    repeats[name] = math.ceil(SHORTEST / workers[name].time(1))
                seconds.append(workers[name].time(repeats[name]))
            except Failed as failure:
                outcomes[name].error = str(failure)
                del workers[name]
    for worker in workers.values():
        worker.close()
    return outcomes
