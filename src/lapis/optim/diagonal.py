"""Optimisers whose posterior is a diagonal Gaussian: moments, draws, the step of the mean, the posterior."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lapis.likelihoods import Likelihood
from lapis.optim.checks import check_betas
from lapis.optim.gaussian import WithProcess, gaussian_posterior
from lapis.optim.sampling import SamplingOptimizer, state_dtype
from lapis.options import check_arguments, check_positive
from lapis.posteriors.factored import FactoredPosterior
from lapis.posteriors.posterior import MEMORY_BUDGET


class DiagonalOptimizer(WithProcess, SamplingOptimizer):
    """N(m, 1 / (N (h + d + c))) with a Hessian h of the mean loss, d = prior precision / N, and damping c.

    N is data_size / temperature. The mean moves by m <- m - rate clip((v / (1 - b1^t) + d m) / (h + d + c)), with the
    average v of gradients; classes say how h moves.
    """

    @abstractmethod
    def _move_hessians(
        self, group: Mapping[str, Any], hessians: list[Tensor], seen: list[Tensor]
    ) -> tuple[Tensor, ...] | list[Tensor]:
        """Change the Hessians in place by the statistics, which may be overwritten; returns the new h + d + c."""

    def _rate(self, group: Mapping[str, Any]) -> float:
        """The learning rate of a group."""
        return float(group["lr"])

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_betas(group["betas"])
        check_positive("hess_init", group["hess_init"])
        check_positive("damping", group["damping"], or_zero=True)
        radius = group["clip_radius"]
        if not isinstance(radius, float) or radius != math.inf:
            check_positive("clip_radius", radius)

    def _moments(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's step count, momentum and Hessian."""
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(p, dtype=state_dtype(p))
            state["hessian"] = torch.full_like(p, group["hess_init"], dtype=state_dtype(p))
        return state

    def _perturb(self, params: list[Tensor]) -> None:
        groups = [([p for p in group["params"] if p.requires_grad], group) for group in self.param_groups]
        hessians = [self._moments(p, group)["hessian"] for own, group in groups for p in own]
        noise = iter(self._noise.normal(hessians))
        place = iter(hessians)
        for own, group in groups:
            size, decay = scales(group)
            roots = torch._foreach_add([next(place) for _ in own], decay + group["damping"])
            torch._foreach_pow_(roots, -0.5)  # three times as fast as a square root on processors
            torch._foreach_addcmul_(own, [next(noise) for _ in own], roots, size**-0.5)

    def _update(self) -> None:
        for group in self.param_groups:
            params = self._ready(group)
            if params:
                self._update_group(group, params)

    def _update_group(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        _, decay = scales(group)
        beta = group["betas"][0]
        states = [self._moments(p, group) for p in params]
        momenta, hessians = ([state[name] for state in states] for name in ("momentum", "hessian"))
        for state in states:
            state["step"] += 1
        gradients = [p.grad for p in params if p.grad is not None]
        if any(g.dtype != v.dtype for g, v in zip(gradients, momenta, strict=True)):
            gradients = [g.to(v.dtype) for g, v in zip(gradients, momenta, strict=True)]
        torch._foreach_lerp_(momenta, gradients, 1 - beta)
        precisions = self._move_hessians(group, hessians, [self._seen[p] for p in params])
        rate = self._rate(group)
        weights = {1 - beta ** state["step"] for state in states}  # of the gradients in their averages
        if len(weights) == 1 and group["clip_radius"] == math.inf:
            (weight,) = weights
            steps = torch._foreach_add(momenta, params, alpha=decay * weight)
            torch._foreach_addcdiv_(params, steps, precisions, -rate / weight)
            return
        steps = torch._foreach_mul(momenta, [1 / (1 - beta ** state["step"]) for state in states])
        torch._foreach_add_(steps, params, alpha=decay)
        if group["clip_radius"] == math.inf:
            torch._foreach_addcdiv_(params, steps, precisions, -rate)
            return
        torch._foreach_div_(steps, precisions)
        torch._foreach_clamp_min_(steps, -group["clip_radius"])
        torch._foreach_clamp_max_(steps, group["clip_radius"])
        torch._foreach_add_(params, steps, alpha=-rate)

    def posterior(
        self, model: nn.Module, likelihood: str | Likelihood, data: Any = None, *, memory_budget: int = MEMORY_BUDGET
    ) -> FactoredPosterior:
        """The Gaussian over the optimiser's parameters; the model must keep its weights from now on.

        Args:
            model: the network that has been trained; weights that are not the optimiser's are constants.
            likelihood: see `lapis.laplace`; the one whose mean negative log likelihood was the loss.
            data: some of the training data, if predictions are to check that inputs are like those; optional.
            memory_budget: bytes of working memory for predictions.
        """
        check_arguments(DiagonalOptimizer.posterior, locals(), apart=("likelihood",))
        precisions = {}
        for group in self.param_groups:
            size, decay = scales(group)
            for p in group["params"]:
                hessian = self._moments(p, group)["hessian"].double()
                precisions[p] = size * (hessian + decay + group["damping"])
        return gaussian_posterior(self, model, likelihood, precisions, data, memory_budget)


def scales(group: Mapping[str, Any]) -> tuple[float, float]:
    """N, the effective number of examples, and d, the prior precision for each of them."""
    size = group["data_size"] / group["temperature"]
    return size, group["prior_precision"] / size
