"""A mixture of Gaussians as a model for EM, with classes that may be known for some rows.

    p(x, z = k) = pi_k N(x | mu_k, Sigma_k);    responsibilities r_nk = p(z_n = k | x_n, label_n)

A label enters as a factor l_nk = p(label_n | z_n = k): one for the known class and zero for others, all ones where
nothing is known, anything between for soft labels. Covariances keep Sigma >= floor I (`floor`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.latent.driver import Expected, LatentModel
from lapis.latent.floor import NOBODY, raised
from lapis.latent.sequences import as_real
from lapis.options import shown

Covariance = Literal["full", "tied", "diagonal", "spherical"]

CHUNK = 2**18
"""Numbers in the largest temporary array."""


@dataclass(frozen=True)
class Rows:
    """Data of a mixture: rows x (N, D), and log l (N, K), or None where no class is known."""

    x: Tensor
    log_labels: Tensor | None = None

    @staticmethod
    def of(data: Any, dimensions: int) -> Rows:
        """Data of this width: rows already, or a tensor, array or list (N, D)."""
        given = isinstance(data, Rows)
        x: Tensor = data.x if given else as_real(data)
        if x.dim() != 2 or not len(x) or x.shape[1] != dimensions or not (given or bool(x.isfinite().all())):
            raise DataError(
                "These are no data of the mixture", expected=f"finite numbers (N, {dimensions})", got=shown(x),
                do="pass one row for each datum",
            )  # fmt: skip
        return data if given else Rows(x.double())

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Tensor | slice) -> Rows:
        return Rows(self.x[rows], None if self.log_labels is None else self.log_labels[rows])


@dataclass(frozen=True)
class MixtureModel(LatentModel):
    """Weights (K,), means (K, D), covariances: full (K, D, D), tied (D, D), diagonal (K, D), spherical (K,)."""

    weights: Tensor
    means: Tensor
    covariances: Tensor
    kind: Covariance
    floor: float = 0.0

    # densities -----------------------------------------------------------------------------------------

    def whitening(self) -> tuple[Tensor, Tensor]:
        """W with W W^T = Sigma^-1, (K, D, D) or (K, D) for diagonal ones, and log |Sigma|, (K,)."""
        components, dimensions = self.means.shape
        if self.kind in ("full", "tied"):
            root = torch.linalg.cholesky(self.covariances)
            eye = torch.eye(dimensions, dtype=root.dtype, device=root.device).expand_as(root)
            inverse = torch.linalg.solve_triangular(root, eye, upper=False).mT
            logdet = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            return inverse.expand(components, dimensions, dimensions), logdet.expand(components)
        variances = self.covariances if self.kind == "diagonal" else self.covariances[:, None].expand_as(self.means)
        return variances.rsqrt(), variances.log().sum(1)

    def log_densities(self, x: Tensor) -> Tensor:
        """log N(x | mu_k, Sigma_k), (N, K), in chunks of rows."""
        white, logdet = self.whitening()
        components, dimensions = self.means.shape
        constant = -0.5 * (dimensions * math.log(2 * math.pi) + logdet)
        result = x.new_empty(len(x), components)
        step = max(1, CHUNK // (components * dimensions))
        if white.dim() == 3:
            flat = white.permute(1, 0, 2).reshape(dimensions, -1)  # one product for all components
            centre = torch.einsum("kd,kde->ke", self.means, white).reshape(-1)
        for start in range(0, len(x), step):
            part = x[start : start + step]
            if white.dim() == 3:
                z = torch.addmm(centre, part, flat, beta=-1).view(len(part), components, dimensions)
            else:
                z = (part[:, None] - self.means) * white
            torch.addcmul(constant, z.square_().sum(2), x.new_tensor(-0.5), out=result[start : start + step])
        return result

    def log_joints(self, rows: Rows) -> Tensor:
        """log p(x, z = k, label), (N, K)."""
        joint = self.log_densities(rows.x).add_(self.weights.log())
        return joint if rows.log_labels is None else joint.add_(rows.log_labels)

    def responsibilities(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """r (N, K), and log p(x, label) of each row, (N,)."""
        joint = self.log_joints(rows)
        evidence = joint.logsumexp(1)
        return joint.sub_(evidence[:, None]).exp_(), evidence

    # EM ------------------------------------------------------------------------------------------------

    def expectation(self, data: Rows) -> Expected:
        """In chunks of rows: responsibilities of all rows are never held."""
        data = Rows.of(data, self.means.shape[1])
        step = max(1, CHUNK // self.means.numel())
        total: Expected | None = None
        for start in range(0, len(data), step):
            part = data[start : start + step]
            joint = self.log_joints(part)
            evidence = joint.logsumexp(1, keepdim=True)
            sums = gathered(part, (joint - evidence).exp_(), joint, evidence, self.kind)
            total = sums if total is None else total.plus(sums)
        assert total is not None
        return total

    def log_joint(self, expected: Expected) -> Tensor:
        sums = expected.statistics
        n = sums["n"]
        white, logdet = self.whitening()
        dimensions = self.means.shape[1]
        total = torch.xlogy(n, self.weights).sum() - 0.5 * (n * (dimensions * math.log(2 * math.pi) + logdet)).sum()
        around = scatter(sums, self.means, self.kind)
        if self.kind == "full":
            total = total - 0.5 * torch.einsum("kde,kdf,kfe->", white, around, white)
        elif self.kind == "tied":
            total = total - 0.5 * torch.einsum("de,df,fe->", white[0], around, white[0])
        else:
            total = total - 0.5 * (white.square() * around).sum()
        return total + sums["labels"]

    def maximisation(self, expected: Expected) -> MixtureModel:
        sums = expected.statistics
        n = sums["n"]
        alive = n > NOBODY
        means = torch.where(alive[:, None], sums["x"] / n.clamp_min(NOBODY)[:, None], self.means)
        covariances = floored(_covariances(scatter(sums, means, self.kind), n, self.kind), self.kind, self.floor)
        if self.kind != "tied":
            shape = (-1, *([1] * (covariances.dim() - 1)))
            covariances = torch.where(alive.reshape(shape), covariances, self.covariances)
        return MixtureModel(n / n.sum(), means, covariances, self.kind, self.floor)

    # acceleration --------------------------------------------------------------------------------------

    def vector(self) -> Tensor | None:
        """Log weights, means, and logarithms of variances or Cholesky factors with logarithmic diagonals."""
        if not bool((self.weights > 0).all()):
            return None
        if self.kind in ("full", "tied"):
            root = torch.linalg.cholesky(self.covariances)
            spread = root.tril(-1) + torch.diag_embed(root.diagonal(dim1=-2, dim2=-1).log())
        else:
            spread = self.covariances.log()
        return torch.cat([self.weights.log(), self.means.flatten(), spread.flatten()])

    def with_vector(self, vector: Tensor) -> MixtureModel:
        components = len(self.weights)
        weights, means, spread = torch.split(vector, [components, self.means.numel(), self.covariances.numel()])
        spread = spread.reshape(self.covariances.shape)
        if self.kind in ("full", "tied"):
            root = spread.tril(-1) + torch.diag_embed(spread.diagonal(dim1=-2, dim2=-1).exp())
            covariances = root @ root.mT
        else:
            covariances = spread.exp()
        covariances = floored(covariances, self.kind, self.floor)
        return MixtureModel(weights.softmax(0), means.reshape(self.means.shape), covariances, self.kind, self.floor)


def gathered(rows: Rows, r: Tensor, joint: Tensor, evidence: Tensor, kind: Covariance) -> Expected:
    """Sums over the data under responsibilities r (N, K) = exp(joint - evidence)."""
    x = rows.x
    dimensions = x.shape[1]
    components = r.shape[1]
    if kind == "tied":
        second = (x * r.sum(1, keepdim=True)).mT @ x
    elif kind == "full":
        second = x.new_zeros(components * dimensions, dimensions)
        step = max(1, CHUNK // (components * dimensions))
        for start in range(0, len(x), step):
            part = x[start : start + step]
            weighted = (r[start : start + step, :, None] * part[:, None]).flatten(1)
            second.addmm_(weighted.mT, part)
        second = second.view(components, dimensions, dimensions)
        second = (second + second.mT) / 2
    else:
        second = r.mT @ x.square()
    sums = {"n": r.sum(0), "x": r.mT @ x, "xx": second}
    labels = x.new_zeros(())
    if rows.log_labels is not None:
        labels = torch.where(r > 0, r * rows.log_labels, 0.0).sum()
    sums["labels"] = labels
    # H(r) = -sum r log r = sum_n evidence_n - sum r joint
    entropy = evidence.sum() - torch.where(r > 0, r * joint, 0.0).sum()
    return Expected(sums, entropy, float(len(x)))


def scatter(sums: Mapping[str, Tensor], means: Tensor, kind: Covariance) -> Tensor:
    """sum_n r_nk (x - mu_k)(x - mu_k)^T: (K, D, D), (D, D) summed over k, or its diagonals (K, D)."""
    n, first, second = sums["n"], sums["x"], sums["xx"]
    if kind == "full":
        cross = first[:, :, None] * means[:, None]
        return second - cross - cross.mT + n[:, None, None] * means[:, :, None] * means[:, None]
    if kind == "tied":
        cross = first.mT @ means
        return second - cross - cross.mT + (means.mT * n) @ means
    return second - 2 * first * means + n[:, None] * means.square()


def _covariances(around: Tensor, n: Tensor, kind: Covariance) -> Tensor:
    """Maximum-likelihood covariances, without the floor."""
    if kind == "tied":
        return around / n.sum()
    if kind == "full":
        return around / n.clamp_min(NOBODY)[:, None, None]
    variances = around / n.clamp_min(NOBODY)[:, None]
    return variances if kind == "diagonal" else variances.mean(1)


def floored(covariances: Tensor, kind: Covariance, floor: float) -> Tensor:
    """Variances raised to the floor, in every direction."""
    return raised(covariances, covariances.new_tensor(floor), full=kind in ("full", "tied"))
