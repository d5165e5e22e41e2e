"""Contextual bandits: classification where only the reward of the class that was guessed is seen.

A context comes, an action (a class) is chosen, and its reward is 1 if it is the right class, else 0. Every RETRAIN
rounds a small network from (context, action) to the expected reward is trained on all that was seen, and a dense
Laplace posterior over its last layer is fitted and tuned. Thompson sampling and upper confidence bounds act by it; the
greedy rule takes the network's own best; linear Thompson sampling has a Bayesian linear regression an action. Regret
is the number of wrong guesses so far.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import torch
from common import COLOURS
from methods.command import About, arguments, fill, write_page
from methods.rows import Row, read
from methods.tables import by_column, scored
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

import lapis

SETTINGS = {"digits": (load_digits, 1_500), "breast cancer": (load_breast_cancer, 560)}
COLUMNS = ("Thompson", "upper confidence", "greedy", "linear Thompson", "random")
RETRAIN, STEPS = 50, 150
F64 = torch.float64


class Reward(nn.Module):
    """The expected reward of an action in a context: one network, an output an action, of which one is returned."""

    def __init__(self, features: int, actions: int) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(features, 40), nn.Tanh())
        self.rewards = nn.Linear(40 * actions, 1)
        self.actions = actions

    def forward(self, x: Tensor, action: Tensor) -> Tensor:
        h = self.hidden(x)
        placed = nn.functional.one_hot(action, self.actions).to(h)[:, :, None] * h[:, None]  # (B, A, 40)
        return self.rewards(placed.flatten(1))


class Linear:
    """Bayesian linear regression an action, noise variance .25, prior variance 1."""

    def __init__(self, features: int, actions: int) -> None:
        self.precision = torch.eye(features + 1, dtype=F64).repeat(actions, 1, 1)
        self.moment = torch.zeros(actions, features + 1, dtype=F64)

    def choose(self, x: Tensor, generator: torch.Generator) -> int:
        z = torch.cat([x, torch.ones(1)]).to(F64)
        root = torch.linalg.cholesky(self.precision)
        mean = torch.cholesky_solve(self.moment[..., None], root)[..., 0]
        noise = torch.randn(mean.shape, dtype=F64, generator=generator)
        drawn = mean + torch.linalg.solve_triangular(root.mT, noise[..., None], upper=True)[..., 0]
        return int((drawn @ z).argmax())

    def see(self, x: Tensor, action: int, reward: float) -> None:
        z = torch.cat([x, torch.ones(1)]).to(F64)
        self.precision[action] += torch.outer(z, z) / 0.25
        self.moment[action] += reward * z / 0.25


def play(name: str, column: str, seed: int, rounds: int) -> Row:
    """The mistakes so far, every RETRAIN rounds."""
    found = SETTINGS[name][0]()
    x, y = torch.from_numpy(found.data).float(), torch.from_numpy(found.target).long()
    x = (x - x.mean(0)) / x.std(0).clamp_min(1e-3)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)[:rounds]
    x, y, actions = x[order], y[order], int(y.max()) + 1
    linear = Linear(x.shape[1], actions)
    posterior: lapis.Posterior | None = None
    taken, rewards, mistakes, curve = [], [], 0, [0]
    for t in range(rounds):
        inputs = (x[t].expand(actions, -1), torch.arange(actions))
        if column == "linear Thompson":
            action = linear.choose(x[t], generator)
        elif posterior is None or column == "random":
            action = int(torch.randint(actions, (1,), generator=generator))
        elif column == "Thompson":
            action = int(lapis.decisions.thompson(posterior, inputs, generator=generator))
        elif column == "upper confidence":
            action = int(lapis.decisions.upper_confidence(posterior, inputs, width=2.0))
        else:
            with torch.no_grad():
                action = int(posterior.network.module(*inputs).argmax())
        reward = float(action == y[t])
        mistakes += int(reward == 0)
        taken.append(action)
        rewards.append(reward)
        linear.see(x[t], action, reward)
        if (t + 1) % RETRAIN == 0 or t + 1 == rounds:
            curve.append(mistakes)
            if column in ("Thompson", "upper confidence", "greedy") and t + 1 < rounds:
                seen = ((x[: t + 1], torch.tensor(taken)), torch.tensor(rewards)[:, None])
                posterior = fitted(actions, seen, seed)
    return {"regret": curve, "total": mistakes}


def fitted(actions: int, data: tuple[tuple[Tensor, Tensor], Tensor], seed: int) -> lapis.Posterior:
    (x, taken), rewards = data
    torch.manual_seed(seed)
    model = Reward(x.shape[1], actions)
    optimiser = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=1e-2)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS + len(rewards) // 4):
        rows = torch.randint(len(rewards), (64,), generator=generator)
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x[rows], taken[rows]), rewards[rows]).backward()
        optimiser.step()
    likelihood = lapis.Gaussian(noise=0.3)
    posterior = lapis.laplace(model, data, likelihood, weights="last_layer", structure="dense")
    return posterior.tune()


def page(chosen: Any, rows: list[Row], rounds: dict[str, int]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
    parts = []
    for axis, name in zip(axes, SETTINGS, strict=True):
        found = by_column(rows, name, COLUMNS)
        for (column, each), colour in zip(found.items(), (*COLOURS, "#999999"), strict=False):
            curves = torch.tensor([row["regret"] for row in each]).double()
            steps = [min(RETRAIN * k, rounds[name]) for k in range(curves.shape[1])]
            axis.plot(steps, curves.mean(0), color=colour, label=column, lw=1.8)
            if len(each) > 1:
                spread = curves.std(0) / len(each) ** 0.5
                low, high = curves.mean(0) - spread, curves.mean(0) + spread
                axis.fill_between(steps, low, high, color=colour, alpha=0.15)
        axis.set(title=name, xlabel="rounds")
        axis.grid(alpha=0.25)
        if found:
            scores = {f"regret after {rounds[name]:,} rounds": lambda row: float(row["total"])}
            parts.append(f"## {name}\n\n{scored(found, scores)}")
    axes[0].set_ylabel("regret: wrong guesses so far")
    next(axis for axis in axes if axis.lines).legend(frameon=False)
    about = About(
        "Contextual bandits",
        f"""Rewards are 1 for the right class and 0 for others; networks are trained anew every {RETRAIN} rounds.
        Means over seeds with standard errors.""",
        f"The first {RETRAIN} rounds of the networks are random.",
        "Regret against rounds",
    )
    write_page(chosen, about, parts, rows, figure)


def main() -> None:
    names = tuple(SETTINGS)
    chosen = arguments("bandits", __doc__, (names, names), (COLUMNS, COLUMNS), seeds=5)
    rounds = {name: 110 if chosen.quick else SETTINGS[name][1] for name in SETTINGS}
    if not chosen.report:
        fill(
            chosen,
            lambda setting, seed: (setting, seed),
            lambda loaded, column: play(loaded[0], column, loaded[1], rounds[loaded[0]]),
            ("total",),
        )
    page(chosen, read(chosen.rows), rounds)


if __name__ == "__main__":
    main()
