"""Draws by SGD on minibatches, in three forms of one problem.

A draw is the minimiser of 1/2 |G z - u|^2 + 1/2 |z - z0|^2_Lambda with white noise u and z0 = Lambda^-1/2 e. In units
of the prior, y = Lambda^1/2 z and F = G Lambda^-1/2, with data terms summed over minibatches b:

    noisy:      1/2 sum_b |F_b y - u_b|^2 + 1/2 |y - e|^2            gradient  F_b^T (F_b y - u_b) + y - e
    low noise:  1/2 sum_b |F_b y|^2       + 1/2 |y - e - F^T u|^2    gradient  F_b^T F_b y         + y - e - F^T u

Both have the gradient (I + F^T F) y - e - F^T u over all data, hence the same minimiser, and neither inverts a singular
matrix. Minibatch gradients of the low-noise objective do not depend on u, but at the minimiser they are not zero.

    dual:       y = e + F^T a with one number of a for each row: a step moves a_b along u_b - a_b - F_b y, and y with it

At the solution a = u - F y all of these are zero: minibatches add no noise there, and momentum can be larger.
"""

from __future__ import annotations

import logging
import time
import warnings
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapis.checkpoint import Checkpoint
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.errors import LapisWarning, users_level
from lapis.posteriors.laplace.matrix_free.drawn import Drawing
from lapis.posteriors.laplace.matrix_free.noise import noise
from lapis.progress import announce, shown
from lapis.schema import count, entry, sound, tensor
from lapis.solvers import Operator, SGDSettings, SGDState, sgd, sgd_learning_rate
from lapis.solvers.operator import norms

if TYPE_CHECKING:
    from lapis.posteriors.laplace.matrix_free.drawing import Options
    from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior

log = logging.getLogger("lapis")

SGD_RESIDUAL = 0.1
"""Draws by SGD count as converged below this |A z - b| / |b|. It says little about variances: they were right to a
percent on small networks, and off by 118 % on a LeNet with the low-noise objective (docs/matrix-free.md)."""

MOMENTUM, BATCH = 0.9, 128
"""Of SGD on minibatch gradients that are not zero at the solution."""

DUAL_MOMENTUM, DUAL_TAIL, DUAL_BATCH, DUAL_MINIBATCHES, LEAST_BATCH = 0.95, 0.2, 64, 8, 8
"""Of the dual objective: momentum, share of the iterates that are averaged, and examples of a minibatch, fewer, but
not below the last, where the data would not make so many minibatches. Chosen on a LeNet (docs/matrix-free.md)."""

EPOCHS = 20
"""Of a draw where none are asked for; the residual at the end and the right-hand side cost a pass each."""

MOST_HALVINGS = 8
"""Of the dual objective's learning rate, where minibatches differ so much that the descent grows."""

RATES = {MOMENTUM: 0.5, DUAL_MOMENTUM: 0.7}
"""Share of the largest stable learning rate, for each momentum."""

RATE_STEPS = 8
"""Lanczos steps for the learning rate; each stores a weight vector."""

RATE_BATCHES = 3
"""Minibatches whose top eigenvalues bound the learning rate."""


