"""Deep ensembles in one call: members trained in turn or by several processes, finished ones kept in files."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import nn

from lapis.batches import batches, check_repeatable, digest
from lapis.checkpoint import Checkpoint
from lapis.errors import FileError, OptionError
from lapis.likelihoods import Gaussian, Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network, outside_inference_mode
from lapis.options import check_arguments, check_count
from lapis.posteriors.ensemble import EnsemblePosterior
from lapis.posteriors.posterior import MEMORY_BUDGET, Facts
from lapis.posteriors.predicting.members import member_outputs
from lapis.progress import track
from lapis.training.noise import with_residual_noise
from lapis.training.plain import fit_network
from lapis.training.state import load_model, model_tensors
from lapis.training.step import MakeOptimiser

SIZE = 5
"""Members by default; more than this bring little (Lakshminarayanan et al. 2017)."""


@outside_inference_mode
def ensemble(
    models: Sequence[nn.Module] | nn.ModuleList | Callable[[], nn.Module],
    data: Any = None,
    likelihood: str | Likelihood | None = None,
    *,
    size: int | None = None,
    epochs: int | None = None,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    optimiser: str | MakeOptimiser | None = None,
    schedule: Literal["cosine", "constant"] | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool | None = None,
) -> EnsemblePosterior:
    """A deep ensemble: of trained networks, `ensemble(models, likelihood)`, or of new ones, trained here.

    `ensemble(make_model, data, likelihood, size=5)` calls `make_model()` for every member, each with random numbers of
    its own, and trains it on all the data, in an order of its own.

    Args:
        models: trained networks, of any architectures whose outputs agree, or a function that makes a new network.
        data: for training, see `lapis.training.plain.fit_network`. For trained networks optional: with them, outputs
            are checked now and not at the first prediction.
        likelihood: see `lapis.laplace`. The noise of "regression" is that of the members' residuals on the data.
        size: members to train, 5 by default.
        epochs: of every member; this and the next five are those of `fit_network`, and only for training.
        workers: processes that train members at the same time; by default one member after the other. `make_model` must
            then be a function that other processes can import, as multiprocessing asks for.
        checkpoint: a folder for finished members. When it holds some, only the others are trained.
        generator: source of every member's random numbers; seeded with 0 when None.
        memory_budget: bytes of working memory for predictions.

    >>> x = torch.linspace(-1, 1, 32)[:, None]
    >>> posterior = ensemble(lambda: nn.Linear(1, 1), (x, 2 * x + 0.1 * x.sin()), "regression", size=3, epochs=50)
    >>> len(posterior), posterior.predict(x).mean.shape
    (3, torch.Size([32, 1]))
    """
    if likelihood is None and isinstance(data, (str, Likelihood)):
        data, likelihood = None, data
    if likelihood is None:
        raise OptionError(
            "There is no likelihood",
            expected="ensemble(models, likelihood) or ensemble(make_model, data, likelihood)",
            got=f"only {type(models).__name__} and {type(data).__name__}",
            do='name one, as in "classification"',
        )
    family = resolve_likelihood(likelihood)
    check_arguments(ensemble, locals(), signed=("weight_decay",), apart=("models",))
    settings = {
        "epochs": epochs, "learning_rate": learning_rate, "weight_decay": weight_decay, "optimiser": optimiser,
        "schedule": schedule, "batch_size": batch_size,
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if value is not None}
    models = list(models) if isinstance(models, nn.ModuleList) else models
    if isinstance(models, nn.Module) or not (callable(models) or isinstance(models, Sequence)):
        raise OptionError(
            "An ensemble needs several networks",
            expected="a list of trained networks, or a function that makes a new one",
            got=type(models).__name__,
            do="pass [model, ...], or a function such as lambda: Net()",
        )
    if isinstance(models, Sequence):
        only = {**given, "size": size, "workers": workers, "checkpoint": checkpoint, "generator": generator}
        _refuse_training(models, [name for name, value in only.items() if value is not None])
        modules = list(models)
    else:
        task = _task(models, data, family, SIZE if size is None else size, given, generator)
        modules = _trained(task, 1 if workers is None else workers, checkpoint, progress)
    if isinstance(likelihood, str) and data is not None:
        family = _with_common_noise(modules, data, family)
    members = [Network(module) for module in modules]
    facts = Facts.of(members[0], family, data, memory_budget)
    if members[0].example is not None:
        member_outputs(members, None, family, facts.n_outputs, members[0].example)  # raises where they do not agree
    return EnsemblePosterior.of(members, family, facts)


def _refuse_training(models: Sequence[Any], given: list[str]) -> None:
    if given:
        raise OptionError(
            f"Trained networks need no {given[0]}",
            expected="ensemble(models, likelihood), or a function that makes networks to train",
            got=f"a list of {len(models)} networks, and {', '.join(given)}",
            do="leave these out, or pass a function instead of the list",
        )
    if not models:
        raise OptionError("The ensemble is empty", expected="at least one network", got="none", do="pass some")


def _with_common_noise(modules: Sequence[nn.Module], data: Any, likelihood: Likelihood) -> Likelihood:
    """The likelihood with the root mean square of all members' residuals for its noise, if that is Gaussian."""
    if not isinstance(likelihood, Gaussian):
        return likelihood
    check_repeatable(data)
    noises = [with_residual_noise(module, data, likelihood).noise for module in modules]
    return likelihood.with_noise(torch.stack([noise.square() for noise in noises if noise is not None]).mean().sqrt())


