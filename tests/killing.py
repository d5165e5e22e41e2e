"""A kit that kills: long works of every kind end by SIGKILL at random moments, and go on.

Each work runs in a process that writes its checkpoint as often as it can, and is killed after a random time, up to as
long as the whole work takes. Then it runs again, perhaps to be killed again, until it ends. Its result must be that of
a process that was left alone, bit by bit.

`python tests/killing.py 20` (`make kills N=20`) kills each work so many times; names of works may follow. Processes are
forked: importing torch takes longer than the work.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapis
from lapis import checkpoint

F64 = torch.float64


def problem(features: int = 6) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).double()
    x = torch.randn(120, features, dtype=F64)
    return model, x, x[:, :1].sin()


def train(path: Path) -> list[Tensor]:
    model, x, y = problem()
    options: dict[str, Any] = {"epochs": 8, "burn_in": 2, "every": 2, "batch_size": 20, "structure": "diagonal"}
    found = lapis.train(model, (x, y), "regression", checkpoint=path, progress=False, **options)
    return [found.mean, found.weight_prior.precision, found.log_evidence()]


def draw(path: Path, **options: Any) -> list[Tensor]:
    model, x, y = problem()
    posterior = lapis.laplace(model, (x, y), lapis.Gaussian(0.05), structure="implicit", prior=0.01)
    drawn = posterior.with_solver(space="weights").draw(6, checkpoint=path, progress=False, **options)  # type: ignore[union-attr]
    return [drawn.deviations, torch.tensor(drawn.drawing.residuals)]


def draw_by_sgd(path: Path) -> list[Tensor]:
    return draw(path, solver="sgd", epochs=20, batch_size=20)


def variational(path: Path) -> list[Tensor]:
    model, x, y = problem()
    found = lapis.variational(model, (x, y), "regression", steps=200, checkpoint=path, progress=False)
    return [found.mean, found.marginal_variance()]


def laplace(path: Path) -> list[Tensor]:
    """Two passes, in single precision, where sums are buffered; in the other order, drawn targets."""
    model, x, y = problem()
    found = lapis.laplace(
        model.float(), (x.float(), y.float()), "regression", structure="ekfac", weights="all", batch_size=2,
        checkpoint=path, progress=False,
    )  # fmt: skip
    drawn = lapis.laplace(
        model, (x.float(), y.float()), "regression", structure="dense", curvature="sampled", weights="all",
        batch_size=2, checkpoint=path.with_suffix(".drawn"), progress=False,
    )  # fmt: skip
    return [found.log_evidence(), found.marginal_variance(), drawn.log_evidence(), drawn.marginal_variance()]


def classifier() -> tuple[Any, Tensor, Tensor]:
    model, x, y = problem()
    return lapis.laplace(model, (x, (y > 0).double()), "binary", structure="dense", weights="all"), x, (y > 0).double()


def refine(path: Path) -> list[Tensor]:
    posterior, x, y = classifier()
    found = posterior.refine(
        (x, y), max_rounds=4, tune=True, tolerance=1e-9, batch_size=60, checkpoint=path, progress=False
    )
    return [found.mean, found.elbo(), found.marginal_variance(), found.weight_prior.precision]


def calibrate(path: Path) -> list[Tensor]:
    posterior, x, y = classifier()
    found = posterior.calibrate((x.flip(1), y), batch_size=30, checkpoint=path, progress=False)
    solver = {"space": "weights", "tolerance": 1e-3}
    implicit: Any = lapis.laplace(posterior.network.module, (x, y), "binary", structure="implicit").with_solver(
        **solver
    )
    other = implicit.calibrate((x.flip(1)[:3], y[:3]), checkpoint=path.with_suffix(".implicit"), progress=False)
    return [found.weight_prior.precision, torch.tensor(found.sharpness), other.weight_prior.precision]


def ensemble(path: Path) -> list[Tensor]:
    _, x, y = problem()
    options: Any = {"size": 4, "epochs": 10, "checkpoint": path, "progress": False}
    return [lapis.ensemble(lambda: problem()[0], (x, y), "regression", **options).predict(x).variance]


def optimise(path: Path) -> list[Tensor]:
    """Every optimiser with a schedule, in a loop that keeps their states after each step, as a user's would."""
    kept: dict[str, Any] = torch.load(path, weights_only=True) if path.exists() else {"found": [], "states": []}
    for name in ("IVON", "VOGN", "VON", "BayesBiNN")[len(kept["found"]) :]:
        model, x, y = problem()
        kind: Any = getattr(lapis.optim, name)
        optimiser = kind(model if name == "VOGN" else model.parameters(), lr=0.01, data_size=len(x))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 40)
        parts: tuple[Any, ...] = (model, optimiser, schedule)
        for part, state in zip(parts, kept["states"], strict=False):
            part.load_state_dict(state)
        while schedule.last_epoch < 40:
            number = schedule.last_epoch
            torch.manual_seed(number)  # dropout
            batch = torch.arange(20) + 20 * (number % 6)
            optimiser.zero_grad()
            with optimiser.sampled():
                ((model(x[batch]) - y[batch]).square().mean() / 2).backward()
            optimiser.step()
            schedule.step()
            kept["states"] = [part.state_dict() for part in parts]
            torch.save(kept, path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)
        ends = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        kept = {"found": [*kept["found"], [ends, optimiser.posterior(model, "regression").sample(2)]], "states": []}
    return [tensor for pair in kept["found"] for tensor in pair]


