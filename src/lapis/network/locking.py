"""One lock for each model, so that threads take turns with it.

Lapis puts a module into evaluation mode, exchanges its parameters and their flags, and restores all that. Another
thread must not see the module in between. The lock is re-entrant, is found by the module itself, and goes with it:
nothing is stored in the module, which can be copied and pickled as before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lapis.network.wrappers import unwrapped

_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_finding = threading.Lock()


@contextmanager
def held(module: nn.Module) -> Iterator[None]:
    """Wait until no other thread uses the module through Lapis, and keep them out until the end."""
    with _finding:
        lock = _locks.setdefault(unwrapped(module), threading.RLock())
    with lock:
        yield