def examples_at_once(objective: str, n_data: int) -> int:
    """Examples of a minibatch where none are asked for."""
    return min(DUAL_BATCH, max(LEAST_BATCH, n_data // DUAL_MINIBATCHES)) if objective == "dual" else BATCH


class Descent:
    """SGD for k draws: minibatches, their order, and the gradient of either objective in units of the prior."""

    def __init__(self, posterior: ImplicitPosterior, objective: str, batch_size: int, seed: int, k: int) -> None:
        self.objective, self.seed = objective, seed
        source = torch.Generator(posterior.network.device).manual_seed((seed + 2**40) % 2**63)
        self.data = posterior.curvature.rebatched(batch_size, source)
        self.parts = [self.data.part(i) for i in range(self.data.minibatches)]
        e, u = noise(posterior, seed, 0, k)
        self.start, rows = e, self.data.reordered(u)
        self.rows = self.data.by_part(rows, self.parts) if objective in ("noisy", "dual") else None
        self.ends = list(accumulate(part.rows for part in self.parts)) if objective == "dual" else []
        """Where the rows of each minibatch end among the dual variables."""
        self.target = self.data.root_transposed(rows)
        self.root, self.scale = torch.ones(()), 1.0
        self._rescale(posterior)
        self.target.add_(e)
        """e + F^T u, (k, P)."""

    def _rescale(self, posterior: ImplicitPosterior) -> None:
        """Rescale `target`, which holds F^T u, from the previous prior and noise to those of `posterior`."""
        old, self.root = self.root.to(posterior.mean), posterior.gaussian.precision.sqrt()
        change, self.scale = float(posterior.scale.detach()) / self.scale, float(posterior.scale.detach())
        self.target.mul_(change**0.5 * old / self.root)

    def moved(self, posterior: ImplicitPosterior) -> Descent:
        """This descent, changed in place to another prior and likelihood noise: same white noise, no pass over data."""
        self.target.sub_(self.start)
        self._rescale(posterior)
        self.target.add_(self.start)
        return self

    def _pulled(self, data: ImplicitCurvature, rows: Tensor) -> Tensor:
        """F^T u."""
        return data.root_transposed(rows).div_(self.root).mul_(self.scale**0.5)

    def product(self, part: ImplicitCurvature, y: Tensor, weight: float) -> Tensor:
        """weight F_b^T F_b y + y."""
        return part.product(y / self.root).div_(self.root).mul_(weight * self.scale).add_(y)

    def minibatch(self, step: int) -> int:
        """Index of the minibatch of a step: each once per epoch, in random order."""
        count = len(self.parts)
        order = torch.Generator().manual_seed((self.seed + 2**41 + step // count) % 2**63)
        return int(torch.randperm(count, generator=order)[step % count])

    def begin(self, settings: SGDSettings) -> SGDState:
        """The state before the first step, from the prior's own draw; with the dual objective [y, a]."""
        if not self.ends:
            return SGDState.begin(self.start, settings)
        return SGDState.begin(
            torch.cat([self.start, self.start.new_zeros(len(self.start), self.ends[-1])], 1), settings
        )

    def gradient(self, y: Tensor, step: int) -> Tensor:
        """An unbiased estimate of (I + F^T F) y - e - F^T u from one minibatch; with the dual objective see there."""
        index, count = self.minibatch(step), len(self.parts)
        part = self.parts[index]
        if self.ends:
            return self._dual_gradient(y, index, count)
        product = self.product(part, y, count)
        if self.rows is None:
            return product.sub_(self.target)
        return product.sub_(self._pulled(part, self.rows[index]), alpha=count).sub_(self.start)

    def grows(self, state: SGDState) -> bool:
        """Whether, at the end of an epoch, gradients are larger than in the first one."""
        count, norms = len(self.parts), state.gradient_norms
        if state.step % count or state.step == count:
            return False
        last = norms[state.step - count : state.step].square().mean()
        return not bool(last <= norms[:count].square().mean())

    def _dual_gradient(self, x: Tensor, index: int, count: int) -> Tensor:
        """For x = [y, a]: -count r_b for a_b, -count F_b^T r_b for y, with r_b = u_b - a_b - F_b y."""
        assert self.rows is not None
        part, size = self.parts[index], len(self.root)
        stop = size + self.ends[index]
        own = slice(stop - self.rows[index].shape[1], stop)
        left = self.rows[index] - x[:, own] - part.root(x[:, :size] / self.root).mul_(self.scale**0.5)
        found = torch.zeros_like(x)
        found[:, :size] = self._pulled(part, left)
        found[:, own] = left
        return found.mul_(-count)

    def residuals(self, y: Tensor) -> Tensor:
        """|(I + F^T F) y - e - F^T u| / |e + F^T u| over all data, in units of the weights: |A z - b| / |b|."""
        left = self.product(self.data, y, 1.0).sub_(self.target).mul_(self.root)
        return norms(left) / norms(self.target * self.root)

    def forecast(self, state: SGDState) -> str:
        """How long the steps from a state on will take, by the time of one."""
        self.gradient(state.iterate, state.step)  # the first product is slower: it is proven
        began = time.perf_counter()
        self.gradient(state.iterate, state.step)
        each, left = time.perf_counter() - began, state.settings.steps - state.step
        return (
            f"Draws by SGD, {len(state.iterate)} together: {left:,} steps of {each:.2g} s "
            f"({len(self.parts)} minibatches an epoch): about {left * each:.2g} s"
        )

    @staticmethod
    def judged(residuals: Tensor) -> bool:
        """Whether the residuals are small enough; warns if not."""
        converged = bool((residuals <= SGD_RESIDUAL).all())
        if not converged:
            warnings.warn(
                f"SGD left a relative residual of {float(residuals.max()):.2g}, above {SGD_RESIDUAL}: these are not "
                "yet draws of the posterior. Raise epochs or batch_size.",
                LapisWarning,
                stacklevel=users_level(),
            )
        return converged

    def learning_rate(self, momentum: float) -> float:
        """A share of the largest stable rate, the smallest over a few minibatches."""
        source = torch.Generator(self.root.device).manual_seed(0)
        rates = []
        for part in self.parts[:RATE_BATCHES]:
            product = partial(self.product, part, weight=len(self.parts))
            operator = Operator(product, len(self.root), self.root.dtype, self.root.device)
            rates.append(
                sgd_learning_rate(
                    operator, momentum=momentum, fraction=RATES[momentum], steps=RATE_STEPS, generator=source
                )
            )
        return min(rates)


def _settings(chosen: Options, rate: float, minibatches: int) -> SGDSettings:
    assert chosen.epochs is not None
    steps = chosen.epochs * minibatches
    if chosen.objective == "dual":
        return SGDSettings(steps, rate, DUAL_MOMENTUM, chosen.clip, "tail", DUAL_TAIL)
    return SGDSettings(steps, rate, MOMENTUM, chosen.clip, "tail", 0.5)


def by_sgd(
    posterior: ImplicitPosterior, chosen: Options, seed: int, kept: Checkpoint, progress: bool | None
) -> tuple[Tensor, Drawing]:
    """All draws together."""
    assert chosen.objective is not None
    assert chosen.epochs is not None
    assert chosen.batch_size is not None
    descent = Descent(posterior, chosen.objective, chosen.batch_size, seed, chosen.samples)
    size = posterior.n_weights
    if kept.tensors:
        shape = (chosen.samples, size + (descent.ends[-1] if descent.ends else 0))
        for name in ("iterate", "velocity", "average"):
            tensor(kept.tensors, name, shape, posterior.network.dtype)
        steps = chosen.epochs * len(descent.parts)
        tensor(kept.tensors, "gradient_norms", (steps, chosen.samples), least=0)
        tensor(kept.tensors, "clipped", (chosen.samples,), torch.int64)
        config = entry(kept.facts, "sgd", dict)
        count(config, "step", least=0, most=steps)
        count(config, "steps", least=steps, most=steps)
        with sound("draw"):
            state = SGDState.load({name: t.to(descent.root.device) for name, t in kept.tensors.items()}, config)
    else:
        rate = chosen.learning_rate or descent.learning_rate(_settings(chosen, 1.0, 1).momentum)
        state = descent.begin(_settings(chosen, rate, len(descent.parts)))
    if descent.rows is None:
        descent.start = descent.start[:0]  # free it: the state holds the iterate from here on

    if posterior.curvature.ranks is None and shown(progress):  # steps of ranks would need all of them
        announce(descent.forecast(state), progress)
    cautious = bool(descent.ends) and chosen.learning_rate is None

    def note(now: SGDState) -> bool:
        if cautious and descent.grows(now):
            return True
        kept.offer(now.tensors(), {"sgd": now.config()}, now=now.step == now.settings.steps)
        return False

    with kept.guarded():
        for _ in range(MOST_HALVINGS if cautious else 0):
            found = sgd(descent.gradient, state, callback=note, progress=progress)
            if found.stopped == "steps":
                break
            rate = state.settings.learning_rate / 2
            log.info("draws by SGD: gradients grow, so they begin anew at rate %.3g", rate)
            state = descent.begin(_settings(chosen, rate, len(descent.parts)))
        else:
            cautious = False
            found = sgd(descent.gradient, state, callback=note, progress=progress)
    solution = found.solution[:, :size]
    residuals = descent.residuals(solution)
    steps = found.state.step
    reason = (
        f"{chosen.epochs} epochs of {len(descent.parts)} minibatches at rate {found.state.settings.learning_rate:.3g}"
    )
    products, converged = chosen.samples * (chosen.epochs + 2), descent.judged(residuals)
    drawing = Drawing(
        "sgd", chosen.objective, seed, (steps,) * chosen.samples, tuple(residuals.tolist()), converged, reason, products
    )
    return solution / descent.root, drawing
