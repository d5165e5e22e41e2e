"""MC dropout: networks drawn by the dropout that a network was trained with."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapis.batches import Inputs, batch_length, describe, take
from lapis.curvature.outputs import check_outputs
from lapis.errors import FileError, ModelError, OptionError
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network, outside_inference_mode
from lapis.options import check_arguments
from lapis.posteriors.over_weights import WeightPosterior
from lapis.posteriors.posterior import EXAMPLES, MEMORY_BUDGET, Facts, LatentKind, State
from lapis.posteriors.predicting.masked_weights import (
    MaskedWeight,
    draw_weights,
    masked_weights,
    plausible_inputs,
)
from lapis.posteriors.predicting.masks import MaskPlan, known_rates, masked, may_drop, no_dropout, plan_masks
from lapis.posteriors.predicting.sampled import SMALL_RUN
from lapis.predictions import Latent, LatentSamples
from lapis.schema import record


@dataclass(frozen=True, eq=False, repr=False)
class DropoutPosterior(WeightPosterior):
    """Networks whose dropout is on, with one set of masks for all examples in each; made by `lapis.dropout`.

    A draw is a function: the same masks at every input, so that outputs at different inputs are correlated as those of
    one network are. At a single input the distribution is that of usual MC dropout, with new masks for every example.

    Where dropout stands before linear layers and convolutions, a draw is a weight vector with columns zeroed:
    W diag(z) / (1 - p) with z ~ Bernoulli(1 - p). That is the variational distribution over weights of which dropout
    training maximises the evidence lower bound. `sample` gives these.
    """

    kind: ClassVar[str] = "dropout"

    rates: dict[str, float]
    """Probability of a zero, for torch's own layers, by their names."""
    weights: tuple[MaskedWeight, ...] | None = None
    """The weights that the masks multiply, where that is known already."""

    def latent(
        self, inputs: Inputs, kind: LatentKind, samples: int | None, generator: torch.Generator | None
    ) -> Latent:
        """Outputs of networks drawn by dropout."""
        count = self._networks() if samples is None else samples
        seeds = self._seeds(count, self.source(count, generator))
        if self.network.example is None:
            self.network.example = take(inputs, 0, EXAMPLES)
        plan = self._plan(inputs)
        outputs = []
        for start in range(0, count, step := self._networks_in_a_run(inputs, plan)):
            raw = masked(self.network, inputs, plan, seeds[start : start + step])
            f = self.likelihood.canonical(raw)
            check_outputs(f, self.n_outputs)
            outputs.append(f.reshape(-1, batch_length(inputs), *f.shape[1:]))
        return LatentSamples(torch.cat(outputs), raw_shape=(batch_length(inputs), *raw.shape[1:]))

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Weights of networks drawn by dropout, (samples, P); ModelError where masks are not masks of weights.

        Which weights the masks multiply is found by a forward pass: of the data's first inputs, of inputs that were
        predicted, else of random ones (B, features) or (B, channels, 32, 32) as the first layer takes them.
        """
        source = self.source(samples, generator)
        self.check_network()
        return torch.stack(list(self.draws(samples, source)))

    def draws(self, samples: int, generator: torch.Generator) -> Iterable[Tensor]:
        """The rows of `sample`."""
        found = self._masked_weights
        return (draw_weights(self.network, found, seed) for seed in self._seeds(samples, generator))

    @cached_property
    def _masked_weights(self) -> tuple[MaskedWeight, ...]:
        if self.weights is not None:
            return self.weights
        example = self.network.example
        if example is None:
            example = plausible_inputs(self.network)
        if example is None:
            raise OptionError(
                "Which weights the masks multiply takes a forward pass to find",
                expected="some inputs",
                got="a posterior that has seen none",
                do="pass data to lapis.dropout(model, likelihood, data), or predict before you sample",
            )
        return masked_weights(self.network, self._plan(example), example)

    @cached_property
    def _plans(self) -> dict[str, MaskPlan]:
        """How the network draws masks, by the shape of an example."""
        return {}

    def _plan(self, inputs: Inputs) -> MaskPlan:
        key = describe(take(inputs, 0, 1))
        if key not in self._plans:
            self._plans[key] = plan_masks(self.network, inputs)
        return self._plans[key]

    def _networks_in_a_run(self, inputs: Inputs, plan: MaskPlan) -> int:
        """How many small networks run together, as one larger batch."""
        held = self.network.example_bytes.get(describe(take(inputs, 0, 1)))
        if held is None or None in plan.layouts:
            return 1
        return max(1, SMALL_RUN // (sum(held) * batch_length(inputs)))

    @staticmethod
    def _seeds(samples: int, generator: torch.Generator) -> list[int]:
        seeds: list[int] = torch.randint(2**62, (samples,), generator=generator, device=generator.device).tolist()
        return seeds

    def _network_is_as_fitted(self) -> bool:
        return known_rates(self.network.module) == self.rates and super()._network_is_as_fitted()

    def _advice(self, less: bool) -> str:
        return f"Train with a {'smaller' if less else 'larger'} dropout probability, or choose it by held-out data."

    def state(self) -> State:
        """Nothing but the rates: the masks are those of the network's own layers."""
        found = None if self.weights is None else [asdict(each) for each in self.weights]
        return State({"rates": self.rates, "weights": found})

    @classmethod
    def from_state(cls, state: State, network: Network, likelihood: Likelihood, facts: Facts) -> DropoutPosterior:
        """The posterior of a network with the same dropout; FileError for another."""
        rates, now = state.entry("rates", dict[str, float]), known_rates(network.module)
        found = state.entry("weights", list[dict[str, Any]] | None)
        if rates != now:
            raise FileError(
                "The network has other dropout layers",
                expected=f"probabilities {rates}",
                got=str(now),
                do="build the network with the dropout that it was saved with",
            )
        weights = None if found is None else tuple(record(MaskedWeight, each) for each in found)
        for each in weights or ():
            each.check(network)
        return cls(network, likelihood, facts, rates, weights)


@outside_inference_mode
def dropout(
    model: nn.Module, likelihood: str | Likelihood, data: Any = None, *, memory_budget: int = MEMORY_BUDGET
) -> DropoutPosterior:
    """MC dropout: predictions by networks drawn by the model's own dropout, which it must have been trained with.

    Only dropout is switched on; batch norm and all other layers stay in evaluation mode. Dropout may be layers of any
    kind, part of attention or recurrent layers, or functional dropout that follows `self.training`.

    Args:
        model: a trained network with dropout.
        likelihood: see `lapis.laplace`.
        data: optional; with some inputs at hand, problems show now and not at the first prediction, and `sample` needs
            no prediction before it. Only the first batch runs; all are counted.
        memory_budget: bytes of working memory for predictions.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    >>> prediction = dropout(net, "classification").predict(torch.randn(5, 2), samples=50)
    >>> prediction.probs.shape, bool((prediction.f_variance > 0).all())
    (torch.Size([5, 3]), True)
    """
    family = resolve_likelihood(likelihood)
    network = Network(model)
    check_arguments(dropout, locals())
    if not may_drop(network.module):
        raise no_dropout(network.module)
    facts = Facts.of(network, family, data, memory_budget)
    found = None
    if network.example is not None:
        plan = plan_masks(network, network.example)
        with suppress(ModelError):  # `sample` says why there are no weights
            found = masked_weights(network, plan, network.example)
    return DropoutPosterior(network, family, facts, known_rates(network.module), found)
