"""The interface of Gaussian processes over a network's outputs: mean, kernel, draws, predictions, conditioning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lapis.batches import Inputs, batch_length, take
from lapis.function_space.tangent import Tangent
from lapis.network import outside_inference_mode
from lapis.options import check_arguments
from lapis.predictions import LatentGaussian, Prediction
from lapis.predictions import predict as predict_outputs
from lapis.solvers import Operator

if TYPE_CHECKING:
    from lapis.function_space.conditioned import ConditionedProcess

PREDICTED_OUTPUTS = 512
"""Outputs whose kernel matrix is computed together for the variances along its diagonal."""

Self = TypeVar("Self", bound="Process")


@dataclass(frozen=True, eq=False, repr=False)
class Process(ABC):
    """A Gaussian process over the outputs of a linearised network.

    Args:
        tangent: the linear model of the network.
        temperature: the likelihood enters as p(y | f)^(1 / temperature).
        link: whether `mean`, `kernel` and `sample` are about E[y | f] to first order instead of f: link(f(x)), with
            kernel Lambda(x) K(x, x') Lambda(x')^T, Lambda the derivative of the link.
    """

    tangent: Tangent
    temperature: float
    link: bool

    # to be implemented by each class ---------------------------------------------------------------

    @abstractmethod
    def _mean(self, inputs: Inputs) -> tuple[Tensor, tuple[int, ...]]:
        """The mean of the outputs, (B, T, C) float64, and the shape of the network's own output."""

    @abstractmethod
    def _kernel(self, left: Inputs, right: Inputs | None) -> Tensor:
        """Between all outputs of two batches, (n, n')."""

    @abstractmethod
    def _functions(self, places: Sequence[Inputs], samples: int, generator: torch.Generator) -> list[Tensor]:
        """Outputs (S, B, T, C) of the same drawn functions at several batches, float64."""

    @abstractmethod
    def _product(self, inputs: Inputs, vectors: Tensor) -> Tensor:
        """K(x, x) v for v (k, n), float64."""

    @abstractmethod
    def squared_distance(self) -> Tensor:
        """|t - m|^2 in the metric of the precision, for the mean m of the weights, 0-d float64."""

    # derived from these ----------------------------------------------------------------------------

    def __repr__(self) -> str:
        about = "predictions" if self.link else "outputs"
        return f"<{type(self).__name__} over the {about} of a network with {self.tangent.network.size:,} weights>"

    @outside_inference_mode
    def mean(self, x: Inputs) -> Tensor:
        """The mean at x, in the layout of the network's outputs: f(x) + J(x) (m - t), or its link."""
        check_arguments(Process.mean, locals())
        with self.tangent.ready():
            f, shape = self._mean(self.tangent.inputs(x))
        values = self.tangent.likelihood.link(f) if self.link else f
        return self.tangent.likelihood.layout(values, shape).to(self.tangent.network.dtype)

    @outside_inference_mode
    def kernel(self, x: Inputs, x2: Inputs | None = None) -> Tensor:
        """The covariance of all outputs at x with all at x2 (None: at x), (B, C, B2, C); positions after each B.

        Computed in tiles: the Jacobians of all examples are never in memory together.
        """
        check_arguments(Process.kernel, locals())
        with self.tangent.ready():
            left = self.tangent.inputs(x)
            right = None if x2 is None else self.tangent.inputs(x2)
            total = self._kernel(left, right)
            rows = self._shape(left)
            columns = rows if right is None else self._shape(right)
            if self.link:
                slopes = self._slopes(left)
                others = slopes if right is None else self._slopes(right)
                total = _times_blocks(slopes.to(total), _times_blocks(others.to(total), total.mT).mT)
        return total.to(self.tangent.network.dtype).reshape(*rows, *columns)

    @outside_inference_mode
    def operator(self, x: Inputs) -> Operator:
        """The kernel matrix at x by its products with vectors (k, B T C), float64: J Sigma J^T v, without the matrix.

        Of the outputs, also for a process with its link.
        """
        check_arguments(Process.operator, locals())
        with self.tangent.ready():
            inputs = self.tangent.inputs(x)
            size = torch.Size(self._shape(inputs)).numel()

        def product(vectors: Tensor) -> Tensor:
            with self.tangent.ready():
                return self._product(inputs, vectors)

        return Operator(product, size, torch.float64, self.tangent.network.device, "symmetric")

    @outside_inference_mode
    def sample(self, x: Inputs, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Functions drawn from the process, at x: (samples, *shape of the outputs).

        Equal states of the generator give the same functions at any inputs. Needs no kernel matrix of x: weights are
        drawn, and their linear functions computed. The default generator has seed 0.
        """
        check_arguments(Process.sample, locals())
        source = generator or torch.Generator(self.tangent.network.device).manual_seed(0)
        with self.tangent.ready():
            inputs = self.tangent.inputs(x)
            (drawn,) = self._functions([inputs], samples, source)
            f, shape = self._mean(inputs)
            if self.link:
                slope = self.tangent.likelihood.link_slope(f)
                drawn = self.tangent.likelihood.link(f) + (slope @ (drawn - f).unsqueeze(-1)).squeeze(-1)
        layout = self.tangent.likelihood.layout
        return torch.stack([layout(each, shape) for each in drawn]).to(self.tangent.network.dtype)

    @outside_inference_mode
    def predict(self, x: Inputs, *, joint: bool = False) -> Prediction:
        """The predictive distribution at x, as `posterior.predict` gives it.

        Args:
            x: inputs in one piece.
            joint: covariance between examples too.
        """
        check_arguments(Process.predict, locals())
        with self.tangent.ready():
            inputs = self.tangent.inputs(x)
            f, shape = self._mean(inputs)
            latent = self._latent(inputs, f.to(self.tangent.network.dtype), shape, joint)
        return predict_outputs(self.tangent.likelihood, latent)

    def _latent(self, inputs: Inputs, mean: Tensor, shape: tuple[int, ...], joint: bool) -> LatentGaussian:
        """The outputs' distribution, with covariances between the outputs of each position, or of all."""
        if joint:
            whole = self._kernel(inputs, None).to(mean.dtype)
            return LatentGaussian(mean, whole.diagonal().reshape(mean.shape), None, whole, shape)
        _, positions, outputs = mean.shape
        step = max(1, PREDICTED_OUTPUTS // (positions * outputs))
        parts = []
        for start in range(0, len(mean), step):
            whole = self._kernel(take(inputs, start, start + step), None)
            cells = whole.reshape(len(whole) // outputs, outputs, len(whole) // outputs, outputs)
            parts.append(cells.diagonal(dim1=0, dim2=2).movedim(-1, 0))
        covariance = torch.cat(parts).reshape(*mean.shape, outputs).to(mean.dtype)
        return LatentGaussian(mean, covariance.diagonal(dim1=-2, dim2=-1), covariance, raw_shape=shape)

    # learning from data ----------------------------------------------------------------------------

    @outside_inference_mode
    def given(self, data: Any, *, steps: int | None = 1, batch_size: int | None = None) -> ConditionedProcess:
        """The process conditioned on data: for the prior's process, the posterior from any subset of the data.

        The likelihood is expanded at the network's outputs, -log p(y | f) ~ g^T (f - f_t) + 1/2 |f - f_t|^2_H: Gaussian
        observations of the pseudo-targets f_t - H^-1 g with noise H^-1. Its kernel is that of the Laplace posterior
        from these data, to rounding; its mean is the tangent model's mode for Gaussian likelihoods, else one Newton
        step to it. Memory: a matrix (n, n) for n outputs of the data, in float64.

        Args:
            data: in any form that `lapis.laplace` takes.
            steps: of Newton's method, each with g and H at the outputs that the last one found; None: as many as it
                takes to reach the tangent model's mode.
            batch_size: for data that are not batched yet.
        """
        from lapis.function_space.conditioned import conditioned

        check_arguments(Process.given, locals())
        with self.tangent.ready():
            return conditioned(self, data, steps, batch_size)

    @outside_inference_mode
    def log_evidence(self, data: Any, *, at_mode: bool = False, batch_size: int | None = None) -> Tensor:
        """log p(data) under the process, from the kernel: log p(y | f) - 1/2 |t - m|^2 - 1/2 log |I + S^T K S|.

        Of the prior's process and the data of a fit this is the dense posterior's `log_evidence`, to rounding. Exact
        for Gaussian likelihoods with `at_mode`, else Laplace's approximation.

        Args:
            data: in any form that `lapis.laplace` takes.
            at_mode: take it at the tangent model's mode, found by Newton's method, instead of t: the dense posterior's
                evidence after `at_tangent_mode`.
            batch_size: for data that are not batched yet.
        """
        from lapis.function_space.conditioned import evidence

        check_arguments(Process.log_evidence, locals())
        with self.tangent.ready():
            return evidence(self, data, at_mode, batch_size)

    def with_link(self: Self, link: bool = True) -> Self:
        """The same process, seen through the likelihood's link or not."""
        check_arguments(Process.with_link, locals())
        return replace(self, link=link)

    def _shape(self, inputs: Inputs) -> tuple[int, ...]:
        """(B, *positions, C) of the outputs for a batch."""
        likelihood = self.tangent.likelihood
        jacobian = self.tangent.jacobian(take(inputs, 0, 1))
        return (batch_length(inputs), *likelihood.positions(jacobian.shapes[0]), jacobian.outputs[0].shape[-1])

    def _slopes(self, inputs: Inputs) -> Tensor:
        """Lambda at the mean, (B T, C, C)."""
        f, _ = self._mean(inputs)
        return self.tangent.likelihood.link_slope(f).flatten(0, 1)


def _times_blocks(blocks: Tensor, matrix: Tensor) -> Tensor:
    """The block-diagonal matrix of blocks (k, c, c) times a matrix (k c, n)."""
    return (blocks @ matrix.reshape(len(blocks), -1, matrix.shape[-1])).flatten(0, 1)
