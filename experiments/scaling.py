"""Fits divided among 1, 2 and 4 local processes (gloo): the same data for all, and data that grow with the processes.

A perceptron (784-256-10, 203,530 weights), random images. Kronecker and EKFAC fits share out their eigendecompositions.
Seconds of the processor are those of the busiest rank, communication included: what a rank would take on a machine of
its own. Seconds on the clock are of this machine, with as many cores as it says, beside other work. Bytes are those of
the sums that each rank gives to the all-reduce (a ring sends them about twice).
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from typing import Any

import torch
import torch.distributed as distributed
from common import COLOURS, arguments, report, save, table
from matplotlib import pyplot as plt
from torch import nn

import lapis

PROCESSES = (1, 2, 4)
STRUCTURES = ("diagonal", "kronecker", "ekfac")


class Sent(logging.Handler):
    """Bytes that the log tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        if "bytes summed" in str(record.msg) and isinstance(record.args, tuple):
            self.bytes += int(str(record.args[0]).replace(",", ""))


def run(rank: int, size: int, folder: str, examples: dict[str, int]) -> None:
    """One rank: every structure, for each number of examples."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    sent = Sent()
    logging.getLogger("lapis").addHandler(sent)
    logging.getLogger("lapis").setLevel(logging.INFO)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    found: dict[Any, Any] = {}
    for what, n in examples.items():
        data = torch.randn(n, 784), torch.randint(10, (n,))
        for structure in STRUCTURES:
            distributed.barrier()
            sent.bytes, clock, processor = 0, time.perf_counter(), time.process_time()
            fit = lapis.laplace(model, data, "classification", structure=structure, weights="all", distributed=True)
            evidence = float(fit.log_evidence())
            found[what, structure] = (
                time.process_time() - processor,
                time.perf_counter() - clock,
                sent.bytes,
                evidence,
            )
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def measured(size: int, examples: dict[str, int]) -> list[dict[Any, Any]]:
    """What each rank found."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (size, folder, examples), nprocs=size)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


def picture(times: dict[tuple[str, str, int], float], share: int, chosen: argparse.Namespace) -> None:
    """Seconds against processes, beside the ideal."""
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True)
    for axis, what in zip(axes, ("strong", "weak"), strict=True):
        for colour, structure in zip(COLOURS, STRUCTURES, strict=False):
            values = [times[what, structure, size] for size in PROCESSES]
            axis.plot(PROCESSES, values, marker="o", color=colour)
            ideal = [values[0] / (size if what == "strong" else 1) for size in PROCESSES]
            axis.plot(PROCESSES, ideal, linestyle=":", color=colour)
            if what == "weak":
                axis.annotate(structure, (4, values[-1]), (8, -3), textcoords="offset points", color=colour)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(PROCESSES, [str(size) for size in PROCESSES])
        axis.set_yticks([0.2, 0.5, 1, 2, 4], ["0.2", "0.5", "1", "2", "4"])
        axis.minorticks_off()
        axis.set_xlabel("processes (dotted: ideal)")
        axis.set_title(f"{4 * share:,} examples" if what == "strong" else f"{share:,} examples a process", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("seconds of the busiest rank")
    save(figure, "scaling", chosen)


def main(chosen: argparse.Namespace) -> None:
    share = 250 if chosen.quick else 4000
    rows, times = [], {}
    for size in PROCESSES:
        ranks = measured(size, {"warm": share // 10, "strong": 4 * share, "weak": size * share})
        for what in ("strong", "weak"):
            for structure in STRUCTURES:
                found = [rank[what, structure] for rank in ranks]
                assert len({each[3] for each in found}) == 1, "one answer on every rank"
                busiest, clock = max(each[0] for each in found), max(each[1] for each in found)
                times[what, structure, size] = busiest
                n = 4 * share if what == "strong" else size * share
                ideal = times[what, structure, 1] / (size if what == "strong" else 1)
                rows.append([what, structure, size, f"{n:,}", f"{busiest:.2f}", f"{ideal / busiest:.2f}",
                             f"{clock:.2f}", f"{found[0][2] / 1e6:.2f}", f"{found[0][3]:.3f}"])  # fmt: skip
    head = ("scaling", "structure", "processes", "examples", "s of the busiest rank", "efficiency", "s on the clock",
            "MB summed", "log evidence")  # fmt: skip
    rows.sort(key=lambda row: (row[0], row[1], row[2]))
    picture(times, share, chosen)
    report("scaling", f"{os.cpu_count()} cores.\n\n" + table(head, rows), chosen)


if __name__ == "__main__":
    main(arguments(__doc__))
