"""A posterior that is a set of drawn weight vectors: its predictions are Jacobian-vector products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapis.batches import Inputs
from lapis.errors import OptionError
from lapis.function_space.kernels import DrawnKernel
from lapis.function_space.tangent import Tangent
from lapis.likelihoods import Likelihood
from lapis.network import Network, outside_inference_mode
from lapis.options import check_arguments
from lapis.posteriors.laplace.calibration.search import Calibration, calibrate_draws
from lapis.posteriors.over_weights import LinearisedPosterior
from lapis.posteriors.posterior import Facts, LatentKind, State
from lapis.posteriors.predicting.linearised import by_draws
from lapis.predictions import LatentGaussian
from lapis.schema import optional, record, wrong
from lapis.shards import Distributed


@dataclass(frozen=True)
class Drawing:
    """How weights were drawn: the solver's statistics; tuples have one entry per draw."""

    solver: str
    """"block", "cg" or "sgd"."""
    objective: str | None
    seed: int
    iterations: tuple[int, ...]
    """Iterations of conjugate gradients, or SGD steps."""
    residuals: tuple[float, ...]
    """|A z - b| / |b|, recomputed at the end."""
    converged: bool
    reason: str
    products: int
    """Products of the GGN of the whole data set with a vector; minibatches count by their share."""

    def __post_init__(self) -> None:
        for name in ("iterations", "residuals"):  # JSON turns tuples into lists
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, eq=False, repr=False)
class DrawnPosterior(LinearisedPosterior):
    """K draws z_k of N(0, A^-1) around the trained weights t; made by `ImplicitPosterior.draw`.

    The linearised network's outputs have mean f(x) and covariance mean_k (J z_k)(J z_k)^T, by K Jacobian-vector
    products. With K draws a variance has a relative error of sqrt(2 / K), and a covariance has rank K at most; so
    predictions hold variances only, unless covariance="full" is requested. Intervals of real targets account for K by
    Student's t with K degrees of freedom. Memory: (K, P) in the network's dtype.
    """

    kind: ClassVar[str] = "drawn"

    deviations: Tensor
    """z, (K, P), in the network's dtype."""
    drawing: Drawing
    calibration: Calibration | None = None
    """The record of `calibrate`."""

    @outside_inference_mode
    def calibrate(
        self,
        validation: Any,
        temperature: bool = False,
        *,
        link: str | None = None,
        batch_size: int | None = None,
        distributed: Distributed = False,
        progress: bool | None = None,
    ) -> DrawnPosterior:
        """The posterior whose draws' spread, and Gaussian noise, predict held-out data best, from one pass over them.

        Draws know no prior: their covariance is multiplied by one factor, which is a temperature and the inverse of a
        prior precision at once, so that there is no other `temperature`. The network alone is among the candidates, and
        `distributed` divides the data, as in `LaplaceFamily.calibrate`.
        """
        check_arguments(DrawnPosterior.calibrate, locals())
        self.check_network()
        if temperature is not False:
            raise OptionError(
                "The factor of the draws' covariance is their temperature already",
                expected="temperature=False",
                got=repr(temperature),
                do="leave temperature out",
            )
        return calibrate_draws(self, validation, link, batch_size, distributed, progress)

    def __len__(self) -> int:
        """The number of draws, K."""
        return len(self.deviations)

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """`samples` of the K draws, chosen without replacement, as weights (samples, P)."""
        source = self.source(samples, generator)
        if samples > len(self):
            raise OptionError(
                "There are fewer draws",
                expected=f"samples <= {len(self)}",
                got=str(samples),
                do="draw more: ImplicitPosterior.draw(samples)",
            )
        chosen = torch.randperm(len(self), generator=source, device=source.device)[:samples].to(self.mean.device)
        return self.deviations[chosen].add_(self.mean)

    def draws(self, samples: int, generator: torch.Generator) -> Iterable[Tensor]:
        """The rows of `sample`, chosen together so that none occurs twice."""
        return self.sample(samples, generator=generator).unbind()

    def marginal_variance(self) -> Tensor:
        """mean_k z_k^2 of each weight, (P,)."""
        return self.deviations.square().mean(0)

    def _full_by_default(self) -> bool:
        return False

    def _networks(self) -> int:
        return len(self)

    def _outputs(self, inputs: Inputs, kind: LatentKind) -> LatentGaussian:
        found = by_draws(
            self.network,
            self.likelihood.canonical,
            self.n_outputs,
            self.deviations,
            inputs,
            kind,
            self.facts.memory_budget,
        )
        return replace(found, degrees=len(self))

    def _weight_kernel(self, tangent: Tangent) -> DrawnKernel:
        return DrawnKernel(tangent, self.deviations)

    def state(self) -> State:
        """The draws, and how they were made."""
        found = self.calibration
        tensors = {"mean": self.mean, "deviations": self.deviations}
        if self.point is not self.mean:
            tensors["point"] = self.point
        return State({"drawing": asdict(self.drawing), "calibration": asdict(found) if found else None}, tensors)

    @classmethod
    def from_state(cls, state: State, network: Network, likelihood: Likelihood, facts: Facts) -> DrawnPosterior:
        """The posterior with the stored draws."""
        mean, point = cls.mean_and_point(state, network)
        drawing = record(Drawing, state.entry("drawing", dict))
        deviations = state.tensor("deviations", (-1, network.size), network.dtype)
        if not 1 <= len(deviations) == len(drawing.iterations) == len(drawing.residuals):
            raise wrong("deviations", "one for each of the draws recorded, at least one", str(len(deviations)))
        return cls(
            network=network,
            likelihood=likelihood,
            facts=facts,
            mean=mean,
            point=point,
            deviations=deviations,
            drawing=drawing,
            calibration=optional(Calibration, state.entry("calibration", dict | None)),
        )
