"""The probabilistic deep image prior from end to end: train, linearise, tune, condition."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.errors import DataError, LapisWarning, MemoryBudgetError, ModelError, OptionError
from lapis.imaging.deep.training import Task, fit_image
from lapis.imaging.deep.unet import UNet
from lapis.imaging.operators.linear import LinearOperator, plain
from lapis.imaging.reconstruction import Centre, Reconstruction
from lapis.imaging.tangent.exact import ExactModel, ExactPosterior
from lapis.imaging.tangent.filters import blocks_of
from lapis.imaging.tangent.iterative import IterativeModel, IterativePosterior
from lapis.imaging.tangent.linearised import TangentImage
from lapis.imaging.tangent.tuning import Groups, Point, Tuned, evidence_at, tuned_posterior
from lapis.network.untouched import restored_modes
from lapis.options import check_arguments, check_positive

NOISE_SHARE = 0.05
"""Noise to begin with when none is stated, relative to the mean absolute measurement."""
MISFIT = 5.0
"""Root mean squared misfit over the stated noise above which a network does not explain the data: a warning."""
NEW_RATE, GIVEN_RATE = 0.16, 3e-3
"""Steps of Adam: over the channels of a U-net made here; for any other network."""


def reconstruct(
    operator: LinearOperator,
    data: Any,
    *,
    noise: float | None = None,
    iterations: int = 1000,
    generator: torch.Generator | None = None,
    network: nn.Module | None = None,
    channels: Sequence[int] = (16, 16, 16),
    bounds: tuple[float, float] = (0.0, 1.0),
    variation: float | None = None,
    complexity: bool = False,
    groups: Groups = "blocks",
    rate: float | None = None,
    stopping: Literal["iterations", "evidence"] = "iterations",
    centre: Centre = "discrepancy",
    point: Point = "trained",
    method: Literal["auto", "exact", "iterative"] = "auto",
    tuning_steps: int | None = None,
    memory_budget: int = 2 * 2**30,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Reconstruction:
    """Reconstruct an image from y = A x + noise, with a posterior: the probabilistic deep image prior.

    A U-net is trained to explain the measurements; linearised at its trained weights it is a Gaussian model of images,
    whose prior variances, length scales and noise are tuned by the evidence, all in the space of the measurements.

    Args:
        operator: A: `RayTransform`, or any `LinearOperator`.
        data: y, in the operator's form or flat.
        noise: its standard deviation, in the units of the data. None tunes it by the evidence.
        iterations: of training.
        generator: of first weights and random vectors; seed 0 when None.
        network: makes images (1, height, width) of (1, 1, height, width); trained in place. A new `UNet` when None.
        channels: of that one's scales; (32, 32, 32) in the publication.
        bounds: of the pixels.
        variation: weight of the total variation in training, and rate of the complexity prior: minus the log density
            per unit of TV. 1 / (high - low) when None; 0 trains without (and needs complexity=False).
        complexity: tune with the predictive complexity prior on the total variation.
        groups: a prior variance and length scale for each of the network's "blocks", or "one" for all.
        rate: of training, the largest step of Adam. When None, 0.16 / channels for a new network, 0.003 for one given.
        stopping: train for all iterations, or stop by the evidence at `point` (ten looks, each as long as a tuning).
        centre: of the posterior: the "network" image, as published; the "tangent" (linear) model's own mean; or by
            "discrepancy" the network's image, moved towards that mean as far as the data ask for: not at all where the
            network explains them (docs/tomography.md).
        point: where tuning takes the evidence: at the "trained" weights, or at the linear model's own "mode", which is
            the exact evidence of that model. That is calibrated for a network with group norm, trained to the end;
            for others far smaller weights explain the data, and its error bars are too small (docs/tomography.md).
        method: "exact" holds J in memory, "iterative" works by products; "auto" takes what fits the budget.
        tuning_steps: at most; 100 evaluations of an exact evidence, 30 by probes when None.
        memory_budget: bytes that the exact method may take.
        checkpoint: a file in which training goes on after an interruption.
        progress: show bars (None: on a terminal only).

    Antoran, Barbano, Leuschner, Hernandez-Lobato, Jin, "A probabilistic deep image prior for computational tomography",
    2022.
    """
    noise, iterations, variation, rate = map(plain, (noise, iterations, variation, rate))
    check_arguments(reconstruct, locals(), signed=("bounds",), apart=("variation",))
    if variation is not None:
        check_positive("variation", variation, or_zero=not complexity)
    low, high = bounds
    if low >= high:
        raise OptionError("Bad bounds", expected="low < high", got=repr(bounds), do="pass the range of the pixels")
    y = operator.flat(data)
    if noise is None and not y.any():
        raise DataError(
            "There is nothing to reconstruct", expected="measurements other than zero", got="zeros",
            do="check the data, or state their noise",
        )  # fmt: skip
    guess = _checked_guess(operator, y, low, high)
    source = generator or torch.Generator().manual_seed(0)
    seed = int(torch.randint(2**62, (), generator=source, device=source.device))
    if network is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = UNet(channels, bounds=bounds).start_at(float(guess.mean()))
        rate = rate or NEW_RATE / max(channels)
    kind = _checked_network(network, operator)
    rate = rate or GIVEN_RATE
    start = noise or NOISE_SHARE * float(y.abs().mean())
    variation = 1 / (high - low) if variation is None else variation
    inputs = ((guess - low) / (high - low))[None, None].to(kind)
    task = Task(operator, y.to(kind), inputs, start, variation, iterations, rate, seed)

    settings: dict[str, Any] = {"fixed_noise": noise is not None, "complexity": variation if complexity else None}
    settings |= {"point": point, "groups": groups, "steps": tuning_steps, "progress": progress}

    def posterior() -> tuple[ExactPosterior | IterativePosterior, Tuned]:
        probed = torch.Generator().manual_seed(seed)  # the same at every look, also after an interruption
        model = _model(network, inputs, operator, y, method, memory_budget, probed, progress)
        return tuned_posterior(model, start**2, **settings)

    watch: Callable[[], float] | None = None
    if stopping == "evidence":
        watch = lambda: evidence_at(posterior()[0], point)  # noqa: E731
    trained = fit_image(network, task, watch=watch, checkpoint=checkpoint, progress=progress)
    found, tuned = posterior()
    made = Reconstruction(operator, network, trained, found, tuned, variation, start, centre, seed)
    if noise is not None and made.misfit > MISFIT:
        warnings.warn(
            f"The trained network does not explain the data: its root mean squared misfit is {made.misfit:.1f} x the "
            "stated noise, and its linear model may be far off. Train for more iterations, or check noise and bounds.",
            LapisWarning,
            stacklevel=2,
        )
    return made


def _model(
    network: nn.Module,
    inputs: Tensor,
    operator: LinearOperator,
    data: Tensor,
    method: str,
    memory_budget: int,
    generator: torch.Generator,
    progress: bool | None,
) -> ExactModel | IterativeModel:
    """The tangent model: in float64 with J in memory, or in the network's dtype by products."""
    tangent = TangentImage(network, inputs, torch.float64 if method != "iterative" else inputs.dtype)
    needed = ExactModel.bytes_needed(tangent, operator)
    if method == "exact" and needed > memory_budget:
        raise MemoryBudgetError(
            "The Jacobian does not fit the memory budget",
            expected=f"at most {memory_budget / 2**30:.2g} GiB",
            got=f"about {needed / 2**30:.2g} GiB",
            do='raise memory_budget, or use method="iterative"',
        )
    if method != "iterative" and needed <= memory_budget:
        return ExactModel(tangent, operator, data, progress)
    if tangent.dtype != inputs.dtype:
        tangent = TangentImage(network, inputs, inputs.dtype)
    return IterativeModel(tangent, operator, data, generator)


