"""Deep ensembles: networks trained from different starting points, each as likely as any other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lapis.batches import Inputs
from lapis.errors import FileError, ModelError, OptionError
from lapis.likelihoods import Likelihood
from lapis.network import Network
from lapis.posteriors.over_weights import WeightPosterior
from lapis.posteriors.posterior import Facts, LatentKind, State
from lapis.posteriors.predicting.members import (
    are_alike,
    check_same_beside_weights,
    member_outputs,
    stack_members,
)
from lapis.posteriors.storage import copied_module
from lapis.predictions import Latent
from lapis.schema import under


@dataclass(frozen=True, eq=False, repr=False)
class EnsemblePosterior(WeightPosterior):
    """K networks with probability 1/K each; made by `lapis.ensemble`.

    The members may be of different architectures, if their outputs have one shape. `network` is the first of them.
    """

    kind: ClassVar[str] = "ensemble"
    holds_networks: ClassVar[bool] = True

    members: tuple[Network, ...]
    fingerprints: tuple[str, ...]
    """Of the members as they were when the ensemble was made."""

    @classmethod
    def of(cls, members: Sequence[Network], likelihood: Likelihood, facts: Facts) -> EnsemblePosterior:
        """The ensemble of these networks as they are now; ModelError unless they can be members of one."""
        first = members[0]
        for number, member in enumerate(members):
            repeated = any(member.module is other.module for other in members[:number])
            if repeated or (member.dtype, member.device) != (first.dtype, first.device):
                raise ModelError(
                    f"Member {number} does not fit into the ensemble",
                    expected=f"a network of its own, in {first.dtype} on {first.device}",
                    got="the same module twice" if repeated else f"{member.dtype} on {member.device}",
                    do="make a new network for every member, and move all to one device and dtype",
                )
        return cls(first, likelihood, facts, tuple(members), tuple(member.fingerprint() for member in members))

    def __len__(self) -> int:
        """The number of members, K."""
        return len(self.members)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {len(self)} members>"

    def latent(
        self, inputs: Inputs, kind: LatentKind, samples: int | None, generator: torch.Generator | None
    ) -> Latent:
        """Outputs of the members: of all, or of `samples` of them, chosen without replacement."""
        if samples is not None and samples > len(self):
            raise OptionError(
                "There are fewer members", expected=f"samples <= {len(self)}", got=str(samples), do="train more"
            )
        chosen = list(range(len(self))) if samples is None else self._chosen(samples, generator)
        stacked = self._stacked and {name: tensor[chosen] for name, tensor in self._stacked.items()}
        return member_outputs([self.members[k] for k in chosen], stacked, self.likelihood, self.n_outputs, inputs)

    @cached_property
    def _stacked(self) -> dict[str, Tensor] | None:
        return stack_members(self.members)

    def sample(self, samples: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Weights (samples, P) of members in random order, none a second time before all others have occurred.

        ModelError where weights alone are no member: for members of different architectures, or with different buffers
        (batch norm) or frozen weights.
        """
        chosen = self._chosen(samples, generator)
        check_same_beside_weights(self.members)
        return torch.stack([self.members[k].flat() for k in chosen])

    def draws(self, samples: int, generator: torch.Generator) -> Iterable[Tensor]:
        """The rows of `sample`, chosen together so that all occur equally often."""
        return self.sample(samples, generator=generator).unbind()

    def _chosen(self, samples: int, generator: torch.Generator | None) -> list[int]:
        source = self.source(samples, generator)
        rounds = -(-samples // len(self))
        orders = [torch.randperm(len(self), generator=source, device=source.device) for _ in range(rounds)]
        chosen: list[int] = torch.cat(orders)[:samples].tolist()
        return chosen

    def _networks(self) -> int:
        return len(self)

    def _network_is_as_fitted(self) -> bool:
        return all(map(Network.holds, self.members, self.fingerprints))

    def _advice(self, less: bool) -> str:
        return "Train the members longer, or with weight_decay." if less else "Train more members."

    def state(self) -> State:
        """All parameters and buffers of all members."""
        if not are_alike(self.members):
            raise FileError(
                "The ensemble's members have different architectures, and files hold no code",
                expected="members of one architecture, which lapis.load(path, model) is given",
                got="several",
                do="save the members' state dictionaries, and make the ensemble of them again",
            )
        members = enumerate(self.members)
        tensors = {f"{k}.{name}": tensor for k, member in members for name, tensor in member.tensors().items()}
        return State({"size": len(self)}, tensors)

    @classmethod
    def from_state(cls, state: State, network: Network, likelihood: Likelihood, facts: Facts) -> EnsemblePosterior:
        """The ensemble of copies of the network's module, with the members' parameters and buffers."""
        modules = [copied_module(network, under(f"{k}.", state.tensors)) for k in range(state.count("size"))]
        members = [Network(module, example=network.example) for module in modules]
        for member in members:
            member.signature = network.signature
        return cls.of(members, likelihood, facts)
