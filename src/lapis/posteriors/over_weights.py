"""Base classes of posteriors over weights: predictions by drawn networks, and by the linearised network."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapis.batches import Batch, Inputs, all_finite, batch_length
from lapis.curvature.products.jacobian import Jacobian
from lapis.errors import DataError
from lapis.function_space import GaussianProcess
from lapis.function_space.data_view import Of
from lapis.function_space.kernels import WeightKernel
from lapis.function_space.tangent import Tangent
from lapis.network import Network, full_precision, outside_inference_mode
from lapis.network.inputs import check_inputs
from lapis.options import check_arguments, checked_tensor
from lapis.posteriors import examples
from lapis.posteriors.posterior import LatentKind, Posterior, State
from lapis.posteriors.predicting.parts import DRAWN_NETWORKS
from lapis.posteriors.predicting.sampled import drawn_outputs
from lapis.predictions import Latent, LatentGaussian
from lapis.schema import wrong

FULL_COVARIANCE = 32
"""Up to this many outputs, predictions hold the full covariance between outputs by default."""


@dataclass(frozen=True, eq=False, repr=False)
class WeightPosterior(Posterior):
    """A distribution over the chosen weights that can be drawn from."""

    @abstractmethod
    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the weights, (samples, P). The default generator has seed 0."""

    def latent(
        self, inputs: Inputs, kind: LatentKind, samples: int | None, generator: torch.Generator | None
    ) -> Latent:
        """Outputs of networks drawn from the posterior."""
        count = self._networks() if samples is None else samples
        return drawn_outputs(self, inputs, count, self.source(count, generator))

    def source(self, samples: int, generator: torch.Generator | None) -> torch.Generator:
        """The generator to draw from, seeded with 0 if None; checks that `samples` is a positive count."""
        check_arguments(WeightPosterior.source, locals())
        return generator or torch.Generator(self.network.device).manual_seed(0)

    def _networks(self) -> int:
        """Default number of networks drawn for a sampled prediction."""
        return DRAWN_NETWORKS

    def draws(self, samples: int, generator: torch.Generator) -> Iterable[Tensor]:
        """The draws of `sample`, (P,) each, with one in memory at a time."""
        return (self.sample(1, generator=generator)[0] for _ in range(samples))

    def quick_draws(
        self, samples: int, generator: torch.Generator, inputs: Inputs
    ) -> Iterable[Mapping[str, Tensor]] | None:
        """The draws of `sample` as parameters of networks that will run on `inputs`; None if there is no shortcut."""
        return None


