"""Long work that goes on after an interruption: its state in a file, and what must be the same to go on with it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from lapis.errors import FileError
from lapis.files import check_writable, read, write
from lapis.schema import entry

Offered: TypeAlias = "tuple[dict[str, Tensor], dict[str, Any]] | None"
"""Tensors and facts of a state, or None."""

SAVE_SECONDS = 30.0
"""A checkpoint is written at most this often, beside when interrupted and when asked to."""


class Checkpoint:
    """The state of some work, in a file; without a path nothing is read or written.

    Args:
        path: where the file is, or will be. One that cannot be written is a FileError at once.
        work: what is done, in a word: "draw".
        same: what decides the result (settings, digests of the data). A file where any of these differs is refused.
        key: what the file is sealed with, so that nobody else can change it.

    `tensors` and `facts` are the state an earlier run left; both are empty when there was none.
    """

    def __init__(self, path: str | os.PathLike[str] | None, work: str, same: Mapping[str, Any], key: str) -> None:
        self.path = None if path is None else Path(path)
        self.kind = f"checkpoint of a {work}"
        self.same: dict[str, Any] = json.loads(json.dumps(dict(same)))  # as it comes back from a file
        self.key = key
        self.tensors: dict[str, Tensor] = {}
        self.facts: dict[str, Any] = {}
        self._latest: Callable[[], Offered] | None = None
        self._written = time.monotonic()
        if self.path is None:
            return
        check_writable(self.path)
        if not self.path.exists():
            return
        contents = read(self.path, self.kind)
        self.facts, before = entry(contents.config, "facts", dict), entry(contents.config, "same", dict)
        changed = [name for name, value in self.same.items() if before.get(name) != value]
        if changed:
            raise FileError(
                f"{path} belongs to another {work}",
                expected=f"{changed[0]}={before.get(changed[0])!r}",
                got=repr(self.same[changed[0]]),
                do="pass the same arguments as before, or delete the file to start anew",
            )
        contents.check_seal(self.key)
        # in memory of their own: where numbers lie decides in which order sums of products add them
        self.tensors = {name: tensor.clone() for name, tensor in contents.tensors.items()}

    def offer(self, tensors: dict[str, Tensor], facts: dict[str, Any], now: bool = False) -> None:
        """Write this state when it is time, or `now`; else remember it in case of an interruption."""
        self.follow(lambda: (tensors, facts), now)

    def follow(self, state: Callable[[], Offered], now: bool = False) -> None:
        """The same for a state that goes on changing, which is asked for when it is written.

        None means that it is in the midst of a change: nothing is written then.
        """
        if self.path is None:
            return
        self._latest = state
        if now or time.monotonic() - self._written > SAVE_SECONDS:
            self._write()

    def _write(self) -> None:
        found = None if self._latest is None else self._latest()
        if found is not None and self.path is not None:
            tensors, facts = found
            write(self.path, {"same": self.same, "facts": facts}, tensors, self.kind, self.key)
            self._written = time.monotonic()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Write the latest state when the work inside ends with an exception, Ctrl-C included."""
        try:
            yield
        except BaseException:
            self._write()
            raise
