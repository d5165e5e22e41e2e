"""IVON (Shen et al. 2024): variational inference at the price of Adam, with the Hessian from the noise itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lapis.optim.diagonal import DiagonalOptimizer, scales
from lapis.optim.sampling import Statistics, state_dtype
from lapis.options import check_arguments


class IVON(DiagonalOptimizer):
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
            gradient descent with `lr`. Gradients are averaged with weight 1 - b1, so ten times a good rate of SGD with
            momentum 0.9 is a good one: 0.1 to 1.
        data_size: number of training examples.
        prior_precision: of the Gaussian prior N(0, 1 / prior_precision) of each weight.
        betas: decay of the gradient's and of the Hessian's average; 0.99999 for a hundred thousand steps. With a short
            memory weights that the data leave open drift towards the prior's width, which costs accuracy.
        hess_init: h0. Too small a value makes the first draws wild: they deviate by 1 / sqrt(N (h0 + d)), 0.006 in
            published runs (50,000 images). With few examples or small weights take 10,000 / N, a deviation of 0.01.
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
    >>> model = torch.nn.Linear(1, 1)
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
        lr: float = 0.3,
        *,
        data_size: int | None = None,
        prior_precision: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.9999),
        hess_init: float = 0.5,
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
            "damping": 0.0,
            "rescale_lr": rescale_lr,
        }
        super().__init__(params, defaults, draws=draws, generator=generator, synchronise=synchronise)

    def _statistics(self, gradients: Mapping[Tensor, Tensor]) -> tuple[Statistics, float]:
        """(theta - m) g."""
        assert self._means is not None
        params = list(gradients)
        drawn = [p.detach() if p.dtype == state_dtype(p) else p.detach().to(state_dtype(p)) for p in params]
        found = torch._foreach_sub(drawn, [self._means[p] for p in params])
        torch._foreach_mul_(found, list(gradients.values()))
        return dict(zip(params, found, strict=True)), 0.0

    def _move_hessians(
        self, group: Mapping[str, Any], hessians: list[Tensor], seen: list[Tensor]
    ) -> tuple[Tensor, ...] | list[Tensor]:
        """With r = (1 - b2) (k - h) / (h + d) the new h is h + (h + d) (r + r^2 / 2)."""
        (size, decay), rate = scales(group), 1 - group["betas"][1]
        precisions = torch._foreach_add(hessians, decay)
        torch._foreach_mul_(seen, rate * size)
        torch._foreach_addcdiv_(seen, hessians, precisions, -rate)
        torch._foreach_addcmul_(seen, seen, seen, 0.5)
        torch._foreach_addcmul_(hessians, precisions, seen)
        torch._foreach_addcmul_(precisions, precisions, seen)
        return precisions

    def _rate(self, group: Mapping[str, Any]) -> float:
        factor = group["hess_init"] + scales(group)[1] if group["rescale_lr"] else 1.0
        return float(group["lr"] * factor)
