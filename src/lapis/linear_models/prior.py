"""Zero-mean Gaussian priors of a linear model's weights, in groups that share a precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapis.errors import DataError, OptionError, PriorError
from lapis.options import UNREADABLE, checked_tensor, shown


@dataclass(frozen=True)
class LinearPrior:
    """Precisions alpha_g s_i of weight i in group g.

    Args:
        precision: alpha, (G,).
        groups: the group of each weight, (d,) int64; None for one group.
        scales: s, (d,), which tuning leaves as they are; None for ones.
    """

    precision: Tensor
    groups: Tensor | None = None
    scales: Tensor | None = None

    @staticmethod
    def of(prior: Any, size: int) -> LinearPrior:
        """The prior with this precision: a number, or one for each weight, whose common factor can be tuned."""
        try:
            given = checked_tensor("prior", torch.as_tensor(prior))
            found = given.detach() if given.dtype == torch.float64 else torch.as_tensor(prior, dtype=torch.float64)
        except (*UNREADABLE, DataError):
            found = torch.zeros(())
        if found.shape not in ((), (size,)) or not bool(((found > 0) & found.isfinite()).all()):
            raise PriorError(
                "Bad prior",
                expected=f"a positive precision, or one for each of {size:,} weights",
                got=f"a tensor {tuple(found.shape)}" if isinstance(prior, Tensor) else repr(prior)[:80],
                do="pass such numbers",
            )
        if found.dim() == 0:
            return LinearPrior(found.reshape(1))
        return LinearPrior(torch.ones(1, dtype=torch.float64), None, found)

    def grouped(self, groups: Any, size: int) -> LinearPrior:
        """The same with groups (d,)."""
        try:
            index = checked_tensor("groups", torch.as_tensor(groups))
        except (*UNREADABLE, DataError):
            index = torch.empty(0)
        whole = index.dtype in (torch.int64, torch.int32) and index.shape == (size,) and bool((index >= 0).all())
        if not whole or len(set(index.tolist())) != int(index.max()) + 1:
            raise OptionError(
                "Bad groups",
                expected=f"whole numbers ({size},), each from 0 to the largest used",
                got=shown(groups),
                do="number the groups without gaps",
            )
        vector = self.precision if self.groups is None else self.precision[self.groups[:1]]
        return replace(self, precision=vector[:1].expand(int(index.max()) + 1).clone(), groups=index.long())

    def vector(self) -> Tensor:
        """Lambda's diagonal: 0-d where all weights share it, else (d,)."""
        alpha = self.precision[0] if self.groups is None else self.precision[self.groups]
        return alpha if self.scales is None else alpha * self.scales

    def by_group(self, values: Tensor) -> Tensor:
        """Sums (G,) of values (d,)."""
        if self.groups is None:
            return values.sum().reshape(1)
        return torch.zeros_like(self.precision).index_add(0, self.groups, values)
