"""A Gaussian over a network's weights as a Gaussian process over its outputs: mean f(x), kernel J Sigma J'^T."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from lapis.batches import Inputs
from lapis.errors import OptionError
from lapis.function_space.kernels import DiagonalKernel, WeightKernel, assembled
from lapis.function_space.process import Process
from lapis.function_space.tangent import Tangent
from lapis.priors import WeightPrior

DRAW_COPIES = 8
"""Float64 vectors in memory for each function that is drawn."""

Draws = Callable[[int, torch.Generator], Iterable[Tensor]]
"""From a count and a source of randomness to deviations theta - t of drawn weights, (P,) each."""


@dataclass(frozen=True, eq=False, repr=False)
class GaussianProcess(Process):
    """f(x) + J(x) (theta - t) for Gaussian weights theta ~ N(m, Sigma).

    Made by `posterior.gaussian_process()`. `of_diagonal` makes it of any mean and variances of the weights.

    Args:
        covariance: the kernel J Sigma J'^T.
        deviation: m - t (P,), None for zero.
        draws: of theta - t.
        distance: |t - m|^2 in the metric of Sigma^-1; only called where m is not t.
        weight_prior: of the weights, if there is one.

    >>> import torch, lapis
    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> model = torch.nn.Linear(1, 1).double()
    >>> process = lapis.laplace(model, (x, 2 * x), "regression").gaussian_process()
    >>> process.kernel(x[:3], x).shape
    torch.Size([3, 1, 20, 1])
    >>> process.prior().given((x, 2 * x)).mean(x).shape
    torch.Size([20, 1])
    """

    covariance: WeightKernel
    deviation: Tensor | None
    draws: Draws
    distance: Callable[[], Tensor] | None = None
    weight_prior: WeightPrior | None = None

    @staticmethod
    def of_diagonal(
        tangent: Tangent,
        variance: Tensor,
        *,
        factors: Tensor | None = None,
        deviation: Tensor | None = None,
        weight_prior: WeightPrior | None = None,
        link: bool = False,
        exact: bool = False,
    ) -> GaussianProcess:
        """The process of weights N(t + deviation, diag(variance) + F^T F): of a prior, or of an optimiser's state.

        `exact` processes, to be conditioned on data, multiply in float64.
        """
        covariance = DiagonalKernel(tangent, variance, factors, exact=exact)
        centre = torch.zeros_like(covariance.variance) if deviation is None else deviation.double()

        def draws(samples: int, generator: torch.Generator) -> Iterable[Tensor]:
            for _ in range(samples):
                drawn = centre + covariance.variance.sqrt() * _white(centre, generator)
                if covariance.factors is not None:
                    drawn = drawn + _white(covariance.factors[:, 0], generator) @ covariance.factors
                yield drawn

        def distance() -> Tensor:
            return (centre.square() / covariance.variance).sum()

        return GaussianProcess(
            tangent, 1.0, link, covariance, deviation, draws, distance if factors is None else None, weight_prior
        )

    def prior(self) -> GaussianProcess:
        """The process of the prior: mean f(x) + J(x) (m - t) with the prior's mean m, kernel J Lambda^-1 J'^T."""
        prior = self.weight_prior
        if prior is None:
            raise OptionError(
                "These weights have no prior",
                expected="the process of a Laplace or a variational posterior",
                got=repr(self),
                do="fit one, as in lapis.laplace(model, data).gaussian_process().prior()",
            )
        made = GaussianProcess.of_diagonal(
            self.tangent,
            prior.vector().detach().reciprocal(),
            deviation=prior.mean.double() - self.tangent.point.double(),
            weight_prior=prior,
            link=self.link,
            exact=True,
        )
        return replace(made, temperature=self.temperature)

    def squared_distance(self) -> Tensor:
        if self.deviation is None:
            return torch.zeros((), dtype=torch.float64, device=self.tangent.network.device)
        if self.distance is None:
            raise OptionError(
                "The evidence needs the density of the weights at t",
                expected="a process with a known precision, or with its mean at t",
                got=repr(self),
                do="use at_mode=True, or the prior's process",
            )
        return self.distance()

    def _mean(self, inputs: Inputs) -> tuple[Tensor, tuple[int, ...]]:
        jacobian = self.tangent.jacobian(inputs)
        return self.tangent.outputs(jacobian, self.deviation), self.tangent.raw_shape(jacobian)

    def _kernel(self, left: Inputs, right: Inputs | None) -> Tensor:
        return assembled(self.covariance, left, right)

    def _product(self, inputs: Inputs, vectors: Tensor) -> Tensor:
        jacobian = self.tangent.jacobian(inputs)
        shapes = [f.shape for f in jacobian.outputs]
        parts = torch.split(vectors, [shape.numel() for shape in shapes], -1)
        seeds = [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
        moved = self.covariance.product(jacobian.backward(seeds))
        return torch.cat(jacobian.forward(moved), 1).flatten(1)

    def _functions(self, places: Sequence[Inputs], samples: int, generator: torch.Generator) -> list[Tensor]:
        network = self.tangent.network
        jacobians = [self.tangent.jacobian(inputs) for inputs in places]
        step = max(1, self.tangent.memory_budget // (DRAW_COPIES * 8 * network.size))
        found: list[list[Tensor]] = [[] for _ in places]
        waiting = iter(self.draws(samples, generator))
        while some := list(islice(waiting, step)):
            deviations = torch.stack(some).double()
            for jacobian, into in zip(jacobians, found, strict=True):
                into.append(torch.cat(jacobian.outputs) + torch.cat(jacobian.forward(deviations), 1))
        return [torch.cat(parts) for parts in found]


def _white(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, (len(like),) float64."""
    noise = torch.randn(len(like), dtype=torch.float64, generator=generator, device=generator.device)
    return noise.to(like.device)
