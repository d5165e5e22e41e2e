"""A network of `cases` with its data, and everything fitted to it that a call may need; made once, when first asked."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapis
from cases import CASES, Case
from lapis.batches import take, tensors_in

FITS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "dense": lambda *problem: lapis.laplace(*problem, structure="dense"),
    "diagonal": lambda *problem: lapis.laplace(*problem, structure="diagonal"),
    "kronecker": lambda *problem: lapis.laplace(*problem, structure="kronecker"),
    "ekfac": lambda *problem: lapis.laplace(*problem, structure="ekfac"),
    "lowrank": lambda *problem: lapis.laplace(*problem, structure="lowrank"),
    "implicit": lambda *problem: lapis.laplace(*problem, structure="implicit"),
    "last layer": lambda *problem: lapis.laplace(*problem, weights="last_layer"),
    "drawn": lambda *problem: lapis.laplace(*problem, structure="implicit").draw(3),
    "subnetwork": lambda *problem: lapis.laplace(*problem, weights=lapis.Subnetwork(3)),
    "variational": lambda *problem: lapis.variational(*problem, steps=2),
    "ensemble": lambda model, data, likelihood: lapis.ensemble([model, copy.deepcopy(model)], data, likelihood),
    "dropout": lambda model, data, likelihood: lapis.dropout(model, likelihood, data),
    "swag": lambda model, data, likelihood: lapis.swag(
        copy.deepcopy(model), data, likelihood, epochs=1, snapshots=3, rank=2
    ),
    "refined": lambda *problem: lapis.laplace(*problem, structure="dense").refine(problem[1], max_rounds=2),
}
"""Posteriors to begin with; other kinds come from what calls return."""


class World:
    """One case in one dtype. The model is never to be changed; calls that train get a copy."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.model: nn.Module = case.make_model(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about the network
            self.data: tuple[Any, Tensor] = case.make_batch(dtype)
        self.likelihood: lapis.Likelihood = case.likelihood.build()
        self._fitted: dict[str, Any] = {}
        self.raw: dict[str, str] = {}
        """Tracebacks of fits that ended in another error than a LapisError, by the posterior's name."""

    @property
    def name(self) -> str:
        return f"{self.case.name}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def inputs(self) -> Any:
        return self.data[0]

    @property
    def targets(self) -> Tensor:
        return self.data[1]

    @property
    def halves(self) -> list[tuple[Any, Tensor]]:
        """The data as two batches."""
        middle = len(self.targets) // 2
        ends = ((0, middle), (middle, len(self.targets)))
        return [(take(self.inputs, i, j), self.targets[i:j]) for i, j in ends]

    @cached_property
    def outputs(self) -> Tensor:
        """The network's canonical outputs for the data."""
        network = lapis.network.Network(self.model)
        with network.prepared(), torch.no_grad():
            return self.likelihood.canonical(network.call(self.inputs))

    @cached_property
    def canonical_targets(self) -> Tensor:
        return self.likelihood.targets(self.targets, self.outputs)

    def copy_of_model(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def posterior(self, name: str) -> Any:
        """A fitted posterior; None where the network or the likelihood has none of this kind.

        An error that is not ours is kept in `raw`, to be reported.
        """
        if name not in self._fitted:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._fitted[name] = FITS[name](self.model, self.data, self.likelihood)
            except lapis.LapisError:
                self._fitted[name] = None
            except Exception:  # noqa: BLE001  (a finding)
                self._fitted[name], self.raw[name] = None, traceback.format_exc()
        return self._fitted[name]

    @cached_property
    def folder(self) -> Path:
        """A folder of its own, removed when the process ends."""
        name = tempfile.mkdtemp(prefix="lapis-fuzz-")
        atexit.register(shutil.rmtree, name, ignore_errors=True)
        return Path(name)

    @cached_property
    def file(self) -> Path:
        """A saved posterior."""
        path = self.folder / "saved"
        found = next(p for p in map(self.posterior, FITS) if p is not None and type(p).kind == "laplace")
        found.save(path)
        return path

    @property
    def n_inputs(self) -> int:
        return len(tensors_in(self.inputs))


@cache
def world(number: int) -> World:
    """The worlds in turn: every case in float64, every third in float32 as well."""
    names = list(CASES)
    single = number >= len(names)
    return World(
        CASES[names[3 * (number - len(names)) if single else number]], torch.float32 if single else torch.float64
    )


COUNT = len(CASES) + (len(CASES) + 2) // 3
