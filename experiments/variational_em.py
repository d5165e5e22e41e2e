"""The lecture's pictures drawn by its own code, and variational EM where the truth is known.

Pictures: the table of two Gaussians with some classes known; the bound of EM, which touches and climbs; KL + ELBO =
log p(y). Factor analysis (60 rows of 4 columns, 2 factors): q against the posterior, and theta against the maximum of
the likelihood, both in closed form. Bayesian logistic regression with latent scales (100 rows, 8 columns of which 3
matter; w_d = s_d v_d, v_d ~ N(0, 1), log s_d ~ N(-1, 1), 16 latent variables): log p(y) by importance sampling from q,
and test likelihoods beside the same model with scales held at 1. A network: its weights are the latent variables, and
its ELBO is that of `lapis.variational`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import COLOURS, arguments, report, save, table
from sklearn.decomposition import FactorAnalysis
from torch import Tensor, nn
from torch.func import functional_call

import lapis
from lapis.latent import GaussianMixture, variational_em
from lapis.latent.mixture_model import MixtureModel, Rows

DOUBLE = torch.float64
KNOWN, HIDDEN = ([4.3, 6.0, 7.2], [0, 1, 1]), [5.1, 6.6]
BLUE, RED, GREEN, YELLOW = COLOURS


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


# the lecture's pictures ------------------------------------------------------------------------------------


def table_picture(axes: Any) -> Any:
    """Maximum likelihood where classes are known, p(z = 1 | y) where they are not, and EM of all rows."""
    y, z = np.array(KNOWN[0])[:, None], np.array(KNOWN[1])
    every, labels = np.concatenate([y, np.array(HIDDEN)[:, None]]), [*KNOWN[1], -1, -1]
    first = GaussianMixture(2, "tied").fit(y, labels=z)
    both = GaussianMixture(2, "tied").fit(every, labels=labels)
    grid = np.linspace(2.5, 9, 300)[:, None]
    titles = ("classes known: averages of each", "two classes unknown: p(z = 1 | y)", "EM: all rows have a share")
    for axis, mixture, title in zip(axes, (first, first, both), titles, strict=True):
        for k, colour in enumerate((BLUE, RED)):
            density = np.exp(mixture.score_samples(grid)) * mixture.predict_proba(grid)[:, k]
            axis.fill_between(grid[:, 0], density, color=colour, alpha=0.25, lw=0)
            axis.plot(grid[:, 0], density, color=colour, lw=1.5)
        axis.plot(y[z == 0], 0 * y[z == 0], "o", color=BLUE, ms=9, clip_on=False)
        axis.plot(y[z == 1], 0 * y[z == 1], "o", color=RED, ms=9, clip_on=False)
        axis.set(title=title, xlabel="y", ylim=(0, None), xlim=(2.5, 9))
    for axis, mixture in zip(axes[1:], (first, both), strict=True):
        axis.plot(HIDDEN, [0, 0], "o", mfc="white", mec="black", ms=9, clip_on=False)
        twin = axis.twinx()
        twin.plot(grid[:, 0], mixture.predict_proba(grid)[:, 1], color="black", lw=1, ls="--")
        shares = mixture.predict_proba(np.array(HIDDEN)[:, None])[:, 1]
        twin.plot(HIDDEN, shares, "k.", ms=8)
        for place, share in zip(HIDDEN, shares, strict=True):
            twin.annotate(f"{share:.2f}", (place, share), textcoords="offset points", xytext=(-26, 2), fontsize=9)
        twin.set(ylim=(0, 1.05), ylabel="p(z = 1 | y), dashed")
    axes[0].set(ylabel="share x density")
    return both


RANDOM = np.random.RandomState(0)
ROWS = Rows(torch.from_numpy(np.concatenate([4 + RANDOM.randn(20), 6.2 + RANDOM.randn(20)])[:, None]))


def at(mean: float) -> MixtureModel:
    """Two Gaussians of unit variance and equal shares, of which one mean is not known."""
    half, one = torch.full((2,), 0.5, dtype=DOUBLE), torch.ones(2, dtype=DOUBLE)
    return MixtureModel(half, torch.tensor([[4.0], [mean]], dtype=DOUBLE), one, "spherical")


def log_likelihood(mean: float) -> float:
    """The bound where it touches."""
    return at(mean).bound(at(mean).expectation(ROWS))


def bound_pictures(axes: Any) -> None:
    """Half-steps of EM in one mean; all curves are `bound` of a model and an E-step."""
    grid = torch.linspace(4.2, 10.2, 200, dtype=DOUBLE)
    likelihood = [log_likelihood(float(mean)) for mean in grid]
    before = mean = 9.6
    for number, axis in enumerate(axes):
        expected = at(before).expectation(ROWS)
        axis.plot(grid, likelihood, color="black", lw=2, label="log p(y | theta)")
        axis.plot(grid, [at(float(m)).bound(expected) for m in grid], color=BLUE, lw=1.8, label="B(q, theta)")
        touch = log_likelihood(before)
        if number % 2 == 0:
            axis.plot(before, touch, "o", color=BLUE, ms=8)
            axis.set(title=f"E-step {number // 2 + 1}: the bound touches", ylabel="nats")
            mean = float(at(before).maximisation(expected).means[1])
        else:
            low = at(mean).bound(expected)
            axis.plot([before, mean], [touch, low], color=BLUE, lw=1, ls=":", marker="o", ms=6, mfc="white")
            axis.plot([mean, mean], [low, log_likelihood(mean)], color=RED, lw=3, label="KL(q || p(z | y))")
            axis.set(title=f"M-step {number // 2 + 1}: it climbs, log p(y) more")
            before = mean
        axis.set(ylim=(-128, -64), xlabel="mean of the second Gaussian")
        axis.grid(alpha=0.25)
    axes[1].legend(frameon=False, fontsize=9, loc="upper right")


def identity_of_em(axis: Any) -> None:
    """KL and ELBO after each half-step of the same problem: the KL of every E-step is zero."""
    mean, bounds, top = 9.6, [], []
    for _ in range(3):
        expected = at(mean).expectation(ROWS)
        bounds, top = [*bounds, at(mean).bound(expected)], [*top, log_likelihood(mean)]
        mean = float(at(mean).maximisation(expected).means[1])
        bounds, top = [*bounds, at(mean).bound(expected)], [*top, log_likelihood(mean)]
    places, floor = np.arange(len(bounds)), min(bounds) - 6
    axis.bar(places, np.array(bounds) - floor, bottom=floor, color=BLUE, alpha=0.8, width=0.7, label="ELBO")
    axis.bar(places, np.subtract(top, bounds), bottom=bounds, color=RED, width=0.7, label="KL(q || p(z | y))")
    axis.plot(places, top, "k_", ms=34, mew=1.6, label="log p(y | theta)")
    axis.set_xticks(places, [f"{'EM'[n % 2]}{n // 2 + 1}" for n in places])
    axis.set(title="EM: every E-step closes the gap", ylabel="nats", ylim=(floor, max(top) + 8))
    axis.legend(frameon=False, fontsize=8, loc="upper left", ncols=3, markerscale=0.4)


# factor analysis -------------------------------------------------------------------------------------------

LOADINGS, LOG_NOISE = 1.5 * normal(0, 4, 2), torch.tensor([-0.5, 0.0, 0.3, -1.0], dtype=DOUBLE)


def log_joint(y: Tensor, z: Tensor, theta: dict[str, Tensor]) -> Tensor:
    """z ~ N(0, I), y ~ N(W z, diag(noise^2))."""
    gaps = (y - z @ theta["W"].mT) / theta["log_noise"].exp()
    sizes = 6 * math.log(2 * math.pi) / 2 + theta["log_noise"].sum()
    return -0.5 * (gaps.square().sum(-1) + z.square().sum(-1)) - sizes


def closed_form(w: Tensor, log_noise: Tensor, y: Tensor) -> tuple[Any, float]:
    """p(z | y) of each row, and log p(y)."""
    weighted = w / (2 * log_noise).exp()[:, None]
    covariance = torch.linalg.inv(torch.eye(2, dtype=DOUBLE) + w.mT @ weighted)
    posterior = torch.distributions.MultivariateNormal(y @ weighted @ covariance, covariance.expand(len(y), 2, 2))
    marginal = torch.distributions.MultivariateNormal(y.new_zeros(4), w @ w.mT + (2 * log_noise).exp().diag())
    return posterior, float(marginal.log_prob(y).sum())


def divergence(fit: Any, posterior: Any) -> float:
    q = torch.distributions.MultivariateNormal(fit.q.means, fit.q.covariances)
    return float(torch.distributions.kl_divergence(q, posterior).sum())


def factor_analysis(axis: Any, quick: bool) -> list[list[str]]:
    y = normal(31, 60, 2) @ LOADINGS.mT + normal(32, 60, 4) * LOG_NOISE.exp()
    y = y - y.mean(0)
    posterior, log_p = closed_form(LOADINGS, LOG_NOISE, y)
    known = {"W": LOADINGS, "log_noise": LOG_NOISE}
    counts = (5, 10) if quick else (4, 8, 12, 15, 40)
    lines = []
    floor = log_p - 460
    for place, rounds in enumerate(counts):
        fit = quietly(lambda y, z: log_joint(y, z, known), "mean_field", y, n_latent=2, rounds=rounds)
        kl, (elbo, error) = divergence(fit, posterior), fit.elbo(4000)
        axis.bar(
            place,
            max(elbo - floor, 0),
            bottom=floor,
            color=BLUE,
            alpha=0.8,
            width=0.7,
            label="ELBO" if not place else "",
        )
        axis.bar(place, kl, bottom=elbo, color=RED, width=0.7, label="KL(q || p(z | y))" if not place else "")
        lines.append(
            ["independent", rounds, f"{elbo:.2f} ± {error:.2f}", f"{kl:.2f}", f"{elbo + kl:.2f}", f"{log_p:.2f}"]
        )
    axis.axhline(log_p, color="black", lw=1.2, label="log p(y), closed form")
    axis.set_xticks(range(len(counts)), counts)
    axis.set(title="variational EM: factor analysis", xlabel="rounds, q independent", ylim=(floor, log_p + 45))
    axis.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)
    fit = quietly(lambda y, z: log_joint(y, z, known), "full", y, n_latent=2, rounds=20 if quick else 100)
    kl, (elbo, error) = divergence(fit, posterior), fit.elbo(4000)
    lines.append(
        ["full", 20 if quick else 100, f"{elbo:.2f} ± {error:.2f}", f"{kl:.2f}", f"{elbo + kl:.2f}", f"{log_p:.2f}"]
    )
    return lines


def maximum_likelihood(quick: bool) -> list[list[str]]:
    """theta by variational EM beside scikit-learn's maximum of the closed form."""
    y = normal(31, 60, 2) @ LOADINGS.mT + normal(32, 60, 4) * LOG_NOISE.exp()
    y = y - y.mean(0)
    peer = FactorAnalysis(2, tol=1e-9, max_iter=100_000).fit(y.numpy())
    w, log_noise = torch.as_tensor(peer.components_.T.copy()), torch.as_tensor(peer.noise_variance_).log() / 2
    best = closed_form(w, log_noise, y)[1]
    start = {"W": LOADINGS + 0.5 * normal(5, 4, 2), "log_noise": torch.zeros(4, dtype=DOUBLE)}
    lines = [["start", "", "", f"{closed_form(start['W'], start['log_noise'], y)[1]:.2f}", "", ""]]
    for rounds in (10,) if quick else (15, 30, 50, 100, 200):
        fit = quietly(log_joint, "full", y, n_latent=2, parameters=start, rounds=rounds)
        reached = closed_form(fit.parameters["W"], fit.parameters["log_noise"], y)[1]
        elbo, error = fit.elbo(1000)
        apart = float((fit.parameters["W"] @ fit.parameters["W"].mT - w @ w.mT).abs().max() / (w @ w.mT).abs().max())
        lines.append(
            [
                f"{rounds} rounds",
                f"{fit.gain[0]:.3f} ± {fit.gain[1]:.3f}",
                str(fit.converged),
                f"{reached:.2f}",
                f"{elbo:.2f} ± {error:.2f}",
                f"{apart:.3f}",
            ]
        )
    lines.append(["maximum, closed form", "", "", f"{best:.2f}", "", "0"])
    return lines


