"""The methods: from a task to a posterior, each by one call of the library and its defaults."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lapis
from methods.task import Task

Fit = Callable[[Task], lapis.Posterior]
SAMPLES = 30
"""Networks drawn for a prediction."""


@dataclass(frozen=True)
class Method:
    """How the posterior is made, and how it predicts."""

    fit: Fit
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `predict`."""

    def posterior(self, task: Task) -> lapis.Posterior:
        return self.fit(task)


def once(name: str, fit: Fit) -> Fit:
    """Fit that is shared by several methods of the same task."""

    def fitted(task: Task) -> lapis.Posterior:
        if name not in task.posteriors:
            task.posteriors[name] = fit(task)
        return task.posteriors[name]

    return fitted


def plain(task: Task) -> lapis.Posterior:
    """The network alone: an ensemble of one."""
    return lapis.ensemble([task.network()], task.likelihood)


def laplace(structure: str, weights: str = "all", tolerated_loss: float | None = 0.004) -> Fit:
    """Laplace, tuned by the evidence; without a tolerated loss a classifier's covariance keeps its width."""

    def fit(task: Task) -> lapis.Posterior:
        posterior = lapis.laplace(task.network(), task.train, task.likelihood, structure=structure, weights=weights)
        return posterior.tune(tolerated_loss=tolerated_loss)

    return once(f"{structure}, {weights}, {tolerated_loss}", fit)


def refined(fit: Fit) -> Fit:
    return lambda task: fit(task).refine(task.train)  # type: ignore[attr-defined]


def calibrated(fit: Fit) -> Fit:
    return once("calibrated", lambda task: fit(task).calibrate(task.validation))  # type: ignore[attr-defined]


def subnetwork(variances: Fit | None = None, tolerated_loss: float | None = 0.004) -> Fit:
    """The weights of largest variance: of a diagonal Laplace posterior, or of another; the width as for `laplace`.

    Weights that no example reaches have the largest variances of all under the former, and change no prediction.
    """

    def fit(task: Task) -> lapis.Posterior:
        chosen = lapis.Subnetwork(task.subnetwork, from_=None if variances is None else variances(task))
        posterior = lapis.laplace(task.network(), task.train, task.likelihood, weights=chosen)
        return posterior.tune(tolerated_loss=tolerated_loss)

    return fit


def _swag(task: Task) -> lapis.Posterior:
    """Snapshots from the trained network on."""
    model = copy.deepcopy(task.network())
    return lapis.swag(
        model, task.train, task.likelihood, epochs=0, snapshots=task.snapshots, weight_decay=task.training.decay,
        generator=task.generator(), progress=False,
    )  # fmt: skip


swag = once("SWAG", _swag)


def dropout(task: Task) -> lapis.Posterior:
    """MC dropout of a network that was trained with dropout."""
    return lapis.dropout(task.network(dropout=task.dropout), task.likelihood)


def ensemble(task: Task) -> lapis.Posterior:
    return lapis.ensemble([task.network(number) for number in range(task.members)], task.likelihood)


def mixture(task: Task) -> lapis.Posterior:
    """The members' last-layer Laplace posteriors, with equal weights."""
    networks = [task.network(number) for number in range(task.members)]
    each = [lapis.laplace(net, task.train, task.likelihood, weights="last_layer").tune() for net in networks]
    return lapis.mixture(each, weights="uniform")


def variational(task: Task) -> lapis.Posterior:
    """Mean-field, from the trained weights on; prior precision, and Gaussian noise, by the ELBO."""
    return lapis.variational(
        task.network(), task.train, task.likelihood, tune=True, noise=task.likelihood == "regression",
        steps=task.variational_steps, generator=task.generator(), progress=False,
    )  # fmt: skip


def with_held_out_noise(fit: Fit) -> Fit:
    """A regression whose Gaussian noise is the best for the validation part, of steps of a tenth."""

    def fitted(task: Task) -> lapis.Posterior:
        posterior = fit(task)
        x, y = task.validation

        def loss(noise: float) -> float:
            candidate = dataclasses.replace(posterior, likelihood=lapis.Gaussian(noise))
            return -float(candidate.predict(x, progress=False).log_prob(y).mean())

        best = min((math.exp(0.1 * step) for step in range(-40, 11)), key=loss)
        return dataclasses.replace(posterior, likelihood=lapis.Gaussian(best))

    return fitted


LAST_LAYER = laplace("dense", "last_layer")
KRONECKER = laplace("kronecker")
DRAWN = {"samples": SAMPLES}

CLASSIFIERS: dict[str, Method] = {
    "plain": Method(plain),
    "diagonal": Method(laplace("diagonal")),
    "Kronecker": Method(KRONECKER),
    "last layer": Method(LAST_LAYER),
    "last layer, refined": Method(refined(LAST_LAYER)),
    "subnetwork": Method(subnetwork()),
    "subnetwork, by SWAG": Method(subnetwork(swag)),
    "SWAG": Method(swag, DRAWN),
    "dropout": Method(dropout, DRAWN),
    "ensemble": Method(ensemble),
    "mixture": Method(mixture),
    "VI": Method(variational, DRAWN | {"method": "sampled"}),
}

DENSE = laplace("dense")
REGRESSIONS: dict[str, Method] = {
    "plain": Method(with_held_out_noise(plain)),
    "linearised": Method(DENSE),
    "sampled": Method(DENSE, {"method": "sampled", "samples": 100}),
    "refined": Method(refined(DENSE)),
    "VI": Method(variational, {"method": "sampled", "samples": 100}),
    "dropout": Method(with_held_out_noise(dropout), {"samples": 100}),
    "SWAG": Method(with_held_out_noise(swag), {"samples": 100}),
    "ensemble": Method(with_held_out_noise(ensemble)),
}
