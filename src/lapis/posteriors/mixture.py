"""Mixtures of posteriors: ensembles of Laplace posteriors, MultiSWAG, or any that predict the same targets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lapis.batches import Inputs
from lapis.errors import DataError, FileError, LapisWarning, ModelError, OptionError, users_level
from lapis.likelihoods import Likelihood
from lapis.network import Network, outside_inference_mode
from lapis.options import UNREADABLE, check_arguments, check_choice, checked_tensor
from lapis.posteriors.evidences import log_evidences
from lapis.posteriors.over_weights import WeightPosterior
from lapis.posteriors.posterior import Facts, LatentKind, Posterior, State
from lapis.posteriors.predicting.members import are_of_one_architecture, check_same_beside_weights
from lapis.posteriors.stacking import held_out_log_probs, stacked_weights
from lapis.posteriors.storage import copied_module, pack, unpack
from lapis.predictions import Latent, LatentMixture, Prediction
from lapis.predictions import predict as predict_outputs
from lapis.schema import record, under, wrong

WAYS = ("evidence", "uniform", "stacking")


@dataclass(frozen=True)
class Weighting:
    """Where the weights of a mixture come from."""

    way: str
    """"evidence", "uniform", "stacking" or "given"."""
    score: float | None = None
    """Of stacking: mean log probability of a held-out example under the mixture."""
    gap: float | None = None
    """Of stacking: a bound of how much higher the score could be."""


@dataclass(frozen=True, eq=False, repr=False)
class MixturePosterior(Posterior):
    """sum_k w_k q_k: each component with its own network, weights and likelihood; made by `lapis.mixture`.

    Predictions are mixtures too. With method="sampled", `samples` networks are drawn from every component.
    """

    kind: ClassVar[str] = "mixture"
    holds_networks: ClassVar[bool] = True

    components: tuple[Posterior, ...]
    weights: Tensor
    """w, (K,) float64."""
    weighting: Weighting

    @property
    def methods(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those that all components have."""
        return tuple(m for m in self.components[0].methods if all(m in each.methods for each in self.components))

    def __len__(self) -> int:
        """The number of components, K."""
        return len(self.components)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {len(self)} components>"

    @property
    def _active(self) -> list[Posterior]:
        """The components with a weight above zero."""
        return [each for each, weight in zip(self.components, self.weights.tolist(), strict=True) if weight > 0]

    def latent(
        self, inputs: Inputs, kind: LatentKind, samples: int | None, generator: torch.Generator | None
    ) -> Latent:
        """The mixture of the components' outputs."""
        source = self._source(generator)
        found = [each.latent(inputs, kind, samples, source).scaled(each._sharpness()) for each in self._active]
        parts = [each for each in found if not isinstance(each, LatentMixture)]
        if len(parts) < len(found):
            raise ModelError(
                "A component is a mixture itself",
                expected="Gaussian or sampled outputs",
                got="a LatentMixture",
                do="pass the components of that mixture",
            )
        return LatentMixture(tuple(parts), self.weights[self.weights > 0])

    def _predicted(
        self, latent: Latent, link: str | None, samples: int | None, generator: torch.Generator | None
    ) -> Prediction:
        likelihoods = [each.likelihood for each in self._active]
        return predict_outputs(
            self.likelihood, latent, link=link, samples=samples, generator=generator, likelihoods=likelihoods
        )

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the weights, (samples, P): a component by its weight, then its weights; seeded with 0 by default.

        ModelError where weights alone say not which network they belong to: the components must share everything else.
        """
        check_arguments(MixturePosterior.sample, locals())
        drawn = [each for each in self.components if isinstance(each, WeightPosterior)]
        if len(drawn) < len(self):
            raise OptionError(
                "Not all components are distributions over weights",
                expected="components that can be sampled",
                got=", ".join(type(each).__name__ for each in self.components if each not in drawn),
                do="use predict",
            )
        check_same_beside_weights([each.network for each in drawn])
        source = self._source(generator)
        weights = self.weights.to(source.device)
        chosen = torch.multinomial(weights, samples, replacement=True, generator=source).to(self.network.device)
        draws = torch.empty(samples, self.n_weights, dtype=self.network.dtype, device=self.network.device)
        for k in sorted(set(chosen.tolist())):
            draws[chosen == k] = drawn[k].sample(int((chosen == k).sum()), generator=source)
        return draws

    def _source(self, generator: torch.Generator | None) -> torch.Generator:
        return generator or torch.Generator(self.network.device).manual_seed(0)

    def log_evidence(self) -> Tensor:
        """log p(D) = log mean_k p(D | k), 0-d float64: components as likely as each other before the data.

        Their probabilities after the data are then the weights of weights="evidence"; other weights have no evidence.
        """
        if self.weighting.way != "evidence":
            raise OptionError(
                "The mixture has no evidence",
                expected='weights="evidence": the components\' probabilities, given the data',
                got=f"weights that are {self.weighting.way}",
                do='use lapis.mixture(posteriors, weights="evidence")',
            )
        evidences = log_evidences({str(k): each for k, each in enumerate(self.components)})
        return evidences.logsumexp(0) - math.log(len(self))

    def _full_by_default(self) -> bool:
        return all(each._full_by_default() for each in self.components)

    def _network_is_as_fitted(self) -> bool:
        return all(each._network_is_as_fitted() for each in self.components)

    def _fitted_to(self, digest: int) -> bool:
        return all(each._fitted_to(digest) for each in self.components)

    def state(self) -> State:
        """The components' states, and all parameters and buffers of their networks, each network once."""
        self._check_for_file()
        modules: list[nn.Module] = []
        config: list[dict[str, Any]] = []
        tensors = {"weights": self.weights}
        for k, each in enumerate(self.components):
            if not any(each.network.module is module for module in modules):
                tensors |= {f"network.{len(modules)}.{n}": t for n, t in each.network.tensors().items()}
                modules.append(each.network.module)
            contents, own = pack(each)
            tensors |= {f"component.{k}.{name}": tensor for name, tensor in own.items()}
            number = next(i for i, module in enumerate(modules) if module is each.network.module)
            config.append({"network": number, "contents": contents})
        return State({"components": config, "networks": len(modules), "weighting": asdict(self.weighting)}, tensors)

    def _check_for_file(self) -> None:
        needing = [type(each).__name__ for each in self.components if type(each).needs_data]
        if needing or not are_of_one_architecture([each.network for each in self.components]):
            raise FileError(
                "No file can hold this mixture",
                expected="components of one architecture, which lapis.load(path, model) is given, that need no data",
                got=f"{needing[0]}, which needs its data" if needing else "several architectures",
                do="save the components, each in a file of its own",
            )

    @classmethod
    def from_state(cls, state: State, network: Network, likelihood: Likelihood, facts: Facts) -> MixturePosterior:
        """The mixture, over copies of the network's module with the parameters and buffers of each component."""
        modules = [
            copied_module(network, under(f"network.{i}.", state.tensors)) for i in range(state.count("networks"))
        ]
        components: list[Posterior] = []
        for k, each in enumerate(state.entry("components", list[dict[str, Any]])):
            number, contents = each.get("network"), each.get("contents")
            if not isinstance(number, int) or not 0 <= number < len(modules) or not isinstance(contents, dict):
                raise wrong(f"component {k}", "the number of a network, and contents", str(each)[:80])
            own = under(f"component.{k}.", state.tensors)
            given = likelihood if likelihood.name == "custom" else None
            components.append(unpack(contents, own, modules[number], f"Component {k} of the mixture", given))
        weights = state.tensor("weights", (len(components),), least=0.0)
        if not components or abs(float(weights.sum()) - 1) > 1e-9:
            raise wrong("weights", "numbers whose sum is one, one for each component", str(weights.tolist())[:80])
        weighting = record(Weighting, state.entry("weighting", dict))
        return cls(components[0].network, likelihood, facts, tuple(components), weights, weighting)


