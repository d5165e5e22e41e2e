"""Base class of the Laplace family: prior, evidence, and posteriors under another prior, noise or temperature."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lapis.batches import Batch, batches
from lapis.evidence import TangentMode, Tuning
from lapis.function_space import GaussianProcess
from lapis.likelihoods import Likelihood
from lapis.network import differentiating, outside_inference_mode
from lapis.options import check_arguments
from lapis.posteriors.diagnosis.data import Seen
from lapis.posteriors.diagnosis.report import Notes
from lapis.posteriors.evidences import Evidence
from lapis.posteriors.laplace.arguments import TOLERATED_LOSS, TuneOptions
from lapis.posteriors.laplace.calibration.search import Calibration, calibrate
from lapis.posteriors.laplace.checks import examine
from lapis.posteriors.laplace.family_state import family_state
from lapis.posteriors.laplace.refinement.refinable import Refinable
from lapis.posteriors.laplace.refinement.rounds import Refinement
from lapis.posteriors.laplace.tuning.by_evidence import checked
from lapis.posteriors.posterior import State
from lapis.priors import Groups, Prior, WeightPrior, as_prior
from lapis.shards import Distributed

Self = TypeVar("Self", bound="LaplaceFamily")


@dataclass(frozen=True, eq=False, repr=False)
class LaplaceFamily(Refinable):
    """N(mean, (scale * curvature + prior)^-1), with curvature of any structure.

    Args:
        fitted_likelihood: has the noise under which the curvature was computed; `likelihood` has the current one.
        prior: as passed by the user; `weight_prior` is the same prior resolved for this network.
        curvature: sums over data; every structure's has `statistics`, `n_data`, `outputs`, `signature` and `digest`.
        temperature: the likelihood enters as p(D | theta)^(1 / temperature).
        tuning: the record of the last `tune`.
        tangent: the mode of the tangent model, if the evidence is taken there (`at_tangent_mode`).
        calibration: the record of the last `calibrate`.
        refinement: the record of the last `refine`; the mean is then no longer t.
        width: factor of the covariance, q = N(mean, width A^-1). `tune` sets it; the evidence does not depend on it.
        sharpness: factor of a classifier's logits in predictions, one over the temperature of temperature scaling:
            softmax(sharpness f). `calibrate(..., temperature=True)` sets it; neither q nor the evidence depends on it.
    """

    fitted_likelihood: Likelihood
    prior: Prior
    weight_prior: WeightPrior
    curvature: Any
    structure: str
    temperature: float
    tuning: Tuning | None = None
    tangent: TangentMode | None = None
    calibration: Calibration | None = None
    refinement: Refinement | None = None
    width: float = 1.0
    sharpness: float = 1.0

    def __repr__(self) -> str:
        size = f"{self.n_weights:,} weights, {self.n_data:,} examples"
        return f"<{self.structure} {type(self).__name__}, {size}, {self.likelihood.name}>"

    @cached_property
    def scale(self) -> Tensor:
        """Factor of the curvature: it accounts for a changed noise, and for the temperature."""
        scale = torch.as_tensor(self.likelihood.curvature_scale(self.fitted_likelihood), device=self.network.device)
        return scale.double() / self.temperature

    # evidence --------------------------------------------------------------------------------------

    @abstractmethod
    def effective_parameters(self) -> Tensor:
        """gamma = tr(A^-1 (A - Lambda)): the number of weights determined by the data."""

    def log_likelihood(self) -> Tensor:
        """log p(D | t), with all constants."""
        return self.likelihood.log_likelihood(self.curvature.statistics)

    def evidence_point(self) -> tuple[Tensor, Tensor]:
        """Weights (P,) at which the evidence is taken, theta* or t, and the likelihood's statistics there."""
        if self.tangent is not None:
            return self.tangent.weights, self.tangent.statistics
        return self.point, self.curvature.statistics

    @property
    def mode(self) -> Tensor | None:
        """theta*, (P,) float64, after `at_tangent_mode`."""
        return None if self.tangent is None else self.tangent.weights

    def _evidence(self, logdet: Tensor) -> Tensor:
        """log p(D), given log |A|."""
        prior = self.weight_prior
        weights, statistics = self.evidence_point()
        distance = (prior.precision * prior.squared_distance(weights)).sum()
        fit = self.likelihood.log_likelihood(statistics) / self.temperature
        return fit + 0.5 * (prior.logdet() - distance - logdet)

    def log_evidence(self) -> Tensor:
        """log p(D) ~ log p(D | t) - 1/2 |t - m|^2_Lambda + 1/2 log |Lambda| - 1/2 log |A|, 0-d float64.

        After `at_tangent_mode` the first two terms are those of the tangent model at theta*. Exact for linear Gaussian
        models at their mode. Differentiable in the prior precision and the noise, when these require grad. Of a refined
        posterior it is the ELBO.
        """
        return self._evidence(self._logdet()) if self.refinement is None else self.elbo()

    @outside_inference_mode
    def tune(
        self: Self,
        *,
        method: Literal["gradient", "fixed_point", "draws"] | None = None,
        groups: Groups | None = None,
        noise: bool = True,
        max_iterations: int | None = None,
        tolerance: float | None = None,
        samples: int | None = None,
        solver: Literal["cg", "sgd"] | None = None,
        batch_size: int | None = None,
        tolerated_loss: float | None = TOLERATED_LOSS,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Self:
        """The posterior whose prior precisions, and Gaussian noise, maximise the evidence.

        A classifier's covariance at the mode can be far wider than its data allow, whatever its prior. So `tune` also
        multiplies it by a `width` of at most one: the largest whose leave-one-out predictions of a sample of the
        training data lose no more than `tolerated_loss` against the best width, one standard error included.

        After `at_tangent_mode`, theta* is recomputed for every prior and noise, so that the result is stationary in
        both. The result's `tuning` records the search.

        Args:
            method: stored structures have "gradient" (default; on logarithms, by Newton's method where eigenvalues
                determine the evidence, else L-BFGS) and "fixed_point" (MacKay: alpha_g = gamma_g / |theta_g - m_g|^2,
                noise^2 = SSE / (n - gamma), damped). The implicit one has "draws": the same equations, with gamma
                estimated from `samples` draws (expectation-maximisation); one draw is often enough.
            groups: new groups of the prior, set before tuning: see `lapis.Prior`.
            noise: tune the Gaussian noise too, if there is one: each output's own where the outputs' curvature is kept
                apart (the GGN of up to 8 outputs; dense, diagonal, kronecker and ekfac). Elsewhere one factor of all is
                tuned, with a warning if the residuals have other proportions.
            max_iterations: 200 by default, or 10 rounds of draws.
            tolerance: on the relative error of MacKay's equations (gradient, 1e-6 by default), or on the steps in
                logarithms (fixed point; 0.01 for draws).
            samples: for "draws", the number of draws from which gamma is estimated, 4 by default.
            solver: for "draws", "cg" (default) or "sgd": see `ImplicitPosterior.draw`.
            batch_size: for solver="sgd".
            tolerated_loss: for classifiers, nats an example; None leaves the width at one. Implicit posteriors have a
                width where weights or the data's outputs are few enough to factorise (`matrix_free/direct`).
            generator: for "draws"; seeded with 0 when not given.
            progress: show a bar for passes over data; by default on a terminal only.
        """
        check_arguments(LaplaceFamily.tune, locals(), apart=("groups",))
        self._refuse_if_refined("be tuned by the evidence at t", "tune before refining, or use refine(data, tune=True)")
        asked = TuneOptions(
            method, groups, noise, max_iterations, tolerance, samples, solver, batch_size, tolerated_loss, generator,
            progress,
        )  # fmt: skip
        with differentiating(self.network.device):
            self.check_network()
            return replace(self, calibration=None, sharpness=1.0)._tune(asked)

    @abstractmethod
    def _tune(self: Self, asked: TuneOptions) -> Self:
        """As `tune`, with the structure's own defaults; options without a meaning for it are refused."""

    @outside_inference_mode
    def at_tangent_mode(
        self: Self,
        data: Any = None,
        *,
        batch_size: int | None = None,
        tolerance: float | None = None,
        max_products: int = 2000,
        start: Tensor | None = None,
    ) -> Self:
        """The posterior with its evidence taken at the mode theta* of the tangent linear model, held in `tangent`.

        theta* = argmin sum_n l(f_n + J_n (theta - t), y_n) + 1/2 |theta - m|^2_Lambda under the current prior and
        noise, for the data of the fit. t remains the linearisation point, `mean`, and the centre of predictions.
        Trained networks are seldom at a mode, and with normalisation layers there is none: the evidence at t is then
        misleading. `at_tangent_mode(data).tune()` finds the joint optimum of theta*, prior and noise.

        Args:
            data: the data of the fit, in any order and batches; implicit posteriors hold them already.
            batch_size: for data that are not batched yet.
            tolerance: nats (times the loss, if above one) by which the loss may still exceed its minimum; by default
                1e-16 for a float64 network and 1e-5 for float32.
            max_products: maximal number of passes over the data for each theta*.
            start: weights (P,) to start from; by default t, or the prior's mean if solved in the outputs' space.
        """
        check_arguments(LaplaceFamily.at_tangent_mode, locals())
        self._refuse_if_refined("take its evidence elsewhere: that is its ELBO", "ask before refining")
        with self.network.held():
            self.check_network()
            return checked(self._at_tangent_mode(data, batch_size, tolerance, max_products, start))

    @abstractmethod
    def _at_tangent_mode(
        self: Self,
        data: Any,
        batch_size: int | None,
        tolerance: float | None,
        max_products: int,
        start: Tensor | None,
    ) -> Self:
        """As `at_tangent_mode`, of a posterior that is not refined."""

    @outside_inference_mode
    def calibrate(
        self: Self,
        validation: Any,
        temperature: bool = False,
        *,
        link: str | None = None,
        batch_size: int | None = None,
        distributed: Distributed = False,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> Self:
        """The posterior whose prior precisions, and Gaussian noise, predict held-out data best.

        All precisions are multiplied by a common factor, then up to 8 groups each by its own, where every block of the
        structure belongs to one group. Stored structures need one pass over the data; each candidate of others is a
        prediction of all of them. The network alone is a candidate too; where it wins, a warning says so.

        Args:
            validation: data that the network was not trained on, in any form that `lapis.laplace` takes.
            temperature: choose temperatures too: that of the posterior, where the likelihood enters as
                p(D | theta)^(1 / temperature), and, for classification, that of the predictions: logits are multiplied
                by a `sharpness` (temperature scaling), those of the network alone too. A weak prior, log sharpness ~
                N(0, 1), keeps a few examples that are all predicted well from asking for boundless certainty.
            link: for classification, how Gaussian logits become probabilities: see `predict`.
            batch_size: for data that are not batched yet.
            distributed: divide the data among the processes of torch.distributed, as `lapis.laplace` does.
            checkpoint: a file that the same call goes on from, to the same numbers bit for bit; one for each rank.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(LaplaceFamily.calibrate, locals())
        with self.network.held():
            self.check_network()
            return calibrate(self, validation, temperature, link, batch_size, distributed, checkpoint, progress)

    # changes ---------------------------------------------------------------------------------------

    @outside_inference_mode
    def update(
        self: Self,
        data: Any,
        *,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> Self:
        """The posterior after `data` as well: their curvature is added, as it is a sum over data.

        EKFAC adds exact second moments along the eigenvectors of its fit: not quite those that all data would have.

        Implicit posteriors keep the new data.

        Args:
            data: in any form that `lapis.laplace` takes.
            batch_size: for data that are not batched yet.
            generator: for targets drawn for the sampled Fisher information.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(LaplaceFamily.update, locals())
        self._refuse_if_refined("take more data: its curvature is no longer a sum", "update first, then refine")
        with self.network.held():
            self.check_network()
            stream, total = batches(data, dtype=self.network.dtype, device=self.network.device, batch_size=batch_size)
            return self._with_sums(self._sums_with(stream, total, generator, progress))

    @abstractmethod
    def _sums_with(
        self, stream: Iterable[Batch], total: int | None, generator: torch.Generator | None, progress: bool | None
    ) -> Any:
        """The curvature of the data of the fit and of `total` further batches."""

    def _check_prior(self, prior: WeightPrior) -> None:
        """Raise PriorError for a prior that the structure does not support; most support any."""

    def _changed(self: Self, **changes: Any) -> Self:
        """A copy with other fields, without records, width and sharpness, which belong to the old ones."""
        stale = self.refinement and replace(self.refinement, current=False)
        kept = {"tuning": None, "tangent": None, "calibration": None, "width": 1.0, "sharpness": 1.0}
        return replace(self, **kept | changes, refinement=stale)

    def _with_sums(self: Self, curvature: Any) -> Self:
        """A copy with other sums over data, and their number of examples."""
        return self._changed(curvature=curvature, facts=replace(self.facts, n_data=int(curvature.n_data)))

    def with_prior(self: Self, prior: Prior | float | Tensor) -> Self:
        """The posterior under another prior; no pass over data. The evidence is taken at t again."""
        chosen = as_prior(prior)
        resolved = chosen.resolve(self.network)
        self._check_prior(resolved)
        if resolved.differs_in_precision_only(self.weight_prior):
            resolved = self.weight_prior.with_precision(resolved.precision)
        return self._changed(prior=chosen, weight_prior=resolved)

    def with_noise(self: Self, noise: float | Tensor) -> Self:
        """The posterior under another Gaussian noise (standard deviation); no pass over data."""
        likelihood = self.likelihood.with_noise(noise)
        likelihood.check_outputs(torch.empty(1, 1, self.n_outputs))
        likelihood.curvature_scale(self.fitted_likelihood)  # raises if the noise has other proportions
        return self._changed(likelihood=likelihood)

    def with_temperature(self: Self, temperature: float) -> Self:
        """The posterior at another temperature; no pass over data."""
        check_arguments(LaplaceFamily.with_temperature, locals())
        return self._changed(temperature=temperature)

    def gaussian_process(self, *, link: bool = False) -> GaussianProcess:
        """See `LinearisedPosterior.gaussian_process`."""
        process = super().gaussian_process(link=link)
        return replace(process, weight_prior=self.weight_prior)

    def _tempering(self) -> float:
        return self.temperature

    # diagnosis -------------------------------------------------------------------------------------

    def _gamma(self, progress: bool | None) -> Tensor:
        return self.effective_parameters()

    def _advice(self, less: bool) -> str:
        if not less:
            return "Use calibrate(validation), a smaller prior precision, or more of the weights."
        refine = "" if self.refinement is not None else "refine(data), "
        return f'Use {refine}calibrate(validation), or weights="last_layer".'

    def _sharpness(self) -> float:
        return self.sharpness

    def _fitted_to(self, digest: int) -> bool:
        return bool(digest == self.curvature.digest)

    def _evidence_of_data(self) -> Evidence:
        kind = f"temperature {self.temperature:g} at {'t' if self.mode is None else 'theta*'}"
        return Evidence(self.log_evidence(), self.curvature.digest, kind)

    def _examine(self, notes: Notes, seen: Seen | None, progress: bool | None) -> None:
        examine(self, notes, seen, progress)

    # summary and files -----------------------------------------------------------------------------

    def _summary(self, evidence: str, gamma: str, choices: Sequence[str]) -> str:
        precision = self.weight_prior.precision.detach()
        spread = f"{float(precision.min()):.4g}" + (f" .. {float(precision.max()):.4g}" if len(precision) > 1 else "")
        lines = [
            f"{self.structure} Laplace posterior over {self.n_weights:,} weights from {self.n_data:,} examples",
            f"likelihood            {self.likelihood!r}",
            f"prior precision       {spread} ({len(precision)} group{'s' if len(precision) > 1 else ''})",
            f"log evidence          {evidence}",
            *([f"covariance            times {self.width:.3g}, by leave-one-out"] if self.width != 1 else []),
            *([f"logits                times {self.sharpness:.3g} in predictions"] if self.sharpness != 1 else []),
            f"effective parameters  {gamma}",
            *(f"note                  {choice}" for choice in choices),
        ]
        return "\n".join(lines)

    def state(self) -> State:
        """Mean, prior, tuning and tangent mode; structures add their curvature."""
        return family_state(self)
