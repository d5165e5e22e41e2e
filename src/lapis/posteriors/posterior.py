"""The interface of every posterior: a distribution of the outputs at new inputs, and a state that a file can hold.

A new inference method is one class that defines the distribution of its outputs (`latent`), its contents for files
(`state`, `from_state`), and its name in files (`kind`). Prediction on data of any size, saving, loading, and the check
that the network has not changed since the fit are derived from these.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor

from lapis.batches import Inputs, batches, describe, take
from lapis.errors import ModelError, OptionError
from lapis.likelihoods import Likelihood
from lapis.network import Network, full_precision, outside_inference_mode
from lapis.options import check_arguments, checked_device
from lapis.posteriors.conformal import Conformal, Score, conformal
from lapis.posteriors.diagnosis.data import Seen
from lapis.posteriors.diagnosis.diagnose import diagnose
from lapis.posteriors.diagnosis.report import Diagnosis, Notes
from lapis.posteriors.evidences import Evidence
from lapis.posteriors.predicting.divided import latent_of_ranks
from lapis.posteriors.predicting.parts import latent_of_parts
from lapis.predictions import Latent, Prediction
from lapis.predictions import predict as predict_outputs
from lapis.schema import count, entry, number, tensor, word

LatentKind = Literal["diagonal", "full", "joint", "sampled"]
"""The form of the outputs' distribution: variances only, the covariance between an example's outputs, the covariance
between all outputs of all examples, or outputs of networks drawn from the posterior.
"""

MEMORY_BUDGET = 4 * 2**30

EXAMPLES = 8
"""Inputs kept with the network, for properties that only a forward pass reveals."""

Self = TypeVar("Self", bound="Posterior")


@dataclass(frozen=True)
class Facts:
    """Facts about the data and network of a fit, besides its result."""

    n_data: int
    """Examples seen; 0 for a posterior made without data."""
    n_outputs: int
    """Outputs of the network at one position; 0 if no data were seen, and the network has therefore not run."""
    signature: str
    """Shapes and dtypes of the inputs seen, for error messages; empty without data."""
    fingerprint: str
    """Digest of every parameter and buffer of the network."""
    memory_budget: int = MEMORY_BUDGET
    """Bytes of working memory for predictions."""

    @staticmethod
    def of(network: Network, likelihood: Likelihood, data: Any, memory_budget: int = MEMORY_BUDGET) -> Facts:
        """Facts from one pass over the data; the network runs on the first batch only. None is no data."""
        if data is None:
            return Facts(0, 0, "", network.fingerprint(), memory_budget)
        stream, _ = batches(data, dtype=network.dtype, device=network.device)
        first = next(stream)
        network.example, network.signature = take(first.inputs, 0, EXAMPLES), describe(first.inputs)
        with network.prepared(), torch.no_grad():
            f = likelihood.canonical(network.call(first.inputs))
        likelihood.check_outputs(f)
        count = len(first) + sum(len(batch) for batch in stream)
        return Facts(count, f.shape[-1], network.signature, network.fingerprint(), memory_budget)


@dataclass(frozen=True)
class State:
    """The contents of a posterior besides network, likelihood and facts, as written to a file."""

    config: dict[str, Any] = field(default_factory=dict)
    """JSON-able entries."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    data: Any = None
    """The training data, passed to `lapis.load` for a posterior that needs them; never written."""

    # for `from_state`: entries of a file, of the form expected, or a FileError that names them

    def entry(self, name: str, hint: Any) -> Any:
        """An entry of `config`, of the type of an annotation: int, float | None, tuple[str, ...], and so on."""
        return entry(self.config, name, hint)

    def number(self, name: str, *, least: float = 0.0, above: bool = True) -> float:
        """A finite number above `least`, or from there on."""
        return number(self.config, name, least=least, above=above)

    def count(self, name: str, *, least: int = 1, most: int | None = None) -> int:
        """A whole number from `least` to `most`."""
        return count(self.config, name, least=least, most=most)

    def word(self, name: str, allowed: Sequence[str]) -> str:
        """One of the words allowed."""
        return word(self.config, name, allowed)

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype | None = torch.float64,
        *,
        least: float | None = None,
        above: bool = False,
    ) -> Tensor:
        """A finite tensor of this shape (-1 for any length) and dtype (None for any), with entries from `least` on."""
        return tensor(self.tensors, name, shape, dtype, least=least, above=above)


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(ABC):
    """A distribution over the functions that a network can compute. Immutable: methods return new posteriors.

    Args:
        network: the module as a function of its chosen weights.
        likelihood: p(y | outputs).
        facts: facts about the data and network of the fit.
    """

    kind: ClassVar[str] = ""
    """The name of the class in files."""
    methods: ClassVar[tuple[str, ...]] = ("sampled",)
    """Methods of prediction, the default first: "linearised" (Gaussian outputs), "sampled" (drawn networks)."""
    needs_data: ClassVar[bool] = False
    """Whether loading it requires its training data."""
    holds_networks: ClassVar[bool] = False
    """Whether its state holds all weights and buffers: any network of the same architecture loads it, as a copy."""

    network: Network
    likelihood: Likelihood
    facts: Facts

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" not in vars(cls):
            return
        taken = KINDS.get(cls.kind)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise OptionError(
                f"Files know another posterior by the kind {cls.kind!r}",
                expected="a kind that is not in use",
                got=f"the kind of {taken.__module__}.{taken.__qualname__}",
                do="give the class another kind",
            )
        KINDS[cls.kind] = cls

    # to be implemented by each class ---------------------------------------------------------------

    @abstractmethod
    def latent(
        self, inputs: Inputs, kind: LatentKind, samples: int | None, generator: torch.Generator | None
    ) -> Latent:
        """The distribution of the outputs at checked inputs.

        Args:
            inputs: on the network's device, in its dtype.
            kind: the form of the distribution; only forms that belong to one of `methods` are requested.
            samples: networks to draw, for "sampled"; the class's default when None.
            generator: source of randomness; seeded with 0 when None. Equal generator states must give the same drawn
                networks for any inputs: large inputs are predicted in parts.
        """

    @abstractmethod
    def state(self) -> State:
        """Its contents, for a file."""

    @classmethod
    @abstractmethod
    def from_state(cls: type[Self], state: State, network: Network, likelihood: Likelihood, facts: Facts) -> Self:
        """The posterior with this state; the inverse of `state`."""

    # derived from these ----------------------------------------------------------------------------

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
        """Outputs of the network at one position; 0 if no data were seen."""
        return self.facts.n_outputs

    def __repr__(self) -> str:
        seen = f"{self.n_data:,} examples" if self.n_data else "no data"
        return f"<{type(self).__name__}, {self.n_weights:,} weights, {seen}, {self.likelihood.name}>"

    @outside_inference_mode
    def predict(
        self,
        x: Any,
        method: Literal["linearised", "sampled"] | None = None,
        link: Literal["quasi", "mean_field", "probit", "mc", "bridge"] | None = None,
        samples: int | None = None,
        generator: torch.Generator | None = None,
        covariance: Literal["full", "diagonal"] | None = None,
        joint: bool = False,
        distributed: bool = False,
        progress: bool | None = None,
    ) -> Prediction:
        """The predictive distribution at `x`.

        Args:
            x: inputs (a tensor, a tuple of arguments or a dictionary of them), or a DataLoader, Dataset or iterator of
                inputs or of (inputs, targets) pairs. Many examples are processed in parts that fit the memory budget.
            method: "linearised" (the network's tangent, Gaussian outputs) or "sampled" (drawn networks); by default the
                posterior's first method.
            link: for classification, how Gaussian logits become probabilities: "quasi" (default: the integral, by fixed
                points), "mean_field" and "probit" (closed forms), "mc", "bridge".
            samples: drawn networks, or Monte Carlo draws of the link (default 256; points of "quasi": 128 or 512).
            generator: source of randomness; seeded with 0 when not given.
            covariance: "full" between an example's outputs, or "diagonal" (variances only); full by default up to 32
                outputs.
            joint: covariance between examples too; `log_prob` is then that of the whole batch.
            distributed: divide the examples among the processes of torch.distributed; all ranks make the same call
                and get the whole prediction.
            progress: show a bar while there are several parts; by default on a terminal only.
        """
        check_arguments(Posterior.predict, locals())
        chosen = self.methods[0] if method is None else method
        if chosen not in self.methods:
            raise OptionError(
                f"{type(self).__name__} has no {chosen} predictions",
                expected=" or ".join(map(repr, self.methods)),
                got=repr(method),
                do="leave method out",
            )
        if joint and covariance == "diagonal":
            raise OptionError(
                "A joint prediction holds all covariances",
                expected="covariance left out with joint=True",
                got="covariance='diagonal'",
                do="leave one of them out",
            )
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
        with self.network.held(), full_precision(self.network.device):
            self.check_network()
            latent_of = latent_of_ranks if distributed else latent_of_parts
            latent = latent_of(self, x, kind, samples if kind == "sampled" else None, generator, progress)
        if self._sharpness() != 1:
            latent = latent.scaled(self._sharpness())
        drawn = kind == "sampled"
        return self._predicted(latent, link, None if drawn else samples, None if drawn else generator)

    def _predicted(
        self, latent: Latent, link: str | None, samples: int | None, generator: torch.Generator | None
    ) -> Prediction:
        """p(y | x) from the distribution of the outputs."""
        return predict_outputs(self.likelihood, latent, link=link, samples=samples, generator=generator)

    @outside_inference_mode
    def diagnose(self, data: Any = None, *, batch_size: int | None = None, progress: bool | None = None) -> Diagnosis:
        """What a careful statistician would check, in plain words and numbers, each with what to do about it.

        With data (inputs and targets): the posterior against the network alone, its calibration, doubt at the data,
        outputs that are probabilities already, unscaled inputs. Always: the state of prior, noise and searches.
        `findings` of the result lists what is wrong, and is empty when all is well; printing it shows a table.

        Args:
            data: examples to judge by, best new ones; in any form that `lapis.laplace` takes. With the training data
                the posterior's doubt is also held against what these data allow.
            batch_size: for data that are not batched yet.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(Posterior.diagnose, locals())
        with self.network.held():
            self.check_network()
            return diagnose(self, data, batch_size, progress)

    @outside_inference_mode
    def conformal(
        self,
        data: Any,
        score: Score | None = None,
        *,
        simultaneous: bool = False,
        method: Literal["linearised", "sampled"] | None = None,
        link: Literal["quasi", "mean_field", "probit", "mc", "bridge"] | None = None,
        samples: int | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Conformal:
        """Calibrate prediction sets and intervals that hold the target with a stated probability, by new data.

        `posterior.conformal(held_out).predict(x, coverage=0.9)` gives, for classes, sets of them, and for numbers
        intervals mean +- q std. That these hold new targets with probability 0.9 at least, on average over inputs,
        follows from the calibration examples being exchangeable with the new ones and from nothing else: neither the
        network nor the posterior need be right.

        Args:
            data: calibration examples (inputs and targets) that were not trained on; n of them allow coverages up to
                n / (n + 1).
            score: how badly a target fits. Numbers: "deviation", |y - mean| / std with the posterior's predictive
                standard deviation. Classes: "probability", 1 - p_y (default; the smallest sets on average), or
                "cumulative", the probability of y and all more probable classes (larger sets where the posterior is
                in doubt, smaller where it is sure).
            simultaneous: the coverage is of all of an example's targets at once (outputs, positions); by default it is
                that of each target by itself, with a quantile for each.
            method: as in `predict`, and so are `link` and `samples`; drawn networks are those of seed 0.
            batch_size: for data that are not batched yet.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(Posterior.conformal, locals())
        options = {"method": method, "link": link, "samples": samples}
        return conformal(self, data, score, simultaneous, options, batch_size, progress)

    def _advice(self, less: bool) -> str:
        """What a diagnosis advises for `less` doubt about the weights, or for more."""
        return f"Use a posterior with {'less' if less else 'more'} doubt about the weights."

    def _fitted_to(self, digest: int) -> bool:
        """Whether data with this fingerprint are those of the fit; False if not known."""
        return False

    def _evidence_of_data(self) -> Evidence | None:
        """log p(D) and what it is about; None for methods that have none."""
        return None

    def _examine(self, notes: Notes, seen: Seen | None, progress: bool | None) -> None:  # noqa: B027  (need not add)
        """Add what the class knows about itself to a diagnosis; `seen` are sums over the data, if there are any."""

    def _sharpness(self) -> float:
        """Factor of the outputs in predictions; other than one after temperature scaling."""
        return 1.0

    def _full_by_default(self) -> bool:
        """Whether predictions hold the covariance between an example's outputs by default."""
        return True

    def check_network(self) -> None:
        """Raise ModelError if the network has changed since the fit."""
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
        """Write the posterior to one file of tensors and JSON, for `lapis.load(path, model)`; written atomically."""
        from lapis.posteriors.storage import save

        save(self, path)

    def to(self: Self, device: str | torch.device, *, data: Any = None) -> Self:
        """The posterior on another device, with a copy of the network; itself if it is there already.

        Args:
            device: such as "cuda" or "cpu".
            data: the data of the fit, for implicit posteriors only, which compute with them.
        """
        from lapis.posteriors.storage import moved

        check_arguments(Posterior.to, locals())
        target = checked_device(device)
        return self if target == self.network.device else cast(Self, moved(self, target, data))


KINDS: dict[str, type[Posterior]] = {}
"""Posterior classes by their name in files."""
