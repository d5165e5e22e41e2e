"""What the methods cost: time and memory of fit and prediction, in multiples of one training epoch.

A convolutional network with 28,874 weights and 2,000 training images of Fashion-MNIST; predictions are of 500 images.
Training: epochs that the method's networks take to train; fit: what comes after it. Time is that of the processor, on
one thread. Memory is the peak above that at the start of the fit (or prediction), each method in a process of its own.
The last lines are fits of subnetworks of growing size, chosen by magnitude, without tuning.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

from common import table
from methods import command
from methods.fits import CLASSIFIERS, Method
from methods.images import Images, convolutional, small_digits, stored
from methods.rows import Row, read
from methods.tables import failures
from methods.task import Task
from torch import Tensor, nn
from trust.networks import Training, train

import lapis

EPOCHS = 15
SIZES, SMALL_SIZES = (1000, 2000, 4000, 8000), (100, 200)


def _subnetwork(count: int) -> Method:
    def fit(task: Task) -> lapis.Posterior:
        chosen = lapis.Subnetwork(count, by="magnitude")
        return lapis.laplace(task.network(), task.train, task.likelihood, weights=chosen)

    return Method(fit)


SEVERAL = ("ensemble", "mixture")
"""Methods that train all members; the others train one network."""
SUBNETWORKS = {f"subnetwork of {count:,}": _subnetwork(count) for count in (*SMALL_SIZES, *SIZES)}
METHODS = CLASSIFIERS | SUBNETWORKS
COLUMNS = (*CLASSIFIERS, *(f"subnetwork of {count:,}" for count in SIZES))
QUICK_COLUMNS = ("plain", "last layer", "ensemble", *(f"subnetwork of {count:,}" for count in SMALL_SIZES))


@dataclass(frozen=True)
class Setting:
    images: Callable[[int], Images]
    make: Callable[[float], nn.Module]
    training: Training
    variational_steps: int


SETTINGS = {
    "fashion": Setting(
        lambda seed: stored("fashion_mnist", "mnist", seed, 2000, 500),
        lambda dropout: convolutional((1, 28), (8, 16), 32, 10, 5, dropout),
        Training(EPOCHS),
        1000,
    )
}
QUICK = {
    "digits": Setting(
        small_digits, lambda dropout: convolutional((1, 8), (4, 8), 16, 8, 3, dropout), Training(3, batch=32), 50
    )
}


@dataclass
class Problem:
    task: Task
    inputs: Tensor
    epoch: float
    """Seconds of one epoch of training."""


def load(name: str, seed: int, cache: Path) -> Problem:
    setting = (SETTINGS | QUICK)[name]
    images = setting.images(seed)
    parts = (images.standardised(part) for part in (images.train, images.validation))
    task = Task(
        name, seed, *parts, "classification", setting.make, setting.training, cache,
        variational_steps=setting.variational_steps, subnetwork=100 if name == "digits" else 1000,
    )  # fmt: skip
    for number in range(task.members):
        task.network(number)
    task.network(dropout=task.dropout)
    family, once = lapis.likelihoods.resolve(task.likelihood), Training(1, batch=setting.training.batch)
    started = time.process_time()
    for _ in range(3):
        train(setting.make(0.0), *task.train, family, once, seed)
    return Problem(task, images.standard(images.test[0]), (time.process_time() - started) / 3)


def resident(what: str) -> float:
    """Megabytes of memory now ("VmRSS"), or at the peak ("VmHWM")."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def forget_peak() -> float:
    """Give freed memory back, and let the peak start from what is left, which is returned."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident("VmRSS")


def work(problem: Problem, column: str, answer: Connection) -> None:
    """In a process of its own: fit, predict, and send what both took, or the reason why not."""
    warnings.simplefilter("ignore", lapis.LapisWarning)
    try:
        task, method = problem.task, METHODS[column]
        base, started = forget_peak(), time.process_time()
        posterior = method.posterior(task)
        fitted, fit_peak = time.process_time() - started, resident("VmHWM") - base
        base, started = forget_peak(), time.process_time()
        _ = posterior.predict(problem.inputs, **method.options, progress=False).probs
        predicted, predict_peak = time.process_time() - started, resident("VmHWM") - base
        answer.send(
            {
                "training": task.training.epochs * (task.members if column in SEVERAL else 1),
                "fit": fitted / problem.epoch,
                "fit_memory": fit_peak,
                "predict": predicted / problem.epoch,
                "predict_memory": predict_peak,
                "epoch_seconds": problem.epoch,
            }
        )
    except Exception as reason:  # noqa: BLE001 - the other process raises it
        answer.send(reason)


def measure(problem: Problem, column: str) -> Row:
    return apart(work, problem, column)


def apart(job: Callable[..., None], *given: object) -> Row:
    """What `job` sends from a process of its own, its last argument the connection; an exception is raised here."""
    context = multiprocessing.get_context("fork")  # the trained network is there already; one thread survives a fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=job, args=(*given, sender))
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    finally:
        process.join()
    if isinstance(found, Exception):
        raise found
    return dict(found)


def report(chosen: argparse.Namespace) -> None:
    rows = {row["column"]: row for row in read(chosen.rows)}
    good = {column: rows[column] for column in METHODS if column in rows and "error" not in rows[column]}
    if not good:
        return
    lines = [
        [
            column, row["training"], f"{row['fit']:.2f}", f"{row['predict']:.2f}",
            f"{row['fit_memory']:,.0f}", f"{row['predict_memory']:,.0f}",
        ]
        for column, row in good.items()
    ]  # fmt: skip
    head = ["method", "training, epochs", "fit, epochs", "predict, epochs", "fit, MB", "predict, MB"]
    seconds = next(iter(good.values()))["epoch_seconds"]
    opening = "# Costs\n\n" + " ".join((__doc__ or "").split())
    note = f"An epoch took {seconds:.2f} s."
    text = "\n\n".join([opening, note, table(head, lines)])
    sizes = [column for column in SUBNETWORKS if column in good]
    growth = [
        f"{before.removeprefix('subnetwork of ')} to {after.removeprefix('subnetwork of ')}: time "
        f"x {good[after]['fit'] / max(good[before]['fit'], 1e-9):.1f}, memory "
        f"x {good[after]['fit_memory'] / max(good[before]['fit_memory'], 1e-9):.1f}"
        for before, after in pairwise(sizes)
    ]
    if growth:
        text += (
            "\n\nDoubling the subnetwork ("
            + "; ".join(growth)
            + "): a dense precision of n weights has n^2 entries (8,000 in float64: 512 MB), and n^2 operations an "
            "example and output to add up."
        )
    command.write_report(chosen, text + failures(list(rows.values())))


def main() -> None:
    chosen = command.arguments("costs", __doc__, (SETTINGS, QUICK), (COLUMNS, QUICK_COLUMNS), seeds=1)
    if not chosen.report:
        command.fill(
            chosen,
            lambda name, seed: load(name, seed, chosen.cache),
            measure,
            ("training", "fit", "predict", "fit_memory"),
        )
    report(chosen)


if __name__ == "__main__":
    main()
