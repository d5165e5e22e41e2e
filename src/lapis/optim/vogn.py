"""VOGN (Khan et al. 2018, Osawa et al. 2019): variational online Gauss-Newton, by squared per-example gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapis.errors import OptionError
from lapis.network import Network
from lapis.optim.diagonal import DiagonalOptimizer, scales
from lapis.optim.sampling import Statistics
from lapis.optim.squares import Squares
from lapis.options import check_arguments, shown


class VOGN(DiagonalOptimizer):
    r"""A diagonal Gaussian over the weights, whose precision averages squares of the examples' own gradients.

    With N = `data_size` / `temperature` and d = `prior_precision` / N, a step draws theta = m + e / sqrt(N (h + d +
    damping)), e standard normal, and takes the gradients g_i of the examples' losses there, of mean g:

        v <- b1 v + (1 - b1) g,      h <- b2 h + (1 - b2) mean_i g_i^2
        m <- m - lr (v / (1 - b1^t) + d m) / (h + d + damping)

    The posterior is N(m, 1 / (N (h + d + damping))). The squares are those of the loss as it is written, the mean over
    the batch of a loss for each example, in training mode; they cost about as much as another backward pass
    (`optim/squares.py`), and no gradient of a single example is kept. The network must be called as a whole,
    once for each backward pass. Batch norm in training mode couples the examples: each then counts by the gradient
    that came through its own activations.

    Args:
        model: the network to be trained; it returns a tensor, or an object with `.logits`, one row an example.
        lr: learning rate, divided by h + d + damping: with damping c the first steps are those of SGD with momentum
            and a rate of about lr (1 - b1) / c. Published values, for damping 0.001, are 0.001 to 0.01.
        data_size: number of training examples; with data augmentation published runs count every example 5 to 10
            times.
        prior_precision: of the Gaussian prior N(0, 1 / prior_precision) of each weight.
        betas: decay of the gradient's and of the squares' average (published: 0.9, and 0.99 to 0.999).
        hess_init: h at the start.
        damping: added to the precision, in steps and in draws: deviations are at most 1 / sqrt(N damping), 0.05 for
            4,000 examples. Published runs take 0.001 and 500,000 examples (augmented ones counted): the same width.
            Where weights are small, as in convolutions, take 10,000 / N (deviations of 0.01), and `lr` a tenth to all
            of it: draws as wide as the weights learn little.
        temperature: of the posterior; published runs raise it from 0.01 to 1 over the first thousand steps
            (`optimiser.param_groups[0]["temperature"] = ...`).
        clip_radius: largest move of a weight in a step, before `lr`.
        draws: of the weights in each `step(closure)`; published runs take 5 to 10.
        params: parameters or groups of them; all trainable ones of the model by default.
        generator: source of the seed, 0 without one; see `SamplingOptimizer`.
        synchronise: average gradients and squares over the ranks of torch.distributed, which draw weights of their
            own; with or without DistributedDataParallel.

    >>> from lapis import Gaussian
    >>> x = torch.linspace(-1, 1, 50)[:, None]
    >>> model = nn.Linear(1, 1)
    >>> optimiser = VOGN(model, lr=0.01, data_size=50)
    >>> for _ in range(300):
    ...     optimiser.zero_grad()
    ...     with optimiser.sampled():
    ...         ((model(x) - 2 * x).square().mean() / 2).backward()
    ...     _ = optimiser.step()
    >>> prediction = optimiser.posterior(model, Gaussian(1.0)).predict(x)
    """

    pairs_noise_with_gradients: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.03,
        *,
        data_size: int | None = None,
        prior_precision: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        hess_init: float = 1e-2,
        damping: float = 0.1,
        temperature: float = 1.0,
        clip_radius: float = math.inf,
        draws: int = 1,
        params: Any = None,
        generator: torch.Generator | None = None,
        synchronise: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(
                "VOGN needs the network itself",
                expected="a torch.nn.Module, whose layers tell the examples' gradients",
                got=shown(model),
                do="pass the model instead of its parameters",
            )
        check_arguments(VOGN.__init__, locals(), apart=("lr", "betas", "damping", "clip_radius", "data_size", "params"))
        self.model = model
        self._squares: Squares | None = None
        defaults = {
            "lr": lr,
            "data_size": data_size,
            "prior_precision": prior_precision,
            "betas": betas,
            "hess_init": hess_init,
            "damping": damping,
            "temperature": temperature,
            "clip_radius": clip_radius,
        }
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else params
        super().__init__(chosen, defaults, draws=draws, generator=generator, synchronise=synchronise)

    def _listening(self) -> AbstractContextManager[None]:
        held = {id(p) for p in self._trainable()}
        if self._squares is None or {id(p) for p in self._squares.network.parameters.values()} != held:
            self._squares = Squares(Network(self.model, lambda _, p: id(p) in held))
        return self._squares.recording()

    def _begun(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self.model and self._squares is not None:
            self._squares.begin(module, args, kwargs)

    def _network(self) -> nn.Module:
        return self.model

    def _differentiates(self) -> bool:
        return self._squares is not None and self._squares.differentiates

    def _statistics(self, gradients: Mapping[Tensor, Tensor]) -> tuple[Statistics, float]:
        """The sum over examples of squared gradients of the mean loss, and how many they are."""
        assert self._squares is not None
        squares, examples = self._squares.totals()
        if not examples:
            raise OptionError(
                "The loss was not computed by the network",
                expected="a loss of the outputs of the model that VOGN was given, within step(closure) or sampled()",
                got="gradients, but no call of the model",
                do="call the model as a whole, model(x), inside the context",
            )
        parameters = self._squares.network.parameters
        return {p: squares[name] for name, p in parameters.items() if p in gradients}, float(examples)

    def _move_hessians(
        self, group: Mapping[str, Any], hessians: list[Tensor], seen: list[Tensor]
    ) -> tuple[Tensor, ...] | list[Tensor]:
        """Gradients of a mean over B examples are 1/B of their own: the mean of squares is B times the sum."""
        torch._foreach_mul_(seen, self._examples)
        torch._foreach_lerp_(hessians, seen, 1 - group["betas"][1])
        return torch._foreach_add(hessians, scales(group)[1] + group["damping"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "model": self.model, "_squares": None}
