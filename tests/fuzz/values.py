"""Values for arguments: right ones by the argument's name (or its annotation), and wrong ones.

`refused` decides whether a value must not be accepted: by the annotation, and by what numbers mean in this library
(counts are at least one, other numbers positive, unless the argument is listed in `SIGNED`).
"""

from __future__ import annotations

import collections.abc
import math
import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lapis
from fuzz import own_data, rooms
from fuzz.worlds import FITS, World
from lapis.batches import tensors_in
from lapis.solvers import Diagonal, Operator

SIGNED = frozenset(
    {
        "seed",
        "ignore_index",
        "max_iterations",
        "mean",
        "momentum",
        "precision",
        "log_determinant",
        "axis",
        "rank",
        "limits",
        "start_at.level",
        "UNet.bounds",
        "reconstruct.bounds",
        "tv_reconstruction.bounds",
        "rotated.degrees",
        "disc.centre",
        "disc_sinogram.centre",
        "random_state",
        "after",
        "skips",
        "labels_to.value",
    }
)
"""Numbers that may be zero or negative, or are checked when used."""

FROM_ZERO = frozenset(
    {"weight_decay", "em.tolerance", "pseudo_count", "dropout", "serve.port", "optim.lr", "optim.beta", "variation"}
)
"""Numbers that may be zero: none, or where schedules begin."""


class Strange:
    """An object of no use."""

    def __repr__(self) -> str:
        return "Strange()"


def generator(r: Random) -> torch.Generator:
    return torch.Generator().manual_seed(r.randrange(5))


def vectors(w: World, r: Random, size: int) -> Tensor:
    shape = (size,) if r.random() < 0.5 else (2, size)
    return 0.1 * torch.randn(shape, dtype=w.dtype, generator=generator(r))


def data(w: World, r: Random) -> Any:
    return r.choice([w.data, w.halves, list(w.halves), DataLoader(Pairs(w), batch_size=None, generator=generator(r))])


class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The two halves as a map-style data set of batches."""

    def __init__(self, w: World) -> None:
        self.halves = w.halves

    def __len__(self) -> int:
        return len(self.halves)

    def __getitem__(self, index: int) -> Any:
        return self.halves[index]


def probabilities(w: World, r: Random) -> Tensor:
    return torch.rand(8, 3, dtype=w.dtype, generator=generator(r)).softmax(-1)


def operator(w: World, r: Random) -> Operator:
    matrix = torch.randn(5, 5, dtype=w.dtype, generator=generator(r))
    return Operator.from_matrix(matrix @ matrix.mT + torch.eye(5, dtype=w.dtype))


def posterior(w: World, r: Random) -> Any:
    names = list(FITS)
    r.shuffle(names)
    return next((p for p in map(w.posterior, names) if p is not None), None)


def rows_for(w: World, owner: Any) -> Tensor:
    """Two vectors that a preconditioner takes, or is made of."""
    form = getattr(owner, "form", None)
    return torch.ones(2, 5, dtype=w.dtype) if form is None else form.new_ones(2, len(form))


def canonical_targets(w: World, owner: Any) -> Tensor:
    """Targets as `owner`, a likelihood of the world's kind, hands them to its methods, with its own ignored class."""
    y = w.canonical_targets
    if y.is_floating_point():
        return y
    ignored = getattr(owner, "ignore_index", None)
    return torch.where(y < 0, 0 if ignored is None else ignored, y)


def size_of(w: World, owner: Any) -> int:
    """The length of the weight vectors that a call on `owner` is about."""
    if hasattr(owner, "n_weights"):
        return int(owner.n_weights)
    return sum(p.numel() for p in w.model.parameters() if p.requires_grad)


Make = Callable[[World, Random, Any], Any]

