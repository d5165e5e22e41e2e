"""The cases of `benchmarks.memory`: networks and data whose work overflows a small budget unless it is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import lapis
from lapis.network import Network

MEGABYTE = 2**20
SMALL = 64 * MEGABYTE
FEW = 4
"""Examples of the run that loads code."""


@dataclass(frozen=True)
class Task:
    """What is measured, and which tensors of its result count as the result."""

    run: Callable[[], Any]
    kept: Callable[[Any], Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    title: str
    task: Callable[[int, bool], Task]
    """What to run under a budget; with True, on a few examples only."""
    budget: int = SMALL


@dataclass(frozen=True)
class Problem:
    """A network with random weights and data: memory does not depend on how well it was trained."""

    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    positions: tuple[int, ...] = ()

    def make(self, examples: int) -> tuple[nn.Module, Tensor, Tensor]:
        torch.manual_seed(0)
        x, y = torch.randn(examples, *self.shape), torch.randint(self.classes, (examples, *self.positions))
        return self.network().eval(), x, y

    @property
    def likelihood(self) -> lapis.likelihoods.Likelihood:
        return lapis.likelihoods.Categorical(channels="first" if self.positions else "last")


def _mlp(*widths: int) -> Callable[[], nn.Module]:
    def network() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    return network


def _pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 3, padding=1))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


PIXELS = Problem(_pixels, (1, 32, 32), 5, (32, 32))
CLASSES = Problem(_mlp(50, 64, 200), (50,), 200)
MILLION = Problem(_mlp(784, 1000, 200, 10), (784,), 10)
IMAGES = Problem(_cnn, (3, 32, 32), 10)
SMALL_NETWORK = Problem(_mlp(10, 60, 20, 3), (10,), 3)


def _fit(
    problem: Problem, structure: str, examples: int, use: Callable[[Any], Any] | None = None, **options: Any
) -> Any:
    """A fit to one batch of a user's loader, and what is asked of it then."""

    def task(budget: int, few: bool) -> Task:
        model, x, y = problem.make(FEW if few else examples)

        def run() -> Any:
            fitted = lapis.laplace(
                model, [(x, y)], problem.likelihood, structure=structure, memory_budget=budget, **options
            )
            return fitted, use and use(fitted)

        return Task(run, lambda found: _tensors(found[0].state().tensors) + _tensors(found[1]) + _held(found[0]))

    return task


def _use(
    problem: Problem,
    structure: str,
    examples: int,
    use: Callable[[Any, Tensor], Any],
    *,
    fitted: int = 64,
    prepare: Callable[[Any], Any] = lambda posterior: posterior,
    **options: Any,
) -> Any:
    """Something asked of a posterior that was fitted before, to few examples."""

    def task(budget: int, few: bool) -> Task:
        model, x, y = problem.make(max(fitted, examples))
        count = FEW if few else examples
        posterior = lapis.laplace(
            model, (x[:fitted], y[:fitted]), problem.likelihood, structure=structure, batch_size=8, **options
        )
        posterior = prepare(posterior)
        posterior = replace(posterior, facts=replace(posterior.facts, memory_budget=budget))
        inputs, before = x[:count].clone(), _reachable(posterior)
        known = {tensor.untyped_storage().data_ptr() for tensor in before}

        def kept(found: Any) -> list[Tensor]:
            """The result, and what the posterior keeps from now on: eigenvectors, casts."""
            held = [t for t in _reachable(posterior) if t.untyped_storage().data_ptr() not in known]
            return _tensors(found) + held

        return Task(lambda: use(posterior, inputs), kept)

    return task


def _predict(**options: Any) -> Callable[[Any, Tensor], Any]:
    """A prediction with its probabilities and entropies."""

    def use(posterior: Any, x: Tensor) -> Any:
        prediction = posterior.predict(x, **options)
        return prediction.latent, prediction.probs, prediction.mutual_information

    return use


def _held(posterior: Any) -> list[Tensor]:
    """What a posterior keeps that is not in its file: outputs and targets of the data, or a sample of these."""
    curvature = posterior.curvature
    if hasattr(curvature, "jacobian"):
        return [*curvature.jacobian.outputs, *curvature.targets]
    return [tensor for batch in curvature.sample.batches() for tensor in (batch.inputs, batch.targets)]


def _reachable(thing: Any) -> list[Tensor]:
    """Every dense tensor that an object of Lapis holds, its network excepted."""
    seen: dict[int, Any] = {}
    queue, tensors = [thing], []
    while queue:
        each = queue.pop()
        if id(each) in seen or isinstance(each, (Network, torch.nn.Module)):
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            tensors.append(each)
        elif isinstance(each, dict):
            queue += each.values()
        elif isinstance(each, (list, tuple, set)):
            queue += each
        elif type(each).__module__.startswith("lapis."):
            queue += vars(each).values() if hasattr(each, "__dict__") else []
    return tensors


