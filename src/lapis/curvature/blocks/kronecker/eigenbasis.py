"""Gaussians whose precision is diagonal in a Kronecker product of two bases, or nearly so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lapis.curvature.backward.contributions import Contribution, Lookup, Rows
from lapis.curvature.backward.pairs import between
from lapis.curvature.blocks.abilities import Traces
from lapis.curvature.blocks.block import Block, BlockGaussian, FactoredDraw

SYMMETRIC_ROOT = 2**20
"""Up to this many multiplications a draw, noise is rotated into the bases: see `EigenbasisGaussian.white`."""


class EigenbasisGaussian(BlockGaussian, Traces):
    """Precision (Q_G (x) W) diag(eigenvalues) (Q_G (x) W)^T, so covariance (Q_G (x) R) diag(1 / eigenvalues) (...)^T.

    Args:
        eigenvalues: (K, O, I), for K groups.
        outputs: Q_G (K, O, O), orthogonal.
        forth: W (K, I, I); None for the identity.
        back: R = W^-T, alike.
        rotation: Q_A (K, I, I), orthogonal: W without the scale of its rows; W itself when None.
    """

    def __init__(
        self,
        eigenvalues: Tensor,
        outputs: Tensor,
        forth: Tensor | None,
        back: Tensor | None,
        rotation: Tensor | None = None,
    ) -> None:
        self.eigenvalues, self.outputs, self.forth, self.back = eigenvalues, outputs, forth, back
        self.rotation = forth if rotation is None else rotation
        _, height, width = eigenvalues.shape
        self._rotates = eigenvalues.numel() * (height + width) <= SYMMETRIC_ROOT
        self._casts: dict[torch.dtype, tuple[Tensor, Tensor, Tensor | None]] = {}

    def logdet(self) -> Tensor:
        return self.eigenvalues.log().sum()

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Variances 1 / eigenvalues, Q_G and R in the network's dtype; kept for the next call."""
        if dtype not in self._casts:
            back = None if self.back is None else self.back.to(dtype)
            self._casts[dtype] = (self.eigenvalues.reciprocal().to(dtype), self.outputs.to(dtype), back)
        return self._casts[dtype]

    def array(self, vectors: Tensor) -> Tensor:
        """(n, size) as (n, K, O, I)."""
        return vectors.reshape(*vectors.shape[:-1], *self.eigenvalues.shape)

    def white(self, noise: Tensor) -> Tensor:
        """White noise in the bases from white noise (..., K, O, I): Q_G^T E Q_A in small blocks, E itself in others.

        Draws then are Sigma^1/2 e by the symmetric root, which depends on the covariance but not on the choice of its
        eigenvectors: sums over data in another order draw the same weights. Where the rotation would take as long as
        the rest of a draw, only the signs of eigenvectors are fixed (`signs`): draws then change with the data's order
        where eigenvalues are equal up to rounding.
        """
        if not self._rotates:
            return noise
        _, outputs, back = self.factors(noise.dtype)
        rotation = back if self.rotation is self.back else self.rotation
        rotated = outputs.mT @ noise
        return rotated if rotation is None else rotated @ rotation.to(noise.dtype)

    def color(self, noise: Tensor) -> Tensor:
        return self._spread(self.white(self.array(noise)))

    def _spread(self, white: Tensor) -> Tensor:
        """Draws (n, size) from white noise (n, K, O, I) in the bases."""
        variance, outputs, back = self.factors(white.dtype)
        draws = outputs @ (white * variance.sqrt())
        return (draws if back is None else draws @ back.mT).flatten(1)

    def factored(self, dtype: torch.dtype) -> FactoredDraw | None:
        variance, outputs, back = self.factors(dtype)
        if back is None or len(outputs) > 1:
            return None
        return FactoredDraw(variance[0].sqrt(), outputs[0], back[0], lambda noise: self.white(noise[None])[0])

    def _through(self, vectors: Tensor, values: Tensor, basis: Tensor | None) -> Tensor:
        """(Q_G (x) basis) diag(values) (Q_G (x) basis)^T times vectors."""
        array = self.array(vectors)
        array = self.outputs.mT @ (array if basis is None else array @ basis)
        array = self.outputs @ (values * array)
        return (array if basis is None else array @ basis.mT).flatten(1)

    def multiply(self, vectors: Tensor) -> Tensor:
        return self._through(vectors, self.eigenvalues, self.forth)

    def solve(self, vectors: Tensor) -> Tensor:
        return self._through(vectors, self.eigenvalues.reciprocal(), self.back)

    def variance(self) -> Tensor:
        spread = self.outputs.square() @ self.eigenvalues.reciprocal()
        return (spread if self.back is None else spread @ self.back.square().mT).reshape(-1)

    def trace(self, block: Block) -> Tensor:
        """From second moments in the same bases."""
        return (block.state()["moments"] / self.eigenvalues).sum()

    def rotated(self, contribution: Contribution) -> tuple[Contribution, Tensor]:
        """The Jacobian in the basis where the covariance is diagonal, and that diagonal."""
        variance, outputs, back = self.factors(contribution.dtype)
        return rotate(contribution, back, outputs, self.eigenvalues.shape), variance

    def covariance(self, contributions: Sequence[Contribution], diagonal: bool) -> Tensor:
        rotated, variance = self.rotated(contributions[0])
        return rotated.covariance(variance, diagonal)

    def along_outputs(self, features: Tensor) -> Tensor:
        """Variances (n, O) of V a along the basis of the outputs, for features a (n, I)."""
        variance, _, back = self.factors(features.dtype)
        rotated = features if back is None else features @ back[0]
        return rotated.square() @ variance[0].mT

    def of_features(self, features: Tensor, diagonal: bool) -> Tensor | None:
        along, outputs = self.along_outputs(features), self.factors(features.dtype)[1][0]
        return along @ outputs.square().mT if diagonal else (outputs * along[:, None]) @ outputs.mT

    def spread(self, vectors: Tensor) -> Tensor | None:
        variance, outputs, back = self.factors(vectors.dtype)
        if back is not None and len(back) == 1:
            back = back[0]  # one product for all vectors, where a group axis would make one for each
        array = self.array(vectors) if back is None else self.array(vectors) @ back
        array = outputs @ (variance * (outputs.mT @ array))
        return (array if back is None else array @ back.mT).flatten(1)

    def features(self, contributions: Sequence[Contribution]) -> Any:
        return self.rotated(contributions[0])[0]

    def kernel(self, left: Any, right: Any) -> Tensor:
        return between(left, right, self.factors(left.dtype)[0])

    def matrix(self) -> Tensor:
        size = self.eigenvalues.numel()
        return self.multiply(torch.eye(size, dtype=torch.float64, device=self.eigenvalues.device))


