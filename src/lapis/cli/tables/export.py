"""`lapis export`: a fitted file as a program that runs without Lapis."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from lapis.cli.shell import AsJson, as_json, readable, say
from lapis.cli.tables.files import read_table
from lapis.cli.tables.predict import File, Model, opened
from lapis.errors import OptionError
from lapis.export import of_predictor, to_onnx, to_torch
from lapis.export.module import OUTPUTS

WRITERS = {".onnx": to_onnx, ".pt2": to_torch}


@readable
def export(
    file: File,
    out: Annotated[Path, typer.Option(help="Program to write: .onnx, or .pt2 of torch.export.")] = Path("model.onnx"),
    model: Model = None,
    data: Annotated[
        Path | None, typer.Option(help="Table, for the shape of arrays that a network of yours takes.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Write a fitted file as ONNX or as a torch program: probabilities, or mean, and uncertainty in one call.

    The linearised prediction, as lapis predict has it. Inputs are the columns in the order of the fit.
    """
    if out.suffix not in WRITERS:
        raise OptionError(
            f"Cannot write {out}", expected=" or ".join(WRITERS), got=out.suffix or "no suffix", do="rename it"
        )
    predictor, columns = opened(file, model)
    if data is None and columns.whole:
        raise OptionError(
            "The network takes an array, whose shape the file does not say", expected="--data TABLE", got="none",
            do="name the table of the fit",
        )  # fmt: skip
    width = len(columns.names) + sum(len(values) - 1 for values in columns.categories.values())
    rows = torch.zeros(2, width).double() if data is None else columns.inputs(read_table(data))[:2]
    dtype = predictor.posterior.network.dtype
    WRITERS[out.suffix](of_predictor(predictor), rows.to(dtype) if rows.is_floating_point() else rows, out)
    names = OUTPUTS[predictor.task]
    if json:
        as_json({"file": str(out), "inputs": width, "dtype": str(dtype).removeprefix("torch."), "outputs": list(names)})
    else:
        say(f"{out}: x ({width} columns, {str(dtype).removeprefix('torch.')}) -> {', '.join(names)}")
