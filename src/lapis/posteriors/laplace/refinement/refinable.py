"""Refinement as an ability of a posterior: `refine`, its ELBO, and what each structure provides for it."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from lapis.batches import Batch
from lapis.errors import OptionError
from lapis.network import outside_inference_mode
from lapis.options import check_arguments
from lapis.posteriors.laplace.arguments import refuse_options
from lapis.posteriors.laplace.refinement.rounds import Refinement, refine
from lapis.posteriors.over_weights import GaussianPosterior, LinearisedPosterior
from lapis.predictions import LatentGaussian
from lapis.priors import WeightPrior
from lapis.ranks import Ranks
from lapis.shards import Distributed, Shard, shard

if TYPE_CHECKING:
    from lapis.posteriors.laplace.family import LaplaceFamily

Self = TypeVar("Self", bound="Refinable")


def full_outputs(posterior: LinearisedPosterior, held: Sequence[Batch], number: int) -> LatentGaussian:
    """The outputs of one of the batches under a posterior, with full covariances."""
    latent = posterior.latent(held[number].inputs, "full", None, None)
    assert isinstance(latent, LatentGaussian)
    return latent


class Refinable(GaussianPosterior):
    """A Gaussian posterior with a prior, whose curvature can be averaged over itself."""

    weight_prior: WeightPrior
    refinement: Refinement | None
    width: float

    @abstractmethod
    def effective_parameters(self) -> Tensor:
        """gamma = tr(A^-1 (A - Lambda)): the number of weights determined by the data."""

    def elbo(self) -> Tensor:
        """E_q[log p(D | theta)] - KL(q | prior) of the tangent model, 0-d float64: known after `refine`.

        A lower bound of the tangent model's log evidence, equal to it for Gaussian likelihoods.
        """
        if self.refinement is None or not self.refinement.current:
            raise OptionError(
                "The ELBO is not known: it takes a pass over the data",
                expected="a posterior from refine(data)",
                got="one that is not refined" if self.refinement is None else "one that was changed since",
                do="call posterior.refine(data) and ask its result",
            )
        return torch.tensor(self.refinement.elbo, dtype=torch.float64, device=self.network.device)

    def divergence(self) -> float:
        """KL(q | prior) = 1/2 (|mean - m|^2_Lambda - gamma - log |Lambda| + log |A|), nats."""
        prior = self.weight_prior
        distance = (prior.precision * prior.squared_distance(self.mean)).sum()
        known = distance - self.effective_parameters() - prior.logdet() + self._logdet()
        return 0.5 * float(known.detach())

    @outside_inference_mode
    def refine(
        self: Self,
        data: Any = None,
        *,
        tune: bool | None = None,
        max_rounds: int = 30,
        tolerance: float = 1e-3,
        tolerated_loss: float | None = None,
        batch_size: int | None = None,
        distributed: Distributed = False,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> Self:
        """The best Gaussian for the tangent model: variational inference, from this posterior on.

        The curvature at the mode can be nearly zero where data are nearly separable; the posterior then spreads over
        functions that the data forbid. Here the curvature is averaged over the posterior itself, and the mean moves:

            A = sum_n J_n^T E_q[H_n] J_n + Lambda,    sum_n J_n^T E_q[gradient_n] + Lambda (mean - m) = 0.

        Predictions use f(x) + J(x) (mean - t). The ELBO never falls from round to round. A round takes three passes
        over the data, and a few products with a vector for structures that are not exact; ten rounds are usual. The
        result's `refinement` records them. A linear Gaussian model at its mode is left as it was.

        Args:
            data: the data of the fit, in any order and batches; implicit posteriors hold them already.
            tune: tune prior precisions, and Gaussian noise, by the ELBO as well (variational expectation-maximisation);
                by default where the posterior was tuned before.
            max_rounds: at most this many rounds; a warning says if the ELBO is still rising.
            tolerance: the search ends when a round gains less than this many nats an example.
            tolerated_loss: for classifiers, nats an example by which to choose the `width` as in `tune`, where
                leave-one-out holds. By default the width stays one, which is nearest to the true posterior.
            batch_size: for data that are not batched yet.
            distributed: divide the data among the processes of torch.distributed, as `lapis.laplace` does; all ranks
                make the same call with the same posterior, and get the same result. For stored structures.
            checkpoint: a file to save the search in, after rounds. A call with the same arguments and data goes on from
                it, and gives the same numbers bit for bit. In one process only.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(Refinable.refine, locals())
        with self.network.held():
            self.check_network()
            self._check_refinable()
            if distributed:
                refuse_options("A refinement by several processes keeps no file", checkpoint=checkpoint)
            shared = shard(data, Ranks.joined(f"distributed={distributed!r}"), distributed) if distributed else None
            refined = refine(
                cast("LaplaceFamily", self),
                self._data(data, batch_size, shared),
                ranks=None if shared is None else shared.ranks,
                tune=tune,
                max_rounds=max_rounds,
                tolerance=tolerance,
                tolerated_loss=tolerated_loss,
                checkpoint=checkpoint,
                progress=progress,
            )
        return cast(Self, refined)

    def _check_refinable(self) -> None:
        """Raise OptionError where a refinement has no meaning."""

    @abstractmethod
    def _data(self, data: Any, batch_size: int | None, shared: Shard | None) -> Sequence[Batch]:
        """The batches of the fit: `data` (or this rank's part of it) after a check, or those that are held."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """Covariance times weight vectors (P,) or (k, P), float64."""

    def sample_of_data(self) -> Sequence[Batch]:
        """A sample of the data of the fit; empty where none is held."""
        return ()

    @property
    def is_exact(self) -> bool:
        """Whether the precision is that of the exact GGN, so that Newton's steps need no further solve."""
        return False

    def _with_view(self: Self, held: bool) -> Self:
        """With what many solves under different priors and curvature share, if there is such a thing, or without it."""
        return self

    def outputs_of_data(self, held: Sequence[Batch]) -> Callable[[int], LatentGaussian]:
        """The outputs' distribution, with full covariances, of each batch by its number."""
        return partial(full_outputs, self, held)

    @abstractmethod
    def recurved(
        self: Self, held: Sequence[Batch], factors: Sequence[Tensor], progress: bool | None, ranks: Ranks | None
    ) -> Self:
        """The posterior with curvature sum_n J_n^T S_n S_n^T J_n for given factors S (B, T, C, R) of each batch.

        With `ranks` the sum is over the batches that all of them hold.
        """

    @abstractmethod
    def gamma_of_groups(self) -> Tensor:
        """Effective parameters of each prior group, (G,)."""

    @outside_inference_mode
    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(theta) for weights (P,) or (n, P)."""
        quadratic = self._squared_distance(self.vectors(theta).double() - self.mean.double()) / self.width
        constant = self._logdet() - self.n_weights * math.log(2 * math.pi * self.width)
        return (0.5 * (constant - quadratic)).reshape(theta.shape[:-1])

    def _refuse_if_refined(self, what: str, do: str) -> None:
        if self.refinement is not None:
            raise OptionError(
                f"A refined posterior cannot {what}",
                expected="a Laplace posterior at the trained weights",
                got="one from refine()",
                do=do,
            )
