"""Ascent of the ELBO: optimiser steps on minibatches, the trace, and whether it has stopped climbing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapis.batches import Batch, naming
from lapis.errors import ModelError
from lapis.likelihoods import Gaussian, Likelihood
from lapis.priors import WeightPrior
from lapis.schema import under
from lapis.training.state import load_optimiser, optimiser_parts
from lapis.training.variational.approximation import Approximation
from lapis.training.variational.perturbation import Draws, Pass

CONSTANT = 0.6
"""Share of the steps with a constant learning rate; it then goes down to zero by a cosine."""

WINDOWS = 50
"""Entries of the trace, at most."""

LOGARITHMIC_RATE = 0.02
"""Learning rate of logarithms (deviations, noise), which have no scale."""

LOADINGS_RATE = 0.5
"""Learning rate of the low-rank part, divided by the root of its number of entries: the noise of a step then adds the
same share to every weight's variance for any rank, and moves whole directions by the same length for any network."""

WARM_UP = 0.2
"""Share of the steps in which the divergence's weight rises to one: under its whole weight from the start, q often
gives up all that the weights know before the likelihood has narrowed it. Prior precisions are tuned afterwards."""

CLIMB = 0.01
"""Nats an example by which the ELBO may still rise from one third of the steps at constant rate to the next."""

ERRORS = 3.0
"""Standard errors that such a rise must exceed to be one."""

EVALUATIONS = 8
"""Passes over all data for the ELBO of the result."""


