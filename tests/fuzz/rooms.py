"""Right values in rooms with words of their own: learning rule, optimisers, active and life-long learning."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

import lapis
from fuzz.worlds import World
from lapis import learning_rule, lifelong

Make = Callable[[World, Random, Any], Any]

SIZE = 4
"""Weights of the families."""


def normal(r: Random, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(r.randrange(5)))


def share(r: Random) -> Tensor:
    return normal(r, SIZE).sigmoid()


def definite(r: Random, size: int) -> Tensor:
    root = normal(r, size, size)
    return root @ root.mT + torch.eye(size, dtype=torch.float64)


def components(r: Random) -> tuple[Any, ...]:
    return tuple(learning_rule.DiagonalGaussian(normal(r, SIZE), share(r) + 0.5) for _ in range(2))


FAMILIES: tuple[Callable[[Random], Any], ...] = (
    lambda r: learning_rule.Bernoulli(normal(r, SIZE)),
    lambda r: learning_rule.Categorical(normal(r, SIZE)),
    lambda r: learning_rule.Dirichlet(share(r) + 0.5),
    lambda r: learning_rule.DiagonalGaussian(normal(r, SIZE), share(r) + 0.5),
    lambda r: learning_rule.FullGaussian(normal(r, SIZE), definite(r, SIZE)),
    lambda r: learning_rule.FixedGaussian(normal(r, SIZE)),
    lambda r: learning_rule.KroneckerGaussian(normal(r, SIZE), definite(r, 2), definite(r, 2)),
    lambda r: learning_rule.SpikeAndSlab(normal(r, SIZE), share(r) + 0.5, share(r)),
    lambda r: learning_rule.FixedSpikeAndSlab(normal(r, SIZE), share(r), 2.0),
    lambda r: learning_rule.GaussianMixture(components(r)),
)


LEARNERS: tuple[Any, ...] = (
    lifelong.EWC, lifelong.FROMP, lifelong.SI, lifelong.VCL, lifelong.FineTuning, lifelong.Joint,
    lifelong.OnlineLaplace, lifelong.Replay,
)  # fmt: skip


def learner(w: World, kind: Any) -> Any:
    """One that has learnt a task."""
    made = kind(w.copy_of_model(), w.likelihood, epochs=1)
    made.learn(w.data)
    return made


def learner_file(w: World, r: Random) -> Any:
    path = w.folder / "learner"
    lifelong.FineTuning(w.copy_of_model(), w.likelihood, epochs=1).save(path)
    return path


def quadratic(theta: Tensor) -> Tensor:
    """A loss of single weights."""
    return (theta - 0.3).square().sum()


IN: dict[str, dict[str, Make]] = {
    "learning_rule": {
        "mean": lambda w, r, o: normal(r, SIZE),
        "logits": lambda w, r, o: normal(r, SIZE),
        "slab": lambda w, r, o: normal(r, SIZE),
        "keep": lambda w, r, o: share(r),
        "precision": lambda w, r, o: share(r) + 0.5,
        "concentration": lambda w, r, o: share(r) + 0.5,
        "covariance": lambda w, r, o: r.choice([None, definite(r, SIZE)]),
        "rows": lambda w, r, o: definite(r, 2),
        "columns": lambda w, r, o: definite(r, 2),
        "groups": lambda w, r, o: r.choice([None, torch.tensor([0, 0, 1, -1])]),
        "components": lambda w, r, o: components(r),
        "weights": lambda w, r, o: None,
        "q": lambda w, r, o: r.choice(FAMILIES)(r),
        "loss": lambda w, r, o: quadratic,
        "rate": lambda w, r, o: r.choice([0.1, 0.5]),
        "curvature": lambda w, r, o: r.choice([None, None, "hessian", "squared_gradients"]),
        "max_iterations": lambda w, r, o: r.choice([1, 3]),
        "batched": lambda w, r, o: False,
    },
    "FullGaussian": {"precision": lambda w, r, o: definite(r, SIZE)},
    "FixedSpikeAndSlab": {"precision": lambda w, r, o: 2.0},
    "family": {
        "theta": lambda w, r, o: o.sample(2),
        "natural": lambda w, r, o: o.natural(),
        "expectation": lambda w, r, o: o.expectation(),
    },
    "optim": {
        "params": lambda w, r, o: list(w.copy_of_model().parameters()),
        "model": lambda w, r, o: w.copy_of_model(),
        "data_size": lambda w, r, o: len(w.targets),
        "betas": lambda w, r, o: (0.9, 0.99),
    },
    "active": {"pool": lambda w, r, o: w.inputs, "n": lambda w, r, o: r.choice([1, 2])},
    "learn": {
        "fit": lambda w, r, o: lambda data: lapis.laplace(w.model, data, w.likelihood, structure="diagonal"),
        "pool": lambda w, r, o: w.data,
        "budget": lambda w, r, o: 3,
        "start": lambda w, r, o: 2,
        "each": lambda w, r, o: 1,
    },
    "lifelong": {
        "model": lambda w, r, o: w.copy_of_model(),
        "data": lambda w, r, o: w.data,
        "heads": lambda w, r, o: None,
        "head": lambda w, r, o: None,
        "epochs": lambda w, r, o: 1,
        "learning_rate": lambda w, r, o: r.choice([None, 1e-3]),
        "batch_size": lambda w, r, o: r.choice([None, 2]),
        "points": lambda w, r, o: 2,
        "coreset": lambda w, r, o: r.choice([None, 2]),
        "deviation": lambda w, r, o: None,
        "prior": lambda w, r, o: r.choice([0.5, 2.0]),
        "jitter": lambda w, r, o: 1e-6,
        "samples": lambda w, r, o: None,
        "method": lambda w, r, o: r.choice([None, "network"]),
        "make": lambda w, r, o: lambda: lifelong.FineTuning(w.copy_of_model(), w.likelihood, epochs=1),
        "lessons": lambda w, r, o: [lifelong.Lesson(w.data, w.data)],
        "after": lambda w, r, o: -1,
    },
    "lifelong.load": {
        "path": lambda w, r, o: learner_file(w, r),
        "likelihood": lambda w, r, o: None,
        "optimiser": lambda w, r, o: None,
    },
}
"""Joined to `values.IN`."""
