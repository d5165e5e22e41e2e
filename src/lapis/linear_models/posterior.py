"""The posterior of a linear model's weights: mean, draws, predictions, evidence; no matrix is ever formed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapis.batches import as_inputs, batch_length, take
from lapis.errors import DataError
from lapis.evidence import Tuning
from lapis.likelihoods import Likelihood
from lapis.linear_models import tuning
from lapis.linear_models.design import Design, Features, as_design, as_rows
from lapis.linear_models.prior import LinearPrior
from lapis.linear_models.system import System
from lapis.options import check_arguments, checked_numbers, shown
from lapis.predictions import LatentGaussian, Prediction
from lapis.predictions import predict as predict_outputs
from lapis.solvers import QuadratureEstimate, logdet

PREDICTED = 4096
"""Examples whose features are in memory together in a prediction."""


@dataclass(frozen=True)
class Drawing:
    """How draws are made: see `lapis.linear`."""

    samples: int
    solver: str
    epochs: int
    batch_size: int
    seed: int


@dataclass(frozen=True, eq=False, repr=False)
class LinearPosterior:
    """N(mean, A^-1) over the weights w of f = Phi w, A = Phi^T H Phi + Lambda, through `samples` draws.

    Made by `lapis.linear`. Immutable: `tune`, `with_prior` and `with_noise` return new posteriors.

    Args:
        system: A, by its products.
        targets: (n, 1, 1).
        likelihood: p(y | f).
        prior: prior precisions.
        features: the function of inputs, if there is one.
        mean: the mode of w, (d,) float64.
        deviations: draws of N(0, A^-1), (k, d) float64.
        drawing: how they were made.
        tuning: the record of the last `tune`.
    """

    system: System
    targets: Tensor
    likelihood: Likelihood
    prior: LinearPrior
    features: Features | None
    mean: Tensor
    deviations: Tensor
    drawing: Drawing
    flat: bool = True
    """Whether targets came as (n,), and predictions go as (B,); else (B, 1)."""
    tuning: Tuning | None = None
    chunk: int = field(default=PREDICTED)

    @property
    def n_data(self) -> int:
        """Observations, n."""
        return self.system.design.shape[0]

    @property
    def n_weights(self) -> int:
        """Weights, d."""
        return self.system.size

    def __repr__(self) -> str:
        size = f"{self.n_weights:,} weights, {self.n_data:,} observations"
        return f"<LinearPosterior, {size}, {self.likelihood.name}>"

    def summary(self) -> str:
        """A few lines: size, prior, noise, effective parameters."""
        precision = self.prior.precision
        noise = self.likelihood.noise
        spread = f"{float(precision.min()):.4g}" + (f" .. {float(precision.max()):.4g}" if len(precision) > 1 else "")
        return "\n".join([
            f"linear posterior over {self.n_weights:,} weights from {self.n_data:,} observations",
            f"likelihood            {self.likelihood.name}" + ("" if noise is None else f", noise {float(noise):.4g}"),
            f"prior precision       {spread} ({len(precision)} group{'s' if len(precision) > 1 else ''})",
            f"effective parameters  {float(self.effective_parameters()):.2f}, from {len(self.deviations)} draws",
        ])  # fmt: skip

    # over weights ----------------------------------------------------------------------------------

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """New draws of the weights, (samples, d), by conjugate gradients. The default generator has seed 0."""
        check_arguments(LinearPosterior.sample, locals())
        source = generator or torch.Generator().manual_seed(0)
        return self.system.draws(int(torch.randint(2**62, (), generator=source)), samples) + self.mean

    def solve(self, vectors: Tensor) -> Tensor:
        """Covariance times weight vectors (d,) or (k, d)."""
        check_arguments(LinearPosterior.solve, locals())
        if checked_numbers("vectors", vectors).dim() not in (1, 2) or vectors.shape[-1] != self.n_weights:
            raise DataError(
                "These are no weight vectors", expected=f"({self.n_weights},) or (k, {self.n_weights})",
                got=shown(vectors), do="pass one number for each weight",
            )  # fmt: skip
        return self.system.solve(vectors.reshape(-1, self.n_weights).double()).reshape(vectors.shape)

    def marginal_variance(self) -> Tensor:
        """The variance of each weight, (d,), from the draws: relative errors of sqrt(2 / samples)."""
        return self.deviations.square().mean(0)

    def effective_parameters(self, *, per_group: bool = False) -> Tensor:
        """gamma = tr(A^-1 (A - Lambda)): the number of weights determined by the data, from the draws."""
        check_arguments(LinearPosterior.effective_parameters, locals())
        found = tuning.gamma(self)
        return found if per_group else found.sum()

    # evidence and tuning ---------------------------------------------------------------------------

    def log_evidence_estimate(
        self, *, probes: int = 16, steps: int = 64, generator: torch.Generator | None = None
    ) -> QuadratureEstimate:
        """log p(D), exact for Gaussian likelihoods but for log |A|, by Lanczos quadrature: with its standard error."""
        check_arguments(LinearPosterior.log_evidence_estimate, locals())
        source = generator or torch.Generator().manual_seed(0)
        found = logdet(
            self.system.operator, preconditioner=self.system.preconditioner, probes=probes, steps=steps,
            generator=source,
        )  # fmt: skip
        f = self.system.design.forward(self.mean[None])[0].reshape(-1, 1, 1)
        fit = self.likelihood.log_likelihood(self.likelihood.statistics(f, self.targets))
        diagonal = self.system.diagonal
        value = fit - 0.5 * ((diagonal * self.mean.square()).sum() - diagonal.log().sum() + found.value)
        return replace(found, value=value, standard_error=0.5 * found.standard_error, truncation=0.5 * found.truncation)

    def log_evidence(self) -> Tensor:
        """The value of `log_evidence_estimate()`, 0-d float64."""
        return self.log_evidence_estimate().value

    def tune(
        self,
        *,
        groups: Any = None,
        noise: bool = True,
        max_iterations: int = 50,
        tolerance: float = 0.01,
        progress: bool | None = None,
    ) -> LinearPosterior:
        """The posterior whose prior precision, and Gaussian noise, maximise the evidence: EM from draws.

        alpha_g <- gamma_g / |w_g|^2, noise^2 <- SSE / (n - gamma), with gamma from the draws, whose white noise stays
        the same from round to round; mean and draws start from those of the round before. Steps are stretched by what
        the last two rounds tell about how fast they shrink.

        Args:
            groups: whole numbers (d,) from 0 on: weights with the same number share a precision. One for all at first.
            noise: tune the Gaussian noise too, if there is one.
            max_iterations: rounds.
            tolerance: the search ends when no logarithm moves further in a round.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(LinearPosterior.tune, locals())
        prior = self.prior if groups is None else self.prior.grouped(groups, self.n_weights)
        return tuning.tune(replace(self, prior=prior), noise, max_iterations, tolerance, progress)

    def with_prior(self, prior: float | Tensor) -> LinearPosterior:
        """The posterior under another prior precision, or precisions (d,): found anew, from this one on."""
        check_arguments(LinearPosterior.with_prior, locals())
        return tuning.refitted(self, LinearPrior.of(prior, self.n_weights), self.likelihood)

    def with_noise(self, noise: float | Tensor) -> LinearPosterior:
        """The posterior under another Gaussian noise (standard deviation): found anew, from this one on."""
        check_arguments(LinearPosterior.with_noise, locals())
        return tuning.refitted(self, self.prior, self.likelihood.with_noise(noise))

    # predictions -----------------------------------------------------------------------------------

    def predict(self, x: Any, *, exact: bool = False) -> Prediction:
        """The predictive distribution at `x`: for regression with `mean`, `variance` and `interval(level)`.

        Args:
            x: inputs, where the features are a function; else a matrix or an operator with d columns.
            exact: variances by a solve for each example instead of from the draws. Those of K draws have relative
                errors of sqrt(2 / K), which `interval(level)` of targets and `f_interval(level)` of f account for, by
                Student's t with K degrees of freedom: they cover as they say, and are wider the fewer the draws (for
                f at 95%: 2.2 times with 2, 1.42 with 4, 1.04 with 32).
        """
        check_arguments(LinearPosterior.predict, locals())
        means, variances = [], []
        for part in self._parts(x):
            means.append(part.forward(self.mean[None])[0])
            if exact:
                rows = part.row(slice(None))
                variances.append((rows * self.system.solve(rows)).sum(1))
            else:
                variances.append(part.forward(self.deviations).square().mean(0))
        mean, variance = (torch.cat(each).reshape(-1, 1, 1) for each in (means, variances))
        raw_shape = (len(mean),) if self.flat else (len(mean), 1)
        degrees = None if exact else len(self.deviations)
        latent = LatentGaussian(mean, variance.clamp(min=0), raw_shape=raw_shape, degrees=degrees)
        return predict_outputs(self.likelihood, latent)

    def _parts(self, x: Any) -> Iterator[Design]:
        """Designs of the examples, some at a time where the features are a function."""
        if self.features is None:
            design = as_design(x)
            if design.shape[1] != self.n_weights:
                raise DataError(
                    "These features are not those of the fit",
                    expected=f"(B, {self.n_weights})",
                    got=str(design.shape),
                    do="pass rows with the same columns",
                )
            yield design
            return
        inputs = as_inputs(np.asarray(x) if isinstance(x, list) else x, torch.float64, torch.device("cpu"))
        for start in range(0, batch_length(inputs), self.chunk):
            some = take(inputs, start, start + self.chunk)
            yield as_design(as_rows(self.features(some), batch_length(some), self.n_weights))