@outside_inference_mode
def mixture(
    posteriors: Sequence[Posterior],
    weights: Literal["evidence", "uniform", "stacking"] | Sequence[float] | Tensor | np.ndarray[Any, Any] = "uniform",
    data: Any = None,
    *,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> MixturePosterior:
    """The mixture sum_k w_k q_k of posteriors: an ensemble of Laplace posteriors, MultiSWAG, or any others.

    Args:
        posteriors: of networks that predict the same targets; their architectures, and their noise, may differ.
        weights: "uniform"; "evidence" (the components' probabilities given their common training data, all as likely
            before: w_k proportional to p(D | k)); "stacking" (the weights under which `data` are most likely); or K
            numbers, not negative and with sum one.
        data: for "stacking", held-out data, in any form that `lapis.laplace` takes.
        batch_size: for data that are not batched yet.
        progress: show a bar; by default on a terminal only.

    >>> import lapis
    >>> _ = torch.manual_seed(0)
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> models = [nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))]
    >>> both = mixture([lapis.laplace(model, (x, x), "regression") for model in models], weights="evidence")
    >>> both.predict(x).mean.shape, round(float(both.weights.sum()), 6)
    (torch.Size([20, 1]), 1.0)
    """
    check_arguments(mixture, locals(), apart=("weights",))
    components, factors = _flattened(posteriors)
    if isinstance(weights, str):
        check_choice("weights", weights, WAYS)
    if (data is not None) != (isinstance(weights, str) and weights == "stacking"):
        raise OptionError(
            "Held-out data are for stacking, and for nothing else",
            expected='weights="stacking" with data=..., or neither',
            got=f"weights={weights!r} with{'out' if data is None else ''} data",
            do="pass data the networks were not trained on" if data is None else 'leave data out, or use "stacking"',
        )
    _check_alike(components)
    count = len(posteriors)
    weighting = Weighting("given")
    if not isinstance(weights, str):
        found = _given(weights, count)
    elif weights == "uniform":
        found, weighting = torch.full((count,), 1 / count, dtype=torch.float64), Weighting("uniform")
    elif weights == "evidence":
        evidences = log_evidences({str(k): each for k, each in enumerate(posteriors)})
        found, weighting = evidences.log_softmax(0).exp(), Weighting("evidence")
    else:
        found, weighting = _stacked(posteriors, data, batch_size, progress)
    first = components[0]
    whole = torch.cat([weight * own for weight, own in zip(found, factors, strict=True)])
    return MixturePosterior(first.network, first.likelihood, first.facts, components, whole, weighting)


def _flattened(posteriors: Sequence[Posterior]) -> tuple[tuple[Posterior, ...], list[Tensor]]:
    """All components, those of mixtures among the posteriors too, and the weights of each posterior's own."""
    if not isinstance(posteriors, Sequence) or not posteriors or not all(isinstance(p, Posterior) for p in posteriors):
        raise OptionError(
            "A mixture is made of posteriors",
            expected="a list of posteriors, at least one",
            got=repr(posteriors)[:80],
            do="fit some, by lapis.laplace for example",
        )
    components: list[Posterior] = []
    factors = []
    for each in posteriors:
        parts = each.components if isinstance(each, MixturePosterior) else (each,)
        factors.append(each.weights if isinstance(each, MixturePosterior) else torch.ones(1, dtype=torch.float64))
        components += parts
    return tuple(components), factors


def _check_alike(components: Sequence[Posterior]) -> None:
    def meaning(each: Posterior) -> dict[str, Any]:
        settings = {name: value for name, value in each.likelihood.to_config().items() if name != "noise"}
        return settings | {"dtype": str(each.network.dtype), "device": str(each.network.device)}

    known = next((each.n_outputs for each in components if each.n_outputs), 0)
    for k, each in enumerate(components):
        if meaning(each) != meaning(components[0]) or each.n_outputs not in (0, known):
            raise ModelError(
                "The posteriors do not predict the same thing",
                expected=f"{meaning(components[0])}, {known} outputs, as the first",
                got=f"{meaning(each)}, {each.n_outputs} outputs for number {k}",
                do="mix posteriors of one task",
            )
    if not any(all(method in each.methods for each in components) for method in components[0].methods):
        raise OptionError(
            "The posteriors have no method of prediction in common",
            expected="one that all have",
            got="; ".join(f"{type(each).__name__}: {', '.join(each.methods)}" for each in components),
            do="mix others",
        )


def _given(weights: Any, count: int) -> Tensor:
    try:
        checked_tensor("weights", torch.as_tensor(weights))
        found = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    except (*UNREADABLE, DataError) as error:
        raise _no_weights(count, repr(weights)[:80]) from error
    if found.shape != (count,) or not bool((found >= 0).all()) or not abs(float(found.sum()) - 1) <= 1e-5:
        raise _no_weights(count, str(found.tolist())[:80])
    return found / found.sum()


def _no_weights(count: int, got: str) -> OptionError:
    ways = ", ".join(f'"{way}"' for way in WAYS)
    return OptionError(
        "These are no weights of a mixture",
        expected=f"{ways}, or {count} numbers that are not negative, with sum one",
        got=got,
        do="divide them by their sum",
    )


def _stacked(
    posteriors: Sequence[Posterior], data: Any, batch_size: int | None, progress: bool | None
) -> tuple[Tensor, Weighting]:
    log_probs, digest = held_out_log_probs(posteriors, data, batch_size, progress)
    if any(each._fitted_to(digest) for each in posteriors):
        warnings.warn(
            "Stacking by the training data: the component that has overfitted most gets the most weight. Pass data "
            "that no component has seen.",
            LapisWarning,
            stacklevel=users_level(),
        )
    weights, gap = stacked_weights(log_probs)
    score = float((log_probs + weights.log()).logsumexp(1).mean())
    return weights, Weighting("stacking", score, gap)
