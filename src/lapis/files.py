"""One file of tensors (safetensors) with JSON in its header, for posteriors and checkpoints alike.

A file says of which kind it is and carries a digest of all its contents. It is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lapis.errors import FileError

FORMAT = 2
"""Version of the layout; readers refuse all others. 1 was that of development versions before the contract."""


def write(
    path: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str = "posterior"
) -> None:
    """Write beside the target, then rename: a file that exists is whole.

    Args:
        config: anything JSON can hold.
        kind: what the file holds; `read` refuses a file of another kind.
    """
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps({"kind": kind, **config})
    target = Path(path)
    partial = _partial(target)
    try:
        version = str(FORMAT)
        header = {"format": version, "lapis": text, "digest": tensors_digest(held, f"{version} {text}")}
        save_file(held, partial, metadata=header)
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        raise _unwritable(target, str(error)) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def check_writable(path: str | os.PathLike[str]) -> None:
    """FileError unless `write` can write there: to be called before the work whose result the file will hold."""
    target = Path(path)
    if target.is_dir():
        raise _unwritable(target, "a folder")
    partial = _partial(target)
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise _unwritable(target, str(error)) from error


def _partial(target: Path) -> Path:
    """The file that is written first, then renamed to the target."""
    return target.with_name(target.name + f".{os.getpid()}.partial")


def _unwritable(target: Path, got: str) -> FileError:
    return FileError(
        f"Cannot write {target}",
        expected="a path in a folder that exists and can be written",
        got=got,
        do="choose another path",
    )


def read(path: Path, kind: str = "posterior") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors, after checking that the file is whole, unchanged, and of a known format and this kind."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise FileError(
            f"There is no file {path}",
            expected=f"a file that holds a Lapis {kind}",
            got="nothing at that path",
            do="check the path",
        ) from error
    except (SafetensorError, OSError) as error:
        raise FileError(
            f"{path} is not a whole Lapis {kind}",
            expected="a complete file, as Lapis wrote it",
            got=str(error),
            do="save it again, or copy it again; a checkpoint can be deleted to start anew",
        ) from error
    version = header.get("format", "")
    if version.isdecimal() and int(version) != FORMAT:
        newer = int(version) > FORMAT
        raise FileError(
            f"{path} was written by {'a newer' if newer else 'an older'} Lapis",
            expected=f"format {FORMAT}",
            got=f"format {version}",
            do="upgrade Lapis" if newer else "fit again and save anew; a checkpoint can be deleted to start anew",
        )
    text = header.get("lapis", "")
    if header.get("digest") != tensors_digest(tensors, f"{version} {text}"):
        raise FileError(
            f"{path} is not an unchanged Lapis {kind}",
            expected="contents that match the digest in the file",
            got="contents that do not" if text else "a file of another kind",
            do="use the original file",
        )
    config: dict[str, Any] = json.loads(text)
    found = config.pop("kind", None)
    if found != kind:
        raise FileError(
            f"{path} is not a Lapis {kind}",
            expected=f"a file that holds a {kind}",
            got=f"one that holds a {found}",
            do="choose another path",
        )
    return config, tensors


def tensors_digest(tensors: Mapping[str, Tensor], prefix: str = "") -> str:
    """SHA-256 of `prefix` and of names, shapes, dtypes and values, in the names' alphabetic order."""
    digest = hashlib.sha256(prefix.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
