"""From an optimiser's moments to a posterior of the contract."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lapis.batches import check_repeatable
from lapis.errors import ModelError
from lapis.function_space import GaussianProcess
from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network
from lapis.options import check_arguments
from lapis.posteriors.factored import FactoredPosterior
from lapis.posteriors.posterior import Facts


def trained_network(optimiser: Optimizer, model: nn.Module) -> Network:
    """The model as a function of the optimiser's trainable parameters; ModelError if it lacks one of them."""
    held = {id(p) for group in optimiser.param_groups for p in group["params"] if p.requires_grad}
    known = {id(p) for p in model.parameters()}
    if not held <= known:
        raise ModelError(
            "The optimiser has trained another network",
            expected="the model whose parameters the optimiser was given",
            got=f"a model without {len(held - known)} of its {len(held)} parameters",
            do="pass the model that was trained",
        )
    return Network(model, lambda _, p: id(p) in held)


def facts_of(optimiser: Optimizer, network: Network, likelihood: Likelihood, data: Any, memory_budget: int) -> Facts:
    """Facts from the data, or without them from the size that the optimiser was told."""
    if data is not None:
        check_repeatable(data)
    facts = Facts.of(network, likelihood, data, memory_budget)
    network.signature = facts.signature
    return facts if data is not None else replace(facts, n_data=int(optimiser.param_groups[0]["data_size"]))


def gaussian_posterior(
    optimiser: Optimizer,
    model: nn.Module,
    likelihood: str | Likelihood,
    precisions: Mapping[Tensor, Tensor],
    data: Any,
    memory_budget: int,
) -> FactoredPosterior:
    """Independent weights with the model's own weights as means, and a precision for each parameter's entries."""
    family, network = resolve_likelihood(likelihood), trained_network(optimiser, model)
    facts = facts_of(optimiser, network, family, data, memory_budget)
    flat = torch.cat([precisions[p].reshape(-1).to(network.device) for p in network.parameters.values()])
    mean = network.flat()
    return FactoredPosterior(network, family, facts, mean, mean, flat.rsqrt().to(network.dtype))


class WithProcess(ABC):
    """An optimiser whose Gaussian over the weights, at any moment of training, is a Gaussian process over functions."""

    @abstractmethod
    def posterior(self, model: nn.Module, likelihood: str | Likelihood) -> FactoredPosterior:
        """The posterior now."""

    def gaussian_process(
        self, model: nn.Module, likelihood: str | Likelihood = "regression", *, link: bool = False
    ) -> GaussianProcess:
        """The Gaussian process that the network and the optimiser's moments are now: mean f(x), kernel J Sigma J^T.

        It belongs to a copy of the model, so that training may go on: the sequence of them is the sequence of
        processes that training goes through.

        Args:
            model: the network that is being trained.
            likelihood: see `lapis.laplace`; what the outputs mean.
            link: the process of E[y | f]; see `Posterior.gaussian_process`.
        """
        check_arguments(WithProcess.gaussian_process, locals(), apart=("likelihood",))
        now = self.posterior(model, likelihood)
        old = now.network
        network = Network(copy.deepcopy(old.module), lambda name, _: name in old.names)
        facts = replace(now.facts, fingerprint=network.fingerprint())
        return replace(now, network=network, facts=facts).gaussian_process(link=link)
