"""`lapis compare`: fitted files by their evidence, and by scores on new data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lapis.cli.shell import AsJson, as_json, counted, grid, readable, say
from lapis.cli.tables.evaluate import scores
from lapis.cli.tables.files import read_table
from lapis.cli.tables.predict import Model, opened
from lapis.errors import OptionError
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.training import compare as compare_posteriors

EVIDENCE = ("log_evidence", "probability", "effective_parameters", "weights")


@readable
def compare(
    files: Annotated[list[Path], typer.Argument(help="Files written by lapis fit.", show_default=False)],
    data: Annotated[Path | None, typer.Option(help="Table with targets, for scores beside the evidence.")] = None,
    model: Model = None,
    json: AsJson = False,
) -> None:
    """Compare fitted files: which model do the data speak for, and which predicts best?

    Evidences can be compared if all were fitted to the same rows.
    """
    if len(files) < 2 or len(set(files)) < len(files):
        raise OptionError(
            "There is nothing to compare", expected="two different files or more", got=", ".join(map(str, files)),
            do="fit another, say with --hidden 20",
        )  # fmt: skip
    opened_files = {str(file): opened(file, model) for file in files}
    posteriors = {name: predictor.posterior for name, (predictor, _) in opened_files.items()}
    known = {name: found for name, found in posteriors.items() if isinstance(found, LaplacePosterior)}
    table = compare_posteriors(known)
    result: dict[str, dict[str, Any]] = {
        name: {
            "log_evidence": table.log_evidence[i], "probability": table.probability[i],
            "effective_parameters": table.effective_parameters[i], "weights": table.n_weights[i],
        }
        for i, name in enumerate(table.names)
    }  # fmt: skip
    if data is not None:
        held_out = read_table(data)
        for name, (predictor, columns) in opened_files.items():
            result[name] |= scores(predictor, columns, held_out)
    if json:
        as_json(result)
        return
    ordered = sorted(result, key=lambda name: -result[name]["log_evidence"])
    first = next(iter(result.values()))
    scored = [key for key in first if key not in EVIDENCE and key not in ("mae", "interval_score", "auroc_of_mistakes")]
    short = [Path(name).name for name in ordered]
    names = short if len(set(short)) == len(short) else ordered
    for keys in filter(None, (EVIDENCE, scored)):  # one below the other: together they are wider than a screen
        grid(
            ["file", *(key.replace("effective_parameters", "effective").replace("_", " ") for key in keys)],
            [[name, *(result[path][key] for key in keys)] for name, path in zip(names, ordered, strict=True)],
        )
        say("")
    rows = counted(table.n_data, "row")
    say(f"[dim]probability: of each model, given the {rows}, if all were equally likely before.[/]")
