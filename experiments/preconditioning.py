"""Conjugate gradients with the exact precision A = GGN + prior of a trained CNN, under four preconditioners.

Right-hand sides are gradients of test outputs, as predictive variances need them. "Set-up" is what a preconditioner
costs before the first solve (a diagonal or Kronecker fit, or the leading eigenpairs by Lanczos), and is paid once for
all prior precisions; a preconditioner pays for itself where set-up and solve together take less than the plain solve.
Times are CPU seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import arguments, images, report, table
from torch import Tensor, nn

import lapis
from lapis.batches import batches
from lapis.curvature.jacobian import Jacobian
from lapis.solvers import (
    CallablePreconditioner,
    Diagonal,
    LowRankPlusDiagonal,
    Operator,
    Preconditioner,
    conjugate_gradients,
    lanczos_eigenpairs,
)

PRECISIONS = (0.01, 0.1, 1.0, 10.0, 100.0)
TOLERANCE = 1e-4
RANK = 20


def trained(x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2, padding=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), 2e-3, weight_decay=1e-4)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
    return model.eval()


def timed(work: Callable[[], object]) -> tuple[object, float]:
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def main() -> None:
    chosen = arguments(__doc__)
    count, limit = (100, 40) if chosen.quick else (500, 500)
    precisions = PRECISIONS[1::2] if chosen.quick else PRECISIONS
    x, y, x_test, y_test = images("mnist", count, 1000, chosen.seed)
    model = trained(x, y, 5 if chosen.quick else 20, chosen.seed)
    accuracy = float((model(x_test).argmax(1) == y_test).double().mean())

    fits: dict[str, lapis.LaplacePosterior] = {}
    seconds = {"none": 0.0}
    for structure in ("diagonal", "kronecker"):

        def fit(structure: str = structure) -> lapis.LaplacePosterior:
            return lapis.laplace(model, (x, y), "classification", structure=structure, progress=False)

        fits[structure], seconds[structure] = timed(fit)  # type: ignore[assignment]
    network, likelihood = fits["diagonal"].network, fits["diagonal"].likelihood
    held = list(batches((x, y), dtype=network.dtype, device=network.device, batch_size=250)[0])
    jacobian = Jacobian(network, likelihood.canonical, held)
    factors = [
        likelihood.factor(f, likelihood.targets(batch.targets, f, shape)).to(network.dtype)
        for batch, f, shape in zip(held, jacobian.outputs, jacobian.shapes, strict=True)
    ]
    few = list(batches((x_test[:1], y_test[:1]), dtype=network.dtype, device=network.device)[0])
    rhs = Jacobian(network, likelihood.canonical, few).backward([torch.eye(10, dtype=torch.float64)[:2, None, None]])

    def product(vectors: Tensor) -> Tensor:
        return jacobian.ggn(vectors, factors)

    ggn = Operator(product, network.size, property="symmetric")
    pairs, seconds["low rank"] = timed(
        lambda: lanczos_eigenpairs(ggn, rank=RANK, tolerance=1e-2, generator=torch.Generator().manual_seed(chosen.seed))
    )
    diagonal = 1 / fits["diagonal"].with_prior(1.0).marginal_variance().double() - 1

    def preconditioner(name: str, precision: float) -> Preconditioner | None:
        prior = torch.full((network.size,), precision, dtype=torch.float64)
        if name == "diagonal":
            return Diagonal(diagonal.clamp(min=0) + prior)
        if name == "low rank":
            return LowRankPlusDiagonal(pairs.values.clamp(min=0), pairs.vectors, prior)  # type: ignore[attr-defined]
        if name == "kronecker":
            return CallablePreconditioner(fits["kronecker"].with_prior(precision).solve)
        return None

    rows, plain = [], 0.0
    for precision in precisions:
        operator = Operator(lambda v, precision=precision: product(v) + precision * v, network.size)  # type: ignore[misc]
        for name, setup in seconds.items():

            def solve(name: str = name, precision: float = precision, operator: Operator = operator) -> object:
                m = preconditioner(name, precision)
                return conjugate_gradients(operator, rhs, preconditioner=m, tolerance=TOLERANCE, max_iterations=limit)

            result, spent = timed(solve)
            plain = spent if name == "none" else plain
            iterations = int(result.iterations.max())  # type: ignore[attr-defined]
            reached = bool(result.converged.all())  # type: ignore[attr-defined]
            rows.append(
                [
                    f"{precision:g}", name, f"{'' if reached else '> '}{iterations}", f"{spent:.2f}", f"{setup:.2f}",
                    "" if name == "none" or not reached else f"{plain / (spent + setup):.1f} x",
                ]
            )  # fmt: skip
    text = (
        f"MNIST, {count} examples, CNN with {network.size} weights (test accuracy {accuracy:.3f}); two right-hand "
        f"sides, relative residual {TOLERANCE:g}, at most {limit} iterations; low rank: {RANK} eigenpairs.\n\n"
    )
    head = (
        "prior precision",
        "preconditioner",
        "iterations",
        "solve, s",
        "set-up, s",
        "faster with set-up than none (at least, where none was cut off)",
    )
    report("preconditioning", text + table(head, rows), chosen)


if __name__ == "__main__":
    main()
