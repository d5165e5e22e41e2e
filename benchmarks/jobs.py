"""The jobs, as Lapis does them.

A job's name is a structure (`kron`, `diag`, `dense`, or `last`: the last layer with Kronecker factors) and an action.
Biases have Kronecker blocks of their own (`bias="separate"`), as the peers have it: then both compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lapis
from benchmarks.cases import Problem
from lapis.batches import batches
from lapis.curvature.products.jacobian import Jacobian
from lapis.network import Network

SAMPLES = 20
MOST_ENTRIES = 20_000
"""Answers longer than this are thinned before they are compared."""

ACTIONS = {
    "fit": "{} fit",
    "sampled": "{} fit, sampled curvature",
    "ready": "{} fit and log evidence",
    "predict64": "linearised prediction, {}, 64 points",
    "predict256": "linearised prediction, {}, 256 points",
    "predict256_diagonal": "linearised prediction, {}, 256 points, variances only",
    "predict_all": "linearised prediction, {}, all points, variances only",
    "sample": f"{SAMPLES} sampled networks, {{}}, 256 points",
    "evidence": "log evidence and its gradient, {}",
    "tune": "tuning the prior, {}",
    "vectors1": "{} product, 1 vector",
    "vectors8": "{} product, 8 vectors",
}
STRUCTURES = {"ggn": "GGN", "kron": "Kronecker", "diag": "diagonal", "dense": "dense", "last": "last layer"}


def split(job: str) -> tuple[str, str]:
    """Structure and action."""
    structure, _, action = job.partition("_")
    return structure, action


def title(job: str) -> str:
    structure, action = split(job)
    return ACTIONS[action].format(STRUCTURES[structure])


def points(action: str) -> int:
    return 64 if action == "predict64" else 256


def block(problem: Problem, action: str) -> Tensor:
    """The vectors (k, P) that everybody multiplies with."""
    size = sum(p.numel() for p in problem.model.parameters())
    return torch.randn(int(action.removeprefix("vectors")), size, generator=torch.Generator().manual_seed(4))


@dataclass(frozen=True)
class Task:
    """What is measured, and how to read numbers off its result that others should get too (None when random)."""

    run: Callable[[], Any]
    answer: Callable[[Any], Tensor | None]


def thin(answer: Tensor) -> Tensor:
    flat = answer.detach().double().flatten()
    return flat[:: -(-len(flat) // MOST_ENTRIES)]


def product(problem: Problem, action: str) -> Task:
    """The GGN of the summed loss times vectors, over all data, with nothing kept of the Jacobian between products."""
    network = Network(problem.model)
    regression = problem.case.likelihood == "regression"
    likelihood: Any = lapis.Gaussian(1.0) if regression else lapis.Categorical()
    held = list(batches(problem.batches, dtype=network.dtype, device=network.device)[0])
    jacobian = Jacobian(network, likelihood.canonical, held, kept_bytes=0, mode="fastest")
    targets = [
        likelihood.targets(batch.targets, f, shape)
        for batch, f, shape in zip(held, jacobian.outputs, jacobian.shapes, strict=True)
    ]
    vectors = block(problem, action)
    jacobian.ggn(vectors, likelihood, targets)  # the first product of a network times the modes and proves them
    return Task(lambda: jacobian.ggn(vectors, likelihood, targets), lambda products: products)


def prepare(job: str, problem: Problem) -> Task:
    structure, action = split(job)
    if structure == "ggn":
        return product(problem, action)
    options: dict[str, Any] = {
        "kron": {"structure": "kronecker", "bias": "separate"},
        "diag": {"structure": "diagonal"},
        "dense": {"structure": "dense"},
        "last": {"structure": "kronecker", "bias": "separate", "weights": "last_layer"},
    }[structure]

    options["curvature"] = "sampled" if action == "sampled" else "exact"

    def fit() -> lapis.LaplacePosterior:
        return lapis.laplace(problem.model, problem.batches, problem.case.likelihood, progress=False, **options)

    def ready() -> tuple[lapis.LaplacePosterior, Tensor]:
        posterior = fit()
        return posterior, posterior.log_evidence()

    if action in ("fit", "sampled"):
        return Task(fit, lambda posterior: posterior.marginal_variance())
    if action == "ready":
        return Task(ready, lambda result: result[1])
    posterior, _ = ready()
    if action.startswith("predict"):
        x = problem.batches.dataset.tensors[0] if action == "predict_all" else problem.points(points(action))
        covariance = "full" if action in ("predict64", "predict256") else "diagonal"

        def moments_or_probabilities(prediction: Any) -> Tensor:
            if problem.case.likelihood == "regression":
                return torch.stack([prediction.f_mean, prediction.f_variance])
            return prediction.probs

        return Task(lambda: posterior.predict(x, covariance=covariance), moments_or_probabilities)
    if action == "sample":
        x = problem.points(points(action))
        return Task(lambda: posterior.predict(x, method="sampled", samples=SAMPLES), lambda _: None)
    if action == "evidence":

        def evidence() -> Tensor:
            precision = torch.ones((), dtype=torch.float64, requires_grad=True)
            value = posterior.with_prior(precision).log_evidence()
            return torch.stack([value, *torch.autograd.grad(value, precision)])

        return Task(evidence, lambda values: values)
    return Task(lambda: posterior.tune(noise=False), lambda tuned: tuned.log_evidence())
