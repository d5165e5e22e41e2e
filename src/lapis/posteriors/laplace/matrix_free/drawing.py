"""Drawing weights of the exact posterior by optimisation: conjugate gradients, or SGD on minibatches.

A draw is the minimiser of 1/2 |G z - u|^2 + 1/2 |z - z0|^2_Lambda with white noise u and z0 = Lambda^-1/2 e. In units
of the prior, y = Lambda^1/2 z and F = G Lambda^-1/2, with data terms summed over minibatches b:

    noisy:      1/2 sum_b |F_b y - u_b|^2 + 1/2 |y - e|^2            gradient  F_b^T (F_b y - u_b) + y - e
    low noise:  1/2 sum_b |F_b y|^2       + 1/2 |y - e - F^T u|^2    gradient  F_b^T F_b y         + y - e - F^T u

Both have the gradient (I + F^T F) y - e - F^T u over all data, hence the same minimiser, and neither inverts a singular
matrix. Minibatch gradients of the low-noise objective do not depend on u.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapis.checkpoint import Checkpoint, Offered
from lapis.curvature.products.ggn import ImplicitCurvature
from lapis.errors import LapisWarning, OptionError
from lapis.files import tensors_digest
from lapis.posteriors.laplace.matrix_free.drawn import Drawing, DrawnPosterior
from lapis.posteriors.laplace.matrix_free.noise import noise
from lapis.posteriors.laplace.matrix_free.together import by_block
from lapis.schema import count, entry, sound, tensor, under, wrong
from lapis.solvers import CGProgress, CGState, Operator, SGDSettings, SGDState, sgd, sgd_learning_rate
from lapis.solvers.cg import Stop
from lapis.solvers.operator import norms

if TYPE_CHECKING:
    from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior

SGD_RESIDUAL = 0.1
"""Draws by SGD count as converged below this |A z - b| / |b|. It says little about variances: they were right to a
percent on small networks, and off by 118 % on a LeNet (docs/matrix-free.md)."""

ERROR = 0.05
"""Relative error of variances that draws are solved to when no other is asked for: K draws alone leave sqrt(2 / K)."""

EXACT = 2000
"""With at most so many weights draws are solved to the solver's tolerance: it costs little."""

RATE_STEPS = 8
"""Lanczos steps for the learning rate; each stores a weight vector."""

RATE_BATCHES = 3
"""Minibatches whose top eigenvalues bound the learning rate."""


@dataclass(frozen=True)
class Options:
    """Arguments of `ImplicitPosterior.draw`, checked and with defaults filled in."""

    samples: int
    solver: str
    objective: str | None
    epochs: int | None
    batch_size: int | None
    learning_rate: float | None
    clip: float | None
    error: float = ERROR