BY_NAME: dict[str, Make] = {
    "model": lambda w, r, o: w.model,
    "module": lambda w, r, o: w.model,
    "data": lambda w, r, o: data(w, r),
    "validation": lambda w, r, o: data(w, r),
    "likelihood": lambda w, r, o: w.likelihood,
    "fitted": lambda w, r, o: w.likelihood,
    "x": lambda w, r, o: w.inputs,
    "inputs": lambda w, r, o: w.inputs,
    "y": lambda w, r, o: w.targets,
    "like": lambda w, r, o: w.model,
    "vector": lambda w, r, o: vectors(w, r, size_of(w, None)),
    "vectors": lambda w, r, o: vectors(w, r, size_of(w, o)),
    "theta": lambda w, r, o: vectors(w, r, size_of(w, o)),
    "start": lambda w, r, o: None,
    "path": lambda w, r, o: w.folder / "other",
    "checkpoint": lambda w, r, o: None,
    "posteriors": lambda w, r, o: [p for p in (w.posterior("dense"), w.posterior("diagonal")) if p is not None],
    "posterior": lambda w, r, o: posterior(w, r),
    "network": lambda w, r, o: lapis.network.Network(w.model),
    "prior": lambda w, r, o: r.choice([0.5, 3, lapis.Prior(2.0), lapis.Prior(1.0, groups="layer")]),
    "precision": lambda w, r, o: r.choice([0.5, 3, 1e-3]),
    "groups": lambda w, r, o: r.choice(["one", "layer", "parameter"]),
    "mean": lambda w, r, o: r.choice([0.0, 0.1]),
    "scales": lambda w, r, o: None,
    "noise": lambda w, r, o: r.choice([0.5, 1.5]),
    "weights": lambda w, r, o: r.choice(["all", "auto", "last_layer", lapis.Subnetwork(2)]),
    "uncertainty": lambda w, r, o: None,
    "losses": lambda w, r, o: torch.rand(8, dtype=w.dtype, generator=generator(r)),
    "structure": lambda w, r, o: r.choice(["auto", "dense", "diagonal", "kronecker", "ekfac", "lowrank", "implicit"]),
    "curvature": lambda w, r, o: r.choice(["ggn", "exact", "sampled", "empirical"]),
    "sharing": lambda w, r, o: r.choice([None, "expand", "reduce"]),
    "optimiser": lambda w, r, o: r.choice(["adam", "sgd"]),
    "memory_budget": lambda w, r, o: r.choice([2**22, 2**30]),
    "epochs": lambda w, r, o: r.choice([1, 2]),
    "nll": lambda w, r, o: lambda f, y: (f - y).square().sum(),
    "name": lambda w, r, o: "a name",
    "kind": lambda w, r, o: nn.Linear,
    "level": lambda w, r, o: r.choice([0.5, 0.95]),
    "levels": lambda w, r, o: (0.5, 0.9),
    "operator": lambda w, r, o: operator(w, r),
    "preconditioner": lambda w, r, o: r.choice([None, Diagonal(torch.ones(5, dtype=w.dtype))]),
    "rhs": lambda w, r, o: torch.randn(2, 5, dtype=w.dtype, generator=generator(r)),
    "probs": lambda w, r, o: probabilities(w, r),
    "labels": lambda w, r, o: torch.tensor([0, 1, 1, 0, 1, 0, 0, 1]),
    "std": lambda w, r, o: torch.ones(8, dtype=w.dtype),
    "lower": lambda w, r, o: torch.zeros(8, dtype=w.dtype),
    "upper": lambda w, r, o: torch.ones(8, dtype=w.dtype),
    "axes": lambda w, r, o: axes(),
    "generator": lambda w, r, o: generator(r),
    "progress": lambda w, r, o: r.choice([None, False]),
    "matrix": lambda w, r, o: torch.eye(4, dtype=w.dtype),
    "function": lambda w, r, o: torch.log1p,
    "callback": lambda w, r, o: None,
    "momentum": lambda w, r, o: 0.9,
    "fraction": lambda w, r, o: 0.5,
    "raw": lambda w, r, o: w.outputs,
    "f": lambda w, r, o: w.outputs,
    "product": lambda w, r, o: lambda v: 2 * v,
    "inverse": lambda w, r, o: lambda v: 0.5 * v,
    "diagonal": lambda w, r, o: torch.ones(5, dtype=w.dtype),
    "values": lambda w, r, o: torch.ones(2, dtype=w.dtype),
}
"""Right values by name."""


def first_numbers(inputs: Any) -> Tensor:
    """Features of inputs of any form: two numbers of each example, (B, 2)."""
    rows = next(iter(tensors_in(inputs)))
    return rows.reshape(len(rows), -1)[:, [0, -1]].double()


