"""Tables in files: csv, npz and parquet, read and written as named columns. Nothing in them is ever executed."""

from __future__ import annotations

import csv
import importlib
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lapis.errors import DataError, LapisWarning, OptionError
from lapis.files import check_writable

Column: TypeAlias = npt.NDArray[Any]
"""Numbers (float64, int64, bool) or strings (object, None where missing), one for each row; or arrays (N, ...)."""

FORMATS = (".csv", ".tsv", ".npz", ".parquet")
MISSING = ("", "na", "n/a", "nan", "null", "none")


def read_table(path: Path) -> dict[str, Column]:
    """The columns of a file, by name, all of one length."""
    if not path.is_file():
        got = "a folder" if path.is_dir() else "nothing there"
        raise DataError(f"There is no file {path}", expected="a table", got=got, do="check the path")
    try:
        columns = {".csv": _read_csv, ".tsv": _read_csv, ".npz": _read_npz, ".parquet": _read_parquet}[
            path.suffix.lower()
        ](path)
    except KeyError as error:
        raise _unknown(path) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} cannot be read", expected="text in UTF-8", got=f"another encoding, or no text ({error.reason})",
            do="save it as UTF-8",
        ) from error  # fmt: skip
    except (ValueError, OSError, csv.Error) as error:
        raise DataError(
            f"{path} cannot be read",
            expected=f"a {path.suffix} file of numbers and words",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            do="leave pickled objects out" if path.suffix.lower() == ".npz" else "mend the file, or export it again",
        ) from error
    if not columns or not len(next(iter(columns.values()))):
        raise DataError(f"{path} is empty", expected="a header and at least one row", got="none", do="check the file")
    return columns


def write_table(path: Path, columns: Mapping[str, Column]) -> None:
    """Write columns to a file, in the format of its suffix; "-" is csv on standard output."""
    if str(path) == "-":
        _write_csv(sys.stdout, columns, ",")
    elif path.suffix.lower() in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            _write_csv(file, columns, "\t" if path.suffix.lower() == ".tsv" else ",")
    elif path.suffix.lower() == ".npz":
        _write_npz(path, columns)
    elif path.suffix.lower() == ".parquet":
        _write_parquet(path, columns)
    else:
        raise _unknown(path)


def check_output(out: Path, *inputs: Path | None) -> None:
    """An error, before any work, if `out` cannot be written or is one of the files that are read."""
    check_writable(out)
    if any(path is not None and path.resolve() == out.resolve() for path in inputs):
        raise OptionError(
            f"{out} would be overwritten", expected="a file of its own for the result (--out)", got="a file to read",
            do="choose another name",
        )  # fmt: skip


def _unknown(path: Path) -> DataError:
    return DataError(
        f"{path} is of no known format", expected=", ".join(FORMATS), got=path.suffix or "no suffix", do="convert it"
    )


# csv -----------------------------------------------------------------------------------------------------


def _read_csv(path: Path) -> dict[str, Column]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        first = file.readline()
        file.seek(0)
        delimiter = max("\t;,", key=first.count) if first else ","
        rows = [row for row in csv.reader(file, delimiter=delimiter) if row]
    if len(rows) < 2:
        return {}
    names, cells = [name.strip() for name in rows[0]], rows[1:]
    twice = {name for name in names if names.count(name) > 1}
    if twice or "" in names:
        raise ValueError(f"a header with {'the same name twice: ' + min(twice) if twice else 'a nameless column'}")
    for number, row in enumerate(cells, 2):
        if len(row) != len(names):
            raise ValueError(f"line {number} has {len(row)} cells, the header {len(names)}")
    return {name: _column([row[i].strip() for row in cells]) for i, name in enumerate(names)}


def _column(cells: list[str]) -> Column:
    """Whole numbers, numbers or booleans if all cells are, else strings; numbers that are missing are NaN."""
    known = [cell for cell in cells if cell.lower() not in MISSING]
    if known and all(cell.lower() in ("true", "false") for cell in known) and len(known) == len(cells):
        return np.array([cell.lower() == "true" for cell in cells])
    try:
        numbers = [float(cell) for cell in known]
    except ValueError:
        words = [None if cell.lower() in MISSING else cell for cell in cells]
        return np.array(words, dtype=object)
    if len(known) == len(cells) and all(cell.lstrip("+-").isdigit() for cell in known):
        whole = [int(cell) for cell in cells]
        if max(map(abs, whole)) < 2**63:  # larger ones are no int64
            return np.array(whole)
    found = iter(numbers)
    return np.array([float("nan") if cell.lower() in MISSING else next(found) for cell in cells])


def _write_csv(file: Any, columns: Mapping[str, Column], delimiter: str) -> None:
    flat = flattened(columns)
    writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
    writer.writerow(flat)
    for row in zip(*(column.tolist() for column in flat.values()), strict=True):
        writer.writerow("" if cell is None else cell for cell in row)


def flattened(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Arrays (N, ...) as columns of their own: `x` as `x[0]`, `x[1]`, and so on."""
    flat: dict[str, Column] = {}
    for name, column in columns.items():
        if column.ndim == 1:
            flat[name] = column
        else:
            rows = column.reshape(len(column), -1)
            flat |= {f"{name}[{i}]": rows[:, i] for i in range(rows.shape[1])}
    return flat


# npz -----------------------------------------------------------------------------------------------------


def _read_npz(path: Path) -> dict[str, Column]:
    """Arrays as long as the longest; others (names, indices of splits) are left out, and a note says so."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    length = max((len(array) for array in arrays.values() if array.ndim), default=0)
    kept = {
        name: array.astype(object) if array.dtype.kind in "US" else array
        for name, array in arrays.items()
        if array.ndim and len(array) == length
    }
    others = [name for name in arrays if name not in kept]
    if others:
        listed = ", ".join(others[:4]) + (", ..." if len(others) > 4 else "")
        warnings.warn(f"Arrays without {length:,} rows are no columns: {listed}", LapisWarning, stacklevel=2)
    return kept


def _write_npz(path: Path, columns: Mapping[str, Column]) -> None:
    """As numpy.savez does, which cannot name an array "file"."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, column in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.ascontiguousarray(_plain(column)), allow_pickle=False)


def _plain(column: Column) -> Column:
    """Strings as numpy's own, which take no pickle."""
    return np.array(["" if cell is None else str(cell) for cell in column]) if column.dtype == object else column


# parquet -------------------------------------------------------------------------------------------------


def _parquet() -> Any:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise OptionError(
            "Parquet files need a package that is not installed",
            expected="pyarrow",
            got="none",
            do="pip install 'lapis-bayes[parquet]', or convert the file to csv",
        ) from error


def _read_parquet(path: Path) -> dict[str, Column]:
    _, parquet = _parquet()
    table = parquet.read_table(path)
    columns = {}
    for name in table.column_names:
        cells = table.column(name).to_pylist()
        if all(isinstance(cell, bool) for cell in cells):
            columns[name] = np.array(cells)
        elif all(cell is None or isinstance(cell, (int, float)) for cell in cells):
            columns[name] = np.array([float("nan") if cell is None else cell for cell in cells])
        else:
            columns[name] = np.array([None if cell is None else str(cell) for cell in cells], dtype=object)
    return columns


def _write_parquet(path: Path, columns: Mapping[str, Column]) -> None:
    pyarrow, parquet = _parquet()
    parquet.write_table(pyarrow.table({name: column.tolist() for name, column in flattened(columns).items()}), path)
