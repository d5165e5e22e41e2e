"""In-between uncertainty: every method of the library beside a long Markov chain, on a one-dimensional gap.

A network with two hidden layers of 50 tanh units (2,600 weights and 101 biases) sees two groups of points. Between them
the data say nothing: the doubt should grow there, as that of the posterior does. All methods that have a prior share
it, with the noise that made the data; the chain (Hamiltonian Monte Carlo on all 2,701 weights) is the truth for them.
The distance is that of Wasserstein between the two Gaussians of a function value, sqrt((m - m')^2 + (s - s')^2),
averaged over a region of inputs. Moments are kept in docs/results/, a file a seed: a run that was killed goes on from
there, and the table is of all seeds that were run.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from common import COLOURS, RESULTS, arguments, report, save, table
from methods import tables
from torch import Tensor, nn
from truth import hamiltonian, split_r_hat

import lapis
from lapis.training.plain import fit_network

F64 = torch.float64
NOISE, WIDTH, REACH, GAP = 0.15, 50, 3.0, (-0.7, 0.7)
PRECISION = {"0.weight": 0.25, "0.bias": 0.25, "2.weight": 25.0, "2.bias": 1.0, "4.weight": 12.5, "4.bias": 1.0}
"""Of each parameter: variances fall with the number of inputs, so that functions of the prior keep their scale."""


@dataclass(frozen=True)
class Doubt:
    """Mean and standard deviation of the function at the inputs of the grid, (G,) each."""

    mean: Tensor
    std: Tensor
    seconds: float = math.nan

    def distance(self, other: Doubt, where: Tensor) -> float:
        gap = ((self.mean - other.mean).square() + (self.std - other.std).square()).sqrt()
        return float(gap[where].mean())


@dataclass(frozen=True)
class Cell:
    """What was measured for one seed."""

    data: tuple[Tensor, Tensor]
    grid: Tensor
    exact: Doubt
    found: dict[str, Doubt]
    facts: dict[str, float]
    """Of the chain."""


def groups(examples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two groups of points with a gap between them."""
    x = torch.cat([torch.linspace(-2.0, -1.0, examples // 2), torch.linspace(1.0, 2.0, examples - examples // 2)])
    x = x.to(F64)[:, None]
    return x, truth(x) + NOISE * torch.randn(x.shape, dtype=F64, generator=generator)


def truth(x: Tensor) -> Tensor:
    return torch.sin(2.5 * x) + 0.3 * x


def network(seed: int, dropout: float = 0.0) -> nn.Sequential:
    """1-50-50-1, started from a draw of the prior, with dropout before every layer but the first if asked for."""
    torch.manual_seed(seed)
    drop = [nn.Dropout(dropout)] if dropout else []
    made = nn.Sequential(
        nn.Linear(1, WIDTH), nn.Tanh(), *drop, nn.Linear(WIDTH, WIDTH), nn.Tanh(), *drop, nn.Linear(WIDTH, 1)
    ).to(F64)
    with torch.no_grad():
        for parameter, precision in zip(made.parameters(), PRECISION.values(), strict=True):
            parameter.normal_().mul_(0.5 / math.sqrt(precision))
    return made


def at_mode(model: nn.Module, data: tuple[Tensor, Tensor], iterations: int) -> nn.Module:
    """The weights of the highest posterior density, by L-BFGS."""
    optimiser = torch.optim.LBFGS(
        model.parameters(),
        max_iter=iterations,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        fit = (model(data[0]) - data[1]).square().sum() / (2 * NOISE**2)
        pulls = zip(model.parameters(), PRECISION.values(), strict=True)
        total = fit + 0.5 * sum(precision * p.square().sum() for p, precision in pulls)
        total.backward()
        return total

    optimiser.step(loss)
    return model.eval()


# -- the chain ----------------------------------------------------------------------------------------------


def outputs(weights: Tensor, x: Tensor) -> Tensor:
    """Outputs (K, N) of K networks with weights (K, P) at inputs (N, 1)."""
    w1, b1, w2, b2, w3, b3 = weights.split([WIDTH, WIDTH, WIDTH**2, WIDTH, WIDTH, 1], 1)
    h = torch.tanh(w1[:, None] * x + b1[:, None])
    h = torch.tanh(torch.baddbmm(b2[:, None], h, w2.reshape(-1, WIDTH, WIDTH).mT))
    return (h @ w3[:, :, None])[..., 0] + b3


def chain(
    model: nn.Module, data: tuple[Tensor, Tensor], grid: Tensor, draws: int, chains: int, seed: int
) -> tuple[Doubt, float, float]:
    """The function's moments by Hamiltonian Monte Carlo, the largest R-hat on the grid, and the acceptance rate.

    Positions are whitened by the prior and by the curvature at one mode, I + J^T J / noise^2 in units of the prior,
    whose square root has a closed form in the singular vectors of J: only as many directions as examples are stiff.
    """
    began = time.perf_counter()
    x, y = data
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    scale = torch.cat(
        [
            torch.full((p.numel(),), v**-0.5, dtype=F64)
            for p, v in zip(model.parameters(), PRECISION.values(), strict=True)
        ]
    )
    jacobian = torch.autograd.functional.jacobian(lambda w: outputs(w[None], x)[0], weights) * scale / NOISE
    _, singular, directions = torch.linalg.svd(jacobian, full_matrices=False)
    shrink = 1 - (1 + singular.square()).rsqrt()

    def root(z: Tensor) -> Tensor:
        return z - (z @ directions.T * shrink) @ directions

    def log_density(z: Tensor) -> tuple[Tensor, Tensor]:
        white = root(z).requires_grad_()
        with torch.enable_grad():
            error = y[:, 0] - outputs(white * scale, x)
            value = -(error.square().sum(1) / (2 * NOISE**2)) - 0.5 * white.square().sum(1)
            (gradient,) = torch.autograd.grad(value.sum(), white)
        return value.detach(), root(gradient)

    generator = torch.Generator().manual_seed(seed)
    centre = weights / scale
    centre = centre + (centre @ directions.T * (shrink / (1 - shrink))) @ directions  # the inverse of `root`
    start = centre + torch.randn(chains, len(weights), dtype=F64, generator=generator)
    run = hamiltonian(log_density, start, draws, generator, warm_up=draws // 2, length=1.5)
    with torch.no_grad():
        f = torch.stack([outputs(root(z) * scale, grid) for z in run.draws])
    found = Doubt(f.mean((0, 1)), f.std((0, 1)), time.perf_counter() - began)
    return found, float(split_r_hat(f).max()), run.acceptance


# -- the methods --------------------------------------------------------------------------------------------


def methods(
    model: nn.Module, data: tuple[Tensor, Tensor], quick: bool, seed: int
) -> dict[str, Callable[[], lapis.Posterior]]:
    """How to make each posterior; all begin from the mode `model`, or train networks of their own."""
    likelihood, prior = lapis.Gaussian(NOISE), lapis.Prior(PRECISION, groups="parameter")

    def generator() -> torch.Generator:  # each method its own, so that a run that goes on ends as a whole one
        return torch.Generator().manual_seed(seed)

    iterations, members, steps = (100, 3, 300) if quick else (600, 5, 3000)
    decay = 1.0 / len(data[0])  # of the networks that have no prior of this form: that of the biases

    def laplace(structure: str, **options: object) -> Callable[[], lapis.Posterior]:
        return lambda: lapis.laplace(model, data, likelihood, structure=structure, prior=prior, **options)

    def subnetwork(count: int) -> Callable[[], lapis.Posterior]:
        def fit() -> lapis.Posterior:
            chosen = lapis.Subnetwork(
                count, from_=lapis.laplace(model, data, likelihood, structure="diagonal", prior=prior)
            )
            # the prior of the parameters in which any weight was chosen
            probe = lapis.laplace(model, data, likelihood, weights=chosen, structure="dense")
            own = {name: PRECISION[name] for name in probe.network.names}
            return lapis.laplace(
                model, data, likelihood, weights=chosen, structure="dense", prior=lapis.Prior(own, groups="parameter")
            )

        return fit

    def variational(rank: int) -> Callable[[], lapis.Posterior]:
        return lambda: lapis.variational(
            model, data, likelihood, prior=prior, rank=rank, steps=steps, learning_rate=3e-3, generator=generator()
        )

    def swag() -> lapis.Posterior:
        return lapis.swag(
            copy.deepcopy(model), data, likelihood, epochs=0, snapshots=40 if quick else 200, rank=20, batch_size=10,
            weight_decay=decay, generator=generator(),
        )  # fmt: skip

    def ensemble() -> lapis.Posterior:
        return lapis.ensemble([at_mode(network(seed + 1 + i), data, iterations) for i in range(members)], likelihood)

    def dropout() -> lapis.Posterior:
        own = network(seed, dropout=0.05)
        epochs = 200 if quick else 2500
        fit_network(own, data, likelihood, epochs=epochs, learning_rate=3e-3, weight_decay=decay, generator=generator())
        return lapis.dropout(own.eval(), likelihood, data)

    return {
        "Laplace, dense": laplace("dense"),
        "Laplace, refined": lambda: lapis.laplace(model, data, likelihood, structure="dense", prior=prior).refine(data),
        "Laplace, Kronecker": laplace("kronecker"),
        "Laplace, EKFAC": laplace("ekfac"),
        "Laplace, diagonal": laplace("diagonal"),
        **{f"subnetwork of {count:,}": subnetwork(count) for count in (50, 200, 1000, 2000)},
        "variational, mean-field": variational(0),
        "variational, rank 20": variational(20),
        "SWAG": swag,
        f"ensemble of {members}": ensemble,
        "MC dropout": dropout,
    }


def kept(
    path: Path | None, name: str, work: Callable[[], tuple[Doubt, dict[str, float]]]
) -> tuple[Doubt, dict[str, float]]:
    """What an earlier run has left in the file under this name, else what `work` returns, which then stays there."""
    held = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}
    if name not in held:
        own, facts = work()
        moments = {"mean": own.mean.tolist(), "std": own.std.tolist(), "seconds": own.seconds}
        held[name] = {key: _short(value) for key, value in {**moments, **facts}.items()}
        print(name, f"{own.seconds:.1f} s", flush=True)  # noqa: T201
        if path is not None:
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in held.items())
            path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    row = dict(held[name])
    mean, std = (torch.tensor(row.pop(key), dtype=F64) for key in ("mean", "std"))
    return Doubt(mean, std, row.pop("seconds")), row


def _short(value: object) -> object:
    return [round(each, 5) for each in value] if isinstance(value, list) else value


def doubt(make: Callable[[], lapis.Posterior], grid: Tensor) -> Doubt:
    """The function's moments; drawn networks where that is the posterior's own way."""
    began = time.perf_counter()
    posterior = make()
    options = {} if posterior.methods[0] == "linearised" or "Ensemble" in type(posterior).__name__ else {"samples": 200}
    prediction = posterior.predict(grid, **options)
    return Doubt(prediction.f_mean[:, 0], prediction.f_variance[:, 0].sqrt(), time.perf_counter() - began)


# -- the figure ---------------------------------------------------------------------------------------------


def draw(
    found: dict[str, Doubt], exact: Doubt, grid: Tensor, data: tuple[Tensor, Tensor], inside: Tensor
) -> plt.Figure:
    """Mean and two standard deviations of the function, with those of the chain as lines in every panel."""
    panels = {"the truth (HMC)": exact, **found}
    columns = 5
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.1 * columns, 2.5 * rows), sharex=True, sharey=True, layout="constrained"
    )
    x = grid[:, 0].numpy()
    for axis, (name, own) in zip(axes.flat, panels.items(), strict=False):
        colour = COLOURS[1] if own is exact else COLOURS[0]
        low, high = (own.mean + sign * 2 * own.std for sign in (-1, 1))
        axis.axvspan(*GAP, color="#f1efe9", zorder=0, linewidth=0)
        axis.fill_between(x, low.numpy(), high.numpy(), color=colour, alpha=0.25, linewidth=0, zorder=1)
        axis.plot(x, own.mean.numpy(), color=colour, linewidth=1.4, zorder=3)
        if own is not exact:
            for sign in (-2, 2):
                line = (exact.mean + sign * exact.std).numpy()
                axis.plot(x, line, color=COLOURS[1], linewidth=0.8, linestyle=(0, (4, 2)), zorder=2)
        axis.scatter(*(part[:, 0].numpy() for part in data), s=7, color="#333333", linewidth=0, zorder=4)
        axis.set_title(name, fontsize=10, fontweight="bold" if own is exact else "normal")
        if own is not exact:
            note = f"distance {own.distance(exact, inside):.2f}"
            axis.text(0, -2.85, note, ha="center", fontsize=8, color="#666666", zorder=5)
        axis.set(xlim=(-REACH, REACH), ylim=(-3.2, 3.2), xticks=range(-3, 4), yticks=range(-3, 4))
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    return figure


def measured(chosen: argparse.Namespace, seed: int) -> Cell:
    """Every method and the chain on the problem of one seed."""
    data = groups(60, torch.Generator().manual_seed(seed))
    grid = torch.linspace(-REACH, REACH, 61 if chosen.quick else 181, dtype=F64)[:, None]
    model = at_mode(network(seed), data, 200 if chosen.quick else 1000)
    rows = None if chosen.quick else RESULTS / f"inbetween_{seed}.json"

    def long_chain() -> tuple[Doubt, dict[str, float]]:
        run, r_hat, acceptance = chain(model, data, grid, *((30, 2) if chosen.quick else (80, 8)), seed)
        return run, {"r_hat": r_hat, "acceptance": acceptance}

    exact, facts = kept(rows, "the chain", long_chain)
    found = {
        name: kept(rows, name, lambda make=make: (doubt(make, grid), {}))[0]
        for name, make in methods(model, data, chosen.quick, seed).items()
    }
    return Cell(data, grid, exact, found, facts)


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    first = measured(chosen, chosen.seed)
    kept_seeds = (
        [] if chosen.quick else sorted(int(path.stem.split("_")[1]) for path in RESULTS.glob("inbetween_*.json"))
    )
    cells = [first, *(measured(chosen, seed) for seed in kept_seeds if seed != chosen.seed)]
    x = first.grid[:, 0]
    regions = {
        "in between": (x >= GAP[0]) & (x <= GAP[1]),
        "at the data": (x.abs() >= 1) & (x.abs() <= 2),
        "beyond": x.abs() > 2.2,
    }
    save(draw(first.found, first.exact, first.grid, first.data, regions["in between"]), "inbetween", chosen)
    lines = []
    for name in ("the chain", *first.found):
        owns = [cell.exact if name == "the chain" else cell.found[name] for cell in cells]
        line = [name, *(tables.cell([float(own.std[where].mean()) for own in owns]) for where in regions.values())]
        for where in regions.values():
            pairs = zip(owns, cells, strict=True)
            away = [own.distance(cell.exact, where) for own, cell in pairs]
            line.append("" if name == "the chain" else tables.cell(away))
        lines.append([*line, f"{sum(own.seconds for own in owns) / len(owns):.0f}"])
    head = (
        "method", *(f"std, {region}" for region in regions), *(f"distance, {region}" for region in regions), "seconds"
    )  # fmt: skip
    picture = f"inbetween{'_quick' if chosen.quick else ''}.png"
    r_hat = max(cell.facts["r_hat"] for cell in cells)
    acceptance = sum(cell.facts["acceptance"] for cell in cells) / len(cells)
    text = (
        "# In-between uncertainty\n\n" + " ".join((__doc__ or "").split()) + "\n\n"
        f"Regions: in between is {GAP[0]} to {GAP[1]}, beyond is |x| > 2.2. Means over {len(cells)} seeds (data, "
        "network and chain) ± their standard error. The chains: largest R-hat of a function value "
        f"{r_hat:.3f}, mean acceptance {acceptance:.2f}. Seconds: making the posterior and predicting, on a shared "
        f"machine.\n\n{table(head, lines)}\n\n![In-between uncertainty](../figures/{picture})\n\n"
        f"The figure, seed {chosen.seed}: mean and two standard deviations of the function; broken lines: those of the "
        "chain, from which the distance in between (shaded) is given in every panel."
    )
    report("inbetween", text, chosen)


if __name__ == "__main__":
    main()