IN: dict[str, dict[str, Make]] = {
    "metrics": {
        "targets": lambda w, r, o: torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]),
        "mean": lambda w, r, o: torch.zeros(8, dtype=w.dtype),
    },
    "metrics.real": {"targets": lambda w, r, o: torch.rand(8, dtype=w.dtype, generator=generator(r))},
    "plots": {
        "probs": lambda w, r, o: {"one": probabilities(w, r), "two": probabilities(w, r)},
        "targets": lambda w, r, o: torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]),
        "data": lambda w, r, o: None,
        "colour": lambda w, r, o: "black",
        "labels": lambda w, r, o: ("one", "two"),
        "uncertainties": lambda w, r, o: {"one": torch.rand(8, dtype=w.dtype, generator=generator(r))},
        "accuracies": lambda w, r, o: torch.rand(3, 3, dtype=w.dtype, generator=generator(r)),
        "tasks": lambda w, r, o: r.choice([None, ["a", "b", "c"]]),
        "limits": lambda w, r, o: (-1.0, 1.0, -1.0, 1.0),
        "resolution": lambda w, r, o: r.choice([1, 5]),
        "quantity": lambda w, r, o: None,
        "points": lambda w, r, o: r.choice([2, 5]),
    },
    "kernel_matrix": {
        "kernel": lambda w, r, o: torch.eye(4, dtype=w.dtype),
        "labels": lambda w, r, o: r.choice([None, torch.tensor([1, 0, 1, 0])]),
    },
    "load": {"path": lambda w, r, o: w.file, "data": lambda w, r, o: None, "likelihood": lambda w, r, o: None},
    "LowRankPlusDiagonal": {"vectors": lambda w, r, o: rows_for(w, o)},
    "Diagonal": {"vectors": lambda w, r, o: rows_for(w, o)},
    "CallablePreconditioner": {"vectors": lambda w, r, o: rows_for(w, o)},
    "likelihood": {"y": lambda w, r, o: canonical_targets(w, o)},
    "functional_variance": {"diagonal": lambda w, r, o: r.random() < 0.5},
    "targets": {"y": lambda w, r, o: w.targets},
    "train": {"model": lambda w, r, o: w.copy_of_model()},
    "linear": {"features": lambda w, r, o: first_numbers},
    "swag": {
        "model": lambda w, r, o: w.copy_of_model(),
        "snapshots": lambda w, r, o: r.choice([2, 3]),
        "weight_decay": lambda w, r, o: r.choice([0.0, 0.1]),
    },
    "SWAG": {"model": lambda w, r, o: w.copy_of_model(), "rank": lambda w, r, o: r.choice([0, 2, 3])},
    "ensemble": {
        "models": lambda w, r, o: r.choice([[w.model, w.copy_of_model()], w.copy_of_model]),
        "workers": lambda w, r, o: None,
        "weight_decay": lambda w, r, o: 0.1,
    },
    "variational": {
        "steps": lambda w, r, o: r.choice([1, 2, 3]),
        "mean": lambda w, r, o: None,
        "rank": lambda w, r, o: r.choice([0, 1, 2]),
        "noise": lambda w, r, o: r.random() < 0.5,
        "deviation": lambda w, r, o: r.choice([None, 0.1]),
    },
    "Subnetwork": {
        "n": lambda w, r, o: r.choice([1, 2, 3]),
        "by": lambda w, r, o: r.choice(["variance", "magnitude", "random"]),
        "from_": lambda w, r, o: None,
    },
    "bootstrap": {
        "metric": lambda w, r, o: lapis.metrics.rmse,
        "axis": lambda w, r, o: 0,
        "repeats": lambda w, r, o: r.choice([2, 5]),
    },
    "RenewedSWAGPosterior": {"weights": lambda w, r, o: o.mean},
    "tune": {"noise": lambda w, r, o: r.choice([True, False])},
    "calibrate": {"temperature": lambda w, r, o: False},
    "state": {"network": lambda w, r, o: o.network},
    "choose": {"variances": lambda w, r, o: lambda: torch.ones(size_of(w, None), dtype=w.dtype)},
    **rooms.IN,
    **own_data.IN,
}
"""Right values where a name means something else: by the function's name, or its module's."""


def axes() -> Any:
    from matplotlib.figure import Figure

    return Figure().subplots()


