"""Spike and slab: weights that are exactly zero with some probability, and Gaussian otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.learning_rule.expectations import (
    Expectation,
    centred,
    check_nodes,
    hermite,
    normal_grid,
    product,
    refuse_curvature,
)
from lapis.learning_rule.family import Family, Parameters, positive_vector, source_of, vector_of
from lapis.learning_rule.losses import Loss
from lapis.options import check_arguments, shown

LOG_2_PI = math.log(2 * math.pi)


def _share(name: str, value: Tensor, size: int | None) -> Tensor:
    """Probabilities strictly between 0 and 1."""
    found = positive_vector(name, value, size)
    if float(found.detach().max()) >= 1:
        raise DataError(f"{name} is no probability", expected="0 < p < 1", got=shown(found), do="pass probabilities")
    return found


@dataclass(frozen=True, eq=False, repr=False)
class SpikeAndSlab(Family):
    """Each weight is zero with probability 1 - p, and N(m, 1/s) with probability p; densities are on the slab.

    T(theta) = (1[theta != 0], theta, theta^2), mu = (p, p m, p (m^2 + 1/s)) and
    lambda = (log p/(1-p) + (log(s / 2 pi) - s m^2) / 2, s m, -s/2). "local" is the second-order expansion of the loss
    at the mean p m; "quadrature" is a product of the spike and Gauss-Hermite points on the slab; "monte_carlo"
    differentiates through the slabs of drawn weights, and for p compares each drawn slab with zero.

    Args:
        slab: m, (P,).
        precision: s, (P,).
        keep: p, (P,).
    """

    slab: Tensor
    precision: Tensor
    keep: Tensor

    def __post_init__(self) -> None:
        check_arguments(SpikeAndSlab, vars(self))
        slab = vector_of("slab", self.slab)
        object.__setattr__(self, "slab", slab)
        object.__setattr__(self, "precision", positive_vector("precision", self.precision, len(slab)))
        object.__setattr__(self, "keep", _share("keep", self.keep, len(slab)))

    @property
    def mean(self) -> Tensor:
        """p m, (P,)."""
        return self.keep * self.slab

    def natural(self) -> Parameters:
        """lambda, three vectors."""
        scale = (self.precision.log() - LOG_2_PI - self.precision * self.slab.square()) / 2
        return self.keep.logit() + scale, self.precision * self.slab, -self.precision / 2

    def expectation(self) -> Parameters:
        """mu, three vectors."""
        return self.keep, self.mean, self.keep * (self.slab.square() + 1 / self.precision)

    def with_natural(self, natural: Sequence[Tensor]) -> SpikeAndSlab:
        """s = -2 lambda_3, m = lambda_2 / s, and p from lambda_1."""
        first, second, third = self._parts("natural", natural)
        precision = positive_vector("precision", -2 * third)
        slab = second / precision
        scale = (precision.log() - LOG_2_PI - precision * slab.square()) / 2
        return SpikeAndSlab(slab, precision, (first - scale).sigmoid())

    def with_expectation(self, expectation: Sequence[Tensor]) -> SpikeAndSlab:
        """p = mu_1, m = mu_2 / p, 1/s = mu_3 / p - m^2."""
        keep, first, second = self._parts("expectation", expectation)
        slab = first / positive_vector("keep", keep)
        return SpikeAndSlab(slab, 1 / positive_vector("variance", second / keep - slab.square()), keep)

    def entropy(self) -> Tensor:
        """That of the choice, and p times the slab's, 0-d."""
        return (_choice_entropy(self.keep) + self.keep * (LOG_2_PI + 1 - self.precision.log()) / 2).sum()

    def log_prob(self, theta: Tensor) -> Tensor:
        """log (1 - p) for weights that are zero, the log of p times the slab's density for others."""
        theta = self._rows(theta)
        slab = (self.precision.log() - LOG_2_PI - self.precision * (theta - self.slab).square()) / 2
        return torch.where(theta == 0, (1 - self.keep).log(), self.keep.log() + slab).sum(-1)

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws (samples, P); the generator is seeded with 0 when None."""
        check_arguments(SpikeAndSlab.sample, locals())
        kept, slabs = self._drawn(samples, source_of(generator))
        return kept * slabs

    def _drawn(self, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Which weights are kept, and the slabs of all."""
        kept = (torch.rand(samples, self.size, dtype=torch.float64, generator=generator) < self.keep).double()
        noise = torch.randn(samples, self.size, dtype=torch.float64, generator=generator)
        return kept, self.slab + noise / self.precision.sqrt()

    def loss_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """grad_mu E[loss], three vectors."""
        refuse_curvature(how, "A spike and slab")
        if how.kind == "local":
            gradients, hessians = loss.derivatives(self.mean.detach()[None])
            curvature = hessians[0].diagonal()
            return torch.zeros_like(curvature), gradients[0] - curvature * self.mean, curvature / 2
        with torch.enable_grad():
            leaves = tuple(part.detach().clone().requires_grad_() for part in self.expectation())
            member = self.with_expectation(leaves)
            if how.kind == "quadrature":
                total = member._on_grid(loss, how.points)
            elif how.kind == "monte_carlo":
                total = member._by_draws(loss, how)
            else:
                drawn = self.sample(how.samples, generator=how.generator).detach()
                total = centred(loss.values(drawn).detach()) @ member.log_prob(drawn)
            return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)

    def _on_grid(self, loss: Loss, points: int) -> Tensor:
        check_nodes((points + 1, self.size))
        noise, weights = hermite(points)
        slabs = self.slab[:, None] + noise / self.precision[:, None].sqrt()
        places = torch.cat([torch.zeros(self.size, 1, dtype=torch.float64), slabs], 1)
        shares = torch.cat([1 - self.keep[:, None], self.keep[:, None] * weights], 1)
        return product(shares).prod(1) @ loss.values(product(places))

    def _by_draws(self, loss: Loss, how: Expectation) -> Tensor:
        """A function whose gradient is unbiased: through the slabs, and in p by what keeping each weight changes."""
        kept, slabs = self._drawn(how.samples, how.generator)
        total = loss.values(kept * slabs).mean()
        fixed = slabs.detach()
        for i in range(self.size):
            mask = kept.clone()
            mask[:, i] = 1
            with_weight = loss.values(mask * fixed).detach()
            mask[:, i] = 0
            total = total + self.keep[i] * (with_weight - loss.values(mask * fixed).detach()).mean()
        return total