WORKS: dict[str, Callable[[Path], list[Tensor]]] = {
    "train": train, "draw": draw, "draw_by_sgd": draw_by_sgd, "variational": variational, "laplace": laplace,
    "refine": refine, "calibrate": calibrate, "ensemble": ensemble, "optimise": optimise,
}  # fmt: skip


def start(name: str, path: Path, out: Path) -> int:
    """A process that does the work, writing its checkpoint as often as it can; the result goes to `out`."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            checkpoint.SAVE_SECONDS = 0.0
            torch.save(WORKS[name](path), out.with_suffix(".new"))
            out.with_suffix(".new").rename(out)
            status = 0
        finally:
            os._exit(status)
    return process


def ended(process: int) -> bool:
    """Wait for the process; whether it was killed. It must not have failed."""
    status = os.waitpid(process, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@dataclass
class Tally:
    """Runs that were killed and ended with the same result; kills; and kills that left a checkpoint to go on from."""

    runs: int = 0
    kills: int = 0
    midway: int = 0


def kill_and_compare(name: str, kills: int, folder: Path, source: random.Random) -> Tally:
    """Kill the work so many times, at most three times a run; a run that ends before its first kill does not count."""
    WORKS[name](folder / "first")  # what is loaded on first use is there before processes are forked
    began = time.monotonic()
    ended(start(name, folder / "alone", folder / "alone.pt"))
    taken = time.monotonic() - began
    expected = torch.load(folder / "alone.pt")
    tally = Tally()
    for attempt in range(20 * kills):
        path, out, cut = folder / f"{attempt}.lapis", folder / f"{attempt}.pt", 0
        while not out.exists():
            process = start(name, path, out)
            if tally.kills < kills and cut < 3:
                time.sleep(source.uniform(0.0, taken))
                os.kill(process, signal.SIGKILL)
            if ended(process):
                tally.kills, tally.midway, cut = tally.kills + 1, tally.midway + path.exists(), cut + 1
        found = torch.load(out)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True)), (name, attempt)
        assert not list(folder.glob("*.partial"))
        tally.runs += cut > 0
        if tally.kills == kills:
            return tally
    raise AssertionError(f"{name} ended before it was killed, too often: {tally}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seeded = random.Random(0)
    for each in sys.argv[2:] or WORKS:
        with tempfile.TemporaryDirectory() as place:
            found = kill_and_compare(each, int(sys.argv[1]), Path(place), seeded)
            print(
                f"{each}: {found.kills} kills ({found.midway} midway) in {found.runs} runs, all with equal results",
                flush=True,
            )
