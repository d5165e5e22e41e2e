"""The columns of the table: how predictions are made from a trained network.

A column is a function of `Fits`, which holds one trained network and what was fitted to it already, so that the README
recipe is fitted once and refined and calibrated from there. Seconds of a column are those of all that it needs.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from methods.rows import NotThere, OverTime
from scipy import optimize, stats
from torch import Tensor

import lapis
from lapis.likelihoods.heteroscedastic import split
from trust.data import ROOT
from trust.scores import Answers, Density
from trust.settings import CACHE, Loaded

PEER = ROOT / ".venv-bench" / "bin" / "python"
PARTS = ("test", "shifted", "ood")


def readme_recipe(loaded: Loaded, weights: str | None = None) -> Any:
    """The lines of the README, up to `predict`; on other weights than the default where they are named."""
    named = {} if weights is None else {"weights": weights}
    return lapis.laplace(loaded.model, loaded.train, loaded.likelihood, **named).tune()


@dataclass
class Fits:
    """One trained network, the posteriors fitted to it so far, and the seconds that each took."""

    loaded: Loaded
    cache: Path = CACHE
    limit: float | None = None
    """Seconds of the processor that another process may take."""
    posteriors: dict[tuple[str | None, ...], tuple[Any, float]] = field(default_factory=dict)

    def posterior(self, weights: str | None, *steps: str) -> tuple[Any, float]:
        """The README recipe on these weights, then the steps listed; and the seconds of it all.

        Steps: "refined", "calibrated" (prior precisions), "sharpened" (calibrated, with temperature).
        """
        key = (weights, *steps)
        if key not in self.posteriors:
            before, seconds = self.posterior(weights, *steps[:-1]) if steps else (None, 0.0)
            started = time.process_time()
            if not steps:
                after = readme_recipe(self.loaded, weights)
            elif steps[-1] == "refined":
                after = before.refine(self.loaded.train)
            else:
                after = before.calibrate(self.loaded.validation, temperature=steps[-1] == "sharpened")
            self.posteriors[key] = after, seconds + time.process_time() - started
        return self.posteriors[key]

    def inputs(self) -> dict[str, Tensor]:
        parts = {"test": self.loaded.test[0], "shifted": self.loaded.shifted[0]}
        return parts if self.loaded.ood is None else parts | {"ood": self.loaded.ood}

    def logits(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([self.loaded.model(part) for part in x.split(500)])


@dataclass(frozen=True)
class Result:
    answers: Answers
    seconds: float
    note: str = ""


Column = Callable[[Fits], Result]


def plain(fits: Fits) -> Result:
    """The network alone."""
    started = time.process_time()
    if fits.loaded.classification:
        answers: Any = {part: fits.logits(x).softmax(-1) for part, x in fits.inputs().items()}
    else:
        targets = {"test": fits.loaded.test[1], "shifted": fits.loaded.shifted[1]}
        answers = {
            part: plain_density(fits.loaded.likelihood, fits.logits(x), targets[part])
            for part, x in fits.inputs().items()
        }
    return Result(answers, time.process_time() - started)


def plain_density(likelihood: str, f: Tensor, y: Tensor) -> Density:
    """p(y | f) of the network's own outputs."""
    if likelihood == "heteroscedastic":
        mean, log_variance = split(f.double())
        distribution = stats.norm(mean.numpy(), (0.5 * log_variance).exp().numpy())
        log_prob = distribution.logpdf(y.numpy())
    else:
        distribution = stats.poisson(f.double().exp().numpy())
        log_prob = distribution.logpmf(y.numpy())
    ends = distribution.interval(0.95)
    return Density(*(torch.from_numpy(values) for values in (log_prob, distribution.mean(), *ends)))


def temperature(fits: Fits) -> Result:
    """softmax(f / T), T by the likelihood of the validation set."""
    if not fits.loaded.classification:
        raise NotThere("temperature scaling is for classifiers")
    started = time.process_time()
    x, y = fits.loaded.validation
    logits = fits.logits(x).double()

    def loss(log_temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits * np.exp(-log_temperature), y))

    found = optimize.minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 1e-5}).x
    answers = {part: (fits.logits(x).double() * np.exp(-found)).softmax(-1) for part, x in fits.inputs().items()}
    return Result(answers, time.process_time() - started, f"T = {np.exp(found):.3f}")


def laplace_torch(weights: str, method: str) -> Column:
    """laplace-torch, in its own environment."""

    def column(fits: Fits) -> Result:
        if not fits.loaded.classification:
            raise NotThere("laplace-torch has neither unequal noise nor counts")
        if not PEER.exists():
            raise NotThere(f"{PEER.relative_to(ROOT)} is missing: make bench")
        loaded = fits.loaded
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "probabilities.npz"
            worker = str(Path(__file__).with_name("peer.py"))
            command = [str(PEER), worker, loaded.name, str(loaded.seed), weights, method, str(output)]
            allowed: dict[str, Any] = {}
            if fits.limit is not None:
                allowed["preexec_fn"] = partial(resource.setrlimit, resource.RLIMIT_CPU, (int(fits.limit),) * 2)
            environment = os.environ | {"LAPIS_TRUST_CACHE": str(fits.cache), "PYTHONDONTWRITEBYTECODE": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **allowed)
            if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
                raise OverTime
            if done.returncode:
                last = (done.stderr.strip() or "no message").splitlines()[-1]
                raise RuntimeError(f"laplace-torch: {last}")
            with np.load(output, allow_pickle=False) as file:
                answers = {part: torch.from_numpy(file[part]) for part in PARTS}
                return Result(answers, float(file["seconds"]), str(file["note"]))

    return column


def ours(weights: str | None, *steps: str) -> Column:
    """The README recipe on these weights, with these steps."""

    def column(fits: Fits) -> Result:
        posterior, seconds = fits.posterior(weights, *steps)
        started = time.process_time()
        answers: dict[str, Any] = {}
        for part, x in fits.inputs().items():
            prediction = posterior.predict(x)
            if fits.loaded.classification:
                answers[part] = prediction.probs.detach()
            else:
                y = fits.loaded.test[1] if part == "test" else fits.loaded.shifted[1]
                answers[part] = Density(prediction.log_prob(y), prediction.mean, *prediction.interval(0.95))
        note = f"{getattr(posterior, 'structure', type(posterior).__name__)}, {posterior.network.size:,} weights"
        return Result(answers, seconds + time.process_time() - started, note)

    return column


COLUMNS: dict[str, Column] = {
    "plain": plain,
    "temperature": temperature,
    "laplace-torch, evidence": laplace_torch("all", "marglik"),
    "laplace-torch, grid": laplace_torch("all", "gridsearch"),
    "README": ours(None),
    "refined": ours(None, "refined"),
    "calibrated": ours(None, "calibrated"),
    "refined, calibrated": ours(None, "refined", "calibrated"),
    "calibrated with temperature": ours(None, "sharpened"),
    "refined, calibrated with temperature": ours(None, "refined", "sharpened"),
    "all weights": ours("all"),
    "all weights, calibrated": ours("all", "calibrated"),
    "laplace-torch last layer, evidence": laplace_torch("last_layer", "marglik"),
    "laplace-torch last layer, grid": laplace_torch("last_layer", "gridsearch"),
    "last layer": ours("last_layer"),
    "last layer, refined": ours("last_layer", "refined"),
    "last layer, calibrated": ours("last_layer", "calibrated"),
    "last layer, refined, calibrated": ours("last_layer", "refined", "calibrated"),
}
QUICK = ("plain", "temperature", "README", "refined", "calibrated", "last layer")
