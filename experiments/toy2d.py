"""Toy classification in two dimensions: predictive maps of Laplace posteriors side by side with a long Markov chain.

Two moons of 60 points, and a network 2-10-10-2 with tanh units (162 weights) at the mode of its posterior under a
Gaussian prior that all methods share. The chain is Hamiltonian Monte Carlo on the weights of the network itself,
several chains from different modes, in coordinates that the Laplace posterior at the first mode makes round. Errors
are those of the probability of one class, in the mean over a grid and near the data; R-hat is that of probabilities on
the grid.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from common import COLOURS, arguments, report, save, table
from torch import Tensor, nn
from truth import fitted, hamiltonian, split_r_hat

import lapis

F64 = torch.float64
UNITS, PRECISION, REACH = 10, 0.3, 4.0


def moons(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    y = torch.arange(number) % 2
    angle = math.pi * torch.rand(number, dtype=F64, generator=generator)
    sign = 1.0 - 2.0 * y.to(F64)
    x = torch.stack([angle.cos() - 0.5 * sign, sign * angle.sin() - 0.35 * sign], 1)
    return 1.2 * (x + 0.18 * torch.randn(number, 2, dtype=F64, generator=generator)), y


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(2, UNITS), nn.Tanh(), nn.Linear(UNITS, UNITS), nn.Tanh(), nn.Linear(UNITS, 2))
    return nn.Sequential(*layers).to(F64)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def outputs(weights: Tensor, x: Tensor) -> Tensor:
    """Logits (K, N, 2) of K networks with weights (K, P) at inputs (N, 2)."""
    w1, b1, w2, b2, w3, b3 = weights.split([2 * UNITS, UNITS, UNITS**2, UNITS, 2 * UNITS, 2], 1)
    h = torch.tanh(x @ w1.reshape(-1, UNITS, 2).mT + b1[:, None])
    h = torch.tanh(h @ w2.reshape(-1, UNITS, UNITS).mT + b2[:, None])
    return h @ w3.reshape(-1, 2, UNITS).mT + b3[:, None]


def chain(
    modes: list[Tensor], covariance: Tensor, data: tuple[Tensor, Tensor], grid: Tensor, draws: int, seed: int
) -> tuple[Tensor, float, float]:
    """Probabilities of class 1 on the grid (G,), their largest R-hat, and the acceptance rate."""
    root = torch.linalg.cholesky(covariance)

    def log_density(z: Tensor) -> tuple[Tensor, Tensor]:
        weights = (z @ root.T).requires_grad_()
        with torch.enable_grad():
            log_probs = outputs(weights, data[0]).log_softmax(-1)
            hit = log_probs.gather(-1, data[1].expand(len(z), -1)[..., None])
            value = hit.sum((1, 2)) - 0.5 * PRECISION * weights.square().sum(1)
            (gradient,) = torch.autograd.grad(value.sum(), weights)
        return value.detach(), gradient @ root

    start = torch.linalg.solve_triangular(root, torch.stack(modes).T, upper=False).T
    run = hamiltonian(
        log_density, start, draws, torch.Generator().manual_seed(seed), warm_up=max(20, draws // 2), length=1.5
    )
    probs = torch.stack([outputs(z @ root.T, grid).softmax(-1)[..., 1] for z in run.draws])
    return probs.mean((0, 1)), float(split_r_hat(probs).max()), run.acceptance


def functions(nets: list[nn.Module], x: Tensor) -> int:
    """How many different functions the networks compute: modes that differ in the order or signs of units are one."""
    found: list[Tensor] = []
    for net in nets:
        f = net(x).detach()
        if not any(torch.allclose(f, other, atol=1e-3) for other in found):
            found.append(f)
    return len(found)


def methods(model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Probability of class 1, by name."""

    def predicted(posterior: lapis.Posterior, **options: object) -> Callable[[Tensor], Tensor]:
        return lambda x: posterior.predict(x, **options).probs[:, 1]

    fits = {
        structure: lapis.laplace(model, data, "classification", structure=structure, weights="all", prior=PRECISION)
        for structure in ("dense", "kronecker", "diagonal")
    }
    last = lapis.laplace(model, data, "classification", weights="last_layer", structure="dense", prior=PRECISION)
    return {
        "plain": lambda x: model(x).softmax(-1)[:, 1].detach(),
        "dense": predicted(fits["dense"]),
        "Kronecker": predicted(fits["kronecker"]),
        "diagonal": predicted(fits["diagonal"]),
        "last layer": predicted(last),
        "dense, refined": predicted(fits["dense"].refine(data, tune=False)),
        "dense, sampled": predicted(fits["dense"], method="sampled", samples=200),
    }