@dataclass(frozen=True, eq=False, repr=False)
class FixedSpikeAndSlab(Family):
    """Spike and slab of which only the slabs' means m are learned; weights of one group are kept or dropped together.

    With groups of the weights that leave a unit, and s to infinity, this is dropout. lambda = s m and mu = p m: a
    conditional exponential family given which groups are kept, and its entropy is constant. The rule is
    m <- m - rate / (s p) grad_m E_q[loss]. "local" takes the gradient at the mean p m, where dropout's own
    approximation of its average is; "quadrature" sums over all 2^G choices, with Gauss-Hermite points on the slabs.

    Args:
        slab: m, (P,).
        keep: p of each group, (G,).
        precision: s > 0, of all slabs.
        groups: the group of each weight, (P,), from 0 to G - 1, or -1 for weights that are always kept. Each weight is
            a group by itself when None.
    """

    slab: Tensor
    keep: Tensor
    precision: float
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        check_arguments(FixedSpikeAndSlab, vars(self))
        slab = vector_of("slab", self.slab)
        count = len(slab) if self.groups is None else None
        keep = _share("keep", self.keep, count)
        groups = torch.arange(len(slab)) if self.groups is None else vector_of("groups", self.groups, len(slab)).long()
        if int(groups.min()) < -1 or int(groups.max()) >= len(keep):
            raise DataError(
                "A weight is in no group",
                expected=f"numbers from -1 to {len(keep) - 1}",
                got=f"from {int(groups.min())} to {int(groups.max())}",
                do="pass a probability for each group",
            )
        object.__setattr__(self, "slab", slab)
        object.__setattr__(self, "keep", keep)
        object.__setattr__(self, "groups", groups)

    def _each(self, of_groups: Tensor) -> Tensor:
        """From numbers (..., G) of the groups to those of the weights (..., P); 1 for weights that are always kept."""
        return torch.cat([of_groups, torch.ones_like(of_groups[..., :1])], -1)[..., self.groups]

    @property
    def mean(self) -> Tensor:
        """p m, (P,)."""
        return self._each(self.keep) * self.slab

    def natural(self) -> Parameters:
        """(s m,)."""
        return (self.precision * self.slab,)

    def expectation(self) -> Parameters:
        """(p m,)."""
        return (self.mean,)

    def with_natural(self, natural: Sequence[Tensor]) -> FixedSpikeAndSlab:
        """m = lambda / s."""
        slab = self._parts("natural", natural)[0] / self.precision
        return FixedSpikeAndSlab(slab, self.keep, self.precision, self.groups)

    def with_expectation(self, expectation: Sequence[Tensor]) -> FixedSpikeAndSlab:
        """m = mu / p."""
        slab = self._parts("expectation", expectation)[0] / self._each(self.keep)
        return FixedSpikeAndSlab(slab, self.keep, self.precision, self.groups)

    def entropy(self) -> Tensor:
        """That of the groups' choices, and p times that of each slab, 0-d."""
        choice = _choice_entropy(self.keep).sum()
        return choice + (self._each(self.keep) * (LOG_2_PI + 1 - math.log(self.precision)) / 2).sum()

    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(theta); -infinity if only a part of a group is zero."""
        theta = self._rows(theta)
        kept = theta != 0
        slab = (math.log(self.precision) - LOG_2_PI - self.precision * (theta - self.slab).square()) / 2
        total = torch.where(kept | (self.groups == -1), slab, 0.0).sum(-1)
        for g, share in enumerate(self.keep):
            own = kept[..., self.groups == g]
            off = torch.where(own.any(-1), -math.inf, (1 - share).log())
            total = total + torch.where(own.all(-1), share.log(), off)
        return total

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws (samples, P); the generator is seeded with 0 when None."""
        check_arguments(FixedSpikeAndSlab.sample, locals())
        kept, noise = self._drawn(samples, source_of(generator))
        return kept * (self.slab + noise)

    def _drawn(self, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Which weights are kept, and the slabs' deviations from m."""
        kept = (torch.rand(samples, len(self.keep), dtype=torch.float64, generator=generator) < self.keep).double()
        noise = torch.randn(samples, self.size, dtype=torch.float64, generator=generator)
        return self._each(kept), noise / math.sqrt(self.precision)

    def loss_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """(grad_m E[loss] / p,)."""
        refuse_curvature(how, "A fixed spike and slab")
        if how.kind == "local":
            return (loss.gradients(self.mean.detach()[None])[0],)
        if how.kind == "quadrature":
            kept, noise, weights = self._grid(how.points)
        else:
            kept, noise = self._drawn(how.samples, how.generator)
            weights = torch.full((how.samples,), 1 / how.samples).double()
        points = kept * (self.slab.detach() + noise)
        if how.kind == "function_values":
            slope = centred(loss.values(points).detach()) @ (self.precision * kept * noise)
        else:
            slope = weights @ (kept * loss.gradients(points))
        return (slope / self._each(self.keep),)

    def objective_gradient(self, loss: Loss, how: Expectation) -> Parameters:
        """The same, as the entropy does not depend on m."""
        return self.loss_gradient(loss, how)

    def _grid(self, points: int) -> tuple[Tensor, Tensor, Tensor]:
        """All choices of groups, each with the product grid on the slabs."""
        check_nodes((2, len(self.keep)), (points, self.size))
        noise, weights = normal_grid(points, self.size)
        kept = product(torch.tensor([0.0, 1.0]).double().expand(len(self.keep), -1))
        chances = torch.where(kept == 1, self.keep, 1 - self.keep).prod(1)
        repeated = self._each(kept).repeat_interleave(len(noise), 0)
        deviations = noise.repeat(len(kept), 1) / math.sqrt(self.precision)
        return repeated, deviations, torch.outer(chances, weights).flatten()


def _choice_entropy(keep: Tensor) -> Tensor:
    return -(keep * keep.log() + (1 - keep) * (1 - keep).log())