@dataclass(frozen=True)
class _Task:
    """All that decides the members."""

    make: Callable[[], nn.Module]
    data: Any
    likelihood: Likelihood
    settings: dict[str, Any]
    """Arguments of `fit_network`."""
    seeds: tuple[int, ...]
    targets: int
    """Fingerprint of the targets: augmentation changes inputs, but not these."""


def _task(
    make: Callable[[], nn.Module],
    data: Any,
    likelihood: Likelihood,
    size: int,
    settings: dict[str, Any],
    generator: torch.Generator | None,
) -> _Task:
    check_repeatable(data)
    source = generator or torch.Generator().manual_seed(0)
    seeds = tuple(torch.randint(2**62, (size,), generator=source, device=source.device).tolist())
    network = Network(_made(make, seeds[0]))
    stream, _ = batches(data, dtype=network.dtype, device=network.device, batch_size=settings.get("batch_size"))
    targets = sum(digest(batch.targets, batch.targets) for batch in stream) % 2**64
    return _Task(make, data, likelihood, settings, seeds, targets)


def _made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A new network, with random numbers from the seed; torch's global generators are left as they were."""
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count()))):
        torch.manual_seed(seed)
        model = make()
    if not isinstance(model, nn.Module):
        raise OptionError(
            "The function makes no networks",
            expected="a torch.nn.Module from every call",
            got=type(model).__name__,
            do="return the new network",
        )
    return model


def _member(task: _Task, number: int, folder: Path | None) -> nn.Module:
    """A trained member: from its file in the folder if there is one, else trained, and kept there."""
    model = _made(task.make, task.seeds[number])
    optimiser = task.settings.get("optimiser")
    same = task.settings | {
        "optimiser": "a function" if callable(optimiser) else optimiser, "seed": task.seeds[number],
        "likelihood": task.likelihood.to_config(), "targets": task.targets, "n_weights": Network(model).size,
    }  # fmt: skip
    path = None if folder is None else folder / f"member-{number}.lapis"
    kept = Checkpoint(path, "member of an ensemble", same, "")
    if kept.tensors:
        load_model(model, kept.tensors)
        return model
    source = torch.Generator().manual_seed(task.seeds[number])
    fit_network(model, task.data, task.likelihood, **task.settings, generator=source, progress=False)
    kept.offer(model_tensors(model), {}, now=True)
    return model


def _trained(
    task: _Task, workers: int, checkpoint: str | os.PathLike[str] | None, progress: bool | None
) -> list[nn.Module]:
    check_count("workers", workers)
    numbers = range(len(task.seeds))
    folder = None if checkpoint is None else _folder(checkpoint)
    if workers == 1:
        return [_member(task, k, folder) for k in track(numbers, "members", len(numbers), progress)]
    with TemporaryDirectory() as temporary:
        shared = folder or Path(temporary)
        _train_by_pool(task, workers, shared, progress)
        return [_member(task, k, shared) for k in numbers]  # each from its file


def _folder(path: str | os.PathLike[str]) -> Path:
    try:
        folder = Path(path)
        folder.mkdir(exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        raise FileError(
            "The members cannot be kept there",
            expected="a folder, or a path in one where it can be made",
            got=f"{path!r}: {error}",
            do="choose another path",
        ) from error
    return folder


_worker: tuple[_Task, Path] | None = None
"""In a worker process: what it works on."""


def _start(task: _Task, folder: Path, threads: int) -> None:
    global _worker
    torch.set_num_threads(threads)
    _worker = (task, folder)


def _work(number: int) -> None:
    assert _worker is not None
    _member(_worker[0], number, _worker[1])


def _train_by_pool(task: _Task, workers: int, folder: Path, progress: bool | None) -> None:
    """Train all members that have no file yet; processes are spawned, since torch's threads do not survive a fork."""
    try:
        pickle.dumps((task.make, task.settings))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            "Other processes cannot make these networks",
            expected="a function at the top level of a module for workers > 1, and so for an optimiser",
            got=str(error),
            do="move the function there, or leave workers out",
        ) from error
    threads = max(1, torch.get_num_threads() // workers)
    numbers = range(len(task.seeds))
    pool = ProcessPoolExecutor(
        min(workers, len(numbers)), multiprocessing.get_context("spawn"), _start, (task, folder, threads)
    )
    try:
        done = [pool.submit(_work, k) for k in numbers]
        for each in track(done, "members", len(done), progress):
            each.result()
    except BrokenProcessPool as error:
        raise OptionError(
            "A process that trains members ended early",
            expected="processes that can import the main script, and enough memory for all of them",
            got=str(error),
            do='put the script\'s own work under if __name__ == "__main__", or use fewer workers',
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
