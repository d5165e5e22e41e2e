"""What a reconstruction is: the distribution of an image given measurements of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import scipy.sparse.linalg
import torch
from torch import Tensor, nn

from lapis.errors import DataError, OptionError
from lapis.imaging.deep.training import Trained
from lapis.imaging.operators.linear import LinearOperator, numbers, plain
from lapis.imaging.tangent.exact import ExactPosterior
from lapis.imaging.tangent.filters import FilterPrior
from lapis.imaging.tangent.iterative import IterativePosterior
from lapis.imaging.tangent.tuning import Groups, Point, Tuned, tuned_posterior
from lapis.options import check_arguments

Centre = Literal["discrepancy", "network", "tangent"]

EIGENVALUES = 100
"""Of A^T A, the largest ones: as many count in the noise that reaches the image, as in the literature."""
MAP_SAMPLES = 64
"""Draws behind pixel-wise deviations of large images."""
PATCH = 4
"""Side of the patches in which large images' densities are joint."""
DRAWN_TOGETHER = 64


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The distribution of an image given measurements of it: Gaussian, from the linearised network.

    `reconstruct` makes it. Images are (height, width) float64.
    """

    operator: LinearOperator
    network: nn.Module
    """Trained."""
    trained: Trained
    """How the training went."""
    posterior: ExactPosterior | IterativePosterior = field(repr=False)
    tuned: Tuned = field(repr=False)
    variation: float
    """Rate of the total variation in training, and of the complexity prior."""
    stated_noise: float
    """Standard deviation that training took for the noise's, and that tuning starts from."""
    centre: Centre = "discrepancy"
    seed: int = 0

    @property
    def prior(self) -> FilterPrior:
        """Variances and length scales of the network's blocks, as tuned."""
        return self.posterior.prior

    @property
    def noise(self) -> float:
        """Standard deviation of the measurements' noise, stated or tuned."""
        return math.sqrt(self.posterior.noise_variance)

    @property
    def misfit(self) -> float:
        """Root mean square of y - A f(t), relative to the noise: about 1 for a network that explains the data."""
        return math.sqrt(float(self.posterior.model.network_misfit) / self.operator.shape[0]) / self.noise

    @property
    def network_image(self) -> Tensor:
        """f(t): the deep image prior's own reconstruction."""
        return self.posterior.model.image.reshape(self.operator.image_shape)

    @property
    def tangent_mean(self) -> Tensor:
        """The linear model's own posterior mean f - J t + K_fy K_yy^-1 (y - A f + A J t)."""
        return self.posterior.tangent_mean.reshape(self.operator.image_shape)

    @cached_property
    def moved(self) -> float:
        """How far `mean` lies on the way from the network's image f (0) to the linear model's own mean m (1).

        With centre="discrepancy" the least w for which f + w (m - f) explains the n measurements, |y - A (f + w (m -
        f))|^2 <= n noise^2 (Morozov's discrepancy principle), or comes as near to that as it can. A noise that was
        tuned has been fitted to what f leaves of the data; then what m leaves of them says how large it is.
        """
        if self.centre != "discrepancy":
            return float(self.centre == "tangent")
        left = self._left(self.network_image)
        target = self.operator.shape[0] * self.posterior.noise_variance
        if not self.tuned.fixed_noise:
            target = self.operator.shape[0] * min(self.posterior.noise_variance, self.posterior.noise_left())
        excess = float(left.square().sum()) - target
        if excess <= 0:
            return 0.0
        step = left - self._left(self.tangent_mean)
        along, square = float(left @ step), float(step.square().sum())
        if along <= 0:
            return 0.0
        root = math.sqrt(max(along**2 - square * excess, 0.0))
        return min((along - root) / square, 1.0)

    def _left(self, image: Tensor) -> Tensor:
        """y - A x (measurements,), float64."""
        return self.posterior.model.data.to(torch.float64) - (self.operator @ image).flatten()

    @cached_property
    def mean(self) -> Tensor:
        """The centre of the distribution: on the way from `network_image` to `tangent_mean`, at `moved`."""
        if self.moved == 0:
            return self.network_image
        return torch.lerp(self.network_image, self.tangent_mean, self.moved)

    @cached_property
    def std(self) -> Tensor:
        """The error map: posterior standard deviation of each pixel. Of large images, from 64 samples."""
        if isinstance(self.posterior, ExactPosterior):
            return self.posterior.variances.sqrt().reshape(self.operator.image_shape)
        return self._deviations.square().mean(0).sqrt()

    @cached_property
    def _deviations(self) -> Tensor:
        """Samples minus mean, for what large images take from samples."""
        return self.sample(MAP_SAMPLES) - self.mean

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Images (n, height, width) from the posterior, by Matheron's rule.

        With a draw x0 of the prior's images and y0 = A x0 + noise, mean + x0 - K_fy K_yy^-1 y0 is one of the posterior.
        """
        n = plain(n)
        check_arguments(Reconstruction.sample, locals())
        source = generator or torch.Generator().manual_seed(self.seed)
        model, prior, parts = self.posterior.model, self.prior, []
        for first in range(0, n, DRAWN_TOGETHER):
            k = min(DRAWN_TOGETHER, n - first)
            white = torch.randn(k, model.weights.numel(), generator=source, dtype=torch.float64)
            noise = torch.randn(k, len(model.data), generator=source, dtype=torch.float64)
            images = model.push(prior.draws(white))
            parts.append(images - self.posterior.response(self.operator @ images + self.noise * noise))
        return torch.cat(parts).reshape(-1, *self.operator.image_shape) + self.mean

    def covariance(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Posterior covariance (pixels, pixels) of a patch of the image, pixels in row-major order."""
        check_arguments(Reconstruction.covariance, locals())
        pixels = torch.arange(self.operator.shape[1]).reshape(self.operator.image_shape)[rows, columns].flatten()
        if not len(pixels):
            raise OptionError("An empty patch", expected="some pixels", got=f"{rows}, {columns}", do="choose others")
        return self.posterior.patch_covariance(pixels)

    @cached_property
    def image_noise(self) -> float:
        """The measurements' noise as a variance in the image: noise^2 * mean diag of the pseudoinverse of A^T A.

        A^T A is taken at its 100 largest eigenvalues, as the literature does: the others belong to images that the data
        say almost nothing about, whose uncertainty is the posterior's.
        """
        least = min(self.operator.shape)
        if least <= 2 * EIGENVALUES:
            matrix = self.operator.dense()
            squares = torch.linalg.svdvals(matrix)[:EIGENVALUES].square().numpy()
        else:
            start = np.ones(least)
            found = scipy.sparse.linalg.svds(
                self.operator.matrix, EIGENVALUES, v0=start, return_singular_vectors=False, solver="arpack"
            )
            squares = found**2
        squares = squares[squares > squares.max() * 1e-10]
        return self.posterior.noise_variance * float((1 / squares).sum()) / self.operator.shape[1]

    def log_prob(self, image: Any) -> Tensor:
        """Log density of an image (height, width), or of several (n, height, width): 0-d, or (n,).

        Under N(mean, posterior covariance + image_noise I), as the literature scores reconstructions; divide by the
        number of pixels to compare. Of large images, patches of 4 x 4 pixels count as independent, and their
        covariances come from samples.
        """
        images = numbers("image", image).detach().to(torch.float64)
        if tuple(images.shape[-2:]) != self.operator.image_shape or images.dim() not in (2, 3):
            raise DataError(
                "Not an image of this size",
                expected=f"(..., {self.operator.image_shape[0]}, {self.operator.image_shape[1]})",
                got=str(tuple(images.shape)),
                do="pass an image of the reconstruction's size",
            )
        if not bool(images.isfinite().all()):
            raise DataError("Not an image", expected="finite pixels", got="NaN or infinity", do="check the image")
        errors = (images - self.mean).reshape(-1, *self.operator.image_shape)
        if isinstance(self.posterior, ExactPosterior):
            found = _gaussian(errors.flatten(1), self.posterior.covariance, self.image_noise)
        else:
            found = errors.new_zeros(len(errors))
            height, width = self.operator.image_shape
            for top in range(0, height, PATCH):
                for left in range(0, width, PATCH):
                    part = (slice(None), slice(top, top + PATCH), slice(left, left + PATCH))
                    draws = self._deviations[part].flatten(1)
                    found += _gaussian(errors[part].flatten(1), draws.mT @ draws / len(draws), self.image_noise)
        return found.reshape(images.shape[:-2])

    def retuned(
        self,
        *,
        complexity: bool = False,
        point: Point = "trained",
        groups: Groups = "blocks",
        tune_noise: bool = False,
        steps: int | None = None,
        progress: bool | None = None,
    ) -> Reconstruction:
        """The same network with another tuning of prior and noise; arguments as in `reconstruct`."""
        check_arguments(Reconstruction.retuned, locals())
        posterior, tuned = tuned_posterior(
            self.posterior.model, self.stated_noise**2, fixed_noise=not tune_noise,
            complexity=self.variation if complexity else None, point=point, groups=groups,
            steps=steps, progress=progress,
        )  # fmt: skip
        return replace(self, posterior=posterior, tuned=tuned)

    def log_evidence(self) -> Tensor:
        """log p(y) of the linear model, with all constants; of large problems its log-determinant is an estimate."""
        return self.posterior.log_evidence()


def _gaussian(errors: Tensor, covariance: Tensor, noise: float) -> Tensor:
    """log N(error; 0, covariance + noise I) of rows (k, d)."""
    matrix = covariance + noise * torch.eye(len(covariance), dtype=covariance.dtype)
    factor: Tensor = torch.linalg.cholesky(matrix)
    white: Tensor = torch.linalg.solve_triangular(factor, errors.mT, upper=False)
    constant = factor.diagonal().log().sum() + len(covariance) / 2 * math.log(2 * math.pi)
    return -white.square().sum(0) / 2 - constant
