"""From a wish to an answer: train a small network, put a posterior on it, predict a grid. A fraction of a second."""

from __future__ import annotations

import time
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lapis.errors import LapisWarning
from lapis.likelihoods import Categorical, Gaussian, Likelihood
from lapis.playground.wishes import Json, Wish
from lapis.posteriors import LaplacePosterior
from lapis.posteriors.laplace.arguments import TOLERATED_LOSS
from lapis.posteriors.laplace.fit import laplace
from lapis.predictions import ClassificationPrediction, RegressionPrediction

F64 = torch.float64
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}
EXTENT = 4.0
"""The grid reaches from minus to plus this."""

CURVE, MAP = 161, 45
"""Points of the grid of a curve, and of each side of a map."""

ROUNDS = 3
"""Rounds of training and tuning."""

STEPS = 60
"""Steps of L-BFGS in each round."""

START = (0.1, 0.2)
"""Prior precision and noise of the first round, if they are tuned."""

PRECISIONS, NOISES = (1e-3, 1e3), (0.02, 1.0)
"""Few points can leave prior or noise undetermined: they are kept within these."""


def answer(wish: Wish) -> Json:
    """Predictions on a grid, evidence and effective parameters, as JSON has them."""
    started = time.perf_counter()
    table = torch.tensor(wish.points, dtype=F64)
    data = (table[:, :1], table[:, 1:]) if wish.task == "regression" else (table[:, :2], table[:, 2].long())
    posterior, notes = _fitted(wish, data)
    shown = _curve(posterior) if wish.task == "regression" else _map(posterior, wish)
    noise = posterior.likelihood.noise
    return {
        **shown,
        "log_evidence": float(posterior.log_evidence().detach()),
        "effective_parameters": float(posterior.effective_parameters().detach()),
        "weights": posterior.n_weights,
        "precision": float(posterior.weight_prior.precision[0]),
        "noise": None if noise is None else float(noise),
        "seconds": time.perf_counter() - started,
        "notes": notes,
    }


def network(wish: Wish) -> nn.Sequential:
    """A perceptron, with initial weights by the wish's seed; torch's global generator is left as it was."""
    sizes = [1 if wish.task == "regression" else 2, *[wish.units] * wish.layers]
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(wish.seed)
        for one, two in pairwise(sizes):
            layers += [nn.Linear(one, two), ACTIVATIONS[wish.activation]()]
        model = nn.Sequential(*layers, nn.Linear(sizes[-1], 1 if wish.task == "regression" else 2)).to(F64)
    return model


def _fitted(wish: Wish, data: tuple[Tensor, Tensor]) -> tuple[LaplacePosterior, list[str]]:
    """Weights at a mode under prior and noise and, if wished, these by the evidence, in turns; and warnings."""
    model, precision, noise = network(wish), wish.precision, wish.noise
    if wish.tune:
        precision, noise = START
    for turn in range(ROUNDS if wish.tune else 2):  # without tuning, L-BFGS starts anew once, which helps
        likelihood: Likelihood = Gaussian(noise) if wish.task == "regression" else Categorical()
        _train(model, data, likelihood, precision)
        last = turn == (ROUNDS if wish.tune else 2) - 1
        if not (wish.tune or last):
            continue
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", LapisWarning)
            posterior = laplace(model, data, likelihood, structure=wish.structure, weights="all", prior=precision)
            assert isinstance(posterior, LaplacePosterior)
            if wish.tune:
                posterior = posterior.tune(tolerated_loss=TOLERATED_LOSS if last else None, progress=False)
        if wish.tune:
            found = float(posterior.weight_prior.precision[0])
            precision = min(max(found, PRECISIONS[0]), PRECISIONS[1])
            posterior = posterior if found == precision else posterior.with_prior(precision)
            spread = posterior.likelihood.noise
            if spread is not None:
                noise = min(max(float(spread), NOISES[0]), NOISES[1])
                posterior = posterior if float(spread) == noise else posterior.with_noise(noise)
    return posterior, sorted({str(warning.message) for warning in said})


def _train(model: nn.Module, data: tuple[Tensor, Tensor], likelihood: Likelihood, precision: float) -> None:
    """Minimise -log p(y, theta)."""
    x, y = data
    weights = list(model.parameters())
    optimiser = torch.optim.LBFGS(weights, max_iter=STEPS, history_size=20, line_search_fn="strong_wolfe")
    with torch.no_grad():
        targets = likelihood.targets(y, likelihood.canonical(model(x)))

    def loss() -> Tensor:
        optimiser.zero_grad()
        total = likelihood.nll(likelihood.canonical(model(x)), targets).sum()
        total = total + 0.5 * precision * sum((w.square().sum() for w in weights), total.new_zeros(()))
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        optimiser.step(loss)  # type: ignore[no-untyped-call]


def _curve(posterior: LaplacePosterior) -> Json:
    x = torch.linspace(-EXTENT, EXTENT, CURVE, dtype=F64)
    prediction: Any = posterior.predict(x[:, None], progress=False)
    assert isinstance(prediction, RegressionPrediction)
    return {
        "x": x.tolist(),
        "mean": prediction.mean.flatten().tolist(),
        "std": prediction.std.flatten().tolist(),
        "function_std": prediction.epistemic_variance.sqrt().flatten().tolist(),
    }


def _map(posterior: LaplacePosterior, wish: Wish) -> Json:
    side = torch.linspace(-EXTENT, EXTENT, MAP, dtype=F64)
    grid = torch.cartesian_prod(side, side).flip(-1)  # rows of one height, as plotly has them
    prediction: Any = posterior.predict(grid, link=wish.link, progress=False)
    assert isinstance(prediction, ClassificationPrediction)
    return {"x": side.tolist(), "probability": prediction.probs[:, 1].reshape(MAP, MAP).tolist()}
