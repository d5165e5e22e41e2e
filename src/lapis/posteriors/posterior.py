"""The contract of every posterior: outputs at new inputs as a distribution, and a state that a file can hold.

A new method of the field is one class: it says how its outputs are distributed (`latent`), what it consists of
(`state`, `from_state`), and under which name files know it (`kind`). Prediction, data of any size, saving, loading and
the check that the network is still the one fitted follow from these.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lapis.batches import Inputs, batches, describe
from lapis.errors import ModelError, OptionError
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.options import check_choice
from lapis.posteriors.predicting.parts import latent_of_parts
from lapis.predictions import Latent, Prediction
from lapis.predictions import predict as predict_outputs

LatentKind = Literal["diagonal", "full", "joint", "sampled"]
"""What is asked of the outputs' distribution: variances alone, the covariance between an example's outputs, that
between all examples' outputs; or outputs of networks drawn from the posterior.
"""

MEMORY_BUDGET = 4 * 2**30

Self = TypeVar("Self", bound="Posterior")


@dataclass(frozen=True)
class Facts:
    """What a fit knows about its data and network beside its result."""

    n_data: int
    """Examples seen."""
    n_outputs: int
    """Outputs of the network at one position."""
    signature: str
    """Shapes and dtypes of the inputs seen, for messages."""
    fingerprint: str
    """Of every parameter and buffer of the network."""
    memory_budget: int = MEMORY_BUDGET
    """Bytes that predictions may work in."""

    @staticmethod
    def of(network: Network, likelihood: Likelihood, data: Any, memory_budget: int = MEMORY_BUDGET) -> Facts:
        """Read the data once: how many they are, and what the network makes of the first batch."""
        stream, _ = batches(data, dtype=network.dtype, device=network.device)
        first = next(stream)
        with network.prepared(), torch.no_grad():
            f = likelihood.canonical(network.call(first.inputs))
        likelihood.check_outputs(f)
        count = len(first) + sum(len(batch) for batch in stream)
        return Facts(count, f.shape[-1], describe(first.inputs), network.fingerprint(), memory_budget)


@dataclass(frozen=True)
class State:
    """What a posterior consists of beside network, likelihood and facts; a file holds exactly this."""

    config: dict[str, Any] = field(default_factory=dict)
    """Entries that JSON can hold."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    data: Any = None
    """The training data, given by whoever loads a posterior that consists of them; never written."""


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(ABC):
    """A distribution over the functions that a network can compute; a value: methods return new posteriors.

    Args:
        network: the module, seen as a function of its chosen weights.
        likelihood: p(y given outputs).
        facts: what the fit knows about data and network.
    """

    kind: ClassVar[str] = ""
    """The name by which files know the class."""
    methods: ClassVar[tuple[str, ...]] = ("sampled",)
    """How it predicts, the default first: "linearised" (Gaussian outputs), "sampled" (outputs of drawn networks)."""
    needs_data: ClassVar[bool] = False
    """Whether it consists of its training data, so that loading it takes them."""

    network: Network
    likelihood: Likelihood
    facts: Facts

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls

    # what a method of the field says ---------------------------------------------------------------

    @abstractmethod
    def latent(
        self, inputs: Inputs, kind: LatentKind, samples: int | None, generator: torch.Generator | None
    ) -> Latent:
        """The distribution of the outputs at checked inputs.

        Args:
            inputs: on the network's device, in its dtype.
            kind: what is asked for; only what `methods` promise.
            samples: networks to draw, for "sampled"; the class's own number when None.
            generator: source of randomness; seeded with 0 when None. Equal states must give equal draws, whatever the
                inputs are: large inputs are predicted in parts.
        """

    @abstractmethod
    def state(self) -> State:
        """What it consists of, for a file."""

    @classmethod
    @abstractmethod
    def from_state(cls: type[Self], state: State, network: Network, likelihood: Likelihood, facts: Facts) -> Self:
        """The posterior with this state; the inverse of `state`."""

    # what follows ----------------------------------------------------------------------------------

    @property
    def n_data(self) -> int:
        """Examples seen at the fit."""
        return self.facts.n_data

    @property
    def n_weights(self) -> int:
        """Chosen weights of the network, P."""
        return self.network.size

    @property
    def n_outputs(self) -> int:
        """Outputs of the network at one position."""
        return self.facts.n_outputs

    def __repr__(self) -> str:
        size = f"{self.n_weights:,} weights, {self.n_data:,} examples"
        return f"<{type(self).__name__}, {size}, {self.likelihood.name}>"

    def predict(
        self,
        x: Any,
        method: Literal["linearised", "sampled"] | None = None,
        link: Literal["probit", "mc", "bridge"] | None = None,
        samples: int | None = None,
        generator: torch.Generator | None = None,
        covariance: Literal["full", "diagonal"] | None = None,
        joint: bool = False,
        progress: bool | None = None,
    ) -> Prediction:
        """The predictive distribution at `x`.

        Args:
            x: inputs (a tensor, a tuple of arguments or a dictionary of them), or a DataLoader, Dataset or iterator of
                inputs or of (inputs, targets) pairs. Many examples are worked on in parts that fit the memory budget.
            method: "linearised" (the network's tangent, Gaussian outputs) or "sampled" (drawn networks); by default the
                first that the posterior knows.
            link: for classification, how Gaussian logits become probabilities: "probit" (default), "mc", "bridge".
            samples: drawn networks, or Monte Carlo draws of the link (default 256).
            generator: source of randomness; seeded with 0 when not given.
            covariance: between an example's outputs, or variances alone; full by default up to 32 outputs.
            joint: covariance between examples too; `log_prob` is then that of the whole batch.
            progress: show a bar while there are several parts; by default on a terminal only.
        """
        chosen = self.methods[0] if method is None else method
        check_choice("method", chosen, ("linearised", "sampled"))
        if chosen not in self.methods:
            raise OptionError(
                f"{type(self).__name__} has no {chosen} predictions",
                expected=" or ".join(map(repr, self.methods)),
                got=repr(method),
                do="leave method out",
            )
        if covariance is not None:
            check_choice("covariance", covariance, ("full", "diagonal"))
        kind: LatentKind = "sampled"
        if chosen == "linearised":
            full = covariance == "full" or (covariance is None and self._full_by_default())
            kind = "joint" if joint else "full" if full else "diagonal"
        elif covariance is not None or joint:
            raise OptionError(
                "Sampled predictions hold draws, not covariances",
                expected="covariance and joint left out",
                got=f"covariance={covariance!r}, joint={joint}",
                do='use method="linearised"' if "linearised" in self.methods else "leave them out",
            )
        self.check_network()
        latent = latent_of_parts(self, x, kind, samples if kind == "sampled" else None, generator, progress)
        return predict_outputs(
            self.likelihood,
            latent,
            link=link,
            samples=None if kind == "sampled" else samples,
            generator=None if kind == "sampled" else generator,
        )

    def _full_by_default(self) -> bool:
        """Whether predictions hold the covariance between an example's outputs when nothing is asked for."""
        return True

    def check_network(self) -> None:
        """Refuse to go on with a network that is not the one fitted."""
        if not self._network_is_as_fitted():
            raise ModelError(
                "The network has changed since the fit",
                expected="every weight, frozen ones too, and every buffer as it was",
                got="other values",
                do="fit again, or load the old state back",
            )

    def _network_is_as_fitted(self) -> bool:
        return self.network.holds(self.facts.fingerprint)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior to one file of numbers and JSON, for `lapis.load(path, model)`. Never half a file."""
        from lapis.posteriors.storage import save

        save(self, path)


KINDS: dict[str, type[Posterior]] = {}
"""Every class of posteriors, by the name under which files know it."""
