"""`lapis diagnose`: what a careful statistician would check, in plain words."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from lapis.cli.shell import AsJson, as_json, readable
from lapis.cli.tables.columns import labelled
from lapis.cli.tables.files import read_table
from lapis.cli.tables.predict import File, Model, opened, units_of


@readable
def diagnose(
    file: File,
    data: Annotated[Path | None, typer.Argument(help="Table with targets, best a new one.", show_default=False)] = None,
    model: Model = None,
    json: AsJson = False,
) -> None:
    """Check a fitted file: prior, noise, calibration, doubt; each finding with what to do about it."""
    predictor, columns = opened(file, model)
    examples = None if data is None else labelled(predictor, columns, read_table(data))
    report = predictor.posterior.diagnose(examples)
    if json:
        scale = [] if predictor.targets is None else predictor.targets.scale.flatten().tolist()
        as_json({"findings": report.findings, "numbers": report.numbers, "target_units": scale or None})
    else:
        typer.echo(str(report))
        if units := units_of(predictor, columns):
            typer.echo("\n" + textwrap.fill(units, 79))
