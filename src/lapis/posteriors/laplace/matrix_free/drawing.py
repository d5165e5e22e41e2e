"""Drawing weights of the exact posterior by optimisation: conjugate gradients, or SGD on minibatches.

A draw is the minimiser of 1/2 |G z - u|^2 + 1/2 |z - z0|^2_Lambda with white noise u and z0 = Lambda^-1/2 e.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapis.checkpoint import Checkpoint, Offered
from lapis.errors import OptionError
from lapis.files import tensors_digest
from lapis.posteriors.laplace.matrix_free.descending import EPOCHS, by_sgd, examples_at_once
from lapis.posteriors.laplace.matrix_free.drawn import Drawing, DrawnPosterior
from lapis.posteriors.laplace.matrix_free.made import Made
from lapis.posteriors.laplace.matrix_free.noise import noise
from lapis.posteriors.laplace.matrix_free.together import by_block
from lapis.progress import announce, shown
from lapis.schema import entry, under
from lapis.solvers import CGProgress, CGState
from lapis.solvers.cg import Stop

if TYPE_CHECKING:
    from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior

ERROR = 0.05
"""Relative error of variances that draws are solved to when no other is asked for: K draws alone leave sqrt(2 / K)."""

EXACT = 2000
"""With at most so many weights draws are solved to the solver's tolerance: it costs little."""


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
        solver = "sgd" if named and error is None else _chosen(posterior, error)
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
    objective = "dual" if objective is None else objective
    epochs = EPOCHS if epochs is None else epochs
    batch_size = examples_at_once(objective, posterior.n_data) if batch_size is None else batch_size
    return Options(samples, solver, objective, epochs, batch_size, learning_rate, clip)


def _chosen(posterior: ImplicitPosterior, error: float | None) -> str:
    """The solver that "auto" stands for without options of SGD: see `ImplicitPosterior.draw`."""
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
    make = {"cg": _by_cg, "sgd": by_sgd, "block": by_block}
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
    if posterior.curvature.ranks is None and shown(progress):  # products of ranks would need all of them
        announce(_forecast(posterior, chosen.samples), progress)
    records = {"iterations": list[int], "residuals": list[float], "stopped": list[Stop]}
    made, start = Made(posterior, chosen.samples, kept, records), None
    if "cg" in kept.facts:
        start = CGState(under("cg.", kept.tensors), entry(kept.facts, "cg", dict))

    def note(now: CGProgress) -> None:
        def state() -> Offered:
            cut = now.state()
            if cut is None:
                return None
            return {f"cg.{name}": tensor for name, tensor in cut.tensors.items()}, {"cg": cut.facts}

        made.follow(state)

    for first in range(len(made), chosen.samples, step):
        e, u = noise(posterior, seed, first, min(first + step, chosen.samples))
        if start is not None:
            start.check(len(e), u.shape[1] if gaussian.space == "outputs" else e.shape[1], e.dtype)
        with kept.guarded():
            solved = gaussian.draws(e, u, resumed=start, callback=note, progress=progress)
        start, result = None, solved.result
        made.add(
            posterior.solved(solved),
            result.products,
            iterations=result.iterations.tolist(),
            residuals=result.relative_residuals.tolist(),
            stopped=result.stopped,
        )
    iterations, residuals, stopped = made.records.values()
    reason = ", ".join(f"{stopped.count(why)} {why}" for why in sorted(set(stopped)))
    converged = all(why == "converged" for why in stopped)
    drawing = Drawing("cg", None, seed, tuple(iterations), tuple(residuals), converged, reason, made.products)
    return made.draws, drawing


def _forecast(posterior: ImplicitPosterior, samples: int) -> str:
    """How long draws by conjugate gradients will take at most: an iteration for each unknown, by a product's time."""
    gaussian, together = posterior.gaussian, min(samples, posterior.vectors_at_once())
    operator = gaussian.operator() if gaussian.space == "weights" else gaussian.output_operator()
    vectors = torch.ones(together, operator.size, dtype=operator.dtype, device=operator.device)
    operator(vectors)  # the first product is slower: it is proven
    began = time.perf_counter()
    operator(vectors)
    each, blocks = time.perf_counter() - began, -(-samples // together)
    most = min(operator.size, gaussian.max_iterations)
    return (
        f"Draws by conjugate gradients, {together} together, to a residual of {gaussian.tolerance:.1g}: usually far "
        f"fewer than {most:,} products of {each:.2g} s, {blocks} time{'s' if blocks > 1 else ''}: "
        f"{blocks * most * each:.2g} s or less"
    )


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
