"""From columns of a table to numbers: which columns are inputs, what they may hold, and what is the target."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapis.cli.tables.files import Column, flattened
from lapis.errors import DataError, OptionError
from lapis.estimators import Predictor
from lapis.likelihoods import Bernoulli
from lapis.schema import entry

MANY = 50
"""A column of words with more different ones is no category."""

CLASSES = 20
"""Whole numbers 0 .. K-1 with K up to this are taken for classes, unless a likelihood is named."""


@dataclass(frozen=True)
class Columns:
    """Inputs by name, in order; a column of words has its categories, and becomes one indicator for each."""

    names: tuple[str, ...]
    categories: dict[str, tuple[str, ...]]
    target: str
    whole: bool = False
    """Whether the one input is an array that a network takes as it is."""

    @staticmethod
    def of(table: Mapping[str, Column], target: str, leave_out: Sequence[str] = (), *, whole: bool = False) -> Columns:
        """All columns but the target and those left out; `whole` keeps a single array (N, ...) as it is."""
        for name in (target, *leave_out):
            if name not in table:
                raise _missing(name, table)
        inputs = {name: column for name, column in table.items() if name not in (target, *leave_out)}
        if not inputs:
            raise DataError(
                "There are no inputs", expected="a column besides the target", got=", ".join(table), do="add some"
            )
        if whole and len(inputs) == 1 and next(iter(inputs.values())).ndim > 1:
            return Columns(tuple(inputs), {}, target, whole=True)
        flat = flattened(inputs)
        categories = {name: _categories(name, column) for name, column in flat.items() if column.dtype == object}
        return Columns(tuple(flat), categories, target)

    def inputs(self, table: Mapping[str, Column]) -> Tensor:
        """Numbers (N, D) in float64; or the array, if that is what the network takes."""
        if self.whole:
            (name,) = self.names
            if name not in table:
                raise _missing(name, table)
            return _tensor(table[name])
        flat = flattened(table)
        for name in self.names:
            if name not in flat:
                raise _missing(name, flat)
        parts = [
            self._indicators(name, flat[name]) if name in self.categories else _numbers(name, flat[name])
            for name in self.names
        ]
        return torch.from_numpy(np.concatenate(parts, 1))

    def _indicators(self, name: str, column: Column) -> Column:
        known = {value: i for i, value in enumerate(self.categories[name])}
        found = np.zeros((len(column), len(known)))
        for row, value in enumerate(column):
            if value is None or str(value) not in known:
                raise DataError(
                    f"Column {name!r} has an unknown value in row {row + 1}",
                    expected=", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else ""),
                    got="nothing" if value is None else repr(str(value)),
                    do="leave that row out, or fit again with such rows",
                )
            found[row, known[str(value)]] = 1
        return found

    def to_config(self) -> dict[str, Any]:
        categories = {name: list(values) for name, values in self.categories.items()}
        return {"names": list(self.names), "categories": categories, "target": self.target, "whole": self.whole}

    @staticmethod
    def from_config(config: Any) -> Columns:
        """From a file, checked."""
        categories = entry(config, "categories", dict[str, list[str]])
        return Columns(
            tuple(entry(config, "names", list[str])),
            {name: tuple(values) for name, values in categories.items()},
            entry(config, "target", str),
            entry(config, "whole", bool),
        )


def task_of(column: Column) -> str:
    """Words, booleans, and whole numbers 0 .. K-1 are classes; other numbers are real targets."""
    if column.dtype == object or column.dtype == bool:
        return "classification"
    values = np.unique(column)
    classes = column.dtype.kind in "iu" and 2 <= len(values) <= CLASSES
    return "classification" if classes and np.array_equal(values, np.arange(len(values))) else "regression"


def real_targets(name: str, column: Column) -> Tensor:
    """Real numbers (N, K); a DataError names the first row without one."""
    return torch.from_numpy(_numbers(name, column.reshape(len(column), -1) if column.dtype != object else column))


def class_values(name: str, column: Column) -> list[Any]:
    """A class for each row, as JSON can hold it: a word, a number or a boolean."""
    if column.ndim > 1:
        column = column.reshape(len(column), -1)[:, 0]
    values = [str(value) if isinstance(value, str) else value for value in column.tolist()]
    for row, value in enumerate(values):
        if value is None or value != value:
            raise _no_number(name, row, "nothing", "a class")
    return values


def class_indices(name: str, values: Sequence[Any], classes: Sequence[Any]) -> Tensor:
    """The index of each row's class; classes may come as numbers or as words."""
    known = {str(value): i for i, value in enumerate(classes)}
    for row, value in enumerate(values):
        if str(value) not in known:
            expected = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
            raise DataError(
                f"Column {name!r} has an unknown class in row {row + 1}", expected=expected, got=repr(value),
                do="leave that row out",
            )  # fmt: skip
    return torch.tensor([known[str(value)] for value in values])


