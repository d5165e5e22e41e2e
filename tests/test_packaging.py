"""What people install: the distribution, what its wheel holds, and the ways to start the command."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from test_repository import ROOT, constraints, project

BACKEND = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


def built(source: Path, command: list[str], out: Path) -> Path:
    """The wheel of a copy of the sources, so that nothing is left beside them."""
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    out.mkdir()
    done = subprocess.run(command, cwd=source, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = out.iterdir()
    return wheel


@pytest.mark.parametrize("by", ["the backend", "python -m build"])
def test_the_wheel_holds_every_module_its_types_and_the_command(by: str, tmp_path: Path) -> None:
    out = tmp_path / "dist"
    if by == "python -m build":
        pytest.importorskip("build.__main__", reason="python -m build is installed by `make test-extras` only")
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    else:
        command = [sys.executable, "-c", BACKEND, str(out)]
    wheel = built(tmp_path / "source", command, out)
    assert wheel.name.startswith(f"lapis_bayes-{project()['version']}-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    sources = {f.relative_to(ROOT / "src").as_posix() for f in (ROOT / "src" / "lapis").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert "lapis/py.typed" in names
    assert "lapis = lapis.cli:app" in scripts
    assert re.search(r"^Name: lapis-bayes$", metadata, re.MULTILINE)
    assert {name.split("/")[0] for name in names} == {"lapis", info}


def test_python_m_lapis_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "lapis", "--help"], capture_output=True, encoding="utf-8", check=True)
    assert "Usage: lapis " in done.stdout


def test_every_extra_is_in_all_and_pinned() -> None:
    extras = project()["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.name == project()["name"]
    assert everything.extras == extras.keys() - {"all", "dev"}
    pinned = {canonicalize_name(constraint.name) for constraint in constraints()}
    wanted = {Requirement(line).name for name, lines in extras.items() if name != "all" for line in lines}
    assert sorted(canonicalize_name(name) for name in wanted if canonicalize_name(name) not in pinned) == []


def test_the_version_is_that_of_the_installed_distribution() -> None:
    import lapis

    try:
        installed = importlib.metadata.version(project()["name"])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from sources that are not installed: make sets them up")
    assert lapis.__version__ == installed
