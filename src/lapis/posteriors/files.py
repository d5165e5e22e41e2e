"""One file of numbers (safetensors) and JSON in its header, with a digest; written whole or not at all."""

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

FORMAT = 1
"""Version of the layout; readers refuse newer ones."""


def write(path: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write beside the target, then rename: a file that exists is whole."""
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(config)
    target = Path(path)
    partial = target.with_name(target.name + f".{os.getpid()}.partial")
    try:
        version = str(FORMAT)
        header = {"format": version, "lapis": text, "digest": _digest(version, text, held)}
        save_file(held, partial, metadata=header)
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"Cannot write {target}",
            expected="a path in a folder that exists and can be written",
            got=str(error),
            do="choose another path",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors, after checking that the file is whole, unchanged and of a known format."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise FileError(
            f"There is no file {path}",
            expected="a file written by posterior.save",
            got="nothing at that path",
            do="check the path",
        ) from error
    except (SafetensorError, OSError) as error:
        raise FileError(
            f"{path} is not a whole Lapis posterior",
            expected="a complete file written by posterior.save",
            got=str(error),
            do="save it again, or copy it again",
        ) from error
    text = header.get("lapis", "")
    version = header.get("format", "")
    if version.isdecimal() and int(version) > FORMAT:
        raise FileError(
            f"{path} was written by a newer Lapis",
            expected=f"format {FORMAT} or older",
            got=f"format {version}",
            do="upgrade Lapis",
        )
    if header.get("digest") != _digest(version, text, tensors):
        raise FileError(
            f"{path} is not an unchanged Lapis posterior",
            expected="contents that match the digest in the file",
            got="contents that do not" if text else "a file of another kind",
            do="use the original file",
        )
    config: dict[str, Any] = json.loads(text)
    return config, tensors


def _digest(version: str, text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(f"{version} {text}".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
