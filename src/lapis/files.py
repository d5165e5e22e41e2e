"""One file of tensors (safetensors) with JSON in its header, for posteriors and checkpoints alike.

A file says of which kind it is and carries a digest of all its contents, and a *seal*: that digest signed with a key
that only those have who hold what the file is about (the network's weights, the data). It is written whole or not at
all, beside the target first; what is not a regular file is never replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lapis.errors import FileError
from lapis.hashing import flat_bytes

FORMAT = 4
"""Version of the layout; readers refuse all others. 3 had other fingerprints; 2 had no seals, and fingerprints that saw
some of the data only."""

READ_ERRORS = (SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError, AttributeError)
"""Raised by readers of safetensors and of JSON for contents that they were not made for."""

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors files."""

_writing: set[str] = set()
"""Names of the partial files that this process is writing."""


@dataclass(frozen=True)
class Contents:
    """What a whole and unchanged file holds; whether somebody else wrote it `check_seal` tells."""

    path: Path
    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str
    seal: str = field(repr=False, default="")

    def check_seal(self, key: str) -> None:
        """FileError unless the file was written with this key."""
        if not hmac.compare_digest(self.seal.encode(), _seal(key, self.digest).encode()):
            raise FileError(
                f"{self.path} was changed after Lapis wrote it",
                expected="contents sealed by what the file is about",
                got="contents with a digest that fits, and a seal that does not",
                do="use the original file",
            )


def write(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kind: str = "posterior",
    key: str = "",
) -> None:
    """Write beside the target, then rename: a file that exists is whole.

    Args:
        config: anything JSON can hold.
        kind: what the file holds; `read` refuses a file of another kind.
        key: what the seal is made with; `Contents.check_seal` must be given the same.
    """
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"kind": kind, **config})
    digest = tensors_digest(held, f"{FORMAT} {text}")
    header = {"format": str(FORMAT), "lapis": text, "digest": digest, "seal": _seal(key, digest)}
    _replace(path, lambda file: _store(file, held, header))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a page or a table in the same way."""
    _replace(path, lambda file: file.write(text.encode()))


def _replace(path: str | os.PathLike[str], fill: Callable[[BinaryIO], object]) -> None:
    """Fill a new file beside the target, then rename it."""
    target = _target(path)
    try:
        with _partial(target) as partial:
            with open(partial, "r+b") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise _unwritable(path, str(error)) from error


def _store(file: BinaryIO, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a safetensors file: the length of a JSON header, the header, the tensors' bytes, larger dtypes first.

    Not by the library's own writer, which makes a partial file of another name and with other permissions.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    entries: dict[str, Any] = {"__metadata__": dict(header)}
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(_bytes(tensor))


def check_writable(path: str | os.PathLike[str]) -> None:
    """FileError unless `write` can write there: to be called before the work whose result the file will hold."""
    target = _target(path)
    try:
        with _partial(target):
            pass
    except OSError as error:
        raise _unwritable(path, str(error)) from error


def _target(path: Any) -> Path:
    """The path to write to; FileError unless it is free, or a regular file."""
    try:
        target = Path(path)
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return target
    except (OSError, ValueError, TypeError) as error:
        raise _unwritable(path, str(error)) from error
    if stat.S_ISREG(mode):
        if not os.access(target, os.W_OK):
            raise _unwritable(path, "a file that may not be written")
        return target
    if stat.S_ISLNK(mode):
        real = os.path.realpath(target)
        raise _unwritable(path, "a symbolic link", f"pass the file that it points to, {real}, or choose another path")
    names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    raise _unwritable(path, names.get(stat.S_IFMT(mode), "a device"))


def _unwritable(path: Any, got: str, do: str = "choose another path") -> FileError:
    return FileError(
        f"Cannot write {path if isinstance(path, (str, os.PathLike)) else repr(path)}",
        expected="a path in a folder that exists and can be written, free or of a regular file",
        got=got,
        do=do,
    )


@contextlib.contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A new file beside the target, with its permissions, removed at the end unless it was renamed.

    Its name says which process of which machine is writing it, so that those of processes that were killed are removed
    by the next who write to the same target.
    """
    _remove_abandoned(target)
    name = f"{target.name}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.partial"
    partial = target.with_name(name)
    _writing.add(name)
    try:
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            with contextlib.suppress(OSError, AttributeError):  # no such file yet, or no such call on this system
                os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode))
        finally:
            os.close(descriptor)
        yield partial
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
        _writing.discard(name)


