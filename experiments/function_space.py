"""A trained network as a Gaussian process: kernel matrices and means of one-dimensional regression and of MNIST.

In one dimension: functions drawn from the prior's process and from the posterior's, its mean and two standard
deviations, and its kernel matrix over a grid. On MNIST: the kernel matrix, summed over classes, and the mean, through
the softmax, of test digits sorted by class (blocks on the diagonal are digits that the network holds to be alike). Then
the process of the prior learns from a few digits only, chosen at random or as the most memorable ones of each class.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from common import COLOURS, arguments, images, report, save, table
from matplotlib.axes import Axes
from torch import Tensor, nn

import lapis


def fit_line(seed: int, steps: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network for noisy data of a wave with a gap in the middle."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([torch.linspace(-3, -1, 25), torch.linspace(1, 3, 25)])[:, None].double()
    y = torch.sin(2 * x) + 0.3 * x + 0.15 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = (model(x) - y).square().sum() / (2 * 0.15**2) + 0.25 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        optimiser.step()
    return model, x, y


def draw_line(axes: tuple[Axes, Axes, Axes], seed: int, steps: int) -> list[list[object]]:
    """Pictures of the processes before and after the data, and how far function space is from weight space."""
    model, x, y = fit_line(seed, steps)
    posterior = lapis.laplace(model, (x, y), lapis.Gaussian(0.15), structure="dense", prior=0.5)
    process = posterior.gaussian_process()
    grid = torch.linspace(-4, 4, 161, dtype=torch.float64)[:, None]
    before = process.prior()
    conditioned = before.given((x, y))
    for axis, each, title in ((axes[0], before, "prior's process"), (axes[1], process, "posterior's process")):
        mean, deviation = each.mean(grid)[:, 0], each.kernel(grid).reshape(161, 161).diagonal().sqrt()
        axis.fill_between(grid[:, 0], mean - 2 * deviation, mean + 2 * deviation, color=COLOURS[0], alpha=0.2, lw=0)
        axis.plot(grid, each.sample(grid, 4)[..., 0].mT, color=COLOURS[0], lw=0.7)
        axis.plot(grid, mean, color="black", lw=1.5)
        axis.plot(x, y, ".", color=COLOURS[1], ms=4)
        axis.set(title=title, xlim=(-4, 4))
    axes[1].set_ylim(-3, 3)
    kernel = process.kernel(grid).reshape(161, 161)
    drawn = axes[2].imshow(
        kernel, extent=(-4, 4, 4, -4), cmap="RdBu_r", vmin=-float(kernel.max()), vmax=float(kernel.max())
    )
    axes[2].set_title("posterior's kernel matrix")
    axes[2].figure.colorbar(drawn, ax=axes[2], shrink=0.8)
    predicted = posterior.predict(grid, joint=True).latent
    joint = predicted.joint  # type: ignore[union-attr]
    evidence = float((before.log_evidence((x, y)) - posterior.log_evidence()).abs())
    relative = float((conditioned.kernel(grid).reshape(161, 161) - joint).abs().max() / joint.abs().max())
    return [
        [
            "kernel of the posterior's process, relative",
            f"{float((kernel - joint).abs().max() / joint.abs().max()):.1e}",
        ],
        ["kernel of the prior's process given the data, relative", f"{relative:.1e}"],
        ["log evidence, absolute", f"{evidence:.1e}"],
    ]


def small_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, stride=2), nn.ReLU(), nn.Conv2d(6, 12, 5, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def digits(count: int, epochs: int, seed: int) -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor]:
    x, y, x_test, y_test = images("mnist", count, 500, seed)
    torch.manual_seed(seed)
    model = small_network()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for some in torch.randperm(len(x), generator=generator).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            optimiser.step()
    return model, x, y, x_test, y_test


def main() -> None:
    chosen = arguments(__doc__)
    figure, axes = plt.subplots(2, 3, figsize=(14, 8))
    differences = draw_line(tuple(axes[0]), chosen.seed, 300 if chosen.quick else 3000)
    model, x, y, x_test, y_test = digits(*((300, 3) if chosen.quick else (2000, 10)), chosen.seed)
    posterior = lapis.laplace(model, (x, y), "classification", structure="kronecker").tune()
    per_class = 3 if chosen.quick else 10
    order = torch.cat([(y_test == label).nonzero()[:per_class, 0] for label in range(10)])
    seen = x_test[order]
    process = posterior.gaussian_process()
    kernel = torch.einsum("bcdc->bd", process.kernel(seen))
    scaled = kernel / kernel.diagonal().sqrt() / kernel.diagonal().sqrt()[:, None]
    axes[1, 0].imshow(scaled, cmap="RdBu_r", vmin=-1, vmax=1)
    axes[1, 0].set_title("MNIST: kernel as correlations, by class")
    linked = process.with_link()
    axes[1, 1].imshow(linked.mean(seen), cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes[1, 1].set_title("mean through the softmax")
    axes[1, 2].imshow(torch.einsum("bcbc->bc", linked.kernel(seen)).sqrt(), cmap="magma", aspect="auto")
    axes[1, 2].set_title("its standard deviation")
    for axis in axes[1, 1:]:
        axis.set(xlabel="class", ylabel="digit")
    figure.tight_layout()
    save(figure, "function_space", chosen)

    prior = process.prior()
    generator = torch.Generator().manual_seed(chosen.seed)
    ranked = posterior.memorable((x, y), per_class=len(y))
    rows = []
    tested = slice(0, 100 if chosen.quick else 300)
    before = prior.mean(x_test[tested])
    with torch.no_grad():
        against = torch.corrcoef(torch.stack([before.flatten(), model(x_test[tested]).flatten()]))[0, 1]
    guess = f"{100 * float((before.argmax(-1) == y_test[tested]).double().mean()):.1f}"
    rows.append([0, guess, guess, guess])
    for count in (1, 3) if chosen.quick else (1, 3, 10):
        found = [count]
        for kind in ("random", "memorable", "least memorable"):
            indices = []
            for label in range(10):
                own = ranked[y[ranked] == label]
                if kind == "random":
                    own = own[torch.randperm(len(own), generator=generator)]
                indices.append(own[:count] if kind != "least memorable" else own[-count:])
            few = torch.cat(indices)
            outputs = prior.given((x[few], y[few]), steps=None).mean(x_test[tested])
            found.append(f"{100 * float((outputs.argmax(-1) == y_test[tested]).double().mean()):.1f}")
        rows.append(found)
    with torch.no_grad():
        own = 100 * float((model(x_test[tested]).argmax(-1) == y_test[tested]).double().mean())
    report(
        "function_space",
        "# Function space\n\nOne-dimensional regression, 61 weights, 50 examples: largest difference between function "
        f"space and the dense posterior over weights.\n\n{table(['of', 'difference'], differences)}\n\nMNIST: accuracy "
        f"(%) on {tested.stop} test digits of the prior's process given a few training digits of each class; the "
        f"network, trained on {len(x)}, has {own:.1f}. The features J(x) are the trained network's.\n\n"
        "Without any digits the process has the mean f(x) + J(x) (0 - t). For a ReLU network without biases J(x) t is "
        "L f(x), with L layers, and that mean is (1 - L) f(x): it denies what the network says (correlation with its "
        f"outputs here {float(against):.2f}). So few digits leave less than chance: they have to turn the function."
        "\n\n"
        f"{table(['digits a class', 'random', 'most memorable', 'least memorable'], rows)}",
        chosen,
    )


if __name__ == "__main__":
    main()
