"""An ensemble as somebody outside of Lapis would write it: one class, nothing but the contract."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapis.likelihoods import resolve
from lapis.network import Network
from lapis.posteriors import Facts, Posterior, State
from lapis.predictions import LatentSamples


@dataclass(frozen=True, eq=False, repr=False)
class ToyEnsemble(Posterior):
    kind: ClassVar[str] = "toy ensemble"
    members: Tensor  # weights of the networks, (K, P)

    def latent(self, inputs: Any, kind: str, samples: int | None, generator: Any) -> LatentSamples:
        with self.network.prepared(), torch.no_grad():
            raw = [self.network.call(inputs, self.network.unflatten(w)) for w in self.members[:samples]]
        return LatentSamples(torch.stack(list(map(self.likelihood.canonical, raw))), raw_shape=tuple(raw[0].shape))

    def state(self) -> State:
        return State(tensors={"members": self.members})

    @classmethod
    def from_state(cls, state: State, network: Any, likelihood: Any, facts: Any) -> "ToyEnsemble":
        return cls(network, likelihood, facts, state.tensors["members"])


def toy_ensemble(models: list[torch.nn.Module], data: Any, likelihood: Any) -> ToyEnsemble:
    network, meaning = Network(models[0]), resolve(likelihood)
    members = torch.stack([Network(model).flat() for model in models])
    return ToyEnsemble(network, meaning, Facts.of(network, meaning, data), members)
