"""Works that are cut short go on from their checkpoint to the same numbers, bit for bit. `killing.py` kills them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
