"""`lapis experiment`: the experiments behind the documentation, by name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from lapis.cli.shell import grid, readable
from lapis.errors import OptionError

HELPERS = ("common", "__init__")


@readable
def experiment(
    name: Annotated[str | None, typer.Argument(help="Which one; all are listed if left out.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less work, to see that it runs.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed, where the experiment has one.")] = None,
) -> None:
    """Run an experiment of the repository's folder experiments/; it prints its table and writes docs/results/."""
    found = _found()
    if name is None:
        grid(["experiment", "what it shows"], [[each, _first_sentence(path)] for each, path in found.items()])
        return
    if name not in found:
        raise OptionError(
            f"There is no experiment {name!r}", expected=", ".join(found), got=name, do="choose one of these"
        )
    command = [sys.executable, str(found[name]), *(["--quick"] if quick else [])]
    command += [] if seed is None else ["--seed", str(seed)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise typer.Exit(code)


def _found() -> dict[str, Path]:
    """Experiments by name: of the current folder, or of the repository that this package is run from."""
    places = [Path.cwd() / "experiments", Path(__file__).parents[3] / "experiments"]
    folder = next((place for place in places if (place / "common.py").is_file()), None)
    if folder is None:
        raise OptionError(
            "There are no experiments here",
            expected="the folder experiments/ of Lapis' repository",
            got=str(Path.cwd()),
            do="clone the repository, and run the command in its folder",
        )
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem not in HELPERS}


def _first_sentence(path: Path) -> str:
    """Of the experiment's docstring, which may go over a line's end."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.) ", " ".join(text.split("\n\n")[0].split()))[0]
