"""A check against the truth: Laplace, refined and a long Markov chain side by side.

Four problems small enough to sample from their posterior: logistic regression in two dimensions, in ten dimensions with
separable classes, softmax regression with three classes, and the tangent model f(x) + J(x) (theta - t) of a small
network. All are generalised linear models in their weights with a Gaussian prior, which the Laplace posterior, the
refined one (the best Gaussian by its ELBO) and the chain share. The chain is Hamiltonian Monte Carlo, many chains at
once, in the coordinates where the Laplace posterior is standard normal; R-hat compares halves of all chains, over the
weights and over the probabilities at some of the inputs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from common import COLOURS, arguments, report, save, table
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import lapis

F64 = torch.float64
LINKS = ("quasi", "mean_field", "probit", "bridge")

# -- Hamiltonian Monte Carlo --------------------------------------------------------------------------------


LogDensity = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Log density up to a constant (K,), and its gradient (K, P), at K points (K, P)."""


@dataclass(frozen=True)
class Chains:
    """Draws (S, K, P) of K chains, with their acceptance rate and step size."""

    draws: Tensor
    acceptance: float
    step: float


def leapfrog(
    log_density: LogDensity, position: Tensor, momentum: Tensor, gradient: Tensor, step: float, steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions and momenta (K, P) after so many steps, the log density there, and its gradient."""
    momentum = momentum + 0.5 * step * gradient
    for index in range(steps):
        position = position + step * momentum
        value, gradient = log_density(position)
        momentum = momentum + (step if index < steps - 1 else 0.5 * step) * gradient
    return position, momentum, value, gradient


def hamiltonian(
    log_density: LogDensity,
    start: Tensor,
    draws: int,
    generator: torch.Generator,
    *,
    warm_up: int = 200,
    length: float = 2.5,
) -> Chains:
    """K chains at once, with unit masses.

    Args:
        log_density: of the target.
        start: (K, P).
        draws: kept of each chain, S.
        warm_up: draws before them, in which the common step size is tuned to an acceptance rate of 0.8 (Robbins and
            Monro); it is fixed afterwards, so that the chain is one.
        length: mean time of a trajectory. The number of steps is drawn for each trajectory, the same for all chains,
            so that no chain can be periodic.
    """
    position = start.clone()
    value, gradient = log_density(position)
    log_step = math.log(0.3)
    kept, accepted = [], 0.0
    for turn in range(warm_up + draws):
        step = math.exp(log_step)
        most = max(1, round(2 * length / step))
        steps = int(torch.randint(1, most + 1, (), generator=generator))
        momentum = torch.randn(position.shape, dtype=F64, generator=generator)
        q, p, new, g = leapfrog(log_density, position, momentum, gradient, step, steps)
        change = new - 0.5 * p.square().sum(1) - (value - 0.5 * momentum.square().sum(1))
        chance = change.nan_to_num(nan=-math.inf).clamp_max(0).exp()
        take = torch.rand(len(chance), dtype=F64, generator=generator) < chance
        position = torch.where(take[:, None], q, position)
        gradient = torch.where(take[:, None], g, gradient)
        value = torch.where(take, new, value)
        if turn < warm_up:
            log_step += (float(chance.mean()) - 0.8) / (1 + turn) ** 0.6
        else:
            accepted += float(chance.mean()) / draws
            kept.append(position)
    return Chains(torch.stack(kept), accepted, math.exp(log_step))


def split_r_hat(values: Tensor) -> Tensor:
    """R-hat of each quantity, from values (S, K, ...): each chain in two halves, against all (Gelman et al. 2013)."""
    half = len(values) // 2
    chains = torch.cat([values[:half], values[half : 2 * half]], 1)
    within = chains.var(0).mean(0)
    between = chains.mean(0).var(0)
    return ((within * (half - 1) / half + between) / within.clamp_min(1e-300)).sqrt()


# -- problems -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    name: str
    model: nn.Module
    likelihood: str
    data: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    precision: float

    def tangent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f (N, C) at the trained weights, and its Jacobian (N, C, P)."""
        weights = {name: value.detach() for name, value in self.model.named_parameters()}

        def output(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
            return functional_call(self.model, parameters, (one[None],))[0]

        jacobian = vmap(jacrev(output), (None, 0))(weights, x)
        return self.model(x).detach(), torch.cat([part.flatten(2) for part in jacobian.values()], 2)

    @property
    def weights(self) -> Tensor:
        return torch.cat([value.detach().flatten() for value in self.model.parameters()])

    def posterior(self) -> lapis.LaplacePosterior:
        return lapis.laplace(self.model, self.data, self.likelihood, structure="dense", prior=self.precision)

    def covariance(self) -> Tensor:
        """Of the Laplace posterior, written naively."""
        f, jacobian = self.tangent(self.data[0])
        p = probabilities(self.likelihood, f)
        hessian = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        if self.likelihood == "bernoulli":
            hessian = hessian[:, :1, :1]
        curvature = torch.einsum("ncp,ncd,ndq->pq", jacobian, hessian, jacobian)
        return torch.linalg.inv(curvature + self.precision * torch.eye(len(curvature), dtype=F64))


def log_likelihood_and_gradient(likelihood: str, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """log p(y | f), summed over examples (K,), and its gradient in f (K, N, C), at K outputs f (K, N, C)."""
    if likelihood == "bernoulli":
        signs = (2 * y - 1).to(F64)[:, None]
        return nn.functional.logsigmoid(signs * f).sum((1, 2)), signs * torch.sigmoid(-signs * f)
    log_probs = f.log_softmax(-1)
    hit = nn.functional.one_hot(y, f.shape[-1]).to(F64)
    return (hit * log_probs).sum((1, 2)), hit - log_probs.exp()


def probabilities(likelihood: str, f: Tensor) -> Tensor:
    """(..., C), also for the two classes of a Bernoulli output (..., 1)."""
    return torch.cat([-f, f], -1).mul(0.5).softmax(-1) if likelihood == "bernoulli" else f.softmax(-1)


@dataclass(frozen=True)
class Truth:
    """Probabilities (N, C) by the chain, and their standard errors."""

    probs: Tensor
    error: Tensor
    r_hat: float
    acceptance: float


def chain(problem: Problem, x: Tensor, draws: int, chains: int, seed: int) -> Truth:
    """Draws from the tangent model's posterior, and with them the probabilities at x (N, D)."""
    f, jacobian = problem.tangent(problem.data[0])
    t = problem.weights
    root = torch.linalg.cholesky(problem.covariance())

    def log_density(z: Tensor) -> tuple[Tensor, Tensor]:
        weights = t + z @ root.T
        outputs = f + torch.einsum("ncp,kp->knc", jacobian, weights - t)
        value, slope = log_likelihood_and_gradient(problem.likelihood, outputs, problem.data[1])
        gradient = torch.einsum("knc,ncp->kp", slope, jacobian) - problem.precision * weights
        return value - 0.5 * problem.precision * weights.square().sum(1), gradient @ root

    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(chains, len(t), dtype=F64, generator=generator)
    run = hamiltonian(log_density, start, draws, generator)
    f_new, jacobian_new = problem.tangent(x)
    total, some = torch.zeros(chains, *f_new.shape[:1], 2 if f.shape[1] == 1 else f.shape[1], dtype=F64), []
    for part in run.draws.split(20):
        probs = probabilities(problem.likelihood, f_new + torch.einsum("ncp,skp->sknc", jacobian_new, part @ root.T))
        total += probs.sum(0) / draws
        some.append(probs[:, :, -20:, 0])
    r_hat = max(float(split_r_hat(values).max()) for values in (run.draws, torch.cat(some)))
    # chains are independent of each other, so that their means give a standard error
    return Truth(total.mean(0), total.std(0) / math.sqrt(chains), r_hat, run.acceptance)


def fitted(model: nn.Module, likelihood: str, data: tuple[Tensor, Tensor], precision: float) -> nn.Module:
    """The mode of the posterior, by L-BFGS."""
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=2000, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        f = model(data[0])
        if likelihood == "bernoulli":
            fit = nn.functional.binary_cross_entropy_with_logits(f[:, 0], data[1].to(F64), reduction="sum")
        else:
            fit = nn.functional.cross_entropy(f, data[1], reduction="sum")
        total = fit + 0.5 * precision * sum(value.square().sum() for value in model.parameters())
        total.backward()
        return total

    optimiser.step(loss)
    return model.eval()


def clusters(number: int, centres: Tensor, spread: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    y = torch.arange(number) % len(centres)
    return centres[y] + spread * torch.randn(number, centres.shape[1], dtype=F64, generator=generator), y


def problems(quick: bool, seed: int) -> list[Problem]:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)

    def make(
        name: str, model: nn.Module, likelihood: str, centres: Tensor, spread: float, number: int, precision: float
    ) -> Problem:
        data = clusters(number, centres, spread, generator)
        near = clusters(100 if quick else 500, centres, spread, generator)
        model = fitted(model.to(F64), likelihood, data, precision)
        return Problem(name, model, likelihood, data, near, precision)

    two = torch.tensor([[-1.0, -0.5], [1.0, 0.7]], dtype=F64)
    ten = 0.45 * torch.randn(1, 10, dtype=F64, generator=generator).sign() * torch.tensor([[-1.0], [1.0]], dtype=F64)
    angles = torch.arange(3, dtype=F64) * 2 * math.pi / 3
    three = 1.5 * torch.stack([angles.cos(), angles.sin()], 1)
    made = [] if quick else [make("logistic, 2-D, overlapping", nn.Linear(2, 1), "bernoulli", two, 1.0, 40, 1.0)]
    made += [
        make("logistic, 10-D, separable", nn.Linear(10, 1), "bernoulli", ten, 0.7, 40, 0.1),
        make("softmax, 3 classes", nn.Linear(2, 3), "categorical", three, 0.7, 24, 0.1),
    ]
    if not quick:
        network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        made.append(make("tangent model of a 2-8-3 network", network, "categorical", three, 1.0, 45, 0.3))
    return made


# -- side by side -------------------------------------------------------------------------------------------


def everywhere(problem: Problem, number: int, seed: int) -> Tensor:
    """Inputs like the data, and as many from a distribution three times as wide."""
    x = problem.test[0]
    noise = torch.randn(number, x.shape[1], dtype=F64, generator=torch.Generator().manual_seed(seed))
    return torch.cat([x, 3 * noise * problem.data[0].std(0)])


def side_by_side(problem: Problem, quick: bool, seed: int) -> tuple[list[tuple[str, ...]], dict[str, float], Truth]:
    """Rows of the table, mean errors near the data by method, and the chain."""
    y, count = problem.test[1], len(problem.test[0])
    points = everywhere(problem, count, seed)
    exact = chain(problem, points, *((150, 16) if quick else (2000, 32)), seed)

    def of(posterior: lapis.LaplacePosterior, link: str) -> Tensor:
        probs = posterior.predict(points, link=link).probs
        return torch.cat([1 - probs, probs], -1) if problem.likelihood == "bernoulli" else probs

    posterior = problem.posterior()
    refined = posterior.refine(problem.data, tune=False)
    found = {"plain": probabilities(problem.likelihood, problem.tangent(points)[0])}
    found |= {f"Laplace, {link}": of(posterior, link) for link in LINKS}
    found |= {f"refined, {link}": of(refined, link) for link in LINKS}
    found["refined, width by leave-one-out, quasi"] = of(
        posterior.refine(problem.data, tune=False, tolerated_loss=0.004), "quasi"
    )
    rows, errors = [], {}
    for name, probs in found.items():
        gap = (probs - exact.probs).abs()
        errors[name] = float(gap[:count].mean())
        cells = (f"{errors[name]:.4f}", f"{float(gap[count:].mean()):.4f}", f"{float(gap.max()):.3f}")
        rows.append((problem.name, name, *cells, _nll(probs, y)))
    own = (
        f"({float(part):.4f})" for part in (exact.error[:count].mean(), exact.error[count:].mean(), exact.error.max())
    )
    rows.append((problem.name, "chain", *own, _nll(exact.probs, y)))
    return rows, errors, exact


def _nll(probs: Tensor, y: Tensor) -> str:
    return f"{float(-probs[: len(y)].gather(1, y[:, None]).log().mean()):.4f}"


def draw(problem: Problem, quick: bool, seed: int) -> plt.Figure:
    """The largest probability over the plane of a problem with two inputs and three classes, by method; the errors."""
    points, reach = 21 if quick else 61, 6.0
    axis = torch.linspace(-reach, reach, points, dtype=F64)
    x = torch.cartesian_prod(axis, axis).flip(1)
    exact = chain(problem, x, *((100, 8) if quick else (1000, 16)), seed).probs
    posterior = problem.posterior()
    shown = {
        "the chain": exact,
        "plain": problem.tangent(x)[0].softmax(-1),
        "Laplace, probit": posterior.predict(x, link="probit").probs,
        "Laplace, quasi": posterior.predict(x).probs,
        "refined, quasi": posterior.refine(problem.data, tune=False).predict(x).probs,
    }
    figure, axes = plt.subplots(2, len(shown), figsize=(3.1 * len(shown), 6), layout="constrained", squeeze=False)
    extent = (-reach, reach, -reach, reach)
    for column, (name, probs) in enumerate(shown.items()):
        gap = (probs - exact).abs().amax(-1)
        panels = [(probs.amax(-1), name, 1 / 3, 1.0, "viridis")]
        if column:
            panels.append((gap, f"largest error: mean {float(gap.mean()):.3f}", 0.0, 0.4, "magma"))
        for axis, (values, title, low, high, colours) in zip(axes[:, column], panels, strict=False):
            image = values.reshape(points, points).numpy()
            shade = axis.imshow(image, origin="lower", extent=extent, vmin=low, vmax=high, cmap=colours)
            for label in range(3):
                chosen = problem.data[0][problem.data[1] == label].numpy()
                axis.scatter(*chosen.T, s=9, color=COLOURS[label + 1], edgecolors="white", linewidths=0.4)
            axis.set(title=title, xticks=[], yticks=[], xlim=extent[:2], ylim=extent[2:])
            if column == len(shown) - 1:
                figure.colorbar(shade, ax=axis, shrink=0.8)
    axes[1, 0].axis("off")
    return figure


def main() -> None:
    chosen = arguments(__doc__)
    warnings.simplefilter("ignore", lapis.LapisWarning)
    made = problems(chosen.quick, chosen.seed)
    rows, worst = [], 0.0
    for problem in made:
        new, _, exact = side_by_side(problem, chosen.quick, chosen.seed)
        rows += new
        worst = max(worst, exact.r_hat)
    save(draw(made[-1], chosen.quick, chosen.seed), "truth", chosen)
    head = ("problem", "method", "mean error, near", "mean error, far", "largest error", "test NLL")
    text = (
        "# Laplace, refined, and a long chain\n\n" + " ".join((__doc__ or "").split()) + "\n\n"
        "Errors are |p - p of the chain|; near: test inputs like the data; far: from a Gaussian three times as wide. "
        "Refined: the best Gaussian, `refine(data, tune=False)`; with a tolerated loss of .004 its covariance is "
        "narrowed by leave-one-out predictions, which is one more row. "
        f"In brackets the chain's own standard errors. Largest R-hat over all problems: {worst:.4f}.\n\n"
        f"{table(head, rows)}\n\n![{made[-1].name}](../figures/truth{'_quick' if chosen.quick else ''}.png)\n\n"
        f"The figure: {made[-1].name}, the largest probability, and the largest error of a probability."
    )
    report("truth", text, chosen)


if __name__ == "__main__":
    main()
