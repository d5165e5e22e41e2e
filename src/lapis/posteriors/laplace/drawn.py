"""A posterior that is a set of drawn weight vectors: its predictions are Jacobian-vector products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapis.batches import Batch, Inputs, batch_length, take
from lapis.curvature.outputs import check_outputs
from lapis.curvature.products.jacobian import Jacobian
from lapis.errors import OptionError
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.posteriors.base import Posterior, check_draws
from lapis.posteriors.predicting import linearised as functional
from lapis.predictions import LatentGaussian
from lapis.priors import Prior, WeightPrior

EXAMPLES_AT_ONCE = 256
"""Examples whose outputs are predicted together."""


@dataclass(frozen=True)
class Drawing:
    """How weights were drawn: the solver's statistics, one entry a draw where there is a tuple."""

    method: str
    objective: str | None
    seed: int
    iterations: tuple[int, ...]
    """Iterations of conjugate gradients, or SGD steps."""
    residuals: tuple[float, ...]
    """|A z - b| / |b|, computed anew at the end."""
    converged: bool
    reason: str
    products: int
    """Vectors that the GGN of the whole data set was applied to; minibatches count by their share."""

    def __post_init__(self) -> None:
        for name in ("iterations", "residuals"):  # files give lists
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, eq=False, repr=False)
class DrawnPosterior(Posterior):
    """K draws z_k of N(0, A^-1) around the trained weights t; made by `ImplicitPosterior.draw`.

    The linearised network's outputs have mean f(x) and covariance mean_k (J z_k)(J z_k)^T, by K Jacobian-vector
    products. With K draws a variance has a relative error of sqrt(2 / K), and a covariance has rank K at most; so
    predictions hold variances alone unless covariance="full" is asked for. Memory: (K, P) in the network's dtype.
    """

    network: Network
    likelihood: Likelihood
    fitted_likelihood: Likelihood
    prior: Prior
    weight_prior: WeightPrior
    deviations: Tensor
    """z, (K, P), in the network's dtype."""
    mean: Tensor
    fingerprint: str
    temperature: float
    memory_budget: int
    drawing: Drawing
    examples: int
    width: int
    seen: str
    structure: Any = "drawn"

    @property
    def n_data(self) -> int:
        return self.examples

    @property
    def n_outputs(self) -> int:
        return self.width

    @property
    def signature(self) -> str:
        return self.seen

    def __len__(self) -> int:
        """K."""
        return len(self.deviations)

    def sample(self, n: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """n of the K draws, without replacement, as weights (n, P)."""
        source = check_draws(n, generator, self.network.device)
        if n > len(self):
            raise OptionError(
                "There are fewer draws",
                expected=f"n <= {len(self)}",
                got=str(n),
                do="draw more: ImplicitPosterior.draw(k)",
            )
        chosen = torch.randperm(len(self), generator=source, device=source.device)[:n].to(self.mean.device)
        return self.deviations[chosen] + self.mean

    def marginal_variance(self) -> Tensor:
        """mean_k z_k^2 of each weight, (P,)."""
        return self.deviations.square().mean(0)

    def _full_by_default(self) -> bool:
        return False

    def _networks(self) -> int:
        return len(self)

    def _draws(self, n: int, generator: torch.Generator, inputs: Inputs) -> Iterable[Mapping[str, Tensor]]:
        return (self.network.unflatten(weights) for weights in self.sample(n, generator=generator))

    def _outputs(self, inputs: Inputs, kind: functional.Kind) -> tuple[LatentGaussian, torch.Size]:
        means, pushed = [], []
        length = batch_length(inputs)
        for start in range(0, length, EXAMPLES_AT_ONCE):
            part = take(inputs, start, min(start + EXAMPLES_AT_ONCE, length))
            batch = Batch(part, torch.zeros(batch_length(part), device=self.network.device), 0)
            jacobian = Jacobian(self.network, self.likelihood.canonical, [batch], memory_budget=self.memory_budget)
            check_outputs(jacobian.outputs[0], self.width)
            means.append(jacobian.outputs[0])
            pushed.append(jacobian.forward(self.deviations)[0].double())
        mean, draws = torch.cat(means).to(self.network.dtype), torch.cat(pushed, 1)
        shape = torch.Size((length, *jacobian.shapes[0][1:]))
        if kind == "diagonal":
            return LatentGaussian(mean, draws.square().mean(0).to(mean.dtype)), shape
        if kind == "full":
            covariance = (torch.einsum("kbtc,kbtd->btcd", draws, draws) / len(self)).to(mean.dtype)
            return LatentGaussian(mean, covariance.diagonal(dim1=-2, dim2=-1), covariance), shape
        functional.check_joint(mean, self.memory_budget)
        flat = draws.flatten(1)
        joint = (flat.mT @ flat / len(self)).to(mean.dtype)
        return LatentGaussian(mean, joint.diagonal().reshape(mean.shape), None, joint), shape
