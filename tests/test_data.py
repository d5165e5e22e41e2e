"""Data sets: where they are looked for, what a download must be, and splits and shifts that do what they say."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lapis
from lapis.data import repository, sets, stores, uci


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return gzip.compress(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny MNIST at a file address, and an empty cache."""
    place = tmp_path / "source"
    place.mkdir()
    generator = np.random.default_rng(0)
    arrays = [generator.integers(0, 256, shape, dtype=np.uint8) for shape in ((4, 28, 28), (4,), (2, 28, 28), (2,))]
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    for name, array in zip(names, arrays, strict=True):
        (place / f"{name}-ubyte.gz").write_bytes(idx(array))
    checksum = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    monkeypatch.setitem(sets.IDX, "mnist", (f"file://{place}/", checksum))
    # a folder that holds nothing: without the variable, data beside the repository would be found
    monkeypatch.setenv("LAPIS_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("LAPIS_CACHE", str(tmp_path / "cache"))
    return place


def test_a_download_is_checked_decoded_and_kept(source: Path) -> None:
    x, y = lapis.data.mnist("train")
    assert x.shape == (4, 1, 28, 28)
    assert float(x.max()) <= 1
    for file in source.iterdir():
        file.unlink()
    again, _ = lapis.data.mnist("train")
    assert torch.equal(again, x)
    assert y.dtype == torch.int64


def test_a_download_that_was_changed_is_refused_and_not_kept(source: Path, tmp_path: Path) -> None:
    (source / "t10k-labels-idx1-ubyte.gz").write_bytes(idx(np.array([9, 9], np.uint8)))
    with pytest.raises(lapis.DataError, match="is not what it was"):
        lapis.data.mnist("test")
    (source / "t10k-labels-idx1-ubyte.gz").write_bytes(b"<html>login please</html>")
    with pytest.raises(lapis.DataError, match="is not what it was"):
        lapis.data.mnist("test")
    assert not list((tmp_path / "cache").rglob("*.npz"))


def test_without_a_network_the_message_says_what_to_do(source: Path) -> None:
    for file in source.iterdir():
        file.unlink()
    with pytest.raises(lapis.DataError, match=r"cannot be downloaded.*LAPIS_DATA.*npz"):
        lapis.data.mnist()


def test_the_users_folder_comes_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPIS_DATA", str(tmp_path))
    np.savez(tmp_path / "mnist.npz", x_train=np.full((3, 28, 28), 255, np.uint8), y_train=np.arange(3))
    x, y = lapis.data.mnist()
    assert float(x.min()) == 1
    assert y.tolist() == [0, 1, 2]
    with pytest.raises(lapis.DataError, match=r"There is no nothing.npz.*LAPIS_DATA"):
        stores.stored("nothing")


def test_uci_downloads_get_the_published_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "yacht" / "data"
    place.mkdir(parents=True)
    rows = np.random.default_rng(0).normal(size=(20, 3))
    np.savetxt(place / "data.txt", rows, fmt="%.17g")
    np.savetxt(place / "index_features.txt", [0, 1])
    np.savetxt(place / "index_target.txt", [2])
    checksum = hashlib.sha256(rows[:, :2].tobytes() + rows[:, 2].tobytes()).hexdigest()
    monkeypatch.setitem(repository.SETS, "yacht", ("yacht", 3, checksum))
    monkeypatch.setattr(repository, "BASE", f"file://{tmp_path}/")
    monkeypatch.setenv("LAPIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LAPIS_DATA", str(tmp_path / "nothing"))
    found = uci("yacht")
    torch.testing.assert_close(found.x, torch.from_numpy(rows[:, :2]))
    assert [len(split.train) for split in found.splits] == [18, 18, 18]
    # the first split of 20 rows, by numpy's generator itself
    assert found.splits[0].test.tolist() == np.random.RandomState(1).permutation(20)[18:].tolist()
    with pytest.raises(lapis.OptionError, match="Unknown name"):
        uci("moon")


def test_gap_splits_leave_the_middle_third_of_each_column_out() -> None:
    x = torch.randn(31, 3, generator=torch.Generator().manual_seed(0))
    for column, split in enumerate(lapis.data.gap_splits(x)):
        values = x[:, column]
        assert sorted([*split.train.tolist(), *split.test.tolist()]) == list(range(31))
        low, high = values[split.test].min(), values[split.test].max()
        outside = values[split.train]
        assert bool(((outside < low) | (outside > high)).all())
        assert int((outside < low).sum()) == int((outside > high).sum()) == 10


def test_shifts_keep_the_shape_and_do_what_they_say() -> None:
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for shift in (*lapis.data.corruptions().values(), *lapis.data.rotations().values()):
        assert shift(x).shape == x.shape
    torch.testing.assert_close(lapis.data.rotated(x, 0.0), x)
    torch.testing.assert_close(lapis.data.rotated(x, 180.0), x.flip(2, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(lapis.data.moved(x, 0.125)[..., 1:, 1:], x[..., :-1, :-1])
    torch.testing.assert_close(lapis.data.faded(x, 0.5).std((1, 2, 3)), 0.5 * x.std((1, 2, 3)))
    assert float(lapis.data.blurred(x, 1.0).var()) < float(x.var())


def test_bundled_sets_need_no_files() -> None:
    assert lapis.data.digits()[0].shape == (1797, 1, 8, 8)
    assert lapis.data.diabetes()[0].shape == (442, 10)
    assert lapis.data.breast_cancer()[1].bincount().tolist() == [212, 357]
