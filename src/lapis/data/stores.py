"""Where data sets are: a folder of the user's, or a cache that is filled by downloads with checksums."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lapis.errors import DataError
from lapis.options import check_arguments
from lapis.progress import track

Arrays = dict[str, npt.NDArray[Any]]

TIMEOUT = 30
CHUNK = 2**20


def folder() -> Path | None:
    """The user's folder of data sets, $LAPIS_DATA, or `shared/data` beside the repository if it exists; or None."""
    named = os.environ.get("LAPIS_DATA")
    beside = Path(__file__).parents[4] / "shared" / "data"
    return Path(named) if named else beside if beside.is_dir() else None


def cache() -> Path:
    """The folder of downloads: $LAPIS_CACHE, or `lapis` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("LAPIS_CACHE") or Path(base) / "lapis")


def stored(name: str, make: Callable[[], Arrays] | None = None) -> Arrays:
    """The arrays of `name`.npz, from $LAPIS_DATA or the cache; made, and kept in the cache, if it is in neither.

    Args:
        name: of the file, without its suffix; may contain a folder.
        make: downloads the data; without it a missing file is an error.
    """
    check_arguments(stored, locals())
    places = [place / f"{name}.npz" for place in (folder(), cache()) if place is not None]
    for path in places:
        if path.is_file():
            return _read(path)
    if make is None:
        raise DataError(
            f"There is no {name}.npz",
            expected="the file in $LAPIS_DATA",
            got=f"nothing at {' or '.join(map(str, places))}",
            do="set LAPIS_DATA to the folder that holds it",
        )
    arrays = make()
    _keep(places[-1], arrays)
    return arrays


def _read(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path} cannot be read", expected="arrays in an npz file", got=str(error), do="remove it, and try again"
        ) from error


def _keep(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write to the cache, whole or not at all; a cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.npz")
        try:
            np.savez(partial, **arrays)  # type: ignore[arg-type]
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def download(url: str, sha256: str | None = None) -> bytes:
    """What is at an address; DataError without a network, or if it is not what is expected."""
    pieces: list[bytes] = []
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            length = int(answer.headers.get("Content-Length") or 0)
            total = -(-length // CHUNK) or None
            for piece in track(iter(lambda: answer.read(CHUNK), b""), Path(url).name, total):
                pieces.append(piece)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise DataError(
            f"{url} cannot be downloaded",
            expected="a network, or the data set in $LAPIS_DATA",
            got=str(error),
            do="set LAPIS_DATA to a folder that holds it as npz, or try again online",
        ) from error
    content = b"".join(pieces)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise changed(url)
    return content


def check_arrays(what: str, arrays: Iterable[npt.NDArray[Any]], sha256: str) -> None:
    """DataError unless the bytes of the arrays, one after the other, have this checksum."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    if found.hexdigest() != sha256:
        raise changed(what)


def changed(what: str) -> DataError:
    return DataError(
        f"{what} is not what it was",
        expected="contents with the known checksum",
        got="others",
        do="download it by hand, look at it, and put it into $LAPIS_DATA",
    )