def _tensors(found: Any) -> list[Tensor]:
    """Every tensor in a result."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, dict):
        found = list(found.values())
    elif hasattr(found, "__dataclass_fields__"):
        found = [getattr(found, name) for name in found.__dataclass_fields__]
    if isinstance(found, (list, tuple)):
        return [tensor for each in found for tensor in _tensors(each)]
    return []


CASES = {
    # an output for every pixel
    "pixels_kron_full": Case(
        "Kronecker, 50 images of 32 x 32 pixels, 5 classes a pixel", _use(PIXELS, "kronecker", 50, _predict())
    ),
    "pixels_kron_variances": Case(
        "the same, variances only", _use(PIXELS, "kronecker", 50, _predict(covariance="diagonal"))
    ),
    "pixels_diagonal": Case("the same, diagonal posterior", _use(PIXELS, "diagonal", 50, _predict())),
    "pixels_last_layer": Case(
        "the same, last layer only, 200 images", _use(PIXELS, "kronecker", 200, _predict(), weights="last_layer")
    ),
    "pixels_sampled": Case(
        "the same, 20 drawn networks", _use(PIXELS, "kronecker", 50, _predict(method="sampled", samples=20))
    ),
    "pixels_draws": Case(
        "the same, from 8 draws of an implicit posterior",
        _use(PIXELS, "implicit", 50, _predict(), fitted=2, prepare=lambda posterior: posterior.draw(8)),
    ),
    "pixels_fit": Case(
        "Kronecker fit, one batch of 500 such images", _fit(PIXELS, "kronecker", 500, curvature="sampled")
    ),
    # many classes
    "classes_kron_fit": Case("Kronecker fit, one batch of 20,000 x 200 classes", _fit(CLASSES, "kronecker", 20_000)),
    "classes_diagonal_fit": Case("the same, diagonal", _fit(CLASSES, "diagonal", 20_000)),
    "classes_ekfac_fit": Case("the same, EKFAC", _fit(CLASSES, "ekfac", 20_000)),
    "classes_last_layer_fit": Case(
        "the same, last layer only", _fit(CLASSES, "kronecker", 20_000, weights="last_layer")
    ),
    "classes_implicit_fit": Case(
        "the same, implicit, with one draw",
        _fit(CLASSES, "implicit", 20_000, lambda p: p.with_solver(max_iterations=3).sample(1)),
    ),
    "classes_lowrank_fit": Case("the same, rank 4", _fit(CLASSES, "lowrank", 20_000, rank=4)),
    "classes_full": Case(
        "full covariances of 200 classes, 300 examples, Kronecker",
        _use(CLASSES, "kronecker", 300, _predict(covariance="full")),
    ),
    "classes_full_diagonal": Case(
        "the same, diagonal posterior", _use(CLASSES, "diagonal", 300, _predict(covariance="full"))
    ),
    "classes_variances": Case(
        "variances of 200 classes, 10,000 examples", _use(CLASSES, "kronecker", 10_000, _predict())),
    "classes_sampled": Case(
        "20 drawn networks, 10,000 x 200 classes", _use(CLASSES, "kronecker", 10_000, _predict(method="sampled"))
    ),
    # many weights
    "million_kron_sample": Case(
        "200 draws of 987,210 weights, Kronecker", _use(MILLION, "kronecker", 200, lambda p, x: p.sample(len(x)))
    ),
    "million_diagonal_sample": Case(
        "the same, diagonal", _use(MILLION, "diagonal", 200, lambda p, x: p.sample(len(x)))
    ),
    "million_lowrank_sample": Case(
        "20 draws, rank 2", _use(MILLION, "lowrank", 20, lambda p, x: p.sample(len(x)), rank=2)
    ),
    "million_implicit_sample": Case(
        "20 draws, implicit",
        _use(
            MILLION, "implicit", 20, lambda p, x: p.sample(len(x)),
            prepare=lambda p: p.with_solver(max_iterations=3),
        ),
        128 * MEGABYTE,
    ),
    "million_predict": Case("linearised prediction, 2,000 examples", _use(MILLION, "kronecker", 2000, _predict())),
    "million_sampled": Case(
        "20 drawn networks, 5,000 examples", _use(MILLION, "kronecker", 5000, _predict(method="sampled"))
    ),
    # convolutions
    "images_kron_fit": Case("Kronecker fit, one batch of 2,000 images of 3 x 32 x 32", _fit(IMAGES, "kronecker", 2000)),
    "images_diagonal_fit": Case("the same, diagonal", _fit(IMAGES, "diagonal", 1000)),
    "images_implicit_fit": Case(
        "the same, implicit, with one draw",
        _fit(IMAGES, "implicit", 2000, lambda p: p.with_solver(max_iterations=2).sample(1)),
    ),
    "images_lowrank_fit": Case("the same, rank 2, 500 images", _fit(IMAGES, "lowrank", 500, rank=2)),
    "images_predict": Case("linearised prediction, 500 images", _use(IMAGES, "kronecker", 500, _predict())),
    "images_sampled": Case(
        "20 drawn networks, 2,000 images", _use(IMAGES, "kronecker", 2000, _predict(method="sampled"))
    ),
    "images_draws": Case(
        "prediction from 4 draws, 1,000 images",
        _use(IMAGES, "implicit", 1000, _predict(), fitted=8, prepare=lambda posterior: posterior.draw(4)),
    ),
    # all weights together
    "dense_fit": Case(
        "dense fit and evidence, 1,943 weights, one batch of 20,000",
        _fit(SMALL_NETWORK, "dense", 20_000, lambda p: p.log_evidence()),
        128 * MEGABYTE,
    ),
    "dense_predict": Case(
        "dense prediction, 20,000 examples", _use(SMALL_NETWORK, "dense", 20_000, _predict()), 128 * MEGABYTE
    ),
    "dense_joint": Case(
        "joint prediction of 500 examples", _use(SMALL_NETWORK, "dense", 500, _predict(joint=True)), 128 * MEGABYTE
    ),
}  # fmt: skip
