"""A posterior with what leads from a table to its network's inputs, and from its outputs back: one file for all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.errors import DataError, FileError, OptionError
from lapis.estimators.perceptron import Perceptron
from lapis.estimators.scaling import Scaling
from lapis.files import read, write
from lapis.options import UNREADABLE, check_arguments, checked_numbers, checked_tensor, shown
from lapis.posteriors.posterior import Posterior
from lapis.posteriors.storage import pack, unpack
from lapis.predictions import ClassificationPrediction, RegressionPrediction
from lapis.schema import entry, sound, tensor, under, word, wrong

KIND = "predictor"


@dataclass(frozen=True)
class Values:
    """A prediction of real targets, in their own units; each (N, D)."""

    mean: Tensor
    std: Tensor
    """Of a new target: doubt about the function, and noise."""
    epistemic_std: Tensor
    """Of the function alone."""
    lower: Tensor
    upper: Tensor
    log_prob: Tensor | None = None
    """log p(y | x) of each example's targets, (N,), if these were given."""


@dataclass(frozen=True)
class Classes:
    """A prediction of classes."""

    probs: Tensor
    """(N, C), in the order of the predictor's classes."""
    entropy: Tensor
    """All uncertainty about the class, in nats: (N,)."""
    mutual_information: Tensor
    """The part that more data would reduce: (N,)."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """What a prediction needs, as data. The network is a perceptron, whose architecture is in the file, or any other,
    which `load_predictor` must be given: a file never says which code to run.
    """

    posterior: Posterior
    task: Literal["regression", "classification"]
    classes: tuple[Any, ...] = ()
    """Of a classifier, in the order of the outputs: strings, numbers or booleans."""
    inputs: Scaling | None = None
    targets: Scaling | None = None
    architecture: Perceptron | None = None
    table: dict[str, Any] = field(default_factory=dict)
    """What JSON can hold about the table that the inputs came from: names of columns, and so on."""

    def prepared(self, x: Any) -> Tensor:
        """Inputs of the network from numbers (N, D), in the network's dtype; token indices stay whole numbers."""
        rows = _as_numbers(x)
        if self.inputs is None and not rows.is_floating_point():
            return rows
        if self.inputs is not None:
            if rows.dim() != 2 or rows.shape[1] != len(self.inputs.mean):
                raise DataError(
                    "The inputs do not fit",
                    expected=f"{len(self.inputs.mean)} columns",
                    got=f"shape {tuple(rows.shape)}",
                    do="pass the columns of the fit",
                )
            rows = self.inputs.apply(rows.double())
        return rows.to(self.posterior.network.dtype)

    def values(
        self, x: Any, *, level: float = 0.95, targets: Tensor | None = None, progress: bool | None = None
    ) -> Values:
        """The prediction of real targets; intervals hold a new target with probability `level`."""
        check_arguments(Predictor.values, locals())
        found = self.posterior.predict(self.prepared(x), progress=progress)
        if not isinstance(found, RegressionPrediction):
            raise self._other_task("regression")
        scaling = self.targets or Scaling(torch.zeros(1).double(), torch.ones(1).double())

        def columns(values: Tensor) -> Tensor:
            return values.detach().double().reshape(len(values), -1)

        lower, upper = (scaling.undo(columns(end)) for end in found.interval(level))
        density = None
        if targets is not None:
            if columns(checked_numbers("targets", targets)).shape != columns(found.mean).shape:
                raise DataError(
                    "The targets do not fit",
                    expected=f"{tuple(columns(found.mean).shape)}",
                    got=f"shape {tuple(targets.shape)}",
                    do="pass the targets of these inputs",
                )
            scaled = scaling.apply(columns(targets)).to(found.mean.dtype).reshape(found.mean.shape)
            width = columns(found.mean).shape[1]
            density = found.log_prob(scaled).detach().double() - scaling.scale.log().expand(width).sum()
        return Values(
            mean=scaling.undo(columns(found.mean)),
            std=scaling.scale * columns(found.std),
            epistemic_std=scaling.scale * columns(found.epistemic_variance).clamp_min(0).sqrt(),
            lower=lower,
            upper=upper,
            log_prob=density,
        )

    def probabilities(self, x: Any, *, progress: bool | None = None) -> Classes:
        """The prediction of classes."""
        check_arguments(Predictor.probabilities, locals())
        found = self.posterior.predict(self.prepared(x), progress=progress)
        if not isinstance(found, ClassificationPrediction):
            raise self._other_task("classification")
        probs = found.probs.detach().double().reshape(len(found.probs), -1)
        if probs.shape[1] == 1:  # one logit: the probability of the second class
            probs = torch.cat([1 - probs, probs], 1)
        entropy, information = (v.detach().double().reshape(-1) for v in (found.entropy, found.mutual_information))
        return Classes(probs, entropy, information)

    def _other_task(self, expected: str) -> OptionError:
        do = "use probabilities(x)" if expected == "regression" else "use values(x)"
        return OptionError("This predictor has another task", expected=expected, got=self.task, do=do)

    def packed(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a file holds: a config that JSON can hold, and tensors."""
        config, held = pack(self.posterior)
        tensors = {f"posterior.{name}": found for name, found in held.items()}
        tensors |= {f"model.{name}": found for name, found in _state(self.posterior.network.module).items()}
        for name, scaling in (("inputs", self.inputs), ("targets", self.targets)):
            if scaling is not None:
                tensors |= {f"{name}.mean": scaling.mean, f"{name}.scale": scaling.scale}
        return {
            "task": self.task,
            "classes": list(self.classes),
            "architecture": None if self.architecture is None else self.architecture.to_config(),
            "table": self.table,
            "posterior": config,
        }, tensors

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all to one file of tensors and JSON, for `load_predictor`."""
        write(path, *self.packed(), kind=KIND)

    def with_table(self, table: dict[str, Any]) -> Predictor:
        """The same with other facts about its table."""
        check_arguments(Predictor.with_table, locals())
        return replace(self, table=table)


def load_predictor(path: str | os.PathLike[str], model: nn.Module | None = None) -> Predictor:
    """The predictor saved at `path`; `model` is a network of the architecture that was fitted, unless the file has it.

    Its weights are overwritten by those of the file.
    """
    check_arguments(load_predictor, locals())
    contents = read(Path(path), KIND)
    contents.check_seal("")
    return unpacked(contents.config, contents.tensors, str(path), model)


def unpacked(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str, model: nn.Module | None = None
) -> Predictor:
    """The inverse of `Predictor.packed`; errors call the file `where`."""
    described = entry(config, "architecture", dict | None)
    architecture = None if described is None else Perceptron.from_config(described)
    if model is None:
        if architecture is None:
            raise FileError(
                f"{where} does not say how its network is built",
                expected="the network: a file holds numbers, never code",
                got="none",
                do="pass the model of the fit (--model package.module:callable)",
            )
        model = architecture.build()
    _load_state(model, under("model.", tensors), where)
    with sound("predictor"):
        task: Literal["regression", "classification"] = "regression"
        if word(config, "task", ("regression", "classification")) == "classification":
            task = "classification"
        classes = tuple(entry(config, "classes", list[str | bool | int | float]))
        posterior = unpack(entry(config, "posterior", dict), under("posterior.", tensors), model, where)
        return Predictor(
            posterior, task, classes, _scaling(tensors, "inputs"), _scaling(tensors, "targets"), architecture,
            entry(config, "table", dict),
        )  # fmt: skip


def _as_numbers(x: Any) -> Tensor:
    try:
        rows = x if isinstance(x, Tensor) else torch.as_tensor(x)
    except UNREADABLE as error:  # what each of torch's converters raises
        raise DataError("These are no inputs", expected="numbers (N, D)", got=shown(x), do="convert them") from error
    return checked_tensor("x", rows)


def _scaling(tensors: Mapping[str, Tensor], name: str) -> Scaling | None:
    if f"{name}.mean" not in tensors:
        return None
    mean = tensor(tensors, f"{name}.mean", (-1,))
    return Scaling(mean, tensor(tensors, f"{name}.scale", mean.shape, least=0, above=True))


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: held for name, held in module.state_dict().items() if isinstance(held, Tensor)}


def _load_state(model: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Write the file's weights into the network; FileError unless names and shapes are those of the network."""
    own = _state(model)
    for name in {**own, **state}:
        one, two = own.get(name), state.get(name)
        if one is None or two is None or one.shape != two.shape:
            raise FileError(
                f"{where} belongs to another network",
                expected=f"no entry {name!r}" if two is None else f"{name!r} of shape {tuple(two.shape)}",
                got="none" if one is None else f"shape {tuple(one.shape)}",
                do="build the network that was fitted",
            )
    if any(held.is_floating_point() and not bool(torch.isfinite(held).all()) for held in state.values()):
        raise wrong("model", "finite weights", "NaN or infinity")
    dtypes = {held.dtype for held in state.values() if held.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    model.load_state_dict(dict(state))