class OwnBiasGaussian(EigenbasisGaussian):
    """The same with another prior precision d_b for the last of the I columns, a bias, than d_w for the weights.

    In the bases the precision of row o is diag(l_o) + (d_b - d_w) q q^T, where l_o = curvature + d_w and q (I,) is the
    bias's row of Q_A. The added matrix has rank one, so that inverses and roots have a closed form.
    """

    def __init__(self, curvature: Tensor, weights: Tensor, bias: Tensor, outputs: Tensor, inputs: Tensor) -> None:
        """Curvature (K, O, I) in the bases `outputs` and `inputs`; prior precisions of the weights and the bias."""
        super().__init__(curvature + weights, outputs, inputs, inputs)
        self.inputs, self.difference = inputs, bias - weights
        self._q = inputs[:, None, -1, :]
        # 1 + difference * q^T diag(1 / l) q; with |q| = 1 a sum of positive terms
        self._ratio = (self._q.square() * (curvature + bias) / self.eigenvalues).sum(-1)

    @property
    def _dent(self) -> tuple[Tensor, Tensor]:
        """u (K, O, I) and c (K, O): the covariance of row o is diag(1 / l_o) - c_o u_o u_o^T."""
        return self._q / self.eigenvalues, self.difference / self._ratio

    def logdet(self) -> Tensor:
        return super().logdet() + self._ratio.log().sum()

    def color(self, noise: Tensor) -> Tensor:
        # (diag(l) + d q q^T)^-1/2 = diag(l)^-1/2 (I - g v v^T), v = q / sqrt(l), with r^2 = 1 + d |v|^2 and
        # g = (1 - 1 / r) / |v|^2 = d / (r (r + 1)): no division by a vanishing |v|
        root = self._ratio.sqrt()
        v = (self._q * self.eigenvalues.rsqrt()).to(noise.dtype)
        factor = (self.difference / (root * (root + 1))).to(noise.dtype)
        white = self.white(self.array(noise))
        return self._spread(white - (factor * (white * v).sum(-1))[..., None] * v)

    def factored(self, dtype: torch.dtype) -> FactoredDraw | None:
        return None

    def multiply(self, vectors: Tensor) -> Tensor:
        array = torch.zeros_like(self.array(vectors))
        array[..., -1] = self.difference * self.array(vectors)[..., -1]
        return super().multiply(vectors) + array.flatten(1)

    def solve(self, vectors: Tensor) -> Tensor:
        u, c = self._dent
        array = self.outputs.mT @ self.array(vectors) @ self.inputs
        array = array / self.eigenvalues - (c * (array * u).sum(-1))[..., None] * u
        return (self.outputs @ array @ self.inputs.mT).flatten(1)

    def spread(self, vectors: Tensor) -> Tensor | None:
        return None

    def variance(self) -> Tensor:
        u, c = self._dent
        dent = c[..., None] * (u @ self.inputs.mT).square()
        return super().variance() - (self.outputs.square() @ dent).reshape(-1)

    def trace(self, block: Block) -> Tensor:
        u, c = self._dent
        return super().trace(block) - (block.state()["moments"] * c[..., None] * u.square()).sum()

    def along_outputs(self, features: Tensor) -> Tensor:
        u, c = (part[0].to(features.dtype) for part in self._dent)
        rotated = features @ self.inputs[0].to(features.dtype)
        return super().along_outputs(features) - c * (rotated @ u.mT).square()

    def _along(self, rotated: Contribution) -> tuple[Tensor, Tensor]:
        """J[b, m, o, :] u_o for a Jacobian in the bases, (B, M, K * O), and c (K * O)."""
        assert not isinstance(rotated, Lookup)  # embeddings have no bias
        u, c = (part.to(rotated.dtype) for part in self._dent)
        return rotated.along(u), c.reshape(-1)

    def covariance(self, contributions: Sequence[Contribution], diagonal: bool) -> Tensor:
        rotated, variance = self.rotated(contributions[0])
        along, c = self._along(rotated)
        return rotated.covariance(variance, diagonal) - (along.square() @ c if diagonal else (along * c) @ along.mT)

    def features(self, contributions: Sequence[Contribution]) -> tuple[Contribution, Tensor]:
        rotated, _ = self.rotated(contributions[0])
        return rotated, self._along(rotated)[0]

    def kernel(self, left: tuple[Contribution, Tensor], right: tuple[Contribution, Tensor]) -> Tensor:
        total = super().kernel(left[0], right[0])
        c = self._dent[1].to(total.dtype).reshape(-1)
        return total - ((left[1].flatten(0, 1) * c) @ right[1].flatten(0, 1).mT).reshape(total.shape)


def signs(vectors: Tensor) -> Tensor:
    """The sign (..., 1, n) of each eigenvector, a column of (..., n, n), that makes it unique: see `white`."""
    fixed = torch.arange(1, vectors.shape[-1] + 1, dtype=vectors.dtype, device=vectors.device).cos()
    return torch.where((fixed @ vectors.detach()) < 0, -1.0, 1.0)[..., None, :]


def rotate(contribution: Contribution, inputs: Tensor | None, outputs: Tensor, shape: Sequence[int]) -> Contribution:
    """The Jacobian of a (K, O, I) array of weights in the bases of its inputs (None: as they are) and outputs."""
    if isinstance(contribution, Lookup):
        return contribution.rotate(outputs)
    if isinstance(contribution, Rows):
        return contribution.rotate(inputs, outputs, tuple(shape))
    assert inputs is not None
    return contribution.rotate(inputs, outputs)
