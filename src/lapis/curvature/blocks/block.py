"""The interface of all structures. A block holds the curvature of some sites; with a prior it becomes a Gaussian.

Inside a block weights are ordered site after site, each flattened; `LaplacePosterior` translates to the order of the
flat weight vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapis.batches import all_finite
from lapis.curvature.backward.contributions import Contribution
from lapis.curvature.blocks.spectrum import Spectrum
from lapis.curvature.moments import weighted
from lapis.curvature.recording.sites import Site
from lapis.errors import StructureError
from lapis.priors import WeightPrior
from lapis.schema import tensor, wrong

ORTHONORMAL = 1e-3
"""Bases in files may be as far from orthonormal: far above the rounding of float32, in which they may be found."""


class Block(ABC):
    """Curvature of some sites' weights: a sum over data, kept in float64."""

    kind: ClassVar[str]
    forms_jacobian: ClassVar[bool] = True
    """Whether gradients are multiplied with layer inputs, so that several seeds at once make wider products."""
    takes_rows: ClassVar[bool] = False
    """Whether `accumulate` forms rows of the Jacobian over all weights: working memory must be planned for them."""
    takes_moments: bool = False
    """Whether layer inputs a enter only through the sum of a a^T over positions, which may be formed directly."""
    nonnegative: ClassVar[tuple[str, ...]] = ()
    """Tensors of the state without negative entries."""
    orthonormal: ClassVar[tuple[str, ...]] = ()
    """Tensors of the state whose rows are orthonormal."""
    summed: ClassVar[str] = ""
    """The tensor that is a sum over seeds, if sums over single outputs give those over all (see `combine`); else ""."""

    is_hessian: bool = False
    """Whether second derivatives were added, which need not be positive."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = tuple(sites)
        self.size = sum(site.size for site in sites)

    def preliminary(self) -> Block | None:
        """An empty block whose sums, from a pass over the data of its own, `begin` needs; None for most structures."""
        return None

    def begin(self, found: Block) -> None:  # noqa: B027  (most structures need one pass only)
        """Take what the sums to come refer to, such as a basis, from the `preliminary` block."""

    @abstractmethod
    def accumulate(self, contributions: Sequence[Contribution], first: bool) -> None:
        """Add the contributions (one for each site) of some of a batch's seeds.

        `first` marks the first call for a batch: sums over layer inputs, which are the same for all seeds, are added
        only then.
        """

    def combine(self, parts: Sequence[Block], weights: Sequence[float]) -> None:
        """Replace the sums by the weighted sum of other blocks for the same sites, one for each output.

        Only the first of them was told of the `first` seeds of a batch, and has sums over layer inputs.
        """
        total = weighted([getattr(part, self.summed) for part in parts], weights)
        self.load({**parts[0].state(), self.summed: total})
        self.inherit(parts)

    def add_row(self, row: int, values: Tensor) -> None:
        """Add second derivatives `values` (size,) to one row of the curvature matrix."""
        raise StructureError(
            f"The {self.kind} structure holds no second derivatives between weights",
            expected='structure="dense"',
            got=f"structure={self.kind!r}",
            do='use curvature="ggn", or structure="dense"',
        )

    def flush(self) -> None:  # noqa: B027  (most blocks add at once)
        """Add what is still buffered; called at the end of a pass over the data."""

    @abstractmethod
    def gaussian(self, prior: WeightPrior, scale: Tensor) -> BlockGaussian:
        """The Gaussian with precision scale * curvature + prior."""

    @abstractmethod
    def spectra(self, prior: WeightPrior) -> list[tuple[int | Tensor, Spectrum]] | None:
        """Eigenvalues of the curvature as pairs (prior group, spectrum); the group may also be one for each eigenvalue.

        None where the posterior's log-determinant does not follow from them (an eigenvector that belongs to several
        groups), or where they are costly and not yet computed; see `prepare_spectra`.
        """

    def prepare_spectra(self, prior: WeightPrior) -> None:  # noqa: B027  (most blocks have them at little cost)
        """Compute costly eigenvalues now if `spectra` can use them with this prior: it pays before many evaluations."""

    def check(self, prior: WeightPrior) -> None:  # noqa: B027  (most structures take any prior)
        """Raise an error for a prior that the structure cannot represent; called before any long work."""

    def options(self) -> dict[str, str]:
        """The choices beside the sites that the block was made with, by the names of its constructor's arguments.

        With them and its `state` a file can hold the block.
        """
        return {}

    def is_finite(self) -> bool:
        """Whether the sums hold no NaN or infinity."""
        return all(all_finite(tensor) for tensor in self.state().values())

    def eps(self) -> dict[str, float]:
        """Of the least precise dtype in which tensors of the state were summed, by name; 0 stands for float64.

        Empty where all are, or where only positive numbers are added.
        """
        return {}

    def take_eps(self, eps: Mapping[str, float]) -> None:  # noqa: B027  (see `eps`)
        """Take over how precisely the tensors of the state were summed."""

    def inherit(self, others: Sequence[Block]) -> None:
        """Take over how precisely the blocks that this one's sums come from were summed: see `rounding`."""
        known = [other.eps() for other in others]
        self.take_eps({name: max(each[name] for each in known) for name in self.eps()})

    def rounding(self) -> float:
        """About the error in the curvature's eigenvalues that sums in less than float64 left behind."""
        return 0.0

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The block's tensors, by name."""

    @abstractmethod
    def load(self, state: dict[str, Tensor]) -> None:
        """Replace the block's tensors by those of a `state`."""

    def layout(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in `state`, best without allocating them; -1 for a length that the data decide."""
        return {name: tuple(each.shape) for name, each in self.state().items()}

    def check_state(self, state: dict[str, Tensor], part: bool = False) -> dict[str, Tensor]:
        """A `state`, or a `part_state`, from a file; FileError unless the tensors are of this block's layout."""
        names = [name for name in self.layout() if not part or name in state]
        found = {
            name: tensor(state, name, self.layout()[name], least=0.0 if name in self.nonnegative else None)
            for name in names
        }
        for name in self.orthonormal:
            if name in found and not _has_orthonormal_rows(found[name]):
                raise wrong(name, "orthonormal rows", "others")
        return found

    def part_state(self, first: bool) -> dict[str, Tensor]:
        """What `load` needs for a block that is to be combined with others, or is the first of these."""
        return self.state()

    def empty(self) -> None:
        """Set all sums over data to zero."""
        self.load({name: torch.zeros_like(tensor) for name, tensor in self.state().items()})

    @property
    def added(self) -> tuple[str, ...]:
        """Tensors of the state that are sums over data; none where old and new data do not add up."""
        return tuple(self.layout())

    def basis(self) -> list[Tensor]:
        """What the sums refer to: sums in other bases do not add up. Empty where that is the weights themselves."""
        return []

    def check_additive(self, others: bool = False) -> None:
        """Raise StructureError unless data can be taken out, or, with `others`, sums of other fits added."""
        if not self.added or (others and self.basis()):
            raise StructureError(
                f"The curvature of a {self.kind} posterior is no sum over data"
                + (" of several fits" if others else ""),
                expected='structure "dense", "diagonal" or "kronecker"' + ("" if others else ', "ekfac" or "implicit"'),
                got=repr(self.kind),
                do="fit with such a structure, or to the data that are wanted",
            )

    def plus(self, other: Block, weight: float) -> Block:
        """A new block with the sums of this one, plus `weight` times those of another one for the same weights."""
        theirs, result = other.state(), self.fresh()
        mine = {name: tensor.clone() for name, tensor in self.state().items()}
        for name in self.added:
            mine[name].add_(theirs[name], alpha=weight)
        result.load(mine)
        result.inherit([self, other])
        return result

    def clamp(self) -> None:
        """Set sums of squares that became negative by rounding to zero."""
        state = self.state()
        self.load({name: t.clamp(min=0) if name in self.nonnegative else t for name, t in state.items()})

    @property
    def nbytes(self) -> int:
        """Memory that the sums take."""
        return 8 * self.size

    def fresh(self) -> Block:
        """An empty block for the same sites."""
        make: Callable[..., Block] = type(self)
        return make(self.sites, **self.options())

    def part(self, first: bool) -> Block:
        """A copy of a block that is to be combined with others, or is the first of these."""
        copy = self.fresh()
        copy.load({name: tensor.clone() for name, tensor in self.part_state(first).items()})
        copy.inherit([self])
        return copy

    def clone(self) -> Block:
        """A copy that can be added to without changing this block."""
        copy = self.fresh()
        copy.load({name: tensor.clone() for name, tensor in self.state().items()})
        copy.inherit([self])
        return copy


def _has_orthonormal_rows(rows: Tensor) -> bool:
    """Whether Q Q^T v = v for a random v and rows Q (..., r, n): products with vectors only."""
    v = torch.randn(*rows.shape[:-1], 1, dtype=rows.dtype, generator=torch.Generator().manual_seed(0))
    return bool(torch.isclose(rows @ (rows.mT @ v), v, rtol=0, atol=ORTHONORMAL).all())


@dataclass(frozen=True)
class FactoredDraw:
    """Draws of one weight matrix (O, I) as outputs @ (white(noise) * deviations) @ inputs^T, with white noise (O, I).

    A linear layer can be applied to such a draw without forming it. A bias is the last of the I columns.
    """

    deviations: Tensor
    """Standard deviations (O, I)."""
    outputs: Tensor
    """A basis of the outputs, (O, O)."""
    inputs: Tensor
    """A basis of the inputs, (I, I)."""
    white: Callable[[Tensor], Tensor]
    """White noise (..., O, I) in these bases, from white noise."""


class BlockGaussian(ABC):
    """A zero-mean Gaussian over a block's weights. Vectors are (n, size) in the block's order, float64."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """log |precision|; differentiable in the prior precision and the scale."""

    def check(self) -> None:  # noqa: B027  (most need no factorisation)
        """Raise NotPositiveDefiniteError if the precision cannot be factorised in float64."""

    @abstractmethod
    def color(self, noise: Tensor) -> Tensor:
        """Draws (n, size) from white noise (n, size) of any floating dtype."""

    def factored(self, dtype: torch.dtype) -> FactoredDraw | None:
        """The draws that `color` makes, in factored form; None where the weights are not one matrix, or have no such
        form.
        """
        return None

    @abstractmethod
    def multiply(self, vectors: Tensor) -> Tensor:
        """precision @ vectors."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """covariance @ vectors."""

    @abstractmethod
    def variance(self) -> Tensor:
        """Marginal variance of each weight, (size,)."""

    @abstractmethod
    def covariance(self, contributions: Sequence[Contribution], diagonal: bool) -> Tensor:
        """J Sigma J^T of each example: (B, M, M), or its diagonal (B, M)."""

    def of_features(self, features: Tensor, diagonal: bool) -> Tensor | None:
        """Covariance (n, C, C) of V a, or variances (n, C), for features a (n, I) and the block's weights V (C, I).

        None where that has no form of its own.
        """
        return None

    def spread(self, vectors: Tensor) -> Tensor | None:
        """Sigma v for vectors (n, size) in their own dtype; None where `solve` has no form of its own for that."""
        return None

    @abstractmethod
    def features(self, contributions: Sequence[Contribution]) -> Any:
        """J in the form that `kernel` takes, computed once for a batch: it meets the features of many others."""

    @abstractmethod
    def kernel(self, left: Any, right: Any) -> Tensor:
        """J Sigma J'^T between the examples of two `features`: (B, M, B', M')."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """The precision matrix (size, size)."""


def site_precision(prior: WeightPrior, site: Site) -> Tensor:
    """Prior precision of a site's weights: 0-d when they share one group, else (*site.shape)."""
    if common_group(prior, [site]) is not None:
        return prior.of(site.slots[0].name)
    parts = []
    for slot, (start, stop) in zip(site.slots, site.spans(prior.network), strict=True):
        precision = prior.of(slot.name)
        if precision.dim() == 0:
            parts.append(precision.expand(slot.shape))
        else:
            offset = prior.network.offsets[slot.name]
            parts.append(slot.arrange(precision[start - offset : stop - offset]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def common_group(prior: WeightPrior, sites: Sequence[Site]) -> int | None:
    """The prior group of the sites' weights if they all share one, and with it a single precision; else None."""
    if prior.group_of is None or prior.scales is not None:
        return None
    groups = {prior.group_of[slot.name] for site in sites for slot in site.slots}
    return groups.pop() if len(groups) == 1 else None