def _checked_network(network: nn.Module, operator: LinearOperator) -> torch.dtype:
    """The dtype of its weights; ModelError unless it makes images of the operator's size, on the CPU."""
    first = next(network.parameters(), None)
    if first is None or first.device.type != "cpu" or first.dtype not in (torch.float32, torch.float64):
        raise ModelError(
            "The network cannot be used",
            expected="float32 or float64 weights on the CPU",
            got="none" if first is None else f"{first.dtype} on {first.device}",
            do="move the network",
        )
    blocks_of(network)
    with torch.no_grad(), restored_modes(network):
        network.eval()
        shape = tuple(network(torch.zeros(1, 1, *operator.image_shape, dtype=first.dtype)).shape)
    if shape != (1, *operator.image_shape):
        raise ModelError(
            "The network makes no such images",
            expected=f"(1, {operator.image_shape[0]}, {operator.image_shape[1]})",
            got=str(shape),
            do="return one image, without an axis of channels",
        )
    return first.dtype


def _checked_guess(operator: LinearOperator, data: Tensor, low: float, high: float) -> Tensor:
    """A rough image; DataError if its mean is far outside the bounds, which the network could then never explain."""
    guess = operator.guess(data)
    mean, span = float(guess.mean()), high - low
    if not low - span <= mean <= high + span:
        raise DataError(
            "The data belong to an image outside the bounds",
            expected=f"pixels from {low:g} to {high:g}",
            got=f"a rough image with mean {mean:.3g}",
            do="pass bounds, or scale the data",
        )
    return guess