def wrong(w: World, r: Random) -> Any:
    """A value that few arguments take."""
    makers: Sequence[Callable[[], Any]] = (
        lambda: None,
        lambda: "a",
        lambda: "",
        lambda: b"bytes",
        lambda: True,
        lambda: 0,
        lambda: -1,
        lambda: 1,
        lambda: 2.5,
        lambda: -0.5,
        lambda: 0.0,
        lambda: math.nan,
        lambda: math.inf,
        lambda: 10**400,
        lambda: 1j,
        list,
        lambda: (),
        dict,
        lambda: [1],
        lambda: [None],
        lambda: {"a": 1},
        lambda: {1: "a"},
        Strange,
        lambda: Strange,
        lambda: print,
        lambda: lambda: None,
        lambda: torch.tensor(1.0),
        lambda: torch.tensor([]),
        lambda: torch.zeros(0, 3),
        lambda: torch.ones(3, 7, dtype=w.dtype),
        lambda: torch.tensor([math.nan, 1.0]),
        lambda: torch.tensor([1, 2]),
        lambda: torch.tensor([True, False]),
        lambda: torch.tensor([1j]),
        lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: np.ones(3),
        lambda: np.array(["a"]),
        lambda: np.int64(2),
        lambda: np.float32(0.5),
        lambda: torch.float64,
        lambda: torch.device("cpu"),
        lambda: nn.Linear(2, 2),
        lambda: nn.Identity(),
        lambda: w.model,
        lambda: posterior(w, r),
        lambda: lapis.Prior(1.0),
        lambda: w.likelihood,
        lambda: w.data,
        lambda: w.inputs,
        lambda: generator(r),
        lambda: iter([]),
        lambda: (w.inputs, None),
        lambda: (w.inputs, w.targets[:-1]),
        lambda: (w.inputs, torch.full(w.targets.shape, math.nan)),
        lambda: [(1, 2, 3)],
        lambda: Path("/nowhere/at/all"),
        lambda: w.folder,
        lambda: "\0",
        lambda: range(3),
        lambda: slice(3),
        lambda: Ellipsis,
    )
    return r.choice(makers)()


def right(name: str, hint: Any, default: Any, w: World, r: Random, owner: Any, place: Sequence[str]) -> Any:
    """A value that should do for this parameter of a function known by the words in `place`."""
    for word in place:
        if name in IN.get(word, {}):
            return IN[word][name](w, r, owner)
    if name in BY_NAME and get_origin(hint) is not Literal:
        return BY_NAME[name](w, r, owner)
    return by_annotation(hint, default, w, r)


def by_annotation(hint: Any, default: Any, w: World, r: Random) -> Any:
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return by_annotation(r.choice(members), default, w, r)
    if origin is Literal:
        return r.choice(members)
    simple: dict[Any, Callable[[], Any]] = {
        bool: lambda: r.random() < 0.5,
        int: lambda: r.choice([1, 2, 3, 5]),
        float: lambda: r.choice([0.3, 1.0, 1e-3]),
        str: lambda: "a",
        type(None): lambda: None,
        Tensor: lambda: torch.rand(8, dtype=w.dtype, generator=generator(r)),
        torch.Generator: lambda: generator(r),
    }
    if hint in simple:
        return simple[hint]()
    return default


def refused(hint: Any, value: Any, name: str, place: Sequence[str] = ()) -> bool:
    """Whether the annotation forbids the value, or its size has no meaning for a number of this name, at this place."""
    names = {name, *(f"{word}.{name}" for word in place)}
    is_zero = type(value) in (int, float) and value == 0
    if "imaging" in place and isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()  # there NumPy's numbers count as numbers, as images often come from it
    return hint is not None and not admitted(hint, value, bool(names & SIGNED or (is_zero and names & FROM_ZERO)))


def admitted(hint: Any, value: Any, signed: bool) -> bool:
    origin, members = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, (str, TypeVar)) or getattr(hint, "_is_protocol", False):
        return True
    if origin in (Union, types.UnionType):
        return any(admitted(member, value, signed) for member in members)
    if origin is Literal:
        return isinstance(value, str) and value in members
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is os.PathLike:
        return isinstance(value, os.PathLike)
    if isinstance(origin, type) and issubclass(origin, (Sequence, Mapping)):
        return isinstance(value, origin) and not isinstance(value, (str, bytes))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and (signed or value >= 1) and value < 2**63
    if hint is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
        return number and (signed or value > 0)
    if isinstance(hint, type):
        return isinstance(value, hint)
    return True
