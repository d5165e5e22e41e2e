"""Where the examples lie among a tensor's axes: measured by comparing two batch sizes, never assumed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lapis.proofs import close


@dataclass(frozen=True)
class BatchAxis:
    """Examples lie along axis `dim`, folded there as (before, examples, after)."""

    dim: int
    before: int
    after: int

    @property
    def fold(self) -> int:
        """Entries of the axis that belong to one example."""
        return self.before * self.after

    @property
    def trivial(self) -> bool:
        return self.dim == 0 and self.before == 1 and self.after == 1

    def alike(self, other: BatchAxis) -> bool:
        """Whether both fold in the same order: (examples, positions), or (positions, examples)."""
        return self.dim == other.dim and (self.before == 1, self.after == 1) == (other.before == 1, other.after == 1)

    def unfold(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Bring the examples to axis `lead`: (*lead, B, axes ahead of dim, before, after, axes behind dim)."""
        dim = self.dim + lead
        examples = tensor.shape[dim] // (self.before * self.after)
        folded = tensor.reshape(*tensor.shape[:dim], self.before, examples, self.after, *tensor.shape[dim + 1 :])
        return folded.movedim(dim + 1, lead)

    def front(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """`unfold`, or the tensor itself, without the two extra axes, where its first axis is the examples already."""
        return tensor if self.trivial else self.unfold(tensor, lead)


def locate(large: Tensor, small: Tensor, many: int, few: int) -> list[BatchAxis]:
    """All batch axes that `large`, from `many` examples, can have if `small` comes from the first `few` of them."""
    if large.dim() != small.dim():
        return []
    differing = [dim for dim in range(large.dim()) if large.shape[dim] != small.shape[dim]]
    if len(differing) != 1:
        return []
    dim = differing[0]
    if large.shape[dim] % many or large.shape[dim] * few != small.shape[dim] * many:
        return []
    fold = large.shape[dim] // many
    folds = [BatchAxis(dim, before, fold // before) for before in range(1, fold + 1) if fold % before == 0]
    return [axis for axis in folds if close(axis.front(large)[:few], axis.front(small))]
