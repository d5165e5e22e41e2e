"""Simulation-based calibration: over theta ~ prior and D ~ p(D | theta), theta's rank among posterior draws is uniform.

That holds for the exact posterior (Talts et al. 2018). Each simulation draws weights and targets, puts the network at
the mode, fits every structure, and ranks the true weights, one by one and along a random direction, among L draws.
Ranks of one quantity are tested by chi-square with L + 1 bins; `ALARM` is the chance that any test of a run fails
although all is right (Bonferroni).

`make sbc` runs it and writes docs/results/sbc.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import chi2
from torch import Tensor, nn

import lapis

F64 = torch.float64
PRIOR, NOISE = 0.7, 0.6
FEATURES, OUTPUTS = 3, 2
ALARM = 1e-3
RESULTS = Path(__file__).parents[1] / "docs" / "results" / "sbc.md"

Fit = Callable[[nn.Module, Any, Any, torch.Generator], Any]
"""From a model, data, a likelihood and a source of randomness to a posterior."""


def structure(name: str, **options: Any) -> Fit:
    return lambda model, data, likelihood, _: lapis.laplace(
        model, data, likelihood, structure=name, prior=PRIOR, weights="all", **options
    )


def drawn(model: nn.Module, data: Any, likelihood: Any, generator: torch.Generator) -> Any:
    """Drawn anew for every simulation: under the same noise ranks would not be uniform."""
    posterior = lapis.laplace(model, data, likelihood, structure="implicit", prior=PRIOR)
    return posterior.draw(19, generator=generator)


def refined(model: nn.Module, data: Any, likelihood: Any, generator: torch.Generator) -> Any:
    return structure("dense")(model, data, likelihood, generator).refine(data, tolerance=1e-6)


FITS: dict[str, Fit] = {
    "dense": structure("dense"),
    "kronecker": structure("kronecker"),
    "ekfac": structure("ekfac"),
    "lowrank (all)": structure("lowrank", rank=(FEATURES + 1) * OUTPUTS),
    "implicit": structure("implicit"),
    "draws": drawn,
    "refined": refined,
    "diagonal": structure("diagonal"),
}

EXACT = ("dense", "kronecker", "ekfac", "lowrank (all)", "implicit", "draws", "refined")
"""Exact for one linear layer with Gaussian noise: there the GGN is X^T X (x) I / noise^2, a Kronecker product."""


@dataclass(frozen=True)
class Model:
    """A linear network with a likelihood, and how targets are drawn."""

    likelihood: Any
    targets: Callable[[Tensor, torch.Generator], Tensor]
    outputs: int
    examples: int


MODELS = {
    "linear Gaussian": Model(
        lapis.Gaussian(NOISE),
        lambda f, g: f + NOISE * torch.randn(f.shape, dtype=F64, generator=g),
        OUTPUTS,
        8,
    ),
    "logistic": Model("binary", lambda f, g: torch.bernoulli(f.sigmoid(), generator=g), 1, 20),
}


def simulate(kind: Model, generator: torch.Generator) -> tuple[nn.Linear, tuple[Tensor, Tensor], Tensor]:
    """A network at the mode of simulated data, the data, and the weights that made them, (P,)."""
    mixing = torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.6, 0.5], [0.0, 0.0, 1.0]], dtype=F64)  # correlated inputs
    x = torch.randn(kind.examples, FEATURES, dtype=F64, generator=generator) @ mixing
    size = kind.outputs * (FEATURES + 1)
    theta = torch.randn(size, dtype=F64, generator=generator) / PRIOR**0.5
    model = nn.utils.skip_init(nn.Linear, FEATURES, kind.outputs, dtype=F64)
    put(model, theta)
    y = kind.targets(model(x).detach(), generator)
    put(model, mode(x, y, kind))
    return model, (x, y), theta


def put(model: nn.Linear, theta: Tensor) -> None:
    nn.utils.vector_to_parameters(theta, model.parameters())


def mode(x: Tensor, y: Tensor, kind: Model) -> Tensor:
    """argmax of log p(y | theta) + log p(theta), written with the design matrix: one solve, or Newton's method."""
    design = torch.cat([x, x.new_ones(len(x), 1)], 1)
    prior = PRIOR * torch.eye(FEATURES + 1, dtype=F64)
    if kind.outputs > 1:
        columns = torch.linalg.solve(design.mT @ design / NOISE**2 + prior, design.mT @ y / NOISE**2)
    else:
        columns = torch.zeros(FEATURES + 1, 1, dtype=F64)
        for _ in range(50):
            p = (design @ columns).sigmoid()
            gradient = design.mT @ (p - y) + PRIOR * columns
            columns = columns - torch.linalg.solve(design.mT @ (p * (1 - p) * design) + prior, gradient)
        assert float(gradient.norm()) < 1e-8
    return torch.cat([columns[:-1].mT.flatten(), columns[-1]])


