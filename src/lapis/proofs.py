"""Runtime checks of shortcuts: each is used only where its result has agreed with the plain computation.

A shortcut computes the same numbers in less time or memory: all seeds in one backward pass, moments without patches,
drawn networks without drawn matrices. Its correctness can depend on the network, on torch's version and on shapes. So
its first use for each set of shapes is compared with the plain computation; one that disagrees is not used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, finfo

log = logging.getLogger("lapis")


class Proofs:
    """The shortcuts proven, and those refused, for one network."""

    def __init__(self) -> None:
        self._proven: set[tuple[str, Hashable]] = set()
        self.refused: set[str] = set()
        """Shortcuts that are not used: torch does not support them here, or their result disagreed."""

    def holds(self, shortcut: str, key: Hashable, agrees: Callable[[], bool]) -> bool:
        """Whether the shortcut may be used.

        Args:
            shortcut: its name, a plural noun for the log.
            key: what its correctness depends on besides the numbers, such as shapes; each key is checked once.
            agrees: compares the shortcut with the plain computation.
        """
        if shortcut in self.refused:
            return False
        if (shortcut, key) not in self._proven:
            if not agrees():
                log.warning("%s: not used, since they disagree with the plain computation here", shortcut)
                self.refused.add(shortcut)
                return False
            self._proven.add((shortcut, key))
        return True


def close(one: Tensor, two: Tensor) -> bool:
    """Equal up to rounding, relative to the largest entry; integers exactly."""
    if one.shape != two.shape:
        return False
    if not one.is_floating_point():
        return bool((one == two).all())
    if not one.numel():
        return True
    one, two = one.detach(), two.detach()
    error, size = float((one - two).abs().max()), float(one.abs().max())
    return error <= rounding(one.dtype) * size + finfo(one.dtype).tiny


def rounding(dtype: torch.dtype) -> float:
    """The relative difference between two ways to compute the same that rounding may cause."""
    return 1e-8 if dtype == torch.float64 else max(1e-3, 16 * finfo(dtype).eps)
