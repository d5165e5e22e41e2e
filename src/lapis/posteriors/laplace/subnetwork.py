"""Subnetworks: which single weights a posterior is over, by how much each is worth (Daxberger et al. 2021).

Under independent weights, the n with the largest marginal variances are those whose posterior is nearest to the whole
one in the Wasserstein distance, all others being fixed at their trained values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lapis.errors import LapisWarning, ModelError, OptionError, users_level
from lapis.network import Network
from lapis.options import check_arguments, check_choice, check_count, shown

RULES = ("variance", "magnitude", "random")


class WithVariances(Protocol):
    """A posterior, or a SWAG collector, that knows the variance of each of its network's chosen weights."""

    network: Network

    def marginal_variance(self) -> Tensor:
        """Variance of each weight, (P,)."""


@dataclass(frozen=True)
class Subnetwork:
    """The choice of n single weights, for `lapis.laplace(..., weights=Subnetwork(n))`; all others stay as trained.

    Args:
        n: how many weights; may be left out if `by` is a mask.
        by: "variance" (the largest marginal variances), "magnitude" (the largest absolute values), "random", a tensor
            of scores over the flat vector of all trainable weights (the largest are taken), or a mask: a boolean
            tensor over that vector, or a mapping from parameter names to boolean masks.
        from_: for "variance": a posterior with `marginal_variance` over some or all weights of the network, or a
            `lapis.SWAG` collector. Without one, a diagonal Laplace posterior is fitted to the same data first.
        generator: source of randomness for "random"; seeded with 0 when None.

    Equal scores are taken in the order of the flat vector.

    >>> import lapis
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> data = torch.tensor([[1.0, 2.0], [1.0, -2.0]]), torch.zeros(2, 1)
    >>> posterior = lapis.laplace(model, data, "regression", weights=lapis.Subnetwork(1))
    >>> posterior.network.indices  # of the input that is smaller, and so says less about its weight
    {'weight': tensor([0])}
    """

    n: int | None = None
    by: Literal["variance", "magnitude", "random"] | Tensor | Mapping[str, Tensor] = "variance"
    from_: WithVariances | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if isinstance(self.by, str) or not isinstance(self.by, (Tensor, Mapping)):
            check_choice("by", self.by, RULES)
        check_arguments(Subnetwork, vars(self), apart=("n", "from_"))
        if self.n is not None or not self._is_mask:
            check_count("n", self.n)
        if isinstance(self.by, Tensor) and bool(self.by.isnan().any()):
            raise OptionError("Bad scores", expected="numbers", got=f"NaN in {shown(self.by)}", do="check the scores")
        if self.from_ is not None and not callable(getattr(self.from_, "marginal_variance", None)):
            raise OptionError(
                "No variances to choose weights by",
                expected="from_ with a method marginal_variance: a Gaussian posterior, SWAG",
                got=type(self.from_).__name__,
                do="pass such a posterior, or leave from_ out",
            )
        for name, given, needed in (("from_", self.from_, "variance"), ("generator", self.generator, "random")):
            if given is not None and self.by is not needed and self.by != needed:
                raise OptionError(
                    f"{name} has no meaning here",
                    expected=f'by="{needed}"',
                    got=f"by={self.by!r}" if isinstance(self.by, str) else "a mask or scores",
                    do=f"leave {name} out",
                )

    @property
    def _is_mask(self) -> bool:
        return isinstance(self.by, Mapping) or (isinstance(self.by, Tensor) and self.by.dtype == torch.bool)

    def size(self, network: Network) -> int:
        """How many weights it chooses; OptionError if `network`, of all trainable weights, has fewer."""
        check_arguments(Subnetwork.size, locals())
        if self._is_mask:
            masks = self.by.values() if isinstance(self.by, Mapping) else [self.by]
            count = sum(int(mask.sum()) for mask in masks if isinstance(mask, Tensor) and mask.dtype == torch.bool)
            if self.n not in (None, count):
                raise OptionError(
                    "The mask chooses another number of weights",
                    expected=f"n={count}, as the mask has, or none",
                    got=f"n={self.n}",
                    do="leave n out",
                )
            return count
        assert self.n is not None
        most = network.size if self.from_ is None else self.from_.network.size
        if self.n > most:
            raise OptionError(
                "There are not as many weights",
                expected=f"n <= {most:,}",
                got=f"n={self.n:,}",
                do="choose fewer weights, or weights='all'",
            )
        return self.n

    def choose(self, network: Network, variances: Callable[[], Tensor]) -> tuple[Any, str]:
        """The chosen weights as `Network` takes them, and a note on how they were chosen.

        Args:
            network: of all trainable weights.
            variances: fits a diagonal posterior and returns its marginal variances (P,); called for `by="variance"`
                without `from_`.
        """
        check_arguments(Subnetwork.choose, locals())
        count = self.size(network)
        note = f"{count:,} of {network.size:,} weights, "
        if self._is_mask:
            return self.by, note + "by a mask"
        if isinstance(self.by, Tensor):
            return _largest(self._checked(self.by, network), count), note + "by the scores given"
        if self.by == "random":
            source = self.generator or torch.Generator(network.device).manual_seed(0)
            order = torch.randperm(network.size, generator=source, device=source.device)
            return order[:count].to(network.device), note + "drawn at random"
        if self.by == "magnitude":
            return _largest(network.flat().abs(), count), note + "the largest in magnitude"
        if self.from_ is None:
            found, source_name = variances(), "a diagonal Laplace posterior fitted to the same data first"
        else:
            found, source_name = self._given(network), type(self.from_).__name__
        chosen = _largest(found, count)
        idle = int((found[chosen] == found.max()).sum())
        note += f"of largest marginal variance under {source_name}"
        if idle > 1 and self.from_ is None:
            note += f"; {idle:,} of them have the prior's variance: the data say nothing about these"
            if idle == count:
                warnings.warn(
                    f"No example reaches any of the {count:,} chosen weights (units that are never active, inputs that "
                    "are always zero): the posterior changes no prediction at the data. Choose by the variances of "
                    "SWAG (from_=), or more weights.",
                    LapisWarning,
                    stacklevel=users_level(),
                )
        return chosen, note

    def _checked(self, scores: Tensor, network: Network) -> Tensor:
        if tuple(scores.shape) != (network.size,) or not scores.is_floating_point():
            raise OptionError(
                "The scores do not fit the weights",
                expected=f"a floating tensor ({network.size},), a score for each trainable weight",
                got=f"{tuple(scores.shape)} {scores.dtype}",
                do="order them as model.parameters() does, or pass a boolean mask",
            )
        return scores.to(network.device)

    def _given(self, network: Network) -> Tensor:
        """Variances of all weights from `from_`; minus infinity for those that it does not know."""
        assert self.from_ is not None
        other = self.from_.network
        strange = [name for name, shape in other.shapes.items() if network.shapes.get(name) != shape]
        if strange:
            raise ModelError(
                "The variances are those of another network",
                expected="from_ made with a network of the same parameters",
                got=f"{strange[0]!r} of shape {other.shapes[strange[0]]}",
                do="pass a posterior of this network",
            )
        known = self.from_.marginal_variance().detach().to(network.device)
        found = known.new_full((network.size,), -math.inf)
        for name in other.names:
            own = found[network.span(name)]
            own[other.indices.get(name, slice(None))] = known[other.span(name)]
        return found


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices (count,) of the largest scores; the first ones among equals."""
    return torch.sort(scores, descending=True, stable=True).indices[:count]
