"""Draws that share their products: block conjugate gradients from the prior's own draws, to an error of variances.

A z = Lambda^1/2 e + G^T u is solved from z0 = Lambda^-1/2 e on, which is right already in all directions that the data
do not determine. What counts is the error of J z beside J z itself, on average (J is the data's: G = S^T J):

    |z_i - z|_A^2 / |G z|^2 <= error^2,

and by how much an iteration reduces the numerator is known exactly, so that the last few reductions foretell the next.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING

from torch import Tensor

from lapis.checkpoint import Checkpoint
from lapis.errors import LapisWarning, users_level
from lapis.network import full_precision
from lapis.posteriors.laplace.matrix_free.descending import EPOCHS
from lapis.posteriors.laplace.matrix_free.drawn import Drawing
from lapis.posteriors.laplace.matrix_free.made import Made
from lapis.posteriors.laplace.matrix_free.noise import noise
from lapis.progress import announce
from lapis.schema import under
from lapis.solvers import BlockState, Diagonal, block_conjugate_gradients
from lapis.solvers.block import inner
from lapis.solvers.operator import norms

if TYPE_CHECKING:
    from lapis.posteriors.laplace.matrix_free.drawing import Options
    from lapis.posteriors.laplace.matrix_free.implicit import ImplicitPosterior

LAST, SHARE = 4, 12.0
"""The squared error of variances is estimated as the reductions of the last 4 iterations over 12 |G z|^2. On a LeNet
(docs/matrix-free.md), for which 12 was chosen, that is 1.1 to 1.4 times the error."""

ITERATIONS = 50.0
"""Iterations for one draw, as foretold before the first; k together take about 1 / sqrt(k) as many each."""


def by_block(
    posterior: ImplicitPosterior, chosen: Options, seed: int, kept: Checkpoint, progress: bool | None
) -> tuple[Tensor, Drawing]:
    """Draws (samples, P) in blocks, as many together as memory allows."""
    step, size = posterior.vectors_at_once(), posterior.n_weights
    records = {"iterations": list[int], "residuals": list[float], "errors": list[float]}
    made = Made(posterior, chosen.samples, kept, records)
    state = under("block.", kept.tensors) or None
    for first in range(len(made), chosen.samples, step):
        number = min(step, chosen.samples - first)
        solve = _Block(posterior, chosen.error, seed, first, number)
        resumed = None if state is None else BlockState.load(state, number, size, posterior.network.dtype)
        if resumed is None and first == 0:
            announce(solve.forecast(-(-chosen.samples // step)), progress)

        def note(now: BlockState, solve: _Block = solve) -> bool:
            made.follow(lambda: ({f"block.{name}": each for name, each in now.tensors().items()}, {}))
            return solve.enough(now)

        with kept.guarded(), full_precision(posterior.network.device):
            result = block_conjugate_gradients(
                solve.operator, solve.residual, preconditioner=solve.preconditioner, resumed=resumed, callback=note,
                max_iterations=posterior.solver.max_iterations, progress=progress,
            )  # fmt: skip
        state = None
        made.add(
            result.solution.add_(solve.start),
            number * (result.iterations + 2),
            iterations=[result.iterations] * number,
            residuals=(result.residual_norms / solve.scale).tolist(),
            errors=[0.0 if result.stopped == "exhausted" else solve.error] * number,
        )
    iterations, residuals, errors = made.records.values()
    worst = max(errors)
    converged = worst <= chosen.error
    if not converged:
        warnings.warn(
            f"The draws' variances have an estimated relative error of {worst:.2g} after {max(iterations)} iterations, "
            f"above {chosen.error:g}. Raise max_iterations by with_solver().",
            LapisWarning,
            stacklevel=users_level(),
        )
    reason = f"error of variances estimated at {worst:.2g}, {chosen.error:g} asked for"
    drawing = Drawing("block", None, seed, tuple(iterations), tuple(residuals), converged, reason, made.products)
    return made.draws, drawing


class _Block:
    """Some draws together: their system A x = b - A z0 for x = z - z0, and when it is solved well enough."""

    def __init__(self, posterior: ImplicitPosterior, error: float, seed: int, first: int, number: int) -> None:
        gaussian = posterior.gaussian
        e, u = noise(posterior, seed, first, first + number)
        self.wanted, self.error, self.number = error, float("inf"), number
        self.precision = gaussian.precision
        self.preconditioner = gaussian.preconditioner or Diagonal(self.precision)
        self.operator = gaussian.operator()
        with full_precision(posterior.network.device):
            self.target = posterior.curvature.root_transposed(u).mul_(float(posterior.scale.detach()) ** 0.5)
            self.target.addcmul_(self.precision.sqrt(), e)
            self.start = e.div_(self.precision.sqrt())
            began = time.perf_counter()
            self.residual = self.target - self.operator(self.start)
            self.seconds = time.perf_counter() - began
        self.scale = norms(self.target)

    def forecast(self, blocks: int) -> str:
        """How long it will take, by the first product (which is slower than the next) and the usual iterations."""
        expected = max(2, round(ITERATIONS / self.number**0.5))
        seconds = blocks * expected * self.seconds
        other = (
            f'; solver="sgd" would take {EPOCHS + 2} passes in minibatches, without knowing its error'
            if expected > EPOCHS + 2
            else ""
        )
        return (
            f"Draws by block conjugate gradients, {self.number} together: about {expected} products of at most "
            f"{self.seconds:.2g} s, {blocks} time{'s' if blocks > 1 else ''}: {seconds:.0f} s or less{other}"
        )

    def enough(self, now: BlockState) -> bool:
        """Whether the estimated error of variances is small enough."""
        if len(now.decrements) < LAST:
            return False
        z = now.solution + self.start
        # |G z|^2 = z A z - z Lambda z is a small difference: in float64, and rounding may leave less than nothing
        curved = inner(z, self.target - now.residual - z * self.precision).diagonal()
        ratio = now.decrements[-LAST:].sum(0).mean() / curved.mean().clamp(min=1e-30)
        self.error = float((ratio / SHARE).sqrt())
        return self.error <= self.wanted
