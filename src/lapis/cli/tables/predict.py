"""`lapis predict`: columns with a prediction and its uncertainty, beside those of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from lapis.cli.shell import AsJson, as_json, grid, readable, say
from lapis.cli.tables.columns import Columns
from lapis.cli.tables.files import FORMATS, Column, read_table, write_table
from lapis.cli.tables.fit import Data
from lapis.cli.tables.networks import make_network
from lapis.errors import FileError, OptionError
from lapis.estimators import Predictor, load_predictor
from lapis.files import check_writable
from lapis.options import check_between

PROBABILITY = "probability_"

SHOWN = 10
"""Rows on the screen when no file is asked for."""

File = Annotated[Path, typer.Argument(help="File written by lapis fit.", show_default=False)]
Model = Annotated[
    str | None, typer.Option(help="package.module:callable, if the file is of a network of yours.", show_default=False)
]
Level = Annotated[float, typer.Option(help="Probability that an interval holds a new target.")]


@readable
def predict(
    file: File,
    data: Data,
    out: Annotated[
        Path | None, typer.Option(help="Table to write (csv, npz, parquet); - writes csv to standard output.")
    ] = None,
    model: Model = None,
    level: Level = 0.95,
    json: AsJson = False,
) -> None:
    """Predict every row of a table: mean, deviation and interval, or probabilities, with their uncertainty."""
    check_between("level", level, 0, 1)
    if str(out) == "-" and json:
        raise OptionError(
            "Two results for standard output", expected="--out - or --json", got="both", do="leave one of them out"
        )
    if out is not None and str(out) != "-":
        if out.suffix.lower() not in FORMATS:
            raise OptionError(
                f"Cannot write {out}", expected=", ".join(FORMATS), got=out.suffix or "no suffix",
                do="choose another name",
            )  # fmt: skip
        check_writable(out)
    predictor, columns = opened(file, model)
    table = read_table(data)
    added = predicted(predictor, columns, table, level)
    if out is not None:
        write_table(out, {**table, **added})
    if json:
        as_json({name: column.tolist() for name, column in added.items()} if out is None else {"file": str(out)})
    elif out is None:
        brief = _brief(added)
        rows = list(zip(*(column.tolist() for column in brief.values()), strict=True))
        grid(["row", *brief], [[i, *row] for i, row in enumerate(rows[:SHOWN], 1)])
        if len(rows) > SHOWN or len(brief) < len(added):
            say(f"[dim]The first {min(SHOWN, len(rows))} of {len(rows):,} rows; --out FILE writes all, in full.[/]")
    elif str(out) != "-":
        say(f"{len(next(iter(added.values()))):,} rows with {', '.join(added)}: {out}")


def _brief(added: dict[str, Column]) -> dict[str, Column]:
    """Of many classes, the probability of the one that is predicted."""
    probabilities = [name for name in added if name.startswith(PROBABILITY)]
    if not probabilities:
        return added
    first, *others = (name for name in added if name not in probabilities)
    largest = np.max([added[name] for name in probabilities], 0)
    return {first: added[first], "probability": largest} | {name: added[name] for name in others}


def opened(file: Path, model: str | None) -> tuple[Predictor, Columns]:
    """A file of `lapis fit`, and the columns that it takes."""
    predictor = load_predictor(file, None if model is None else make_network(model))
    if not predictor.table:
        raise FileError(
            f"{file} knows no columns", expected="a file written by lapis fit", got="one saved from Python",
            do="load it in Python: lapis.estimators.load_predictor",
        )  # fmt: skip
    return predictor, Columns.from_config(predictor.table)


def units_of(predictor: Predictor, columns: Columns) -> str:
    """What the numbers of the posterior itself are measured in, if that is not the column's own unit; else ""."""
    if predictor.targets is None:
        return ""
    mean, scale = (values.flatten().tolist() for values in (predictor.targets.mean, predictor.targets.scale))
    shown = ", ".join(f"({columns.target} - {m:.4g}) / {s:.4g}" for m, s in zip(mean, scale, strict=True))
    return f"Targets, errors and noise are in the units of the network, which are {shown}."


def predicted(
    predictor: Predictor, columns: Columns, table: dict[str, Column], level: float = 0.95
) -> dict[str, Column]:
    """The new columns."""
    inputs, name = columns.inputs(table), columns.target
    if predictor.task == "regression":
        found = predictor.values(inputs, level=level)
        parts = {
            "mean": found.mean, "std": found.std, "lower": found.lower, "upper": found.upper,
            "epistemic_std": found.epistemic_std,
        }  # fmt: skip
        return {
            f"{name}_{word}" if values.shape[1] == 1 else f"{name}[{i}]_{word}": values[:, i].numpy()
            for i in range(found.mean.shape[1])
            for word, values in parts.items()
        }
    classes = predictor.probabilities(inputs)
    labels = np.array([str(label) for label in predictor.classes], dtype=object)
    return {
        f"{name}_predicted": labels[classes.probs.argmax(1).numpy()],
        **{f"{PROBABILITY}{label}": classes.probs[:, i].numpy() for i, label in enumerate(labels)},
        "entropy": classes.entropy.numpy(),
        "mutual_information": classes.mutual_information.numpy(),
    }
