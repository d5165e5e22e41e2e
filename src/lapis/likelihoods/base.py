"""The interface of a likelihood p(y | f): negative log density, its gradient and curvature in f, and target checks.

All formulas work on *canonical* outputs f of shape (B, T, C): B examples, T positions (tokens, pixels; 1 when
there are none), C outputs per position. `canonical` converts from the network's own layout, `layout` converts back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lapis.errors import LikelihoodError
from lapis.options import check_arguments

Kind = Literal["regression", "classification", "count", "function"]


class Likelihood(ABC):
    """p(y | f), independent over examples and positions.

    Args:
        channels: where the network puts its C outputs when there are positions: "last" for (B, ..., C),
            "first" for (B, C, ...), as in torch's losses. Outputs (B,) count as (B, 1).
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    is_elementwise: ClassVar[bool] = False
    """Whether nll is a sum of functions of one output each, so that expectations need only the outputs' marginals."""
    is_convex: ClassVar[bool] = True
    """Whether nll is convex in f, and its curvature S S^T the Hessian; else it is the Fisher information."""
    channels: Literal["last", "first"]

    def __init__(self, *, channels: Literal["last", "first"] = "last") -> None:
        check_arguments(Likelihood.__init__, locals())
        self.channels = channels

    @property
    def noise(self) -> Tensor | None:
        """The noise's standard deviation, 0-d or (C,); None for likelihoods without one."""
        return None

    # -- layout -----------------------------------------------------------------------------------------

    def canonical(self, raw: Tensor) -> Tensor:
        """The network's output, (B,), (B, ..., C) or (B, C, ...), as (B, T, C)."""
        if raw.dim() == 0:
            raise LikelihoodError(
                "The network's output has no batch dimension",
                expected="(B,), (B, C) or positions between",
                got="a 0-d tensor",
                do="return one output row per example",
            )
        if raw.dim() == 1:
            return raw.reshape(-1, 1, 1)
        last = raw.movedim(1, -1) if self.channels == "first" else raw
        positions = last.shape[1:-1].numel()
        return last.reshape(raw.shape[0], positions, last.shape[-1])

    def layout(self, canonical: Tensor, raw_shape: Sequence[int]) -> Tensor:
        """The inverse of `canonical`: values (B, T, K), for any K, in the layout of outputs of shape `raw_shape`."""
        if len(raw_shape) == 1 and canonical.shape[-1] == 1:
            return canonical.reshape(-1)
        spread = self.spread(canonical, raw_shape)
        return spread.movedim(-1, 1) if self.channels == "first" else spread

    def spread(self, values: Tensor, raw_shape: Sequence[int]) -> Tensor:
        """(B, T, ...) as (B, *positions, ...), with the positions of outputs of shape `raw_shape`."""
        return values.reshape(values.shape[0], *self.positions(raw_shape), *values.shape[2:])

    def positions(self, raw_shape: Sequence[int]) -> tuple[int, ...]:
        """The position dimensions of outputs of shape `raw_shape`; empty when there are none."""
        return tuple(raw_shape[2:] if self.channels == "first" else raw_shape[1:-1])

    # -- targets ----------------------------------------------------------------------------------------

    @abstractmethod
    def targets(self, y: Any, f: Tensor, raw_shape: Sequence[int] | None = None) -> Tensor:
        """Canonical targets for canonical outputs f, after all checks; DataError if one fails.

        With `raw_shape`, the shape of the network's own output, every position axis of y must match;
        without it only the number of positions can be checked.
        """

    def check_outputs(self, f: Tensor) -> None:
        """Raise LikelihoodError when canonical outputs f cannot be parameters of this likelihood."""
        if f.shape[-1] < 1:
            raise LikelihoodError(
                f"The {self.name} likelihood needs outputs",
                expected="C >= 1",
                got="C = 0",
                do="check the network",
            )

    def suspicion(self, f: Tensor) -> str | None:
        """What makes canonical outputs f look like something else than this likelihood takes, and what to do; or None.

        A guess, for warnings: f may be right all the same. Autograd's graph, if f has one, is looked at too.
        """
        return None

    # -- the density ------------------------------------------------------------------------------------

    @abstractmethod
    def position_nll(self, f: Tensor, y: Tensor) -> Tensor:
        """-log p(y | f) at each position, summed over outputs, with all constants: (B, T)."""

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """-log p(y | f), summed over positions and outputs, with all constants: (B,)."""
        return self.position_nll(f, y).sum(1)

    @abstractmethod
    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient of nll in f at the observed targets: (B, T, C)."""

    @abstractmethod
    def factor(self, f: Tensor, y: Tensor) -> Tensor:
        """S of shape (B, T, C, R): at each position S S^T is the Hessian (or Fisher information) of nll in f.

        The targets only mark ignored positions, except in `Custom`, whose Hessian depends on them.
        """

    def curved(self, f: Tensor, y: Tensor, u: Tensor) -> Tensor:
        """S S^T u for each of k vectors u (k, B, T, C), in u's dtype."""
        s = self.factor(f, y).to(u.dtype)
        columns = u.permute(1, 2, 3, 0)  # (B, T, C, k): one product with S for all k vectors
        return (s @ (s.mT @ columns)).permute(3, 0, 1, 2)

    def expected_hessian(self, draws: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """sum_s w_s S_s S_s^T over points f_s, (B, T, C, C), for `draws` (S, B, T, C) with weights (S,)."""
        factor = self.factor(draws.flatten(0, 1), y.expand(len(draws), *y.shape).flatten(0, 1))
        factor = factor.reshape(*draws.shape, factor.shape[-1])
        return torch.einsum("s,sbtcr,sbtdr->btcd", weights, factor, factor)

    def curvature_trace(self, f: Tensor, y: Tensor) -> Tensor:
        """tr(S S^T) at each position, (B, T)."""
        return self.factor(f, y).square().sum((-2, -1))

    def link(self, f: Tensor) -> Tensor:
        """The link: E[y | f], (B, T, C)."""
        raise LikelihoodError(
            f"The {self.name} likelihood has no link",
            expected="gaussian, categorical, bernoulli or poisson",
            got=self.name,
            do="leave the link out: take the outputs themselves",
        )

    def link_slope(self, f: Tensor) -> Tensor:
        """d E[y | f] / d f, (B, T, C, C): for canonical links Lambda(x), the Hessian of nll in f."""
        s = self.factor(f, self.link(f))  # targets with a probability for each output: none is ignored
        return s @ s.mT

    @abstractmethod
    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Gradient of nll in f at targets drawn from p(. | f): (B, T, C). Its second moment is S S^T.

        The targets y only mark ignored positions.
        """

    # -- sums over data ---------------------------------------------------------------------------------

    def statistics(self, f: Tensor, y: Tensor) -> Tensor:
        """Sums over the batch that suffice for `log_likelihood`: a 1-D float64 tensor, detached.

        By default sum_n log p(y_n | f_n); likelihoods with parameters of their own override it.
        """
        exact = f.detach().double()
        return -self.nll(exact, y.double() if y.is_floating_point() else y).sum().reshape(1).detach()

    def log_likelihood(self, statistics: Tensor) -> Tensor:
        """log p(D) = sum_n log p(y_n | f_n) from summed `statistics`: a 0-d float64 tensor."""
        return statistics[0]

    # -- noise ------------------------------------------------------------------------------------------

    def with_noise(self, noise: float | Tensor) -> Likelihood:
        """The same likelihood with another noise standard deviation."""
        raise LikelihoodError(
            f"The {self.name} likelihood has no noise to set",
            expected="a Gaussian likelihood",
            got=f"{self.name} and noise {noise}",
            do="leave the noise out",
        )

    def scaled_noise(self, factor: Tensor) -> Likelihood:
        """The same likelihood with its noise times `factor` (0-d)."""
        return self.with_noise(factor)

    def curvature_scale(self, fitted: Likelihood) -> Tensor | float:
        """The factor that converts curvature computed under `fitted` into curvature under this likelihood."""
        self._same_family(fitted)
        return 1.0

    def _same_family(self, fitted: Likelihood) -> None:
        if fitted.name != self.name:
            raise LikelihoodError(
                "Curvature of one likelihood says nothing about another",
                expected=self.name,
                got=fitted.name,
                do=f"refit with the {self.name} likelihood",
            )

    # -- files ------------------------------------------------------------------------------------------

    def to_config(self) -> dict[str, Any]:
        """JSON-able description from which `lapis.likelihoods.from_config` rebuilds the likelihood."""
        return {"name": self.name, "channels": self.channels}

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self.to_config().items() if key != "name")
        return f"{type(self).__name__}({settings})"


class Separable(Likelihood):
    """A likelihood whose outputs are independent: S is diagonal."""

    @abstractmethod
    def root(self, f: Tensor) -> Tensor:
        """The diagonal of S, (B, T, C)."""

    def factor(self, f: Tensor, y: Tensor) -> Tensor:
        root = self.root(f)
        return root.unsqueeze(-1) if root.shape[-1] == 1 else torch.diag_embed(root)

    def curved(self, f: Tensor, y: Tensor, u: Tensor) -> Tensor:
        return u * (self.root(f) ** 2).to(u.dtype)

    def curvature_trace(self, f: Tensor, y: Tensor) -> Tensor:
        return self.root(f).square().sum(-1)

    def expected_hessian(self, draws: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        squares = self.root(draws.flatten(0, 1)).reshape(draws.shape) ** 2
        return torch.diag_embed(torch.einsum("s,sbtc->btc", weights, squares))
