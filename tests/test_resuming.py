"""Works that are cut short go on from their checkpoint to the same numbers, bit for bit. `killing.py` kills them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapis
from killing import WORKS, classifier, problem
from lapis import checkpoint as checkpoints


class Cut(BaseException):
    """The moment at which a work ends."""


@pytest.mark.filterwarnings("ignore::lapis.LapisWarning")  # searches that end before they converge
@pytest.mark.parametrize("name", ["laplace", "refine", "calibrate", "ensemble"])
def test_a_work_that_was_cut_short_ends_as_if_it_had_not_been(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SAVE_SECONDS", 0.0)
    written = 0
    most = -1
    write = checkpoints.write

    def counted(*arguments: object) -> None:
        nonlocal written
        write(*arguments)  # type: ignore[arg-type]
        written += 1
        if written == most:
            raise Cut

    monkeypatch.setattr(checkpoints, "write", counted)
    expected = WORKS[name](tmp_path / "alone.lapis")
    alone, written = written, 0
    most = (alone + 1) // 2
    with pytest.raises(Cut):
        WORKS[name](tmp_path / "cut.lapis")
    most = -1
    found = WORKS[name](tmp_path / "cut.lapis")
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert written <= alone + 1  # it went on, and did not begin anew


@pytest.mark.parametrize("structure", ["kronecker", "ekfac"])
def test_sums_go_on_with_the_same_bits_wherever_a_file_held_them(
    structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products are added in an order that depends on where in memory they begin, and files pack numbers closely."""
    monkeypatch.setattr(checkpoints, "SAVE_SECONDS", 0.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3)).eval()
    whole = [(torch.randn(30, 8), torch.randint(3, (30,))) for _ in range(20)]

    class Ending(list[tuple[torch.Tensor, torch.Tensor]]):
        passes = 0

        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            Ending.passes += 1
            yield from itertools.islice(super().__iter__(), 9)
            if Ending.passes == (1 if structure == "kronecker" else 2):
                raise Cut
            yield from itertools.islice(super().__iter__(), 9, None)

    def sums(data: Any, path: str) -> list[torch.Tensor]:
        options: Any = {"structure": structure, "weights": "all", "checkpoint": tmp_path / path}
        fit = lapis.laplace(model, data, "classification", **options)
        return [tensor for block in fit.curvature.blocks for tensor in block.state().values()]

    expected = sums(whole, "alone")
    with pytest.raises(Cut):
        sums(Ending(whole), "cut")
    assert all(torch.equal(one, two) for one, two in zip(sums(whole, "cut"), expected, strict=True))


@pytest.mark.filterwarnings("ignore::lapis.LapisWarning")
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SAVE_SECONDS", 0.0)
    posterior, x, y = classifier()
    posterior.refine((x, y), max_rounds=1, tolerance=1e-9, checkpoint=tmp_path / "refinement")
    with pytest.raises(lapis.FileError, match="another refinement"):
        posterior.with_prior(3.0).refine((x, y), max_rounds=1, checkpoint=tmp_path / "refinement")
    posterior.calibrate((x.flip(1), y), checkpoint=tmp_path / "calibration")
    with pytest.raises(lapis.FileError, match="another calibration"):
        posterior.calibrate((x.flip(1)[1:], y[1:]), checkpoint=tmp_path / "calibration")
    model, x, y = problem()
    options = {"structure": "diagonal", "weights": "all", "batch_size": 10, "checkpoint": tmp_path / "fit"}
    lapis.laplace(model, (x, y), "regression", **options)  # type: ignore[call-overload]
    with pytest.raises(lapis.DataError, match="changed since"):
        lapis.laplace(model, (x.flip(0), y), "regression", **options)  # type: ignore[call-overload]
    with pytest.raises(lapis.FileError, match="another fit"):
        lapis.laplace(model, (x, y), "binary", **options)  # type: ignore[call-overload]
    with pytest.raises(lapis.OptionError, match="no sum"):
        lapis.laplace(model, (x, y), "regression", structure="implicit", checkpoint=tmp_path / "fit")  # type: ignore[call-overload]
