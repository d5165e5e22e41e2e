"""IVON (Shen et al. 2024): variational inference at the price of Adam, with the Hessian from the noise itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lapis.likelihoods import Likelihood
from lapis.optim.gaussian import gaussian_posterior
from lapis.optim.sampling import SamplingOptimizer, Statistics, check_betas, state_dtype
from lapis.options import check_arguments, check_positive
from lapis.posteriors.factored import FactoredPosterior
from lapis.posteriors.posterior import MEMORY_BUDGET


class IVON(SamplingOptimizer):
    r"""Improved variational online Newton: a diagonal Gaussian over the weights, learnt while training.

    With N = `data_size` / `temperature` and d = `prior_precision` / N, a step draws theta = m + e / sqrt(N (h + d)),
    e standard normal, takes the gradient g of the mean loss of a batch there, and moves

        v <- b1 v + (1 - b1) g
        h <- b2 h + (1 - b2) k + (1 - b2)^2 (h - k)^2 / (2 (h + d)),      k = N (h + d) (theta - m) g
        m <- m - lr clip((v / (1 - b1^t) + d m) / (h + d))

    E[k] is the diagonal of the mean loss's Hessian, averaged over the posterior (Price's theorem); the last term of h
    keeps h + d positive. The posterior is N(m, 1 / (N (h + d))).

    Args:
        params: parameters, or groups of them with options of their own.
        lr: learning rate; multiplied by (h0 + d) unless `rescale_lr` is False, so that the first steps are those of
            gradient descent with `lr`. Good values are those of SGD, 0.02 to 0.2.
        data_size: number of training examples.
        prior_precision: of the Gaussian prior N(0, 1 / prior_precision) of each weight.
        betas: decay of the gradient's and of the Hessian's average. The published 0.99999 is for long runs; 0.9995 to
            0.999 suits some thousands of steps.
        hess_init: h0. Too small a value makes the first draws wild.
        temperature: of the posterior; the variance grows in proportion to it. 1 is Bayes' rule.
        clip_radius: largest move of a weight in a step, before `lr`.
        rescale_lr: see `lr`.
        draws: of the weights in each `step(closure)`.
        generator: source of the seed, 0 without one; see `SamplingOptimizer`.
        synchronise: for data parallel training without DistributedDataParallel: ranks draw weights of their own, and
            gradients and Hessians are averaged over them. Under DistributedDataParallel, which averages gradients
            only, leave it out: all ranks then draw the same weights.

    >>> from lapis import Gaussian
    >>> x = torch.linspace(-1, 1, 50)[:, None]
    >>> model = nn.Linear(1, 1)
    >>> optimiser = IVON(model.parameters(), lr=0.1, data_size=50, betas=(0.9, 0.99))
    >>> def closure():
    ...     optimiser.zero_grad()
    ...     loss = (model(x) - 2 * x).square().mean() / 2
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(300):
    ...     loss = optimiser.step(closure)
    >>> posterior = optimiser.posterior(model, Gaussian(1.0))
    >>> prediction = posterior.predict(x)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        *,
        data_size: int | None = None,
        prior_precision: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.99999),
        hess_init: float = 1.0,
        temperature: float = 1.0,
        clip_radius: float = math.inf,
        rescale_lr: bool = True,
        draws: int = 1,
        generator: torch.Generator | None = None,
        synchronise: bool = False,
    ) -> None:
        check_arguments(IVON.__init__, locals(), apart=("lr", "betas", "clip_radius", "data_size"))
        defaults = {
            "lr": lr,
            "data_size": data_size,
            "prior_precision": prior_precision,
            "betas": betas,
            "hess_init": hess_init,
            "temperature": temperature,
            "clip_radius": clip_radius,
            "rescale_lr": rescale_lr,
        }
        super().__init__(params, defaults, draws=draws, generator=generator, synchronise=synchronise)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_betas(group["betas"])
        check_positive("hess_init", group["hess_init"])
        if group["clip_radius"] != math.inf:
            check_positive("clip_radius", group["clip_radius"])

    def _moments(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's step count, momentum and Hessian."""
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(p, dtype=state_dtype(p))
            state["hessian"] = torch.full_like(p, group["hess_init"], dtype=state_dtype(p))
        return state

    def _perturb(self, params: list[Tensor]) -> None:
        hessians: list[Tensor] = []
        precisions: list[Tensor] = []
        for group in self.param_groups:
            size, decay = _scales(group)
            own = [self._moments(p, group)["hessian"] for p in group["params"] if p.requires_grad]
            found = torch._foreach_add(own, decay)
            torch._foreach_mul_(found, size)
            hessians += own
            precisions += found
        torch._foreach_sqrt_(precisions)
        noise = self._noise.normal(hessians)
        torch._foreach_div_(noise, precisions)
        torch._foreach_add_(params, noise)

    def _statistics(self, gradients: Mapping[Tensor, Tensor]) -> tuple[Statistics, float]:
        """(theta - m) g."""
        assert self._means is not None
        found = {}
        for p, gradient in gradients.items():
            dtype = state_dtype(p)
            found[p] = (p.detach().to(dtype) - self._means[p]).mul_(gradient)
        return found, 0.0

    def _update(self) -> None:
        for group in self.param_groups:
            params = self._ready(group)
            if params:
                self._update_group(group, params)

    def _update_group(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        size, decay = _scales(group)
        beta1, beta2 = group["betas"]
        states = [self._moments(p, group) for p in params]
        momenta, hessians = ([state[name] for state in states] for name in ("momentum", "hessian"))
        for state in states:
            state["step"] += 1
        gradients = [p.grad.to(momentum.dtype) for p, momentum in zip(params, momenta, strict=True)]  # type: ignore[union-attr]
        torch._foreach_lerp_(momenta, gradients, 1 - beta1)
        # with r = (1 - b2) (k - h) / (h + d) the new h is h + (h + d) (r + r^2 / 2)
        precisions = torch._foreach_add(hessians, decay)
        relative = torch._foreach_mul([self._seen[p] for p in params], size)
        torch._foreach_addcdiv_(relative, hessians, precisions, -1.0)
        torch._foreach_mul_(relative, 1 - beta2)
        torch._foreach_addcmul_(relative, relative, relative, 0.5)
        torch._foreach_addcmul_(hessians, precisions, relative)
        # the step, with the new h
        precisions = torch._foreach_add(hessians, decay)
        steps = torch._foreach_div(momenta, [1 - beta1 ** state["step"] for state in states])
        torch._foreach_add_(steps, params, alpha=decay)
        torch._foreach_div_(steps, precisions)
        if group["clip_radius"] != math.inf:
            torch._foreach_clamp_min_(steps, -group["clip_radius"])
            torch._foreach_clamp_max_(steps, group["clip_radius"])
        rate = group["lr"] * (group["hess_init"] + decay if group["rescale_lr"] else 1.0)
        torch._foreach_add_(params, steps, alpha=-rate)

    def posterior(
        self, model: nn.Module, likelihood: str | Likelihood, data: Any = None, *, memory_budget: int = MEMORY_BUDGET
    ) -> FactoredPosterior:
        """N(m, 1 / (N (h + d))) over the optimiser's parameters; the model must keep its weights from now on.

        Args:
            model: the network that has been trained; weights that are not the optimiser's are constants.
            likelihood: see `lapis.laplace`; the one whose mean negative log likelihood was the loss.
            data: some of the training data, if predictions are to check that inputs are like those; optional.
            memory_budget: bytes of working memory for predictions.
        """
        check_arguments(IVON.posterior, locals(), apart=("likelihood",))
        precisions = {}
        for group in self.param_groups:
            size, decay = _scales(group)
            for p in group["params"]:
                precisions[p] = size * (self._moments(p, group)["hessian"].double() + decay)
        return gaussian_posterior(self, model, likelihood, precisions, data, memory_budget)


def _scales(group: Mapping[str, Any]) -> tuple[float, float]:
    """N, the effective number of examples, and d, the prior precision for each of them."""
    size = group["data_size"] / group["temperature"]
    return size, group["prior_precision"] / size