def quietly(*arguments: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lapis.LapisWarning)
        return variational_em(*arguments, **options)


# logistic regression with latent scales --------------------------------------------------------------------

TRUTH = torch.tensor([2.5, -2.0, 1.0, 0, 0, 0, 0, 0], dtype=DOUBLE)


def weights_of(z: Tensor, scales: bool) -> Tensor:
    """w = s v; z = (v, log s), or v alone."""
    v = z[..., : len(TRUTH)]
    return v * z[..., len(TRUTH) :].exp() if scales else v


def logistic(data: tuple[Tensor, Tensor], z: Tensor, scales: bool) -> Tensor:
    x, y = data
    logits = torch.einsum("sid,ind->sin", weights_of(z, scales), x)
    seen = (y * logits - nn.functional.softplus(logits)).sum(-1)
    middle = torch.cat([torch.zeros_like(TRUTH), -torch.ones_like(TRUTH)])[: z.shape[-1]]
    return seen - 0.5 * ((z - middle).square() + math.log(2 * math.pi)).sum(-1)


def logistic_regression(axis: Any, seeds: int, quick: bool) -> list[list[str]]:
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for seed in range(seeds):
        x, chance = normal(100 + seed, 2100, len(TRUTH)), torch.Generator().manual_seed(200 + seed)
        y = (torch.rand(2100, generator=chance, dtype=DOUBLE) < (x @ TRUTH).sigmoid()).double()
        data, test = (x[None, :100], y[None, :100]), (x[100:], y[100:])
        for scales in (True, False):
            size = len(TRUTH) * (2 if scales else 1)
            joint = lambda data, z, scales=scales: logistic(data, z, scales)  # noqa: E731
            fit = quietly(joint, "full", data, n_latent=size, rounds=20 if quick else 150, draws=16)
            q, source = fit.q, torch.Generator().manual_seed(seed)
            z = q.draw(torch.randn(2000 if quick else 20_000, 1, size, generator=source, dtype=DOUBLE))
            ratio = (joint(data, z) - q.log_prob(z))[:, 0]
            log_p = float(ratio.logsumexp(0)) - math.log(len(ratio))
            share = ratio.softmax(0)
            draws = weights_of(z[:, 0], scales)
            probability = (draws[:500] @ test[0].mT).sigmoid().mean(0).clamp(1e-9, 1 - 1e-9)
            nll = -(test[1] * probability.log() + (1 - test[1]) * (1 - probability).log()).mean()
            exact = (share[:, None] * draws).sum(0)  # importance weights
            gap, idle = float((draws.mean(0) - exact).abs().max()), float(draws[:, 3:].square().mean().sqrt())
            row = [fit.elbo(4000)[0], log_p, float(1 / share.square().sum()) / len(ratio), gap, float(nll), idle]
            found[scales].append([*row, float(fit.converged)])
            if seed == 0:
                low, high = draws.quantile(0.05, 0), draws.quantile(0.95, 0)
                places = np.arange(len(TRUTH)) + (0.15 if scales else -0.15)
                middle = draws.mean(0)
                ends = torch.stack([middle - low, high - middle]).numpy()
                name = "scales latent" if scales else "scales 1"
                axis.errorbar(places, middle, ends, fmt="o", color=BLUE if scales else YELLOW, ms=4, label=name)
    axis.plot(np.arange(len(TRUTH)), TRUTH, "k_", ms=16, label="truth")
    axis.set(title="logistic regression: weights, 90 % of q", xlabel="column", ylabel="weight")
    axis.legend(frameon=False, fontsize=8)
    axis.grid(alpha=0.25)
    lines = []
    for scales, rows in found.items():
        mean, error = np.mean(rows, 0), np.std(rows, 0, ddof=1) / len(rows) ** 0.5 if len(rows) > 1 else np.zeros(7)
        cells = [f"{mean[0]:.2f}", f"{mean[1]:.2f}", f"{mean[1] - mean[0]:.2f}", f"{mean[2]:.2f}", f"{mean[3]:.3f}"]
        lines.append(["latent" if scales else "1", *cells, f"{mean[4]:.4f} ± {error[4]:.4f}", f"{mean[5]:.3f}"])
    return lines