def options(
    posterior: ImplicitPosterior,
    samples: int,
    solver: str,
    objective: str | None,
    epochs: int | None,
    batch_size: int | None,
    learning_rate: float | None,
    clip: float | None,
    error: float | None,
) -> Options:
    """Checked options, with a solver chosen; OptionError for options of another one."""
    given = {"objective": objective, "epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}
    given["clip"] = clip
    named = [name for name, value in given.items() if value is not None]
    if solver == "auto":
        solver = _chosen(posterior, error)
    if solver != "block" and error is not None:
        raise OptionError(
            "Only draws by block conjugate gradients are solved to an error of their variances",
            expected="error=None",
            got=f"error={error:g} with solver={solver!r}",
            do='leave it out, or use solver="block"; with_solver(tolerance=...) is for "cg", epochs for "sgd"',
        )
    if solver in ("cg", "block"):
        if named:
            raise OptionError(
                f"Conjugate gradients have no {named[0]}: they see all data, and both objectives are one system",
                expected=f"{named[0]}=None",
                got=repr(given[named[0]]),
                do=f'leave {named[0]} out, or use solver="sgd"',
            )
        return Options(samples, solver, None, None, None, None, None, ERROR if error is None else error)
    objective = "low_noise" if objective is None else objective
    epochs, batch_size = 20 if epochs is None else epochs, 128 if batch_size is None else batch_size
    return Options(samples, solver, objective, epochs, batch_size, learning_rate, clip)


def _chosen(posterior: ImplicitPosterior, error: float | None) -> str:
    """The solver that "auto" stands for: see `ImplicitPosterior.draw`. Never SGD, whose variances are off by 118 % at
    the price at which those of "block" are right to 5 % (docs/matrix-free.md).
    """
    small = posterior.n_weights <= EXACT
    if error is None and (small or posterior.solver.tolerance is not None or posterior.solver.space == "outputs"):
        return "cg"
    return "block"


def draw(
    posterior: ImplicitPosterior,
    chosen: Options,
    generator: torch.Generator,
    checkpoint: str | os.PathLike[str] | None,
    progress: bool | None,
) -> DrawnPosterior:
    """See `ImplicitPosterior.draw`."""
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    kept = Checkpoint(checkpoint, "draw", _facts(posterior, chosen, seed), posterior.network.key())
    make = {"cg": _by_cg, "sgd": _by_sgd, "block": by_block}
    deviations, drawing = make[chosen.solver](posterior, chosen, seed, kept, progress)
    deviations = deviations.mul_(posterior.width**0.5)
    return DrawnPosterior(
        network=posterior.network,
        likelihood=posterior.likelihood,
        facts=posterior.facts,
        mean=posterior.mean,
        point=posterior.point,
        deviations=deviations,
        drawing=drawing,
    )


def _by_cg(
    posterior: ImplicitPosterior, chosen: Options, seed: int, kept: Checkpoint, progress: bool | None
) -> tuple[Tensor, Drawing]:
    """All draws by conjugate gradients, as many together as memory allows."""
    gaussian, step = posterior.gaussian, posterior.vectors_at_once()
    found = posterior.mean.new_empty(chosen.samples, posterior.n_weights)
    iterations: list[int] = []
    residuals: list[float] = []
    stopped: list[str] = []
    products, start = 0, None
    if kept.tensors:
        iterations = list(entry(kept.facts, "iterations", list[int]))
        residuals = list(entry(kept.facts, "residuals", list[float]))
        stopped = list(entry(kept.facts, "stopped", list[Stop]))
        products = count(kept.facts, "products", least=0)
        if len({len(iterations), len(residuals), len(stopped)}) > 1 or len(iterations) > chosen.samples:
            raise wrong("iterations", f"as many as residuals, at most {chosen.samples}", str(len(iterations)))
        if iterations:
            shape = (len(iterations), posterior.n_weights)
            found[: len(iterations)] = tensor(kept.tensors, "done", shape, posterior.network.dtype)
        if "cg" in kept.facts:
            start = CGState(under("cg.", kept.tensors), entry(kept.facts, "cg", dict))

    def facts() -> dict[str, Any]:
        return {"iterations": iterations, "residuals": residuals, "stopped": stopped, "products": products}

    for first in range(len(iterations), chosen.samples, step):
        e, u = noise(posterior, seed, first, min(first + step, chosen.samples))

        if start is not None:
            start.check(len(e), u.shape[1] if gaussian.space == "outputs" else e.shape[1], e.dtype)

        def note(now: CGProgress, done: Tensor = found[:first]) -> None:
            def state() -> Offered:
                cut = now.state()
                if cut is None:
                    return None
                tensors = {f"cg.{name}": tensor for name, tensor in cut.tensors.items()}
                return tensors | ({"done": done} if len(done) else {}), facts() | {"cg": cut.facts}

            kept.follow(state)

        with kept.guarded():
            solved = gaussian.draws(e, u, resumed=start, callback=note, progress=progress)
        start = None
        found[first : first + len(e)] = posterior.solved(solved)
        iterations += solved.result.iterations.tolist()
        residuals += solved.result.relative_residuals.tolist()
        stopped += solved.result.stopped
        products += solved.result.products
        kept.offer({"done": found[: len(iterations)]}, facts(), now=True)
    reason = ", ".join(f"{stopped.count(why)} {why}" for why in sorted(set(stopped)))
    converged = all(why == "converged" for why in stopped)
    drawing = Drawing("cg", None, seed, tuple(iterations), tuple(residuals), converged, reason, products)
    return found, drawing


class Descent:
    """SGD for k draws: minibatches, their order, and the gradient of either objective in units of the prior."""

    def __init__(self, posterior: ImplicitPosterior, objective: str, batch_size: int, seed: int, k: int) -> None:
        self.objective, self.seed = objective, seed
        source = torch.Generator(posterior.network.device).manual_seed((seed + 2**40) % 2**63)
        self.data = posterior.curvature.rebatched(batch_size, source)
        self.parts = [self.data.part(i) for i in range(len(self.data.batches))]
        e, u = noise(posterior, seed, 0, k)
        self.start, rows = e, self.data.reordered(u)
        self.rows = torch.split(rows, [part.rows for part in self.parts], 1) if objective == "noisy" else None
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

    def gradient(self, y: Tensor, step: int) -> Tensor:
        """An unbiased estimate of (I + F^T F) y - e - F^T u from one minibatch."""
        index, count = self.minibatch(step), len(self.parts)
        part = self.parts[index]
        product = self.product(part, y, count)
        if self.rows is None:
            return product.sub_(self.target)
        return product.sub_(self._pulled(part, self.rows[index]), alpha=count).sub_(self.start)

    def residuals(self, y: Tensor) -> Tensor:
        """|(I + F^T F) y - e - F^T u| / |e + F^T u| over all data, in units of the weights: |A z - b| / |b|."""
        left = self.product(self.data, y, 1.0).sub_(self.target).mul_(self.root)
        return norms(left) / norms(self.target * self.root)

    @staticmethod
    def judged(residuals: Tensor) -> bool:
        """Whether the residuals are small enough; warns if not."""
        converged = bool((residuals <= SGD_RESIDUAL).all())
        if not converged:
            warnings.warn(
                f"SGD left a relative residual of {float(residuals.max()):.2g}, above {SGD_RESIDUAL}: these are not "
                "yet draws of the posterior. Raise epochs or batch_size.",
                LapisWarning,
                stacklevel=5,
            )
        return converged

    def learning_rate(self, momentum: float) -> float:
        """Half of the largest stable rate, the smallest over a few minibatches."""
        source = torch.Generator(self.root.device).manual_seed(0)
        rates = []
        for part in self.parts[:RATE_BATCHES]:
            product = partial(self.product, part, weight=len(self.parts))
            operator = Operator(product, len(self.root), self.root.dtype, self.root.device)
            rates.append(sgd_learning_rate(operator, momentum=momentum, steps=RATE_STEPS, generator=source))
        return min(rates)


def _by_sgd(
    posterior: ImplicitPosterior, chosen: Options, seed: int, kept: Checkpoint, progress: bool | None
) -> tuple[Tensor, Drawing]:
    assert chosen.objective is not None
    assert chosen.epochs is not None
    assert chosen.batch_size is not None
    descent = Descent(posterior, chosen.objective, chosen.batch_size, seed, chosen.samples)
    if kept.tensors:
        shape = (chosen.samples, posterior.n_weights)
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
        rate = chosen.learning_rate or descent.learning_rate(0.9)
        settings = SGDSettings(chosen.epochs * len(descent.parts), rate, 0.9, chosen.clip, "tail", 0.5)
        state = SGDState.begin(descent.start, settings)
    if descent.rows is None:
        descent.start = descent.start[:0]  # free it: the state holds the iterate from here on

    def note(now: SGDState) -> None:
        kept.offer(now.tensors(), {"sgd": now.config()}, now=now.step == now.settings.steps)

    with kept.guarded():
        found = sgd(descent.gradient, state, callback=note, progress=progress)
    residuals = descent.residuals(found.solution)
    steps = found.state.step
    reason = (
        f"{chosen.epochs} epochs of {len(descent.parts)} minibatches at rate {found.state.settings.learning_rate:.3g}"
    )
    products, converged = chosen.samples * (chosen.epochs + 2), descent.judged(residuals)
    drawing = Drawing(
        "sgd", chosen.objective, seed, (steps,) * chosen.samples, tuple(residuals.tolist()), converged, reason, products
    )
    return found.solution.div_(descent.root), drawing


def _facts(posterior: ImplicitPosterior, chosen: Options, seed: int) -> dict[str, Any]:
    """Facts that must match for a draw to resume from a checkpoint; `precision` is a digest of all prior precisions."""
    return {
        **asdict(chosen),
        "seed": seed,
        "space": posterior.space,
        "fingerprint": posterior.facts.fingerprint,
        "data": posterior.curvature.digest,
        "precision": tensors_digest({"precision": posterior.weight_prior.vector()}),
        "scale": float(posterior.scale.detach()),
        "likelihood": posterior.likelihood.to_config(),
        "fitted_likelihood": posterior.fitted_likelihood.to_config(),
        "tolerance": posterior.gaussian.tolerance,
        "max_iterations": posterior.solver.max_iterations,
        "preconditioned": posterior.solver.preconditioner is not None,
    }
