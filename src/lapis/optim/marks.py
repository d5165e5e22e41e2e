"""Which gradients are new: those of a parameter are one tensor that passes are added to, until it is cleared."""

from __future__ import annotations

import weakref

from torch import Tensor


class Mark:
    """Recognises a gradient that has not changed since; holds no memory."""

    def __init__(self, gradient: Tensor) -> None:
        self._tensor, self._version = weakref.ref(gradient), gradient._version

    def same(self, gradient: Tensor) -> bool:
        """Whether it is the same tensor, to which something may have been added."""
        return self._tensor() is gradient

    def __call__(self, gradient: Tensor) -> bool:
        """Whether nothing has been added to it either."""
        return self.same(gradient) and gradient._version == self._version


def never(gradient: Tensor) -> bool:
    """The mark of a parameter without a gradient."""
    return False
