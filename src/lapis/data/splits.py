"""Which rows to train on and which to test on: at random, or with a gap in between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.options import check_arguments, check_between, checked_numbers, shown


@dataclass(frozen=True)
class Split:
    """Indices of rows; none is in both."""

    train: Tensor
    test: Tensor


def random_split(rows: int, share: float = 0.9, *, generator: torch.Generator | None = None) -> Split:
    """A `share` of the rows to train on, drawn at random; seeded with 0 without a generator.

    >>> split = random_split(10, 0.8)
    >>> len(split.train), len(split.test)
    (8, 2)
    """
    check_arguments(random_split, locals())
    check_between("share", share, 0, 1)
    order = torch.randperm(rows, generator=generator or torch.Generator().manual_seed(0))
    end = round(share * rows)
    return Split(order[:end], order[end:])


def gap_splits(x: Tensor) -> tuple[Split, ...]:
    """For each column of x (N, D), the middle third of its values to test on, and both outer thirds to train on.

    Does a model know that it has seen nothing in between (Foong et al. 2019)?

    >>> split, = gap_splits(torch.tensor([[3.0], [1.0], [2.0]]))
    >>> split.train.tolist(), split.test.tolist()
    ([1, 0], [2])
    """
    check_arguments(gap_splits, locals())
    if checked_numbers("x", x).dim() != 2:
        raise DataError("These are no rows", expected="numbers (N, D)", got=shown(x), do="pass one row an example")
    third = len(x) // 3
    orders = [torch.argsort(x[:, column], stable=True) for column in range(x.shape[1])]
    return tuple(
        Split(torch.cat([order[:third], order[len(x) - third :]]), order[third : len(x) - third]) for order in orders
    )