def draw(maps: dict[str, Tensor], data: tuple[Tensor, Tensor], errors: dict[str, float], points: int) -> plt.Figure:
    """The probability of class 1 over the plane, with contours at .1, .5 and .9."""
    columns = 4
    rows = -(-len(maps) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.1 * columns, 3.15 * rows), layout="constrained")
    axis_values = torch.linspace(-REACH, REACH, points).numpy()
    for axis, (name, probs) in zip(axes.flat, maps.items(), strict=False):
        image = probs.reshape(points, points).numpy()
        shade = axis.imshow(
            image, origin="lower", extent=(-REACH, REACH) * 2, vmin=0, vmax=1, cmap="RdBu_r", interpolation="bilinear"
        )
        axis.contour(axis_values, axis_values, image, [0.1, 0.5, 0.9], colors="black", linewidths=(0.6, 1.3, 0.6))
        for label, colour in enumerate((COLOURS[0], COLOURS[1])):
            axis.scatter(*data[0][data[1] == label].numpy().T, s=11, color=colour, edgecolors="white", linewidths=0.4)
        note = f"   {errors[name]:.3f}" if name in errors else ""
        axis.set(title=name + note, xticks=[], yticks=[])
    for axis in axes.flat[len(maps) :]:
        axis.axis("off")
    figure.colorbar(shade, ax=axes, shrink=0.6, label="probability of the red class")
    return figure


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    generator = torch.Generator().manual_seed(chosen.seed)
    data, test = moons(60, generator), moons(500, generator)
    points, draws, chains = (21, 15, 2) if chosen.quick else (61, 800, 12)
    axis = torch.linspace(-REACH, REACH, points, dtype=F64)
    grid = torch.cartesian_prod(axis, axis).flip(1)
    places = torch.cat([grid, test[0]])
    nets = [fitted(network(chosen.seed + number), "categorical", data, PRECISION) for number in range(chains)]
    model = nets[0]
    precision = lapis.laplace(
        model, data, "classification", structure="dense", weights="all", prior=PRECISION
    ).precision()  # fmt: skip
    exact, r_hat, acceptance = chain(
        [flat(net) for net in nets], torch.linalg.inv(precision.to(F64)), data, places, draws, chosen.seed
    )
    found = {name: predict(places).to(F64) for name, predict in methods(model, data).items()}
    found["ensemble of the modes"] = torch.stack([net(places).softmax(-1)[:, 1].detach() for net in nets]).mean(0)
    near = (grid[:, None] - data[0]).norm(dim=-1).amin(1) < 0.6
    rows, errors = [], {}
    for name, probs in {"chain": exact, **found}.items():
        on_grid, at_test = probs.split([len(grid), len(test[0])])
        gap = (on_grid - exact[: len(grid)]).abs()
        hit = torch.where(test[1] == 1, at_test, 1 - at_test)
        scores = (f"{float(gap.mean()):.3f}", f"{float(gap[near].mean()):.3f}", f"{float(gap.max()):.3f}")
        rows.append((name, *(("", "", "") if name == "chain" else scores), f"{float(-hit.log().mean()):.4f}"))
        if name != "chain":
            errors[name] = float(gap.mean())
    maps = {"the truth (HMC)": exact[: len(grid)], **{name: probs[: len(grid)] for name, probs in found.items()}}
    save(draw(dict(list(maps.items())[:8]), data, errors, points), "toy2d", chosen)
    text = (
        "# Two moons, and a long chain\n\n" + " ".join((__doc__ or "").split()) + "\n\n"
        f"{chains} chains of {draws} draws: largest R-hat {r_hat:.2f}, acceptance {acceptance:.2f}. "
        f"The {chains} modes where they start compute {functions(nets, test[0])} different functions: most are copies "
        "with other orders or signs of units, and an ensemble of such modes is little more than one network.\n\n"
        + table(("method", "mean error, grid", "mean error, near the data", "largest error", "test NLL"), rows)
        + f"\n\n![Predictive maps](../figures/toy2d{'_quick' if chosen.quick else ''}.png)\n\n"
        "The figure: the probability of one class, with lines at .1, .5 and .9; in the titles the mean error."
    )
    report("toy2d", text, chosen)


if __name__ == "__main__":
    main()
