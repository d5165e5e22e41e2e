"""BayesBiNN (Meng et al. 2020): the learning rule for weights of -1 and +1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lapis.likelihoods import Likelihood
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.optim.checks import check_betas
from lapis.optim.gaussian import facts_of, trained_network
from lapis.optim.sampling import SamplingOptimizer, Statistics, state_dtype
from lapis.options import check_arguments, check_positive
from lapis.posteriors.binary import BinaryPosterior
from lapis.posteriors.posterior import MEMORY_BUDGET


class BayesBiNN(SamplingOptimizer):
    r"""Independent signs: q(w = +1) = sigmoid(2 lambda), with mean mu = tanh(lambda), learnt by natural gradients.

    A step draws relaxed weights w = tanh((lambda + delta) / T) with delta = log(u / (1 - u)) / 2, u uniform, takes the
    gradient g of the mean loss there, carries it over to mu, and moves

        G = N g (1 - w^2 + e) / (T (1 - mu^2 + e))
        v <- b v + (1 - b) (G + lambda),      lambda <- lambda - lr v / (1 - b^t)

    where `+ lambda` is the pull of the uniform prior. At the low temperatures T that work best w is binary up to
    rounding, 1 - w^2 is zero, and e (of the same size as T) lets the gradient straight through. Between steps the
    weights are the mean tanh(lambda), computed from the new lambda.

    The constructor *overwrites* the weights: lambda starts at +-`start`, with random signs. Pass only weights that are
    to be binary; batch norm without affine weights between the layers helps.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: learning rate; published runs take 1e-4 with a cosine schedule to 1e-16.
        data_size: number of training examples, N.
        temperature: T of the relaxation, published 1e-10 to 1e-8.
        momentum: b.
        start: size of lambda at the start.
        epsilon: e.
        draws: of the weights in each `step(closure)`.
        generator: source of the seed, 0 without one; see `SamplingOptimizer`.
        synchronise: average over the ranks of torch.distributed, which draw on their own; without
            DistributedDataParallel only.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        *,
        data_size: int | None = None,
        temperature: float = 1e-10,
        momentum: float = 0.0,
        start: float = 10.0,
        epsilon: float = 1e-10,
        draws: int = 1,
        generator: torch.Generator | None = None,
        synchronise: bool = False,
    ) -> None:
        check_arguments(BayesBiNN.__init__, locals(), apart=("lr", "momentum", "data_size"))
        defaults = {
            "lr": lr,
            "data_size": data_size,
            "temperature": temperature,
            "momentum": momentum,
            "start": start,
            "epsilon": epsilon,
        }
        super().__init__(params, defaults, draws=draws, generator=generator, synchronise=synchronise)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_betas((group["momentum"],), 1)
        for name in ("start", "epsilon"):
            check_positive(name, group[name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and start its weights at random signs."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        params: list[Tensor] = group["params"]
        uniform = self._noise.uniform([torch.empty_like(p, dtype=state_dtype(p)) for p in params])
        self._noise.count()
        with torch.no_grad():
            for p, u in zip(params, uniform, strict=True):
                natural = torch.where(u < 0.5, -group["start"], group["start"]).to(u.dtype)
                self.state[p] = {"step": 0, "momentum": torch.zeros_like(natural), "natural": natural}
                if p.requires_grad:
                    p.copy_(natural.tanh())

    def _perturb(self, params: list[Tensor]) -> None:
        uniform = iter(self._noise.uniform([self.state[p]["natural"] for p in params]))
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.requires_grad):
                delta = torch.logit(next(uniform)).div_(2)
                p.copy_(delta.add_(self.state[p]["natural"]).div_(group["temperature"]).tanh_())

    def _statistics(self, gradients: Mapping[Tensor, Tensor]) -> tuple[Statistics, float]:
        """The gradients in mu."""
        found = {}
        for group in self.param_groups:
            small = group["epsilon"]
            for p in (each for each in group["params"] if each in gradients):
                flat = 1 - p.detach().to(state_dtype(p)).square() + small
                mean = self.state[p]["natural"].tanh()
                found[p] = gradients[p] * flat / (group["temperature"] * (1 - mean.square() + small))
        return found, 0.0

    def _update(self) -> None:
        for group in self.param_groups:
            beta = group["momentum"]
            for p in self._ready(group):
                state = self.state[p]
                state["step"] += 1
                natural: Tensor = state["natural"]
                state["momentum"].lerp_(group["data_size"] * self._seen[p] + natural, 1 - beta)
                natural.add_(state["momentum"], alpha=-group["lr"] / (1 - beta ** state["step"]))
                p.copy_(natural.tanh())

    def posterior(
        self, model: nn.Module, likelihood: str | Likelihood, data: Any = None, *, memory_budget: int = MEMORY_BUDGET
    ) -> BinaryPosterior:
        """Binary networks, to be drawn from; the model must keep its weights from now on.

        Args:
            model: the network that has been trained; weights that are not the optimiser's are constants.
            likelihood: see `lapis.laplace`; the one whose mean negative log likelihood was the loss.
            data: some of the training data, if predictions are to check that inputs are like those; optional.
            memory_budget: bytes of working memory for predictions.
        """
        check_arguments(BayesBiNN.posterior, locals(), apart=("likelihood",))
        family, network = resolve_likelihood(likelihood), trained_network(self, model)
        facts = facts_of(self, network, family, data, memory_budget)
        natural = torch.cat([self.state[p]["natural"].reshape(-1) for p in network.parameters.values()])
        return BinaryPosterior(network, family, facts, natural.to(network.dtype))
