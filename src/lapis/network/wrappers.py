"""Modules around modules (torch.compile, DataParallel), and compiled code, which Lapis cannot look into.

Both change how a network runs, and not what it computes. Posteriors belong to the module inside: files and names of
weights are then the same with and without a wrapper.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager

import torch
from torch import nn

PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside any nesting of torch.compile, DataParallel and DistributedDataParallel.

    >>> inner = nn.Linear(2, 1)
    >>> unwrapped(nn.DataParallel(inner)) is inner
    True
    """
    while isinstance(module, nn.Module):
        compiled = type(module).__module__.startswith("torch._dynamo.")  # not imported for a mere isinstance
        inner = (
            module.module if isinstance(module, PARALLEL) else module._modules.get("_orig_mod") if compiled else None
        )
        if not isinstance(inner, nn.Module):
            break
        module = inner
    return module


class _Eagerly:
    """Runs compiled parts of networks (layers, functions) as plain code, while any thread is inside."""

    def __init__(self) -> None:
        self._lock, self._threads = threading.Lock(), 0
        self._stance: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._threads == 0 and "torch._dynamo" in sys.modules:  # else nothing can be compiled
                self._stance = torch.compiler.set_stance("force_eager")
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


eagerly = _Eagerly()
"""Recording and derivatives see torch functions, which compiled code does not call."""