def _remove_abandoned(target: Path) -> None:
    """Remove partial files of processes of this machine that are no more."""
    pattern = re.compile(re.escape(target.name) + rf"\.{_host()}-(\d+)-[0-9a-f]+\.partial")
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            found = pattern.fullmatch(name)
            if found and name not in _writing and not _is_running(int(found[1])):
                with contextlib.suppress(OSError):
                    target.with_name(name).unlink()


def _is_running(process: int) -> bool:
    """Whether another process has this number; this process knows its own files."""
    if process == os.getpid():
        return False
    if os.name != "posix":
        return True  # no harmless way to ask
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _sync_folder(path: Path) -> None:
    """Wait until the folder's entries are on disk, where the system can tell."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, kind: str = "posterior") -> Contents:
    """The contents, after checking that the file is whole, unchanged, and of a known format and this kind."""
    header, tensors = _opened(path, kind)
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
    digest = tensors_digest(tensors, f"{version} {text}")
    if header.get("digest") != digest:
        raise FileError(
            f"{path} is not an unchanged Lapis {kind}",
            expected="contents that match the digest in the file",
            got="contents that do not" if text else "a file of another kind",
            do="use the original file",
        )
    try:
        config = json.loads(text)
        found = config.pop("kind", None)
    except (ValueError, AttributeError, RecursionError) as error:
        raise _not_whole(path, kind, f"a header that is no dictionary in JSON ({error})") from error
    if found != kind:
        raise FileError(
            f"{path} is not a Lapis {kind}",
            expected=f"a file that holds a {kind}",
            got=f"one that holds a {found}",
            do="choose another path",
        )
    return Contents(path, kind, config, tensors, digest, header.get("seal", ""))


def kind_of(path: Path) -> str:
    """Of which kind a file says it is; empty if it does not. `read` checks it."""
    header, _ = _opened(path, "file")
    try:
        return str(json.loads(header.get("lapis", "{}")).get("kind", ""))
    except (ValueError, AttributeError, RecursionError):
        return ""


def _opened(path: Path, kind: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of a safetensors file."""
    try:
        while True:
            before = path.stat()
            if not stat.S_ISREG(before.st_mode):
                raise _not_whole(path, kind, "no regular file")
            with safe_open(path, framework="pt") as file:
                found = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            after = path.stat()
            # safetensors opens the path twice, and a writer may have replaced the file in between
            if (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns):
                return found
    except FileNotFoundError as error:
        raise FileError(
            f"There is no file {path}",
            expected=f"a file that holds a Lapis {kind}",
            got="nothing at that path",
            do="check the path",
        ) from error
    except READ_ERRORS as error:
        raise _not_whole(path, kind, str(error)) from error


def _not_whole(path: Path, kind: str, got: str) -> FileError:
    return FileError(
        f"{path} is not a whole Lapis {kind}",
        expected="a complete file, as Lapis wrote it",
        got=got,
        do="save it again, or copy it again; a checkpoint can be deleted to start anew",
    )


def tensors_digest(tensors: Mapping[str, Tensor], prefix: str = "") -> str:
    """SHA-256 of `prefix` and of names, shapes, dtypes and values, in the names' alphabetic order."""
    digest = hashlib.sha256(prefix.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    if not tensor.numel():  # such tensors may have strides that `view` refuses
        return memoryview(b"")
    return flat_bytes(tensor).numpy().data


def _seal(key: str, digest: str) -> str:
    return hmac.new(key.encode(), digest.encode(), "sha256").hexdigest()