@dataclass(frozen=True, eq=False, repr=False)
class LinearisedPosterior(WeightPosterior):
    """A posterior whose network is linearised at weights t: f(x) + J(x) (theta - t).

    Outputs are then Gaussian, with mean f(x) + J(x) (mean - t) and the covariance that `_outputs` computes.

    Args:
        mean: of the weights, (P,); it may differ from t.
        point: t, (P,), where the network is linearised: the module's weights at the fit, unless a class says otherwise.
    """

    methods: ClassVar[tuple[str, ...]] = ("linearised", "sampled")
    _runs_at_point: ClassVar[bool] = True
    """Whether the module holds the weights t where it is linearised."""

    mean: Tensor
    point: Tensor

    def __post_init__(self) -> None:
        for name, vector in (("mean", self.mean), ("point", self.point)):
            if tuple(vector.shape) != (self.n_weights,):
                raise DataError(
                    f"The posterior's {name} does not fit the weights",
                    expected=f"a vector ({self.n_weights},)",
                    got=str(tuple(vector.shape)),
                    do="pass one number for each chosen weight",
                )

    @staticmethod
    def mean_and_point(state: State, network: Network) -> tuple[Tensor, Tensor]:
        """Both from a file, which holds a "point" where it is not the mean; FileError unless it is the network's."""
        mean = state.tensor("mean", (network.size,), network.dtype)
        point = state.tensor("point", (network.size,), network.dtype) if "point" in state.tensors else mean
        if not network.equals(point):
            raise wrong("point", "the network's weights", "others")
        return mean, point

    @abstractmethod
    def _outputs(self, inputs: Inputs, kind: LatentKind) -> LatentGaussian:
        """f(x) and the covariance of the linearised network's outputs at checked inputs."""

    def latent(
        self, inputs: Inputs, kind: LatentKind, samples: int | None, generator: torch.Generator | None
    ) -> Latent:
        """Gaussian outputs of the linearised network, or outputs of drawn networks."""
        if kind == "sampled":
            return super().latent(inputs, kind, samples, generator)
        latent = self._outputs(inputs, kind)
        if self.mean is self.point:
            return latent
        return replace(latent, mean=latent.mean + self._shift(inputs).to(latent.mean.dtype))

    def _shift(self, inputs: Inputs) -> Tensor:
        """J(x) (mean - t), (B, T, C)."""
        batch = Batch(inputs, torch.zeros(batch_length(inputs), device=self.network.device), 0)
        jacobian = Jacobian(
            self.network, self.likelihood.canonical, [batch], memory_budget=self.facts.memory_budget, kept_bytes=0
        )
        return jacobian.forward((self.mean.double() - self.point.double())[None])[0][0]

    def _full_by_default(self) -> bool:
        return self.n_outputs <= FULL_COVARIANCE

    # as a process over functions --------------------------------------------------------------------

    @abstractmethod
    def _weight_kernel(self, tangent: Tangent) -> WeightKernel:
        """J Sigma J'^T of the linearised network."""

    def _tangent(self) -> Tangent:
        """The linearised network."""
        facts = self.facts
        elsewhere = not self._runs_at_point
        return Tangent(
            self.network, self.likelihood, self.point, elsewhere, facts.signature, facts.memory_budget,
            self.check_network,
        )  # fmt: skip

    def gaussian_process(self, *, link: bool = False) -> GaussianProcess:
        """The posterior as a Gaussian process over the network's outputs: mean f(x), kernel J(x) Sigma J(x')^T.

        Equal to the linearised predictions; with `mean`, `kernel`, `sample`, `predict`, and for posteriors with a prior
        `prior()`, the process before any data, which `given(data)` conditions on any of them.

        Args:
            link: the process of E[y | f], to first order: mean link(f(x)), kernel Lambda(x) J Sigma J'^T Lambda(x'),
                with the derivative Lambda of the link (for softmax diag(p) - p p^T).
        """
        check_arguments(LinearisedPosterior.gaussian_process, locals())
        tangent, point = self._tangent(), self.point
        deviation = None if self.mean is point else self.mean.double() - point.double()

        def draws(samples: int, generator: torch.Generator) -> Iterable[Tensor]:
            return (weights.double() - point.double() for weights in self.draws(samples, generator))

        return GaussianProcess(tangent, self._tempering(), link, self._weight_kernel(tangent), deviation, draws)

    # the data view ---------------------------------------------------------------------------------

    def _tempering(self) -> float:
        """The temperature at which the likelihood entered."""
        return 1.0

    @outside_inference_mode
    def memorable(
        self, data: Any, *, per_class: int = 10, batch_size: int | None = None, progress: bool | None = None
    ) -> Tensor:
        """Indices of the examples that matter most to the posterior: those with the largest tr(H), n for each class.

        tr(H) is the trace of the likelihood's Hessian in the outputs, the precision that an example brings: for softmax
        sum_c p_c (1 - p_c), large near a decision boundary. It is the same for all examples under Gaussian noise:
        there the leverage tr(S^T V S) ranks them. Class after class, in each the most memorable first. A class with
        fewer examples gives all of them. Where examples have no single class (regression, counts, positions,
        several labels) `per_class` is the number of all indices.

        Args:
            data: with targets, in any form that `lapis.laplace` takes; indices count its examples in their order.
            per_class: how many of each class.
            batch_size: for data that are not batched yet.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(LinearisedPosterior.memorable, locals())
        return examples.memorable(self, data, per_class, batch_size, progress)

    @outside_inference_mode
    def sensitivity(
        self,
        data: Any,
        *,
        of: Of = "outputs",
        exact: bool = False,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Tensor:
        """How much leaving out each example of the fit would change its own outputs: error times variance, (N,).

        |V g| with the covariance V = J Sigma J^T of the example's outputs and the gradient g of its -log p(y | f): the
        change to first order (memory perturbation). Large for examples that the network had to bend for, such as those
        with a wrong label. Above 32 outputs V are variances only.

        Args:
            data: examples of the fit with their targets, in any form that `lapis.laplace` takes.
            of: the change of the "outputs", or of the "predictions" E[y | f], to first order.
            exact: with the leverage, |V_-n g|: the change in a refit of the tangent model without the example, exact
                for linear Gaussian models at their mode.
            batch_size: for data that are not batched yet.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(LinearisedPosterior.sensitivity, locals())
        return examples.sensitivity(self, data, of, exact, batch_size, progress)

    @outside_inference_mode
    def leave_one_out(self, data: Any, *, batch_size: int | None = None, progress: bool | None = None) -> Tensor:
        """log p(y_n | all other examples) of each example of the fit, (N,) float64, by the tangent model.

        Its outputs without the example are Gaussian, in closed form: V_-n = V + V S (I - S^T V S)^-1 S^T V with mean
        f + V_-n g. Exact for linear Gaussian models at their mode. A wrong label has a low value.

        Args:
            data: examples of the fit with their targets, in any form that `lapis.laplace` takes.
            batch_size: for data that are not batched yet.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(LinearisedPosterior.leave_one_out, locals())
        return examples.leave_one_out(self, data, batch_size, progress)

    @outside_inference_mode
    def functional_variance(self, x: Inputs, diagonal: bool = False) -> Tensor:
        """J Sigma J^T of each example's outputs: (B, C, C), or its diagonal (B, C) in the layout of the outputs.

        Outputs with positions have one matrix per position, (B, *positions, C, C).
        """
        check_arguments(LinearisedPosterior.functional_variance, locals())
        latent = self._linearised(x, "diagonal" if diagonal else "full")
        shape = latent.raw_shape
        if latent.covariance is not None:
            return self.likelihood.spread(latent.covariance, shape)
        return self.likelihood.layout(latent.variance, shape if len(shape) > 1 else (*shape, 1))

    def functional_covariance(self, x: Inputs) -> Tensor:
        """Covariance of all outputs of all examples with each other: (B, C, B, C), with positions after each B."""
        latent = self._linearised(x, "joint")
        assert latent.joint is not None
        one = (latent.mean.shape[0], *self.likelihood.positions(latent.raw_shape), latent.mean.shape[-1])
        return latent.joint.reshape(*one, *one)

    def _linearised(self, x: Inputs, kind: LatentKind) -> LatentGaussian:
        with self.network.held(), full_precision(self.network.device):
            self.check_network()
            return self._outputs(check_inputs(x, self.network, self.facts.signature), kind)


@dataclass(frozen=True, eq=False, repr=False)
class GaussianPosterior(LinearisedPosterior):
    """N(mean, A^-1) with a precision A that is stored, or known through its products with vectors."""

    @abstractmethod
    def _logdet(self) -> Tensor:
        """log |A|, 0-d float64."""

    @abstractmethod
    def _squared_distance(self, deviations: Tensor) -> Tensor:
        """d^T A d, (n,), for deviations d (n, P) in float64."""

    def vectors(self, theta: Tensor) -> Tensor:
        """Weight vectors (P,) or (k, P) as (k, P)."""
        if not isinstance(theta, Tensor) or theta.shape[-1:] != (self.n_weights,) or theta.dim() > 2:
            raise DataError(
                "These are no weight vectors",
                expected=f"a tensor ({self.n_weights},), or (k, {self.n_weights}) with one vector a row",
                got=str(tuple(theta.shape)) if isinstance(theta, Tensor) else type(theta).__name__,
                do="pass flat weights",
            )
        if not all_finite(checked_tensor("theta", theta)):
            raise DataError(
                "The weights are not finite", expected="finite numbers", got="NaN or infinity", do="check them"
            )
        return theta.reshape(-1, self.n_weights)

    def gaussian_process(self, *, link: bool = False) -> GaussianProcess:
        """See `LinearisedPosterior.gaussian_process`."""
        process = super().gaussian_process(link=link)

        def distance() -> Tensor:
            return self._squared_distance((self.point.double() - self.mean.double())[None])[0]

        return replace(process, distance=distance)

    @abstractmethod
    def marginal_variance(self) -> Tensor:
        """Variance of each weight, (P,)."""

    @outside_inference_mode
    def log_prob(self, theta: Tensor) -> Tensor:
        """log q(theta) for weights (P,) or (n, P); its constant is as accurate as the log-determinant."""
        quadratic = self._squared_distance(self.vectors(theta).double() - self.mean.double())
        constant = self._logdet() - self.n_weights * math.log(2 * math.pi)
        return (0.5 * (constant - quadratic)).reshape(theta.shape[:-1])
