"""The Kronecker structure (KFAC): for each matrix of weights, G (x) A from gradients and inputs.

A = E[a a^T] over examples and positions, G = sum over examples, seeds and positions of g g^T. With eigenvalues l of the
factors and prior precision d the posterior precision has eigenvalues l_G l_A + d exactly; the factors are never damped
apart. Different prior precisions for the columns of A (weights against bias) are exact as well: scale A by D^-1/2 on
both sides, and the prior is one.

A bias that is independent of its weights has the same G and an A of one, so the two make one block whose A is that of
the weights with a one beside it: G is summed, decomposed and multiplied with once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lapis.curvature.backward.contributions import Contribution, Outer, Rows
from lapis.curvature.blocks.abilities import SharesDecomposition
from lapis.curvature.blocks.block import Block, common_group, site_precision
from lapis.curvature.blocks.kronecker.eigenbasis import EigenbasisGaussian, signs
from lapis.curvature.blocks.spectrum import Spectrum, product_spectrum, spectrum
from lapis.curvature.moments import Moment, symmetric
from lapis.curvature.recording.sites import Site
from lapis.errors import ModelError, PriorError
from lapis.priors import WeightPrior

EXACT_WIDTH = 64
"""Factors of up to this many rows are summed in float64 where a layer acts once an example: it takes little time."""

SHARED_WIDTH = 256
"""From this width of a factor on, its eigenvectors take longer to find than to be sent by another process."""


class KroneckerBlock(Block, SharesDecomposition):
    """Sums behind A (K, I, I), or its diagonal (V,) for look-ups, and G (K, O, O), one pair for each of K groups.

    Of the symmetric sums only the lower triangles are filled. A separate bias (`bias="separate"`) has no column in A.
    """

    kind = "kronecker"
    nonnegative = ("positions",)
    summed = "gradients"
    forms_jacobian = False

    def __init__(self, sites: Sequence[Site], sharing: str = "expand", bias: str = "joint") -> None:
        super().__init__(sites)
        (self.site,) = self.sites
        self.sharing, self.bias = sharing, bias
        self.takes_moments = sharing == "expand"
        self.separate_bias = bias == "separate" and len(self.site.slots) == 2
        groups, outputs, inputs = self.site.shape
        inputs -= int(self.separate_bias)
        moment = (inputs,) if self.site.kind == "lookup" else (groups, inputs, inputs)
        self._inputs = Moment(moment)
        self._gradients = Moment((groups, outputs, outputs))
        self.positions = torch.zeros((), dtype=torch.float64)
        self._eigen: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None
        self._padded = False
        self._spectra: list[Spectrum] | None = None

    @property
    def inputs(self) -> Tensor:
        return self._inputs.total

    @property
    def gradients(self) -> Tensor:
        return self._gradients.total

    def accumulate(self, contributions: Sequence[Contribution], first: bool) -> None:
        contribution, dtype = contributions[0], contributions[0].dtype
        if isinstance(contribution, Rows):
            self._refuse(contribution)
            return
        if isinstance(contribution, Outer) and self.sharing == "reduce":
            contribution = contribution.reduced()  # look-ups always expand: a mean input would fill a V x V matrix
        if first:
            exact = self._exact(contribution, self._inputs.shape[-1])
            contribution.add_input_moment(self._inputs.recent(torch.float64 if exact else dtype))
            self.positions += contribution.positions
        exact = self._exact(contribution, self._gradients.shape[-1])
        contribution.add_gradient_moment(self._gradients.recent(torch.float64 if exact else dtype))

    @staticmethod
    def _exact(contribution: Contribution, width: int) -> bool:
        return isinstance(contribution, Outer) and contribution.g.shape[3] == 1 and width <= EXACT_WIDTH

    def eps(self) -> dict[str, float]:
        return {"inputs": self._inputs.eps, "gradients": self._gradients.eps}

    def take_eps(self, eps: Mapping[str, float]) -> None:
        self._inputs.eps, self._gradients.eps = eps["inputs"], eps["gradients"]

    def rounding(self) -> float:
        # of G (x) A: the error of each factor times the largest eigenvalue of the other
        values_g, _, values_a, _ = self._decomposed()
        of_inputs = 0.0 if self.site.kind == "lookup" else self._inputs.rounding() / max(1.0, float(self.positions))
        return of_inputs * float(values_g.max()) + self._gradients.rounding() * float(values_a.max())

    def _refuse(self, contribution: Rows) -> None:
        """Raise an error if a batch uses the weights without Kronecker factors; one that does not use them is fine."""
        if bool(contribution.values.any()):
            raise ModelError(
                f"The weights {self.site.label!r} were used in another way than in the first examples",
                expected="the same layer applied to every example in every batch",
                got="a batch in which it sees some of the examples only",
                do='use structure="diagonal" or "dense", which take any use',
            )

    def mean_inputs(self) -> Tensor:
        """The lower triangle of A, without a separate bias; for look-ups its diagonal."""
        return self.inputs / self.positions.clamp(min=1)

    def eigen(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Eigenvalues and eigenvectors of G, then of A, including the column of a separate bias.

        For look-ups A is diagonal, and None stands for its eigenvectors.
        """
        values_g, vectors_g, values, vectors = self._decomposed()
        if self.separate_bias and vectors is not None and not self._padded:
            values, vectors = pad(values, (0, 1), value=1.0), pad(vectors, (0, 1, 0, 1))
            vectors[:, -1, -1] = 1.0
            self._eigen, self._padded = (values_g, vectors_g, values, vectors), True
        return values_g, vectors_g, values, vectors

    def _decomposed(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The same, computed once; a separate bias has no column in A before `eigen` was called (see `_padded`)."""
        if self._eigen is None:
            lookup = self.site.kind == "lookup"
            values, vectors = (self.inputs[None], None) if lookup else _eigh_in_place(self._inputs.copy())
            values = values / self.positions.clamp(min=1)  # not the sums: no copy of them
            self._eigen, self._padded = (*_eigh_in_place(self._gradients.copy()), values, vectors), False
        return self._eigen

    def decomposing(self) -> float:
        sides = self._gradients.shape if self.site.kind == "lookup" else (*self._gradients.shape, *self._inputs.shape)
        return float(sum(side**3 for side in sides)) if max(sides) >= SHARED_WIDTH else 0.0

    def decomposition(self, like: bool = False) -> list[Tensor]:
        if not like:
            return [part.contiguous() for part in self._decomposed() if part is not None]
        shapes = [self._gradients.shape[:-1], self._gradients.shape]
        lookup = self.site.kind == "lookup"
        shapes += [(1, *self._inputs.shape)] if lookup else [self._inputs.shape[:-1], self._inputs.shape]
        return [self.positions.new_empty(shape) for shape in shapes]

    def take_decomposition(self, found: Sequence[Tensor]) -> None:
        values_g, vectors_g, values, *vectors = found
        self._eigen, self._padded = (values_g, vectors_g, values, vectors[0] if vectors else None), False
        self._spectra = None

    def spectra(self, prior: WeightPrior) -> list[tuple[int | Tensor, Spectrum]] | None:
        group = common_group(prior, self.sites)
        if prior.group_of is None or (group is None and not self.separate_bias):
            return None
        if self._spectra is None:
            values_g, _, values_a, _ = self._decomposed()
            if self.separate_bias and self._padded:
                values_a = values_a[:, :-1]
            self._spectra = [product_spectrum(values_g, values_a)]
            if self.separate_bias:
                self._spectra.append(spectrum(values_g))
        slots = self.site.slots[: len(self._spectra)]
        return [(prior.group_of[slot.name], part) for slot, part in zip(slots, self._spectra, strict=True)]

    def check(self, prior: WeightPrior) -> None:
        check_shared_precisions(prior)

    def gaussian(self, prior: WeightPrior, scale: Tensor) -> KroneckerGaussian:
        self.check(prior)
        return KroneckerGaussian(self, column_precision(prior, self.site), scale)

    def state(self) -> dict[str, Tensor]:
        return {"inputs": self.inputs, "gradients": self.gradients, "positions": self.positions}

    def layout(self) -> dict[str, tuple[int, ...]]:
        return {"inputs": self._inputs.shape, "gradients": self._gradients.shape, "positions": ()}

    def part_state(self, first: bool) -> dict[str, Tensor]:
        return self.state() if first else {"gradients": self.gradients}

    def load(self, state: dict[str, Tensor]) -> None:
        self._gradients = Moment(state["gradients"].shape, state["gradients"])
        if "inputs" in state:
            self._inputs, self.positions = Moment(state["inputs"].shape, state["inputs"]), state["positions"]
        self._eigen = self._spectra = None

    @property
    def nbytes(self) -> int:
        return kronecker_bytes(self.site)

    def options(self) -> dict[str, str]:
        return {"sharing": self.sharing, "bias": self.bias}


class KroneckerGaussian(EigenbasisGaussian):
    """Eigenvalues scale * l_G l_A + prior. With one prior precision W = R = Q_A (see `EigenbasisGaussian`).

    With one for each input column, D, W = D^1/2 Q_A and R = D^-1/2 Q_A, where Q_A belongs to D^-1/2 A D^-1/2. A
    separate bias is an eigenvector of A already and keeps its own precision. For look-ups W and R are the identity.
    """

    def __init__(self, block: KroneckerBlock, prior: Tensor, scale: Tensor) -> None:
        values_g, vectors_g, values_a, forth = block.eigen()
        back, rotation, shift = forth, forth, prior
        self.rescaled: Tensor | None = None
        if prior.dim() > 0 and not block.separate_bias:
            root = prior.sqrt()  # its gradient needs both triangles of the matrix below
            values_a, vectors = _eigh(symmetric(block.mean_inputs()) / root / root[:, None])
            forth, back, shift = vectors * root[:, None], vectors / root[:, None], torch.ones_like(root[0])
            self.rescaled, rotation = prior, vectors
        eigenvalues = scale * values_g[:, :, None] * values_a[:, None, :] + shift
        super().__init__(eigenvalues, vectors_g, forth, back, rotation)
        self._values_a = values_a

    def logdet(self) -> Tensor:
        if self.rescaled is None:
            return super().logdet()
        groups, outputs, _ = self.eigenvalues.shape
        return super().logdet() + groups * outputs * self.rescaled.log().sum()

    def trace(self, block: Block) -> Tensor:
        # K = G_k (x) A, in the bases with the diagonal diag(Q_G^T G_k Q_G) l_A
        assert isinstance(block, KroneckerBlock)
        along = ((symmetric(block.gradients) @ self.outputs) * self.outputs).sum(-2)
        return (along[:, :, None] * self._values_a[:, None, :] / self.eigenvalues).sum()


def kronecker_bytes(site: Site) -> int:
    """Kronecker factors of a site in float64."""
    groups, outputs, inputs = site.shape
    return 8 * groups * (outputs**2 + (inputs if site.kind == "lookup" else inputs**2))


def column_precision(prior: WeightPrior, site: Site) -> Tensor:
    """One prior precision for all weights (0-d), or where weight and bias differ one for each input column, (I,)."""
    precision = site_precision(prior, site)
    return precision if precision.dim() == 0 else precision[0, 0]


def check_shared_precisions(prior: WeightPrior) -> None:
    """Raise PriorError for precisions that differ within a parameter, which no Kronecker basis keeps apart."""
    if prior.group_of is None or prior.scales is not None:
        raise PriorError(
            "A Kronecker posterior cannot hold a prior precision for every weight",
            expected="precisions that are shared within each parameter",
            got='groups="weight"' if prior.group_of is None else "a prior with scales",
            do='use structure "diagonal" or "dense", or groups="parameter"',
        )


def _eigh_in_place(lower: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors as by `_eigh`, with the vectors written over the matrix.

    The lower triangle, row by row in memory, is the upper triangle of the column-major matrix that LAPACK sees.
    """
    matrix = lower.mT
    values = lower.new_empty(lower.shape[:-1])
    torch.linalg.eigh(matrix, UPLO="U", out=(values, matrix))
    return values.clamp_(min=0), matrix.mul_(signs(matrix))


def _eigh(lower: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of the symmetric matrix with this lower triangle; the upper one is never read."""
    values, vectors = torch.linalg.eigh(lower, UPLO="L")
    return values.clamp(min=0), vectors * signs(vectors)
