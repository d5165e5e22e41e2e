"""One pass over data for a report: scores, doubts and the examples that a posterior is least sure of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapis.batches import Inputs, batches, map_tensors, naming
from lapis.posteriors import Posterior
from lapis.posteriors.diagnosis.scores import Scores, plain_prediction
from lapis.predictions import ClassificationPrediction, NumericPrediction, Prediction, RegressionPrediction
from lapis.progress import track

SHOWN = 12
"""Least certain examples that are kept with their inputs."""

POINTS = 400
"""Targets of a regression that are kept for plots: the first ones."""


@dataclass(frozen=True)
class Example:
    """One example, with what is known about it."""

    index: int
    inputs: Inputs
    """With a batch axis of one."""
    target: Tensor
    doubt: float
    answer: Tensor
    """Probabilities (K,) of classes; mean and standard deviation (2,) of a number; empty where there are positions."""


@dataclass
class Judged:
    """What one posterior says about data with targets."""

    posterior: Scores = field(default_factory=Scores)
    plain: Scores = field(default_factory=Scores)
    doubts: list[Tensor] = field(default_factory=list)
    """Of each example, mean over its positions: predictive entropy, or the standard deviation of the function."""
    confidences: list[Tensor] = field(default_factory=list)
    """Largest probability of each example's classes, mean over positions."""
    pits: list[Tensor] = field(default_factory=list)
    """P(target <= observed) of real targets."""
    points: list[Tensor] = field(default_factory=list)
    """(n, 3): mean, standard deviation and target of real targets or counts."""
    inputs: list[Tensor] = field(default_factory=list)
    """The first inputs themselves, (n, 1), if they are single numbers."""
    examples: list[Example] = field(default_factory=list)
    count: int = 0


def judged(posterior: Posterior, data: Any, batch_size: int | None, progress: bool | None) -> Judged:
    """Predict the data batch by batch, beside the network alone."""
    network, likelihood, found = posterior.network, posterior.likelihood, Judged()
    stream, total = batches(data, dtype=network.dtype, device=network.device, batch_size=batch_size)
    for batch in track(stream, "report", total, progress):
        with naming(batch.where):
            with network.prepared(), torch.no_grad():
                raw = network.call(batch.inputs)
                f = likelihood.canonical(raw).detach()
            prediction = posterior.predict(batch.inputs, progress=False)
            found.plain.add(plain_prediction(likelihood, f, tuple(raw.shape)), batch.targets)
            found.posterior.add(prediction, batch.targets)
            _add(found, prediction, batch.inputs, batch.targets)
        found.count += len(batch)
    return found


def doubt(prediction: Prediction) -> Tensor:
    """One number an example, (B,) float64, larger where the posterior knows less."""
    if isinstance(prediction, ClassificationPrediction):
        value = prediction.entropy
    elif isinstance(prediction, NumericPrediction):
        value = prediction.epistemic_variance.sqrt()
    else:
        value = prediction.f_variance.clamp_min(0).sqrt()
    return value.detach().double().cpu().flatten(1).mean(1) if value.dim() > 1 else value.detach().double().cpu()


def confidence(prediction: ClassificationPrediction) -> Tensor:
    """The largest probability, mean over positions and labels, (B,) float64."""
    probs = prediction.likelihood.canonical(prediction.probs).detach().double().cpu()
    top = torch.maximum(probs, 1 - probs) if prediction.likelihood.name == "bernoulli" else probs.amax(-1)
    return top.flatten(1).mean(1)


def _add(found: Judged, prediction: Prediction, inputs: Inputs, targets: Tensor) -> None:
    doubts = doubt(prediction)
    found.doubts.append(doubts)
    likelihood = prediction.likelihood
    answers = torch.empty(len(doubts), 0)
    if isinstance(prediction, ClassificationPrediction):
        found.confidences.append(confidence(prediction))
        probs = likelihood.canonical(prediction.probs).detach().double().cpu()
        if probs.shape[1] == 1:
            answers = probs[:, 0]
    elif isinstance(prediction, NumericPrediction):
        canonical = likelihood.targets(targets, prediction.latent.mean, prediction.raw_shape)
        mean, std = (likelihood.canonical(value).detach().double().cpu() for value in (prediction.mean, prediction.std))
        triples = torch.stack([mean, std, canonical.double().cpu()], -1)
        if triples[0].numel() == 3:
            answers = triples[:, 0, 0, :2]
        if isinstance(prediction, RegressionPrediction):
            found.pits.append(prediction._cumulative(canonical.double()).detach().cpu().flatten())
        room = POINTS - sum(map(len, found.points))
        if room > 0:
            found.points.append(triples.reshape(-1, 3)[:room])
            if isinstance(inputs, Tensor) and inputs[0].numel() == 1 and triples[0].numel() == 3:
                found.inputs.append(inputs.detach().double().cpu().reshape(-1, 1)[:room])
    for place in doubts.argsort(descending=True)[:SHOWN].tolist():
        one = map_tensors(lambda tensor, at=place: tensor[at : at + 1].detach().cpu(), inputs)  # type: ignore[misc]
        found.examples.append(
            Example(found.count + place, one, targets[place].detach().cpu(), float(doubts[place]), answers[place])
        )
    found.examples = sorted(found.examples, key=lambda example: -example.doubt)[:SHOWN]
