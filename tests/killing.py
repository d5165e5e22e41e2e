"""A kit that kills: training, draws and variational inference end by SIGKILL at random moments, and go on as if never cut.

Each work runs in a process that writes its checkpoint as often as it can, and is killed after a random time, up to as
long as the whole work takes; then it runs again, perhaps to be killed again, until it ends. Its result must be that of a
process that was left alone, bit by bit.

`python tests/killing.py 20` (`make kills N=20`) kills each work so many times.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapis
from lapis import checkpoint

F64 = torch.float64


def problem(features: int = 6) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, 20), nn.Tanh(), nn.Dropout(0.1), nn.Linear(20, 1)).double()
    x = torch.randn(120, features, dtype=F64)
    return model, x, x[:, :1].sin()


def train(path: Path) -> list[Tensor]:
    model, x, y = problem()
    options: dict[str, Any] = {"epochs": 30, "burn_in": 5, "every": 5, "batch_size": 16, "structure": "diagonal"}
    found = lapis.train(model, (x, y), "regression", checkpoint=path, progress=False, **options)
    return [found.mean, found.weight_prior.precision, found.log_evidence()]


def draw(path: Path, **options: Any) -> list[Tensor]:
    model, x, y = problem()
    posterior = lapis.laplace(model, (x, y), lapis.Gaussian(0.05), structure="implicit", prior=0.01)
    drawn = posterior.with_solver(space="weights").draw(6, checkpoint=path, progress=False, **options)  # type: ignore[union-attr]
    return [drawn.deviations, torch.tensor(drawn.drawing.residuals)]


def draw_by_sgd(path: Path) -> list[Tensor]:
    return draw(path, solver="sgd", epochs=60, batch_size=16)


def variational(path: Path) -> list[Tensor]:
    model, x, y = problem()
    found = lapis.variational(model, (x, y), "regression", steps=600, checkpoint=path, progress=False)
    return [found.mean, found.marginal_variance()]


WORKS: dict[str, Callable[[Path], list[Tensor]]] = {
    "train": train, "draw": draw, "draw_by_sgd": draw_by_sgd, "variational": variational
}  # fmt: skip


def work(name: str, path: str, out: str) -> None:
    """What the process does that is killed: all of it, with a line when it begins."""
    torch.set_num_threads(1)
    checkpoint.SAVE_SECONDS = 0.0
    warnings.simplefilter("ignore")
    print("begun", flush=True)
    torch.save(WORKS[name](Path(path)), out)


def kill_and_compare(name: str, kills: int, folder: Path, source: random.Random) -> tuple[int, int]:
    """Runs that ended with the same result after at least one kill, and kills that came before the work had ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--work", name]

    def start(path: Path, out: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen([*command, str(path), str(out)], stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        return process

    began = time.monotonic()
    alone = start(folder / f"{name}.alone", folder / "alone.pt")
    began = time.monotonic()
    assert alone.wait() == 0
    taken = time.monotonic() - began
    expected = torch.load(folder / "alone.pt")
    done, equal, number = 0, 0, 0
    while done < kills:
        path, out, cut = folder / f"{name}.{number}", folder / f"{number}.pt", 0
        number += 1
        while not out.exists():
            process = start(path, out)
            if done < kills and cut < 3:
                time.sleep(source.uniform(0.0, taken))
                process.send_signal(signal.SIGKILL)
            killed = process.wait() == -signal.SIGKILL
            done, cut = done + killed, cut + 1 if killed else cut
        found = torch.load(out)
        assert len(found) == len(expected)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True)), (name, number)
        equal += cut > 0
        assert not list(folder.glob("*.partial")) or cut
    return equal, done


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(*sys.argv[2:])
    else:
        seeded = random.Random(0)
        for each in WORKS:
            with tempfile.TemporaryDirectory() as place:
                same, count = kill_and_compare(each, int(sys.argv[1]), Path(place), seeded)
                print(f"{each}: {count} kills, {same} runs that went on, all equal bit by bit", flush=True)
