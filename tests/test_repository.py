"""The promises the repository makes about itself: what it installs, and that its files stay readable."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import lapis
from lapis import errors

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
LONGEST_FILE = 400
NEVER_INSTALLED = ("torchaudio", "torchvision")
BUILD_OF_TORCH = ("cuda-", "nvidia-", "pytorch-triton", "triton")
"""Packages that a CUDA build of torch brings along, at versions of its own choice."""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements() -> list[Requirement]:
    """Everything pyproject.toml asks for, to run and to develop."""
    extras = project()["optional-dependencies"]
    return [Requirement(line) for line in [*project()["dependencies"], *extras["dev"]]]


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def pins() -> dict[str, Version]:
    """Name to pinned version, for the Python that runs this test."""
    here = [c for c in constraints() if c.marker is None or c.marker.evaluate()]
    specifiers = {canonicalize_name(c.name): next(iter(c.specifier)) for c in here}
    return {name: Version(s.version) for name, s in specifiers.items() if s.operator == "=="}


def needed(wanted: list[Requirement]) -> Iterator[str]:
    """Names of all distributions that `wanted` pulls in here, each once."""
    waiting = [(requirement, "") for requirement in wanted]
    seen: set[str] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in seen:
            continue
        seen.add(name)
        yield name
        children = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        waiting += [(child, e) for child in children for e in ("", *requirement.extras)]


def test_pyproject_gives_torch_a_range() -> None:
    (torch_requirement,) = (r for r in requirements() if r.name == "torch")
    operators = {specifier.operator for specifier in torch_requirement.specifier}
    assert operators == {">="}, f"torch is pinned in pyproject.toml: {torch_requirement}"
    assert "+" not in str(torch_requirement.specifier)
    assert torch_requirement.url is None


def test_constraints_pin_torch() -> None:
    assert [str(c) for c in constraints() if c.name == "torch"] == ["torch==2.13.0"]


def test_every_installed_dependency_is_the_pinned_one() -> None:
    pinned = pins()
    installed = {name: Version(importlib.metadata.version(name)) for name in needed(requirements())}
    installed = {name: v for name, v in installed.items() if not name.startswith(BUILD_OF_TORCH)}
    assert sorted(installed.keys() - pinned.keys()) == [], "add these to constraints.txt"
    # The pin names the public version: 2.13.0+cpu is 2.13.0.
    others = {name: str(v) for name, v in installed.items() if Version(v.public) != pinned[name]}
    assert others == {}, "these differ from constraints.txt: run make again"


def test_every_constraint_is_a_pin_or_a_refusal() -> None:
    for constraint in constraints():
        assert not constraint.extras
        if canonicalize_name(constraint.name).startswith(NEVER_INSTALLED):
            assert str(constraint.specifier) == "<0", constraint
        else:
            (specifier,) = constraint.specifier
            assert specifier.operator == "==", constraint
            assert "*" not in specifier.version, constraint
            assert "+" not in specifier.version, constraint


def test_no_build_of_torch_is_pinned_or_forbidden() -> None:
    assert [c.name for c in constraints() if canonicalize_name(c.name).startswith(BUILD_OF_TORCH)] == []


def test_torchvision_is_not_installed() -> None:
    names = {canonicalize_name(d.name) for d in importlib.metadata.distributions()}
    assert [name for name in sorted(names) if name.startswith(NEVER_INSTALLED)] == []


def test_files_can_be_read_in_one_sitting() -> None:
    files = sorted((ROOT / "src" / "lapis").rglob("*.py"))
    assert files
    lengths = {str(f.relative_to(ROOT)): len(f.read_text(encoding="utf-8").splitlines()) for f in files}
    assert {name: n for name, n in lengths.items() if n >= LONGEST_FILE} == {}, "split these by subject"


def test_every_error_says_what_was_expected_what_came_and_what_to_do() -> None:
    names = {name for name in vars(errors) if name.endswith("Error")}
    found, missing = 0, []
    for file in sorted((ROOT / "src" / "lapis").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                found += 1
                if not {"expected", "got", "do"} <= {keyword.arg for keyword in node.keywords}:
                    missing.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert found > 50
    assert missing == []


def test_no_package_exports_a_name_of_one_of_its_modules() -> None:
    """Or `package.name` would be the function for some and the module for others."""
    found = []
    for init in sorted((ROOT / "src" / "lapis").rglob("__init__.py")):
        modules = {entry.stem for entry in init.parent.iterdir() if entry.suffix == ".py" or entry.is_dir()}
        package = ".".join(init.parent.relative_to(ROOT / "src").parts)
        held = vars(importlib.import_module(package))
        found += [f"{package}.{n}" for n in sorted(modules & held.keys()) if not inspect.ismodule(held[n])]
    assert found == []


def test_lapis_comes_with_metrics_and_with_plots_that_are_loaded_on_first_use() -> None:
    """matplotlib takes a noticeable part of a second to import, and most programs draw nothing."""
    script = (
        "import sys, lapis; assert lapis.metrics.auroc; assert 'matplotlib' not in sys.modules; "
        "assert lapis.plots.regression_band; assert 'matplotlib' in sys.modules; assert 'plots' in dir(lapis)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="no attribute 'plot'"):
        _ = lapis.plot


def test_every_file_of_the_package_is_installed() -> None:
    """Pages, styles and scripts too, not code alone."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    package = ROOT / "src" / "lapis"
    listed = {file for pattern in patterns["package-data"]["lapis"] for file in package.glob(pattern)}
    others = {file for file in package.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert others == listed


def test_package_is_marked_as_typed() -> None:
    assert (ROOT / "src" / "lapis" / "py.typed").is_file()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no executable bit")
def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "exec make test"


def test_each_worker_computes_on_one_thread() -> None:
    assert torch.get_num_threads() == 1
