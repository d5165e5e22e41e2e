"""Statistics of shards as tasks of Ray (extra `ray`), added up in a tree.

    import lapis.distributed.ray
    total = lapis.distributed.ray.statistics(model, shards, "classification")

Each shard is one task, each sum of a few partial results another. Ray runs them where there is room, and runs again
what was lost with a worker: a killed worker costs its shard only. The tree is fixed by the number of shards, so the
result has the same bits whichever task finishes first and however often one was repeated.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

from torch import nn

from lapis.curvature.blocks.partition import NAMES
from lapis.distributed import sums
from lapis.distributed.sums import Statistics
from lapis.errors import DataError, LapisError, OptionError, RankError
from lapis.likelihoods import Likelihood
from lapis.network import Weights
from lapis.options import check_arguments
from lapis.posteriors.laplace.subnetwork import Subnetwork
from lapis.posteriors.posterior import MEMORY_BUDGET
from lapis.progress import track

WAITING = 2
"""Shards handed to Ray for each one that it can run at a time."""


def statistics(
    model: nn.Module,
    shards: Sequence[Any],
    likelihood: str | Likelihood,
    *,
    structure: str = "kronecker",
    weights: Weights | Subnetwork = "all",
    rank: int | None = None,
    basis: Statistics | None = None,
    batch_size: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
    retries: int = 3,
    fan_in: int = 4,
    cpus: float = 1.0,
    progress: bool | None = None,
) -> Statistics:
    """The sum of `lapis.statistics` over shards, each computed by a task of Ray.

    Connects to the cluster that `ray.init` or RAY_ADDRESS names; without one, Ray starts workers on this machine.

    Args:
        model: the trained network; sent once to each machine.
        shards: the data in parts, different examples in each. A part is data as `lapis.statistics` takes them, or a
            function without arguments that returns such data: it runs where the task does, so that data that lie
            there (files, a database) need not travel.
        likelihood: as in `lapis.laplace`.
        structure: "dense", "diagonal", "kronecker", "ekfac" (with a `basis`) or "lowrank".
        weights: which weights, as in `lapis.laplace`; the same for all shards.
        rank: eigenpairs that each shard keeps, for "lowrank".
        basis: for "ekfac", statistics whose eigenvectors are used: those of the same shards by "kronecker".
        batch_size: for data that are not batched yet.
        memory_budget: bytes of working memory of one task.
        retries: how often Ray runs a task again whose worker died, or that raised an OSError (files, network).
        fan_in: partial sums added by one task, at least 2: log_fan_in(shards) levels of sums.
        cpus: processors that a task occupies.
        progress: show a bar of finished shards; by default on a terminal only.

    A shard that fails ends the call with its error, which begins with its number; tasks that run by then are not
    stopped, but no more than a few are ever waiting.
    """
    check_arguments(statistics, locals(), apart=("likelihood", "weights"))
    if not len(shards):
        raise DataError("There are no shards", expected="at least one part of the data", got="none", do="pass some")
    if fan_in < 2:
        raise OptionError("A sum has at least two terms", expected="fan_in >= 2", got=str(fan_in), do="leave it out")
    if NAMES.get(structure) == "ekfac" and basis is None:
        raise OptionError(
            "EKFAC statistics add up in one basis only",
            expected="basis=statistics of the same shards with structure='kronecker'",
            got="basis=None",
            do="make those first, and pass them",
        )
    engine = _ray()
    options: dict[str, Any] = {"structure": structure, "weights": weights, "rank": rank, "batch_size": batch_size}
    options |= {"memory_budget": memory_budget, "progress": False, "likelihood": likelihood}
    retrying: dict[str, Any] = {"max_retries": retries, "retry_exceptions": [OSError], "num_cpus": cpus}
    shard_task = engine.remote(num_returns=2, **retrying)(_of_shard)
    sum_task = engine.remote(**retrying)(_sum)
    sent, sent_basis = engine.put(model), engine.put(None if basis is None else _packed(model, basis))
    tree = _Tree(lambda parts: sum_task.remote(sent, *parts), fan_in)
    running: dict[Any, int] = {}
    room = WAITING * max(1, int(engine.cluster_resources().get("CPU", 1) / cpus))

    def finished() -> Iterator[Any]:
        for number, shard in enumerate(shards):
            if len(running) >= room:
                yield _first(engine, running)
            packed, counted = shard_task.remote(sent, shard, sent_basis, options)
            tree.add(packed)
            running[counted] = number
        while running:
            yield _first(engine, running)

    for _ in track(finished(), "shards", len(shards), progress):
        pass
    return _unpacked(model, _result(engine, tree.total(), "The sum of the shards"))


class _Tree:
    """Sums of `fan_in` terms of sums of `fan_in` terms, in the order of the shards, whichever of them ends first."""

    def __init__(self, add: Callable[[list[Any]], Any], fan_in: int) -> None:
        self.add_up, self.fan_in = add, fan_in
        self.levels: list[list[Any]] = [[]]

    def add(self, term: Any, level: int = 0) -> None:
        """One more term; a level that is full becomes one term of the next."""
        if level == len(self.levels):
            self.levels.append([])
        terms = self.levels[level]
        terms.append(term)
        if len(terms) == self.fan_in:
            self.levels[level] = []
            self.add(self.add_up(terms), level + 1)

    def total(self) -> Any:
        """The sum of all terms, from the lowest level up."""
        rest: list[Any] = []
        for terms in self.levels:
            terms = [*terms, *rest]
            rest = terms if len(terms) < 2 else [self.add_up(terms)]
        return rest[0]


def _ray() -> Any:
    """The module, connected."""
    try:
        import ray
    except ImportError as error:
        raise OptionError(
            "Ray is not installed", expected="the extra `ray`", got=str(error), do="pip install 'lapis-bayes[ray]'"
        ) from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False)
    return ray


def _first(engine: Any, running: dict[Any, int]) -> int:
    """Wait for one of the shards, and take it out; its number of examples."""
    (done,), _ = engine.wait(list(running), num_returns=1)
    number = running.pop(done)
    return int(_result(engine, done, f"Shard {number}"))


def _result(engine: Any, reference: Any, what: str) -> Any:
    """What a task returned; its LapisError, or RankError for any other end, with `what` before the message."""
    try:
        return engine.get(reference)
    except engine.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, LapisError):
            raise type(cause)(f"{what}: {cause}") from None
        raise RankError(
            f"{what} failed",
            expected="data that can be read, and fitted to",
            got=f"{type(cause).__name__}: {cause}",
            do="see the error above",
        ) from error
    except engine.exceptions.RayError as error:
        raise RankError(
            f"{what} was lost",
            expected="a task that ends, at the latest after its retries",
            got=f"{type(error).__name__}",
            do="raise retries, lower memory_budget, or make smaller shards",
        ) from error


# tasks -------------------------------------------------------------------------------------------


def _of_shard(model: nn.Module, shard: Any, basis: bytes | None, options: dict[str, Any]) -> tuple[bytes, int]:
    """The statistics of a shard, packed, and its number of examples."""
    within = None if basis is None else _unpacked(model, basis)
    found = sums.statistics(model, shard() if callable(shard) else shard, basis=within, **options)
    return _packed(model, found), found.n_data


def _sum(model: nn.Module, *parts: bytes) -> bytes:
    """The sum of packed statistics, from left to right."""
    return _packed(model, reduce(lambda one, other: one + other, (_unpacked(model, part) for part in parts)))


def _places(model: nn.Module) -> dict[str, Any]:
    """The modules, parameters and buffers of a network by name."""
    named = [("module", model.named_modules()), ("parameter", model.named_parameters())]
    found = {f"{kind} {name}": each for kind, every in named for name, each in every}
    return found | {f"buffer {name}": each for name, each in model.named_buffers()}


def _packed(model: nn.Module, found: Statistics) -> bytes:
    """Pickled with references to the network, which every task has already, in place of its parts."""
    from ray import cloudpickle

    names = {id(each): name for name, each in _places(model).items()}

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> str | None:
            return names.get(id(value))

    stream = io.BytesIO()
    Pickler(stream).dump(found)
    return stream.getvalue()


def _unpacked(model: nn.Module, packed: bytes) -> Statistics:
    places = _places(model)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: str) -> Any:
            return places[name]

    found = Unpickler(io.BytesIO(packed)).load()
    assert isinstance(found, Statistics)
    return found