def _categories(name: str, column: Column) -> tuple[str, ...]:
    values = sorted({str(value) for value in column if value is not None})
    if len(values) > MANY and all(re.fullmatch(r"[+-]?\d*,\d+", value) for value in values):
        raise DataError(
            f"Column {name!r} has decimal commas", expected="decimal points, as in 1.5", got=values[0],
            do="export the table with points",
        )  # fmt: skip
    if not values or len(values) > MANY:
        raise DataError(
            f"Column {name!r} is no category",
            expected=f"numbers, or up to {MANY} different words",
            got=f"{len(values)} different words",
            do=f"leave it out (--leave-out {name!r}), or encode it",
        )
    return tuple(values)


def _numbers(name: str, column: Column) -> Column:
    """(N, K) float64."""
    if column.dtype == object:
        row = next(i for i, value in enumerate(column) if value is None or isinstance(value, str))
        raise _no_number(name, row, repr(column[row]) if column[row] is not None else "nothing", "a number")
    values = np.asarray(column, dtype=np.float64).reshape(len(column), -1)
    bad = ~np.isfinite(values).all(1)
    if bad.any():
        raise _no_number(
            name, int(bad.argmax()), "nothing, or infinity", f"a number (rows without one: {int(bad.sum())})"
        )
    return values


def _no_number(name: str, row: int, got: str, expected: str) -> DataError:
    return DataError(
        f"Column {name!r} has no value that can be used in row {row + 1}", expected=expected, got=got,
        do="fill in or drop such rows, or leave the column out (--leave-out)",
    )  # fmt: skip


def _missing(name: str, table: Mapping[str, Column]) -> OptionError:
    names = list(table)
    shown = ", ".join(names[:12]) + (f", ... ({len(names)} columns)" if len(names) > 12 else "")
    return OptionError(f"There is no column {name!r}", expected=shown, got=repr(name), do="check the name")


def _tensor(array: Column) -> Tensor:
    """An array as a network takes it: counts and token indices stay whole numbers, pixels (uint8) become floats."""
    kept = array.astype(np.int64) if array.dtype.kind in "iu" and array.dtype != np.uint8 else array.astype(np.float64)
    return torch.from_numpy(kept)


def labelled(predictor: Predictor, columns: Columns, table: Mapping[str, Column]) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a table as the predictor's posterior takes them."""
    inputs, name = columns.inputs(table), columns.target
    if name not in table:
        raise _missing(name, table)
    if predictor.task == "classification":
        targets = class_indices(name, class_values(name, table[name]), predictor.classes)
    else:
        targets = real_targets(name, table[name])
        targets = targets if predictor.targets is None else predictor.targets.apply(targets)
    if predictor.task == "regression" or isinstance(predictor.posterior.likelihood, Bernoulli):
        targets = targets.to(predictor.posterior.network.dtype)
    return predictor.prepared(inputs), targets
