"""`lapis report`: one page about fitted files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lapis.cli.shell import AsJson, as_json, readable, say
from lapis.cli.tables.columns import Columns, labelled
from lapis.cli.tables.files import check_output, read_table
from lapis.cli.tables.predict import File, Model, opened, units_of
from lapis.errors import DataError
from lapis.estimators import Predictor
from lapis.reports import report as write_report


@readable
def report(
    file: File,
    test: Annotated[Path | None, typer.Argument(help="Table with targets, best a new one.", show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
    data: Annotated[Path | None, typer.Option(help="Table that the file was fitted to.", show_default=False)] = None,
    unlike: Annotated[
        Path | None, typer.Option(help="Table of rows unlike those of the fit.", show_default=False)
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(help="File of another fit to the same columns; repeat for more.")
    ] = None,
    model: Model = None,
    title: Annotated[str | None, typer.Option(help="Of the page.", show_default=False)] = None,
    json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about a fitted file, readable offline, with interactive plots."""
    check_output(out, file, test, data, unlike, *(compare or ()))
    predictor, columns = opened(file, model)
    posteriors = {file.stem: predictor.posterior}
    for other in compare or ():
        second, theirs = opened(other, model)
        if theirs != columns or not _takes_the_same(predictor, second):
            raise DataError(
                f"{other} and {file} cannot be judged by the same table",
                expected="fits of the same columns, with inputs and targets on the same scale",
                got="others",
                do="make a page for each",
            )
        posteriors[str(other) if other.stem in posteriors else other.stem] = second.posterior
    units = units_of(predictor, columns)
    write_report(
        posteriors,
        out,
        data=_examples(predictor, columns, data),
        test=_examples(predictor, columns, test),
        out_of_distribution=None if unlike is None else predictor.prepared(columns.inputs(read_table(unlike))),
        title=title or f"{columns.target} ({file.name})",
        classes=[str(label) for label in predictor.classes] or None,
        notes=[units] if units else [],
    )
    if json:
        as_json({"file": str(out), "bytes": out.stat().st_size})
    else:
        say(f"Report: {out}")


def _examples(predictor: Predictor, columns: Columns, path: Path | None) -> object:
    return None if path is None else labelled(predictor, columns, read_table(path))


def _takes_the_same(one: Predictor, two: Predictor) -> bool:
    def meaning(predictor: Predictor) -> list[object]:
        scalings = [scaling for scaling in (predictor.inputs, predictor.targets) if scaling is not None]
        return [predictor.task, predictor.classes, [(s.mean.tolist(), s.scale.tolist()) for s in scalings]]

    return meaning(one) == meaning(two)
