"""Standard errors of any metric by the bootstrap: its spread over examples drawn again with replacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapis.errors import DataError, OptionError
from lapis.metrics._checks import require
from lapis.options import check_arguments, check_between, check_count, checked_tensor


@dataclass(frozen=True)
class Bootstrap:
    """A metric with its standard error."""

    value: Tensor
    """The metric of the examples themselves."""
    error: Tensor
    """Standard deviation over the resamples, in the shape of the value."""
    resamples: Tensor
    """The metric of each resample, (repeats, *shape of the value)."""

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Quantiles (1 - level) / 2 and (1 + level) / 2 of the resamples."""
        check_between("level", level, 0, 1)
        low, high = (self.resamples.quantile((1 + sign * level) / 2, dim=0) for sign in (-1, 1))
        return low, high

    def __str__(self) -> str:
        return f"{float(self.value):.4g} +- {float(self.error):.2g}" if self.value.dim() == 0 else repr(self)


def bootstrap(
    metric: Callable[..., Tensor],
    *arguments: Tensor,
    repeats: int = 500,
    axis: int | Sequence[int] = 0,
    paired: bool = True,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Bootstrap:
    """A metric of examples with its standard error, from `repeats` resamples with replacement.

    The error is itself known to about 1 / sqrt(2 repeats), 3 % by default. It is the error due to these examples being
    a sample; that of random seeds in training comes on top. Resamples for which the metric is not defined (an AUROC
    without positives) are drawn again.

    Args:
        metric: a function of tensors to a tensor.
        arguments: tensors whose `axis` counts the examples.
        repeats: resamples.
        axis: one for all arguments, or one for each: (1, 1, 0) for `crps` of a mixture.
        paired: the same examples are drawn from all arguments; False for groups of their own, as in `ood_auroc`.
        generator: source of randomness; seeded with 0 when None.
        options: keyword arguments of the metric.

    >>> import lapis
    >>> probs = torch.full((100, 2), 0.5)
    >>> found = bootstrap(lapis.metrics.accuracy, probs, torch.arange(100) % 2)
    >>> found.value.item(), 0.04 < found.error.item() < 0.06
    (0.5, True)
    """
    check_arguments(bootstrap, locals(), signed=("axis",))
    check_count("repeats", repeats, least=2)
    axes = [axis] * len(arguments) if isinstance(axis, int) else list(axis)
    require(len(arguments) > 0, "Nothing to resample", "tensors after the metric", "none", "pass its arguments")
    if len(axes) != len(arguments):
        raise OptionError(
            "Bad axis", expected=f"one, or {len(arguments)}", got=f"{len(axes)}", do="give one for each argument"
        )
    for i, (argument, along) in enumerate(zip(arguments, axes, strict=True)):
        dims = checked_tensor(f"Argument {i}", argument).dim()
        inside = -dims <= along < dims
        require(inside, f"Argument {i} has no such axis", f"axis below {dims}", str(along), "give the examples' axis")
    lengths = [argument.shape[along] for argument, along in zip(arguments, axes, strict=True)]
    require(
        not paired or len(set(lengths)) == 1,
        "The arguments differ in length",
        "as many examples in each",
        ", ".join(map(str, lengths)),
        "give the axis of the examples, or paired=False for groups that are drawn from on their own",
    )
    source = generator or torch.Generator().manual_seed(0)
    value = metric(*arguments, **options)
    found: list[Tensor] = []
    failed = 0
    while len(found) < repeats:
        chosen = [_indices(length, source) for length in (lengths[:1] if paired else lengths)]
        drawn = [
            argument.index_select(along, (chosen[0] if paired else chosen[i]).to(argument.device))
            for i, (argument, along) in enumerate(zip(arguments, axes, strict=True))
        ]
        try:
            found.append(metric(*drawn, **options).detach())
        except DataError:  # defined for the examples, but not for this resample
            failed += 1
            if failed > repeats:
                raise
    resamples = torch.stack(found).double()
    return Bootstrap(value, resamples.std(0), resamples)


def _indices(length: int, source: torch.Generator) -> Tensor:
    return torch.randint(length, (length,), generator=source, device=source.device)