def ranks(kind: Model, fits: dict[str, Fit], simulations: int, draws: int, seed: int) -> dict[str, Tensor]:
    """How many of the draws lie below the truth, (simulations, P + 1) for each structure; the last is a direction."""
    found: dict[str, list[Tensor]] = {name: [] for name in fits}
    for number in range(simulations):
        generator = torch.Generator().manual_seed(1_000_003 * seed + number)
        model, data, theta = simulate(kind, generator)
        direction = torch.randn(len(theta), dtype=F64, generator=generator)
        for name, fit in fits.items():
            sampled = fit(model, data, kind.likelihood, generator).sample(draws, generator=generator)
            below = torch.cat([sampled < theta, ((sampled - theta) @ direction < 0)[:, None]], 1)
            found[name].append(below.sum(0))
    return {name: torch.stack(rows) for name, rows in found.items()}


def p_values(found: Tensor, draws: int) -> Tensor:
    """Chi-square p-values of uniform ranks, one for each column of (simulations, quantities)."""
    counts = torch.stack([(found == rank).sum(0) for rank in range(draws + 1)]).double()
    expected = len(found) / (draws + 1)
    statistic = ((counts - expected).square() / expected).sum(0)
    return torch.tensor(chi2.sf(statistic.numpy(), draws))


def spread(found: Tensor, draws: int) -> float:
    """Variance of the ranks over that of uniform ones: above 1 where the posterior is too narrow, below if too wide."""
    uniform = draws * (draws + 2) / 12
    return float((found.double() - draws / 2).square().mean() / uniform)


def table(found: dict[str, dict[str, Tensor]], draws: int) -> tuple[str, bool]:
    """A Markdown table, and whether every exact structure passed."""
    tests = sum(found["linear Gaussian"][name].shape[1] for name in EXACT if name in found["linear Gaussian"])
    lines = [
        "| model | posterior | exact | smallest p-value | needed | variance of ranks / uniform |",
        "|---|---|---|---|---|---|",
    ]
    fine = True
    for model, rows in found.items():
        for name, values in rows.items():
            exact = model == "linear Gaussian" and name in EXACT
            smallest = float(p_values(values, draws).min())
            fine = fine and (not exact or smallest > ALARM / tests)
            needed = f"{ALARM / tests:.1e}" if exact else "shown only"
            lines.append(
                f"| {model} | {name} | {'yes' if exact else 'no'} | {smallest:.2g} | {needed} | "
                f"{spread(values, draws):.2f} |"
            )
    return "\n".join(lines), fine


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sbc", description=__doc__)
    parser.add_argument("--simulations", type=int, default=300)
    parser.add_argument("--draws", type=int, default=19)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(given)
    torch.set_num_threads(1)
    started, found = time.perf_counter(), {}
    for name, kind in MODELS.items():
        print(f"{name}: {chosen.simulations} simulations", file=sys.stderr, flush=True)
        fits = FITS if kind.outputs == OUTPUTS else {key: fit for key, fit in FITS.items() if key != "lowrank (all)"}
        found[name] = ranks(kind, fits, chosen.simulations, chosen.draws, chosen.seed)
    text, fine = table(found, chosen.draws)
    text = f"""# Simulation-based calibration

{text}

{chosen.simulations} simulations, ranks among {chosen.draws} draws; each weight and one random direction are tested. The
chance that any exact row fails although it is right is {ALARM:g}.

`make sbc`, seed {chosen.seed}, {time.perf_counter() - started:.0f} s. What it means: [reliability](../reliability.md).
"""
    print(text)
    RESULTS.write_text(text, encoding="utf-8")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
