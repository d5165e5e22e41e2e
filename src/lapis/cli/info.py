"""`lapis info`: what a file holds, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lapis.cli.shell import AsJson, as_json, facts, readable
from lapis.cli.tables.fit import summary
from lapis.errors import FileError
from lapis.estimators.predictor import KIND, load_predictor
from lapis.files import Contents, kind_of, read


@readable
def info(
    file: Annotated[Path, typer.Argument(help="Any file that Lapis wrote.", show_default=False)], json: AsJson = False
) -> None:
    """Say what a file holds: kind, network, data, evidence."""
    contents = read(file, kind_of(file) or "file")
    result = {"kind": contents.kind, "bytes": file.stat().st_size} | described(contents)
    if json:
        as_json(result)
        return
    facts({name.replace("_", " "): value for name, value in result.items()})


def described(contents: Contents) -> dict[str, Any]:
    """What the contents say; a network that the file does not hold is not needed."""
    config = contents.config
    if contents.kind == KIND:
        try:
            return summary(load_predictor(contents.path))
        except FileError:  # of a network that the file does not describe
            inner = _posterior(config.get("posterior", {}))
            return {name: config[name] for name in ("task", "classes") if config.get(name)} | inner
    if "posterior" in config and "facts" in config:
        return _posterior(config)
    return {"entries": ", ".join(sorted(config)), "tensors": len(contents.tensors)}


def _posterior(config: dict[str, Any]) -> dict[str, Any]:
    facts_of_fit = config.get("facts", {})
    likelihood = config.get("likelihood", {}).get("name")
    shapes = config.get("shapes", {})
    return {
        "posterior": config.get("posterior"), "likelihood": likelihood, "rows": facts_of_fit.get("n_data"),
        "outputs": facts_of_fit.get("n_outputs"), "inputs": facts_of_fit.get("signature"),
        "parameters": ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items()),
        "dtype": config.get("dtype"),
    }  # fmt: skip
