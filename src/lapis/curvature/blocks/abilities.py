"""What some structures can do beside what every block and block Gaussian can."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from lapis.curvature.blocks.block import Block


class SharesDecomposition(ABC):
    """A block with a costly decomposition, which one process can find for all: see `Curvature.decompose`."""

    @abstractmethod
    def decomposing(self) -> float:
        """About the multiplications that it takes; 0 where it costs too little to be shared."""

    @abstractmethod
    def decomposition(self, like: bool = False) -> list[Tensor]:
        """The decomposition of the sums, or with `like` empty tensors of its shapes."""

    @abstractmethod
    def take_decomposition(self, found: Sequence[Tensor]) -> None:
        """Use a decomposition that was found elsewhere, from equal sums."""


class Traces(ABC):
    """The Gaussian of a block whose outputs' curvature can be kept apart: see `Curvature.keep_apart`."""

    @abstractmethod
    def trace(self, block: Block) -> Tensor:
        """tr(Sigma K) for the curvature K of a block that was combined with others to this one, 0-d."""
