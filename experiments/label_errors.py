"""Do sensitivities find wrong labels? 5 % of Fashion-MNIST labels flipped, and examples ranked.

A small network is trained on the flipped labels, for a short and for a long time: after a long time it has learned most
of them by heart, and their loss is small. Examples are ranked by their loss, by the error |g| alone, by
`posterior.sensitivity(data)` (error times variance; `exact` with the leverage) and by `posterior.leave_one_out(data)`,
of posteriors over the last layer, as the README's recipe has them, and over all weights (diagonal); the best precision
a ranking can have at 5 % is one. On a small network the estimated changes are held against networks that were trained
again without each example. A second figure shows the least and the most memorable digits and garments.
"""

from __future__ import annotations

import copy

import matplotlib.pyplot as plt
import torch
from common import COLOURS, arguments, images, report, save, table
from matplotlib.figure import Figure
from torch import Tensor, nn

import lapis
from lapis.metrics import aupr, auroc

FLIPPED = 0.05


def network(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 10),
    )  # fmt: skip


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for some in torch.randperm(len(x), generator=generator).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            optimiser.step()


def flipped(y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Labels of which 5 % are wrong, and which."""
    generator = torch.Generator().manual_seed(100 + seed)
    wrong = torch.zeros(len(y), dtype=torch.bool)
    wrong[torch.randperm(len(y), generator=generator)[: round(FLIPPED * len(y))]] = True
    other = (y + torch.randint(1, 10, y.shape, generator=generator)) % 10
    return torch.where(wrong, other, y), wrong


def rankings(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Scores of every example, large where its label is suspect."""
    with torch.no_grad():
        f = model(x)
    data, recipe = (x, y), "classification"
    last = lapis.laplace(model, data, recipe, weights="last_layer").tune(tolerated_loss=None)
    every = lapis.laplace(model, data, recipe, weights="all", structure="diagonal").tune(tolerated_loss=None)
    return {
        "loss": nn.functional.cross_entropy(f, y, reduction="none").double(),
        "error": (f.softmax(-1) - nn.functional.one_hot(y, 10)).double().norm(dim=-1),
        "leave-one-out": -last.leave_one_out(data),
        "sensitivity": last.sensitivity(data),
        "sensitivity, exact": last.sensitivity(data, exact=True),
        "sensitivity, all weights": every.sensitivity(data),
    }


def precision_at(scores: Tensor, wrong: Tensor, count: int) -> float:
    return float(wrong[scores.argsort(descending=True)[:count]].double().mean())


def curve(scores: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """Recall and precision of each cut."""
    hits = wrong[scores.argsort(descending=True)].double().cumsum(0)
    return hits / hits[-1], hits / torch.arange(1, len(hits) + 1)


# -- a small network, trained again without each example ---------------------------------------------------------


def spirals(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    angle = 3 * torch.rand(n, generator=generator) + 0.5
    arm = torch.stack([angle * angle.cos(), angle * angle.sin()], 1) * (1 - 2 * y[:, None])
    return (0.6 * (arm + 0.35 * torch.randn(n, 2, generator=generator))).double(), y


SETTLED = {"max_iter": 1000, "tolerance_grad": 1e-9, "tolerance_change": 0.0, "line_search_fn": "strong_wolfe"}
"""Until the gradient vanishes: by the usual tolerances training again can end before its first step."""


def settle(model: nn.Module, x: Tensor, y: Tensor, prior: float) -> None:
    optimiser = torch.optim.LBFGS(model.parameters(), **SETTLED)

    def loss() -> Tensor:
        optimiser.zero_grad()
        total = nn.functional.cross_entropy(model(x), y, reduction="sum")
        total = total + 0.5 * prior * sum(p.square().sum() for p in model.parameters())
        total.backward()
        return total

    optimiser.step(loss)


def refits(n: int, seed: int, prior: float = 0.1) -> tuple[Tensor, Tensor, Tensor]:
    """The change of each example's outputs without it: to first order, with the leverage, and truly."""
    x, y = spirals(n, seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    settle(model, x, y, prior)
    posterior = lapis.laplace(model, (x, y), "classification", structure="dense", prior=prior)
    truth = []
    for left in range(n):
        rest = torch.arange(n) != left
        other = copy.deepcopy(model)
        settle(other, x[rest], y[rest], prior)
        truth.append((other(x[left]) - model(x[left])).detach().norm())
    first, exact = posterior.sensitivity((x, y)), posterior.sensitivity((x, y), exact=True)
    return first, exact, torch.stack(truth)


def correlations(one: Tensor, two: Tensor) -> tuple[float, float]:
    """Of logarithms, and of ranks; of examples that change anything."""
    some = (one > 0) & (two > 0)
    one, two = one[some], two[some]
    ranks = [each.argsort().argsort().double() for each in (one, two)]
    return (
        float(torch.corrcoef(torch.stack([one.log(), two.log()]))[0, 1]),
        float(torch.corrcoef(torch.stack(ranks))[0, 1]),
    )


# -- memorable examples ------------------------------------------------------------------------------------------


def memorable_picture(chosen_train: int, epochs: int, seed: int, each: int = 6) -> Figure:
    """Rows are classes; left the least memorable examples, right the most memorable ones."""
    figure, grid = plt.subplots(1, 2, figsize=(13, 5.6))
    for axes, name in zip(grid, ("mnist", "fashion_mnist"), strict=True):
        x, y, _, _ = images(name, chosen_train, 10, seed)
        torch.manual_seed(seed)
        model = network(64)
        train(model, x, y, epochs, seed)
        posterior = lapis.laplace(model, (x, y), "classification", structure="diagonal")
        order = posterior.memorable((x, y), per_class=len(y))
        rows = []
        for label in range(10):
            own = order[y[order] == label]
            tiles = [*x[own[-each:].flip(0), 0], torch.full((28, 6), float(x.max())), *x[own[:each], 0]]
            rows.append(torch.cat(tiles, 1))
        axes.imshow(torch.cat(rows), cmap="gray_r")
        axes.set_title(f"{name}: least memorable (left), most memorable (right)", fontsize=10)
        axes.axis("off")
    figure.tight_layout()
    return figure


def main() -> None:
    chosen = arguments(__doc__)
    count, lengths, seeds = (300, (2, 4), 1) if chosen.quick else (2000, (6, 30), 3)
    names = ["loss", "error", "leave-one-out", "sensitivity", "sensitivity, exact", "sensitivity, all weights"]
    figure, axes = plt.subplots(1, len(lengths) + 1, figsize=(4.6 * (len(lengths) + 1), 4))
    tints = plt.get_cmap("tab10").colors
    rows, facts = [], []
    for axis, epochs in zip(axes, lengths, strict=False):
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        learned = []
        for seed in range(chosen.seed, chosen.seed + seeds):
            x, y, _, _ = images("fashion_mnist", count, 10, seed)
            y, wrong = flipped(y, seed)
            torch.manual_seed(seed)
            model = network(64)
            train(model, x, y, epochs, seed)
            with torch.no_grad():
                learned.append(float((model(x).argmax(-1) == y)[wrong].double().mean()))
            for place, (name, scores) in enumerate(rankings(model, x, y).items()):
                cut = int(wrong.sum())
                found[name].append(
                    (precision_at(scores, wrong, cut), float(aupr(scores, wrong)), float(auroc(scores, wrong)))
                )
                if seed == chosen.seed:
                    recall, precision = curve(scores, wrong)
                    axis.plot(recall, precision, label=name, color=tints[place])
        axis.set(xlabel="recall", ylabel="precision", title=f"{epochs} epochs", ylim=(0, 1.03))
        share = sum(learned) / len(learned)
        facts.append(f"after {epochs} epochs the network repeats {100 * share:.0f} % of the wrong labels")
        for name, values in found.items():
            means = torch.tensor(values, dtype=torch.float64).mean(0)
            rows.append([epochs, name, *(f"{float(each):.3f}" for each in means)])
    axes[0].legend(fontsize=8)
    first, exact, truth = refits(12 if chosen.quick else 60, chosen.seed)
    axes[-1].loglog(truth, first, "o", color=COLOURS[0], label="to first order")
    axes[-1].loglog(truth, exact, "x", color=COLOURS[1], label="with the leverage")
    ends = [float(truth.min()), float(truth.max())]
    axes[-1].loglog(ends, ends, color="gray", lw=1)
    axes[-1].set(xlabel="change in networks trained again", ylabel="estimated change", title="leave-one-out")
    axes[-1].legend(fontsize=8)
    figure.tight_layout()
    save(figure, "label_errors", chosen)
    save(memorable_picture(*((300, 2) if chosen.quick else (2000, 6)), chosen.seed), "memorable", chosen)
    head = ["epochs", "ranking", "precision = recall at 5 %", "average precision", "AUROC"]
    one, two = correlations(first, truth), correlations(exact, truth)
    report(
        "label_errors",
        f"# Wrong labels\n\n{count} images of Fashion-MNIST, 5 % with another label; means of {seeds} seed(s); "
        f"{'; '.join(facts)}.\n\n{table(head, rows)}\n\nLeave-one-out on a network with 62 weights, {len(truth)} "
        "examples, each left out and the network trained again: correlation of the logarithms, and of the ranks, with "
        f"the true change {one[0]:.3f} and {one[1]:.3f} to first order, {two[0]:.3f} and {two[1]:.3f} with the "
        f"leverage; median ratio to it {float((first / truth).median()):.2f} and "
        f"{float((exact / truth).median()):.2f}.",
        chosen,
    )


if __name__ == "__main__":
    main()