# a network -------------------------------------------------------------------------------------------------


def to_the_mode(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Weights with the highest log p(y | w) + log p(w)."""
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def loss() -> Tensor:
        optimiser.zero_grad()
        squares: Any = sum(p.square().sum() for p in model.parameters())
        value: Tensor = 0.5 * ((y - model(x)) / 0.3).square().sum() + 0.5 * squares
        value.backward()
        return value

    optimiser.step(loss)


def network_elbos(quick: bool) -> list[list[str]]:
    """Weights as the latent variables of one datum: the ELBO of variational EM, and that of `lapis.variational`."""
    x = torch.linspace(-2, 2, 30, dtype=DOUBLE)[:, None]
    y = torch.sin(2 * x) + 0.2 * normal(50, 30, 1)
    lines = []
    for name, model in (
        ("linear", nn.Linear(1, 1)),
        ("4 tanh units", nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))),
    ):
        torch.manual_seed(1)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        model.double()
        to_the_mode(model, x, y)
        shapes = {key: p.shape for key, p in model.named_parameters()}
        start = torch.cat([p.detach().flatten() for p in model.parameters()])

        def outputs(w: Tensor, model: nn.Module = model, shapes: dict[str, Any] = shapes) -> Tensor:
            parts = torch.split(w, [math.prod(shape) for shape in shapes.values()])
            named = {key: part.reshape(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}
            return functional_call(model, named, (x,))

        def joint(data: Tensor, z: Tensor, start: Tensor = start) -> Tensor:
            w = start + z[:, 0]  # q starts at the trained weights
            gaps = (data[0] - torch.func.vmap(outputs)(w)[..., 0]) / 0.3
            likelihood = -0.5 * (gaps.square() + math.log(2 * math.pi * 0.09)).sum(-1)
            return (likelihood - 0.5 * (w.square() + math.log(2 * math.pi)).sum(-1))[:, None]

        rounds = 10 if quick else 300
        fit = quietly(joint, "mean_field", y.mT, n_latent=len(start), rounds=rounds)
        ours, error = fit.elbo(4000)
        theirs = lapis.variational(model, (x, y), lapis.Gaussian(0.3), prior=1.0, steps=500 if quick else 6000)
        full = quietly(joint, "full", y.mT, n_latent=len(start), rounds=rounds)
        best, spread = full.elbo(4000)
        evidence = float(lapis.laplace(model, (x, y), lapis.Gaussian(0.3), structure="dense").log_evidence())
        found = theirs.inference
        elbos = ((ours, error), (found.elbo, found.elbo_error), (best, spread))
        lines.append([name, str(len(start)), *(f"{value:.2f} ± {off:.2f}" for value, off in elbos), f"{evidence:.2f}"])
    return lines


def main() -> None:
    chosen = arguments(__doc__)
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    table_picture(axes)
    save(figure, "lecture_table", chosen)
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    bound_pictures(axes.flat)
    save(figure, "lecture_bound", chosen)
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    identity_of_em(axes[0])
    lines = factor_analysis(axes[1], chosen.quick)
    logistic_lines = logistic_regression(axes[2], 2 if chosen.quick else 4, chosen.quick)
    save(figure, "variational_em", chosen)
    parts = [
        "# Variational EM",
        " ".join((__doc__ or "").split()),
        "## Factor analysis: KL + ELBO = log p(y)",
        table(["q", "rounds", "ELBO", "KL, closed form", "sum", "log p(y), closed form"], lines),
        "## Factor analysis: theta",
        table(
            ["", "the last search gained", "converged", "log likelihood", "ELBO", "W W^T off by"],
            maximum_likelihood(chosen.quick),
        ),
        "## Logistic regression with latent scales",
        table(
            [
                "scales",
                "ELBO",
                "log p(y)",
                "KL",
                "effective share of draws",
                "means of w off by",
                "test NLL",
                "root mean square of idle weights",
            ],
            logistic_lines,
        ),
        "## A network",
        table(
            [
                "network",
                "weights",
                "variational_em, independent",
                "lapis.variational",
                "variational_em, full",
                "Laplace evidence",
            ],
            network_elbos(chosen.quick),
        ),
        "![Variational EM](../figures/variational_em.png)",
    ]
    report("variational_em", "\n\n".join(parts), chosen)


if __name__ == "__main__":
    main()