@dataclass
class Ascent:
    """The state of a fit; everything that a checkpoint holds."""

    q: Approximation
    draws: Draws
    likelihood: Likelihood
    prior: WeightPrior
    n_data: int
    steps: int
    passes: int
    """Forward passes, each with its own draws, for one step."""
    rate: float
    tunes_prior: bool
    log_noise: Tensor | None
    """A leaf if the noise is learnt."""
    logarithmic_rate: float = LOGARITHMIC_RATE
    """Of the deviations' logarithms."""
    done: int = 0
    """Steps made."""
    rounds: int = 0
    estimates: list[float] = field(default_factory=list)
    """The ELBO of each step, estimated from its batch."""
    optimiser: torch.optim.Adam = field(init=False)
    _known: tuple[WeightPrior, Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        groups = [(self.rate, self.q.mean), (self.logarithmic_rate, self.q.log_deviation)]
        if self.q.loadings is not None:
            rate = LOADINGS_RATE / math.sqrt(self.q.loadings.numel())
            groups.append((rate, self.q.loadings))
        if self.log_noise is not None:
            groups.append((LOGARITHMIC_RATE, self.log_noise))
        self.optimiser = torch.optim.Adam([{"params": [t], "first": rate} for rate, t in groups], fused=True)

    def current_likelihood(self) -> Likelihood:
        """The likelihood with the noise learnt so far."""
        return self.likelihood if self.log_noise is None else self.likelihood.with_noise(self.log_noise.exp())

    def loss(self, made: Pass, batch: Batch) -> Tensor:
        """E[-log p(y | f)] of each example, (B,): at drawn outputs; if Gaussian, over outputs of known moments."""
        likelihood = self.current_likelihood()
        moments = made.moments() if isinstance(likelihood, Gaussian) else None
        if moments is None or not isinstance(likelihood, Gaussian):
            f = likelihood.canonical(made.raw)
            return likelihood.nll(f, likelihood.targets(batch.targets, f, made.raw.shape))
        mean, variance = map(likelihood.canonical, moments)
        y = likelihood.targets(batch.targets, mean, made.raw.shape)
        return likelihood.nll(mean, y) + 0.5 * (variance * likelihood.root(mean).square()).sum((1, 2))

    def climb(self, stream: Iterable[Batch], generator: torch.Generator) -> None:
        """One round: a step on -ELBO / N for each batch, until all steps are made."""
        parameters = [*self.q.parameters(), *([] if self.log_noise is None else [self.log_noise])]
        for batch in stream:
            if self.done == self.steps:
                break
            with naming(batch.where):
                self._step(batch, parameters, generator)
        self.rounds += 1

    def _step(self, batch: Batch, parameters: list[Tensor], generator: torch.Generator) -> None:
        def loss(made: Pass) -> Tensor:
            return self.loss(made, batch).mean()

        divergence, pull = self.q.pull(self.prior, self._precision())
        expected, total = 0.0, [torch.zeros((), dtype=p.dtype, device=p.device) for p in parameters]
        for _ in range(self.passes):
            value, gradients = self.draws.gradient(batch.inputs, loss, parameters, generator)
            expected += float(value) / self.passes
            total = [torch.add(before, g, alpha=1 / self.passes) for before, g in zip(total, gradients, strict=True)]
        estimate = -self.n_data * expected - divergence
        if not math.isfinite(estimate):
            raise ModelError(
                f"Variational inference diverged at step {self.done + 1}",
                expected="a finite ELBO",
                got=str(estimate),
                do="use a smaller learning_rate, or scale the inputs and targets",
            )
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
        for gradient, own in zip(total, pull, strict=False):  # the noise, last of all, has no part in the divergence
            gradient.add_(own, alpha=min(1.0, (self.done + 1) / (WARM_UP * self.steps)) / self.n_data)
        for group in self.optimiser.param_groups:
            group["lr"] = group["first"] * self._decay()
        self.optimiser.step()
        self.done += 1
        self.estimates.append(estimate)
        if self.tunes_prior and self.done >= WARM_UP * self.steps:
            self.prior = self.q.best_prior(self.prior)

    def _precision(self) -> Tensor:
        """The prior's precision of every weight in q's dtype; kept until the prior changes."""
        if self._known is None or self._known[0] is not self.prior:
            self._known = self.prior, self.prior.vector().to(self.q.mean)
        return self._known[1]

    def _decay(self) -> float:
        """The share of the first learning rate at this step."""
        share = self.done / self.steps
        return 1.0 if share < CONSTANT else 0.5 * (1 + math.cos(math.pi * (share - CONSTANT) / (1 - CONSTANT)))

    def trace(self) -> tuple[float, ...]:
        """Means of the estimates over equal shares of the steps."""
        parts = torch.tensor(self.estimates, dtype=torch.float64).tensor_split(min(WINDOWS, len(self.estimates)))
        return tuple(float(part.mean()) for part in parts)

    def convergence(self) -> tuple[bool, str]:
        """Whether the ELBO had stopped climbing while the learning rate was constant, and why not."""
        constant = torch.tensor(self.estimates, dtype=torch.float64)[: max(3, int(CONSTANT * self.steps))]
        if len(constant) < 6:
            return False, f"{len(self.estimates)} steps are too few to tell"
        before, after = constant.tensor_split(3)[1:]
        rise = float(after.mean() - before.mean())
        error = math.sqrt(float(before.var() / len(before) + after.var() / len(after)))
        if rise > max(CLIMB * self.n_data, ERRORS * error):
            return False, f"the ELBO still rose by {rise:.3g} nats over {len(after):,} steps"
        return True, "the ELBO climbs no more"

    def evaluate(self, batches: Iterable[Batch], generator: torch.Generator) -> Tensor:
        """Estimates (EVALUATIONS,) of E_q[log p(D | theta)], each from one draw for each batch; float64."""
        total = torch.zeros(EVALUATIONS, dtype=torch.float64)
        for batch in batches:
            for i in range(EVALUATIONS):

                def loss(made: Pass, batch: Batch = batch) -> Tensor:
                    return self.loss(made, batch).double().sum()

                total[i] -= self.draws.value(batch.inputs, loss, generator).cpu()
        return total

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The fit as tensors, copied, and as facts for JSON; `load` takes both."""
        moments, numbers = optimiser_parts(self.optimiser)
        tensors = {f"optimiser.{name}": tensor for name, tensor in moments.items()}
        tensors |= {f"q.{i}": parameter for i, parameter in enumerate(self.q.parameters())}
        tensors |= {"precision": self.prior.precision}
        if self.log_noise is not None:
            tensors["log_noise"] = self.log_noise
        facts = {"optimiser": numbers, "done": self.done, "rounds": self.rounds, "estimates": list(self.estimates)}
        facts["each_example"] = sorted(self.draws.each_example)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}, facts

    def load(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go on from a state that an earlier fit left."""
        load_optimiser(self.optimiser, under("optimiser.", tensors), facts["optimiser"])
        with torch.no_grad():
            for i, parameter in enumerate(self.q.parameters()):
                parameter.copy_(tensors[f"q.{i}"])
            if self.log_noise is not None:
                self.log_noise.copy_(tensors["log_noise"])
        self.prior = self.prior.with_precision(tensors["precision"].to(self.prior.precision))
        self.done, self.rounds, self.estimates = facts["done"], facts["rounds"], facts["estimates"]
        self.draws.each_example = frozenset(facts["each_example"])
