"""A subnetwork of a ResNet-18, in float32: 8,000 of 11.2 million weights, and the published 42,438.

The network is trained on CIFAR-10 images (64, as the sizes are what this is about); four epochs more are SWAG's, whose
variances choose the weights. Fitted to 64 images; then the log evidence, predictions for 16 other images, and two
draws; one of the first two factorises the precision. Each size has a process of its own; memory is that of this whole
process at its peak (resource.getrusage), seconds are of the processor. The residual is |A z - b| / |b| of a solve.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from common import ROOT, table
from costs import apart, forget_peak, resident
from methods import command
from methods.rows import Row, read
from torch import Tensor, nn

import lapis
from lapis.curvature.blocks.partition import dense_bytes

sys.path.insert(0, str(ROOT))
from benchmarks.cases import resnet

SETTINGS = {"resnet18": (64, 128, 256, 512)}
QUICK = {"small": (4, 8, 8, 16)}
COLUMNS, QUICK_COLUMNS = ("8,000", "42,438"), ("200", "400")
TRAINED, FITTED, TESTED, EPOCHS, BATCH = 64, 64, 16, 4, 16


@dataclass
class Problem:
    model: nn.Module
    collector: lapis.SWAG
    x: Tensor
    y: Tensor
    x_test: Tensor


def load(name: str, seed: int) -> Problem:
    """The network after training, and what SWAG collected in epochs after that."""
    x, y = lapis.data.images("cifar10_small", "train") if name in SETTINGS else _noise()
    x, y = x[: TRAINED + TESTED], y[: TRAINED + TESTED]
    x = (x - x.mean()) / x.std()
    torch.manual_seed(seed)
    model = resnet((SETTINGS | QUICK)[name], blocks=2)
    collector = lapis.SWAG(model, rank=0)
    optimiser = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    for epoch in range(2 * EPOCHS):
        for start in range(0, TRAINED, BATCH):
            optimiser.zero_grad()
            part = slice(start, start + BATCH)
            nn.functional.cross_entropy(model.train()(x[part]), y[part]).backward()
            optimiser.step()
        if epoch >= EPOCHS:
            collector.collect()
    optimiser.zero_grad()
    return Problem(model.eval(), collector, x[:FITTED], y[:FITTED], x[TRAINED:])


def _noise() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    count = TRAINED + TESTED
    return torch.rand(count, 3, 16, 16, generator=source), torch.randint(10, (count,), generator=source)


def fitted(problem: Problem, count: int) -> Row:
    """Seconds and bytes of each step."""
    chosen, told = lapis.Subnetwork(count, from_=problem.collector), dense_bytes(count)
    fit = partial(lapis.laplace, problem.model, likelihood="classification", weights=chosen, prior=10.0, batch_size=8)
    found: Row = {"told": told, "before": forget_peak() * 2**20, "refused": False}
    try:
        fit(data=iter(()), memory_budget=told - 1)
    except lapis.MemoryBudgetError:
        found["refused"] = True

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        done = work()
        found[name], found[f"{name}_peak"] = time.process_time() - started, resident("VmHWM") * 2**20
        return done

    posterior = timed("fit", lambda: fit(data=(problem.x, problem.y), memory_budget=max(told, 2**32)))
    found["log_evidence"] = float(timed("evidence", posterior.log_evidence))
    prediction = timed("predict", lambda: posterior.predict(problem.x_test, progress=False))
    found["doubt"] = float(prediction.mutual_information.mean())
    draws = timed("sample", lambda: posterior.sample(2)) - posterior.mean
    back = posterior.gaussians[0].multiply(posterior.solve(draws).double())
    found["residual"] = float((back - draws).norm() / draws.norm())
    found["peak"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


def work(problem: Problem, count: int, answer: Connection) -> None:
    """In a process of its own: what was found, or the reason why not."""
    warnings.simplefilter("ignore", lapis.LapisWarning)
    try:
        answer.send(fitted(problem, count))
    except Exception as reason:  # noqa: BLE001 - the other process raises it
        answer.send(reason)


def measure(problem: Problem, column: str) -> Row:
    return apart(work, problem, int(column.replace(",", "")))


def report(chosen: argparse.Namespace) -> None:
    rows = {row["column"]: row for row in read(chosen.rows) if "error" not in row}
    steps = ("fit", "evidence", "predict", "sample")
    lines = [
        [
            column, f"{row['told'] / 1e9:.2f}", "yes" if row["refused"] else "no",
            *(f"{row[step]:.1f}" for step in steps), f"{row['peak'] / 1e9:.2f}", f"{row['residual']:.0e}",
        ]
        for column, row in rows.items()
    ]  # fmt: skip
    head = [
        "weights", "GB told beforehand", "refused with less", "fit, s", "log evidence, s", "predict 16 images, s",
        "2 draws, s", "process at its peak, GB", "residual",
    ]  # fmt: skip
    text = "# A large subnetwork\n\n" + " ".join((__doc__ or "").split())
    command.write_report(chosen, f"{text}\n\n{table(head, lines)}")


def main() -> None:
    chosen = command.arguments("large_subnetwork", __doc__, (SETTINGS, QUICK), (COLUMNS, QUICK_COLUMNS), seeds=1)
    if not chosen.report:
        command.fill(chosen, load, measure, ("fit", "evidence", "predict", "peak"))
    report(chosen)


if __name__ == "__main__":
    main()
