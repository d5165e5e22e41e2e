"""Training by maximum a posteriori, with the prior and the noise tuned by the evidence on the way."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.batches import Batch
from lapis.curvature.structure import NAMES
from lapis.errors import FileError, LapisWarning, ModelError, OptionError
from lapis.evidence import Training
from lapis.likelihoods import Likelihood, from_config
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network
from lapis.posteriors import LaplacePosterior, laplace
from lapis.priors import Prior, WeightPrior, as_prior
from lapis.progress import track
from lapis.training import checkpoint as files
from lapis.training.data import shuffled, survey

MakeOptimiser = Callable[[list[Tensor], float], torch.optim.Optimizer]

OPTIMISERS: dict[str, MakeOptimiser] = {
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
}


def train(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    epochs: int = 100,
    prior: Prior | float | Tensor | None = None,
    structure: str = "auto",
    curvature: str = "ggn",
    learning_rate: float = 1e-3,
    optimiser: str | MakeOptimiser = "adam",
    schedule: Literal["cosine", "constant"] = "cosine",
    batch_size: int = 128,
    burn_in: int = 10,
    every: int = 5,
    hyper_steps: int = 20,
    noise: bool = True,
    patience: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    seed: int = 0,
    memory_budget: int = 4 * 2**30,
    progress: bool | None = None,
) -> LaplacePosterior:
    """Train a network, and return the Laplace posterior of the epoch with the highest evidence.

    The loss is -log p(D | theta) - log p(theta). After `burn_in` epochs, and every `every` epochs from then on,
    curvature is refitted, `hyper_steps` steps of L-BFGS raise the evidence in prior precisions and noise, and training
    goes on under these. No validation data are needed. The model ends with the weights of the best epoch; `training` on
    the result tells how it went.

    Args:
        data: a pair (inputs, targets) or a Dataset, shuffled anew every epoch, or a DataLoader or list of batches,
            which keep their own way.
        prior: where the precisions start; one for each layer, at 1, when not given.
        structure: see `lapis.laplace`; so are `curvature` and `memory_budget`.
        optimiser: "adam", "sgd" (momentum 0.9), or a function of (parameters, learning rate).
        schedule: how the learning rate goes down: "cosine" to zero, or "constant".
        patience: stop when the evidence has not risen for this many evaluations; None trains all epochs.
        checkpoint: a file, rewritten after every epoch. When it exists, training goes on from there, and ends as it
            would have without the interruption.
        seed: of shuffling and dropout. Every epoch has its own stream of random numbers.

    >>> x = torch.linspace(-1, 1, 30)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> posterior = train(net, (x, x.sin()), "regression", epochs=6, burn_in=2, every=2)
    >>> posterior.training.evaluated
    (2, 4, 6)
    """
    _check(epochs, burn_in, every, hyper_steps, batch_size, patience, schedule, optimiser, learning_rate)
    family = resolve_likelihood(likelihood)
    if NAMES.get(structure) == "implicit":
        raise OptionError(
            "Training by the evidence needs its gradient",
            expected="a structure that is stored",
            got=f"structure={structure!r}, whose evidence is an estimate",
            do='use "kronecker", "diagonal", "dense" or "lowrank"',
        )
    network = Network(model)
    n_data, example = survey(data, network, batch_size)
    network.example = example
    start = as_prior(Prior(1.0, groups="layer") if prior is None else prior).resolve(network)
    make = OPTIMISERS[optimiser] if isinstance(optimiser, str) else optimiser
    run = _Run(network, family, start, make(list(network.parameters.values()), learning_rate), n_data)
    settings = {
        "epochs": epochs, "learning_rate": learning_rate, "schedule": schedule, "batch_size": batch_size, "seed": seed,
        "burn_in": burn_in, "every": every, "hyper_steps": hyper_steps, "noise": noise, "n_data": n_data,
        "structure": structure, "curvature": curvature, "patience": patience,
    }  # fmt: skip
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.exists():
        run.load(path, settings)

    def fit(likelihood: Likelihood, prior: WeightPrior) -> LaplacePosterior:
        return laplace(
            model, data, likelihood, structure=structure, prior=prior.to_prior(), curvature=curvature,
            batch_size=batch_size, memory_budget=memory_budget, progress=False,
        )  # fmt: skip

    modes = [(module, module.training) for module in model.modules()]
    devices = [network.device] if network.device.type == "cuda" else []
    try:
        for epoch in track(range(run.epoch + 1, epochs + 1), "training", epochs - run.epoch, progress):
            if run.reason:
                break
            rate = learning_rate * (0.5 * (1 + math.cos(math.pi * (epoch - 1) / epochs)) if schedule == "cosine" else 1)
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(seed * 1_000_003 + epoch)
                run.one_epoch(shuffled(data, network, batch_size), rate)
                if (epoch >= burn_in and (epoch - burn_in) % every == 0) or epoch == epochs:
                    run.tune(fit(run.likelihood, run.prior), hyper_steps, noise)
            if patience is not None and len(run.evaluated) - 1 - run.best_at >= patience:
                run.reason = f"the evidence has not risen for {patience} evaluations"
            if path is not None:
                run.save(path, settings)
        files.load_model(model, run.best)
        best = run.best_posterior(fit)
    finally:
        for module, training in modes:
            module.training = training
    return best


@dataclass
class _Run:
    """The state of a training run; everything that a checkpoint holds."""

    network: Network
    likelihood: Likelihood
    prior: WeightPrior
    optimiser: torch.optim.Optimizer
    n_data: int
    epoch: int = 0
    reason: str = ""
    loss: list[float] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    log_evidence: list[float] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)
    best_at: int = -1
    """Index of the best evaluation."""
    best_precision: Tensor | None = None
    best_likelihood: Likelihood | None = None

    def one_epoch(self, stream: Iterable[Batch], rate: float) -> None:
        network = self.network
        network.module.train()
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        total, count = 0.0, 0
        for batch in stream:
            self.optimiser.zero_grad()
            raw = network.call(batch.inputs)
            f = self.likelihood.canonical(raw)
            nll = self.likelihood.nll(f, self.likelihood.targets(batch.targets, f, raw.shape)).mean()
            loss = nll + self._penalty() / self.n_data
            if not bool(torch.isfinite(loss)):
                raise ModelError(
                    f"Training diverged in epoch {self.epoch + 1}",
                    expected="a finite loss",
                    got=f"{float(loss.detach())} on batch {batch.index}",
                    do="use a smaller learning_rate, or scale the inputs and targets",
                )
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            total, count = total + float(loss.detach()) * len(batch), count + len(batch)
        self.optimiser.zero_grad()
        self.epoch += 1
        self.loss.append(total / count)

    def _penalty(self) -> Tensor:
        """1/2 |theta - m|^2_Lambda."""
        parts = []
        for name, parameter in self.network.parameters.items():
            mean = self.prior.mean
            if mean.dim():
                begin = self.network.offsets[name]
                mean = mean[begin : begin + parameter.numel()]
            deviation = parameter.reshape(-1) - mean.to(parameter)
            parts.append((self.prior.of(name).to(parameter) * deviation.square()).sum())
        return 0.5 * torch.stack(parts).sum()

    def tune(self, posterior: LaplacePosterior, steps: int, noise: bool) -> None:
        """Raise the evidence in prior and noise, and keep this epoch when it is the best so far."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LapisWarning)  # a few steps need not converge
            tuned = posterior.tune(noise=noise, max_iterations=steps)
        self.prior = self.prior.with_precision(tuned.weight_prior.precision.detach())
        self.likelihood = tuned.likelihood
        self.evaluated.append(self.epoch)
        self.log_evidence.append(float(tuned.log_evidence()))
        if self.best_at < 0 or self.log_evidence[-1] > self.log_evidence[self.best_at]:
            self.best_at = len(self.evaluated) - 1
            self.best = files.model_tensors(self.network.module)
            self.best_precision, self.best_likelihood = self.prior.precision, self.likelihood

    def best_posterior(self, fit: Callable[[Likelihood, WeightPrior], LaplacePosterior]) -> LaplacePosterior:
        assert self.best_precision is not None
        assert self.best_likelihood is not None
        record = Training(
            self.epoch,
            self.evaluated[self.best_at],
            tuple(self.evaluated),
            tuple(self.log_evidence),
            tuple(self.loss),
            self.reason or f"all {self.epoch} epochs were trained",
        )
        posterior = fit(self.best_likelihood, self.prior.with_precision(self.best_precision))
        return replace(posterior, training=record)

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        state, numbers = files.optimiser_parts(self.optimiser)
        tensors = {f"model.{name}": t for name, t in files.model_tensors(self.network.module).items()}
        tensors |= {f"optimiser.{name}": t for name, t in state.items()}
        tensors |= {f"best.{name}": t for name, t in self.best.items()} | {"precision": self.prior.precision}
        if self.best_precision is not None:
            tensors["best_precision"] = self.best_precision
        facts = {
            name: getattr(self, name) for name in ("epoch", "reason", "loss", "evaluated", "log_evidence", "best_at")
        }
        facts |= {"settings": settings, "optimiser": numbers, "likelihood": self.likelihood.to_config()}
        facts["best_likelihood"] = self.best_likelihood and self.best_likelihood.to_config()
        files.write(path, tensors, facts)

    def load(self, path: Path, settings: dict[str, Any]) -> None:
        tensors, facts = files.read(path)
        changed = [name for name, value in settings.items() if facts["settings"].get(name) != value]
        if changed:
            raise FileError(
                f"The run in {path} was started with other settings",
                expected=f"{changed[0]}={facts['settings'].get(changed[0])!r}",
                got=f"{settings[changed[0]]!r}",
                do="pass the same settings, or delete the checkpoint",
            )
        files.load_model(self.network.module, files.under("model.", tensors))
        files.load_optimiser(self.optimiser, files.under("optimiser.", tensors), facts["optimiser"])
        self.prior = self.prior.with_precision(tensors["precision"].to(self.network.device))
        self.best = files.under("best.", tensors)
        self.best_precision = tensors["best_precision"].to(self.network.device) if "best_precision" in tensors else None
        for name in ("epoch", "reason", "loss", "evaluated", "log_evidence", "best_at"):
            setattr(self, name, facts[name])
        if self.likelihood.noise is not None:
            self.likelihood = from_config(facts["likelihood"])
        if facts["best_likelihood"]:
            self.best_likelihood = (
                self.likelihood if self.likelihood.noise is None else from_config(facts["best_likelihood"])
            )


def _check(
    epochs: int, burn_in: int, every: int, steps: int, batch_size: int, patience: int | None, schedule: str,
    optimiser: Any, rate: float,
) -> None:  # fmt: skip
    for name, number in (
        ("epochs", epochs),
        ("burn_in", burn_in),
        ("every", every),
        ("hyper_steps", steps),
        ("batch_size", batch_size),
        ("patience", 1 if patience is None else patience),
    ):
        if number < 1:
            raise OptionError(f"Bad {name}", expected="at least 1", got=str(number), do="pass a positive number")
    if schedule not in ("cosine", "constant"):
        raise OptionError("Unknown schedule", expected='"cosine" or "constant"', got=repr(schedule), do="choose one")
    if isinstance(optimiser, str) and optimiser not in OPTIMISERS:
        raise OptionError(
            "Unknown optimiser", expected=", ".join(map(repr, OPTIMISERS)), got=repr(optimiser), do="or pass a function"
        )
    if not (math.isfinite(rate) and rate > 0):
        raise OptionError("Bad learning_rate", expected="a positive number", got=str(rate), do="try 1e-3")
