"""Regression with Gaussian noise of a fixed standard deviation, shared by all outputs or one per output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lapis.errors import LikelihoodError, OptionError
from lapis.likelihoods._draws import normal_like
from lapis.likelihoods._targets import per_output
from lapis.likelihoods.base import Kind, Likelihood, Separable
from lapis.options import check_arguments, checked_tensor


class Gaussian(Separable):
    """y ~ N(f, diag(sigma^2)): -log p = sum_c (y_c - f_c)^2 / (2 sigma_c^2) + 1/2 log(2 pi sigma_c^2).

    Args:
        noise: the standard deviation sigma, one number for all outputs or a tensor (C,); kept in float64. A
            tensor that requires a gradient keeps its graph, so that the evidence can be differentiated in it.
        channels: see `Likelihood`.

    Targets are (B, C), (B,) when C = 1, or laid out as the network's outputs.
    """

    name: ClassVar[str] = "gaussian"
    kind: ClassVar[Kind] = "regression"
    is_elementwise: ClassVar[bool] = True

    def __init__(self, noise: float | Tensor = 1.0, *, channels: Literal["last", "first"] = "last") -> None:
        check_arguments(Gaussian, locals())
        super().__init__(channels=channels)
        self._noise = _standard_deviation(noise)
        given = isinstance(noise, Tensor) and noise.is_floating_point()
        self._rounding = torch.finfo(noise.dtype).eps if given else 0.0  # type: ignore[union-attr]
        """Relative error with which the noise was given."""
        self._factor: tuple[Tensor, Tensor] | None = None
        """Another noise, and the factor by which this one differs from it, after `scaled_noise`."""

    @property
    def noise(self) -> Tensor:
        """The noise's standard deviation sigma: 0-d, or (C,)."""
        return self._noise

    def targets(self, y: Any, f: Tensor, raw_shape: Sequence[int] | None = None) -> Tensor:
        positions = None if raw_shape is None else self.positions(raw_shape)
        return per_output(
            y, f, width=f.shape[-1], channels=self.channels, positions=positions, what="Regression targets"
        )

    def check_outputs(self, f: Tensor) -> None:
        super().check_outputs(f)
        self._sigma(f.shape[-1])

    def position_nll(self, f: Tensor, y: Tensor) -> Tensor:
        sigma = self._sigma(f.shape[-1]).to(f)
        return (0.5 * ((y - f) / sigma) ** 2 + sigma.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y) / self._sigma(f.shape[-1]).to(f) ** 2

    def link(self, f: Tensor) -> Tensor:
        return f

    def link_slope(self, f: Tensor) -> Tensor:
        return torch.diag_embed(torch.ones_like(f))

    def root(self, f: Tensor) -> Tensor:
        """1 / sigma."""
        return (1 / self._sigma(f.shape[-1]).to(f)).expand(f.shape)

    def sampled_gradient(self, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return normal_like(f, generator) / self._sigma(f.shape[-1]).to(f)

    def statistics(self, f: Tensor, y: Tensor) -> Tensor:
        """[sse_1 .. sse_C, count_1 .. count_C]: sums of squared errors and numbers of targets per output.

        They do not depend on the noise, which can therefore change after the fit.
        """
        errors = ((y.double() - f.detach().double()) ** 2).sum((0, 1))
        return torch.cat([errors, torch.full_like(errors, f.shape[0] * f.shape[1])])

    def log_likelihood(self, statistics: Tensor) -> Tensor:
        """sum_c -sse_c / (2 sigma_c^2) - count_c / 2 log(2 pi sigma_c^2), differentiable in sigma."""
        errors, counts = statistics.chunk(2)
        sigma = self._sigma(len(errors)).to(statistics)
        return -(0.5 * errors / sigma**2 + counts * (sigma.log() + 0.5 * math.log(2 * math.pi))).sum()

    def with_noise(self, noise: float | Tensor) -> Gaussian:
        return Gaussian(noise, channels=self.channels)

    def scaled_noise(self, factor: Tensor) -> Gaussian:
        """The same likelihood with every noise times `factor` (0-d), in which the curvature can be differentiated."""
        base = self.noise.detach()
        scaled = Gaussian(base * factor, channels=self.channels)
        scaled._factor = base, factor
        return scaled

    def has_proportions_of(self, other: Gaussian) -> bool:
        """Whether the noise differs from the other's by one factor for all outputs, within the rounding of both."""
        ratio = self.noise.detach() / other.noise.detach().to(self.noise.device)
        return bool((ratio / ratio.reshape(-1)[0] - 1).abs().max() <= 4 * max(1e-13, self._rounding, other._rounding))

    def curvature_scale(self, fitted: Likelihood) -> Tensor | float:
        """(sigma_fitted / sigma)^2, differentiable in sigma; LikelihoodError if it is not the same for every output.

        The fitted noise is a constant here: it is already part of the curvature.
        """
        self._same_family(fitted)
        assert isinstance(fitted, Gaussian)
        before, now = fitted.noise.detach(), self.noise
        if before.dim() and now.dim() and before.shape != now.shape:
            raise LikelihoodError(
                "The two noises are for different numbers of outputs",
                expected=f"{len(before)}, as fitted",
                got=str(len(now)),
                do="pass one noise, or one per output",
            )
        ratio = (before.to(now.device) / now) ** 2
        if ratio.dim() == 0:
            return ratio
        if not self.has_proportions_of(fitted):
            raise LikelihoodError(
                "Curvature cannot be rescaled output by output",
                expected="a noise that changes by the same factor for every output",
                got=f"variance factors {(1 / ratio).tolist()}",
                do="refit with the new noise",
            )
        if ratio.requires_grad and self._factor is not None:
            base, factor = self._factor
            return (before.to(base.device) / base).reshape(-1)[0] ** 2 / factor**2
        if ratio.requires_grad:
            raise LikelihoodError(
                "Curvature cannot be differentiated in a noise per output",
                expected="one noise for all outputs, or no gradient",
                got=f"a noise of shape {tuple(self.noise.shape)} that requires a gradient",
                do="use one noise for all outputs, or detach it",
            )
        return ratio[0]

    def to_config(self) -> dict[str, Any]:
        return {**super().to_config(), "noise": self.noise.detach().tolist()}

    def _sigma(self, outputs: int) -> Tensor:
        """The noise expanded to (C,)."""
        if self._noise.dim() == 1 and len(self._noise) != outputs:
            raise LikelihoodError(
                "The noise does not fit the network's outputs",
                expected=f"one noise, or {outputs} (one per output)",
                got=f"{len(self._noise)}",
                do="pass noise=<number>, or a tensor with one entry per output",
            )
        return self._noise.expand(outputs)


def _standard_deviation(noise: float | Tensor) -> Tensor:
    """A positive standard deviation as a float64 tensor, 0-d or 1-D, still attached to its graph."""
    given = (
        torch.tensor(noise, dtype=torch.float64) if isinstance(noise, (int, float)) else checked_tensor("noise", noise)
    )
    sigma = given.double()
    values = sigma.detach()
    lowest, highest = map(float, torch.aminmax(values))
    if sigma.dim() > 1 or not 0 < lowest <= highest < math.inf:
        raise OptionError(
            "The noise is no standard deviation",
            expected="a positive finite number, or a tensor (C,) of them",
            got=str(values.tolist()),
            do="pass the noise's standard deviation (not its variance or precision)",
        )
    return sigma
