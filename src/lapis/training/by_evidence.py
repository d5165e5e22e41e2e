"""Training by maximum a posteriori, with the prior and the noise tuned by the evidence on the way."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.batches import Batch
from lapis.checkpoint import Checkpoint
from lapis.curvature.blocks.partition import NAMES
from lapis.errors import LapisWarning, ModelError, OptionError
from lapis.evidence import Training
from lapis.files import tensors_digest
from lapis.likelihoods import Likelihood, from_config
from lapis.likelihoods import resolve as resolve_likelihood
from lapis.network import Network
from lapis.options import check_choice, check_count
from lapis.posteriors import LaplacePosterior
from lapis.posteriors.laplace.fit import laplace
from lapis.priors import Prior, WeightPrior, as_prior
from lapis.progress import track
from lapis.training.constant import constant_log_likelihood
from lapis.training.data import shuffled, survey
from lapis.training.state import load_model, load_optimiser, model_tensors, optimiser_parts, under

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
    curvature is refitted, `hyper_steps` steps of `tune` raise the evidence in prior precisions and noise, and training
    goes on under these. No validation data are needed. The model ends with the weights of the best epoch; `training` on
    the result tells how it went.

    While a network does not fit yet, the evidence is highest without it: noise and precisions grow, the weights go to
    zero, and training does not recover. So until the evidence beats the log likelihood of the best constant prediction,
    or half of the epochs have passed, an evaluation loosens the prior instead of tuning it, the noise may only fall,
    and weights that the prior has pulled close to zero start again from their first values. A result that is no better
    than a constant comes with a LapisWarning.

    Args:
        data: a pair (inputs, targets) or a Dataset, shuffled anew every epoch, or a DataLoader or list of batches,
            used in the order they give.
        prior: where the precisions start; one for each layer, at 1, when not given. Layers that can exchange scale
            (ReLU) let these drift for as long as training lasts; one for all, `Prior(1.0)`, settles.
        structure: see `lapis.laplace`; so are `curvature` and `memory_budget`.
        optimiser: "adam", "sgd" (momentum 0.9), or a function of (parameters, learning rate).
        schedule: how the learning rate goes down: "cosine" to zero, or "constant".
        patience: stop when the evidence has not risen for this many evaluations; None trains all epochs.
        checkpoint: a file, rewritten after every epoch. When it exists, training goes on from there, and ends as it
            would have without the interruption.
        seed: of shuffling and dropout. Every epoch has its own stream of random numbers.

    >>> x = torch.linspace(-3, 3, 30)[:, None]
    >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> posterior = train(net, (x, x.sin()), "regression", epochs=90, burn_in=30, every=30, learning_rate=0.05)
    >>> posterior.training.evaluated
    (30, 60, 90)
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
    run = _Run(network, family, start, lambda: make(list(network.parameters.values()), learning_rate), n_data)
    settings = {
        "epochs": epochs, "learning_rate": learning_rate, "schedule": schedule, "batch_size": batch_size, "seed": seed,
        "burn_in": burn_in, "every": every, "hyper_steps": hyper_steps, "noise": noise, "n_data": n_data,
        "structure": structure, "curvature": curvature, "patience": patience,
        "optimiser": optimiser if isinstance(optimiser, str) else "a function", "likelihood": family.name,
        "n_weights": network.size,
        "prior": tensors_digest({"precision": start.precision, "mean": start.mean}),
    }  # fmt: skip
    kept = Checkpoint(checkpoint, "training run", settings)
    if kept.tensors:
        run.load(kept.tensors, kept.facts)

    def fit(likelihood: Likelihood, prior: WeightPrior) -> LaplacePosterior:
        return laplace(
            model, data, likelihood, structure=structure, weights="all", prior=prior.to_prior(), curvature=curvature,
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
                run.one_epoch(shuffled(data, network, batch_size), rate, noise)
                if (epoch >= burn_in and (epoch - burn_in) % every == 0) or epoch == epochs:
                    run.tune(fit, hyper_steps, noise, guarded=2 * epoch <= epochs)
            if patience is not None and run.waited() >= patience:
                run.reason = f"the evidence has not risen for {patience} evaluations"
            if checkpoint is not None:
                kept.offer(*run.state(), now=True)
        load_model(model, run.best)
        best = run.best_posterior(fit)
    finally:
        for module, training in modes:
            module.training = training
    run.warn(best)
    return best


Fit = Callable[[Likelihood, WeightPrior], LaplacePosterior]

PLAIN = ("epoch", "reason", "loss", "evaluated", "log_evidence", "best_at", "constant", "held", "notes", "spread")
"""Entries of a run that a checkpoint keeps as JSON."""

LOOSEN, LOOSEST = 100.0, 1e-4
"""At each evaluation that does not beat a constant, precisions are divided by LOOSEN; never below LOOSEST times the
first ones."""

SQUASHED = 0.5
"""When |theta - m|^2 has fallen below this share of its first value, the weights are reset to their first values under
the looser prior: weights close to zero are nearly symmetric, and would take long to grow again."""


@dataclass
class _Run:
    """The state of a training run; everything that a checkpoint holds."""

    network: Network
    likelihood: Likelihood
    prior: WeightPrior
    make: Callable[[], torch.optim.Optimizer]
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
    optimiser: torch.optim.Optimizer = field(init=False)
    loosest: Tensor = field(init=False)
    first: dict[str, Tensor] = field(init=False)
    """The model before training."""
    spread: float = field(init=False)
    """Its |theta - m|^2."""
    constant: float | None = None
    """The best log likelihood of a constant prediction; known after the first epoch."""
    held: list[int] = field(default_factory=list)
    """Evaluations at which the hyperparameters were kept from rising."""
    notes: list[str] = field(default_factory=list)
    """What was warned of at the best evaluation."""

    def __post_init__(self) -> None:
        self.optimiser = self.make()
        self.loosest = LOOSEST * self.prior.precision.detach()
        self.first = model_tensors(self.network.module)
        self.spread = self._spread()

    def _spread(self) -> float:
        flat = torch.cat([p.detach().reshape(-1).double() for p in self.network.parameters.values()])
        return float(self.prior.squared_distance(flat).sum())

    def waited(self) -> int:
        """Evaluations since the best one, without those that did not tune."""
        return sum(epoch not in self.held for epoch in self.evaluated[self.best_at + 1 :])

    def one_epoch(self, stream: Iterable[Batch], rate: float, noise: bool) -> None:
        network = self.network
        targets: list[Tensor] = []
        outputs = 0
        network.module.train()
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        total, count = 0.0, 0
        for batch in stream:
            self.optimiser.zero_grad()
            raw = network.call(batch.inputs)
            f = self.likelihood.canonical(raw)
            y = self.likelihood.targets(batch.targets, f, raw.shape)
            if self.constant is None:
                targets.append(y.detach())
                outputs = f.shape[-1]
            loss = self.likelihood.nll(f, y).mean() + self._penalty() / self.n_data
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
        if self.constant is None:
            self.constant = self.n_data * constant_log_likelihood(self.likelihood, targets, outputs, noise)

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

    def tune(self, fit: Fit, steps: int, noise: bool, guarded: bool) -> None:
        """Raise the evidence in prior and noise, and keep this epoch when it is the best so far.

        While `guarded` and no better than a constant, training goes on under a looser prior instead.
        """
        assert self.constant is not None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LapisWarning)
            tuned = fit(self.likelihood, self.prior).tune(noise=noise, max_iterations=steps, tolerated_loss=None)
        for each in caught:
            if not issubclass(each.category, LapisWarning):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        evidence = float(tuned.log_evidence())
        self.evaluated.append(self.epoch)
        self.log_evidence.append(evidence)
        precision = tuned.weight_prior.precision.detach()
        if self.best_at < 0 or evidence > self.log_evidence[self.best_at]:
            self.best_at = len(self.evaluated) - 1
            self.best = model_tensors(self.network.module)
            self.best_precision, self.best_likelihood = precision, tuned.likelihood
            told = [str(each.message) for each in caught if issubclass(each.category, LapisWarning)]
            # a few steps need not converge: the next evaluation goes on from there
            self.notes = [note for note in told if tuned.tuning is None or tuned.tuning.reason not in note]
        if guarded and evidence <= self.constant:
            self._loosen(tuned)
        else:
            self.prior, self.likelihood = self.prior.with_precision(precision), tuned.likelihood

    def _loosen(self, tuned: LaplacePosterior) -> None:
        """Go on under a looser prior, and with no more noise than before, so that the network can fit first."""
        self.held.append(self.epoch)
        old, new = self.prior.precision, tuned.weight_prior.precision.detach()
        loose = torch.minimum(old.to(new), new).div(LOOSEN).clamp(min=self.loosest.to(new))
        if bool((loose < old.to(new)).any()) and self._spread() < SQUASHED * self.spread:
            load_model(self.network.module, self.first)
            self.optimiser = self.make()
        self.prior = self.prior.with_precision(loose)
        before, now = self.likelihood.noise, tuned.likelihood.noise
        if before is not None and now is not None:
            self.likelihood = tuned.likelihood.with_noise(torch.minimum(before.detach().to(now), now.detach()))

    def best_posterior(self, fit: Fit) -> LaplacePosterior:
        assert self.best_precision is not None
        assert self.best_likelihood is not None
        assert self.constant is not None
        record = Training(
            self.epoch,
            self.evaluated[self.best_at],
            tuple(self.evaluated),
            tuple(self.log_evidence),
            tuple(self.loss),
            self.reason or f"all {self.epoch} epochs were trained",
            self.constant,
            tuple(self.held),
        )
        posterior = fit(self.best_likelihood, self.prior.with_precision(self.best_precision))
        return replace(posterior, training=record)

    def warn(self, best: LaplacePosterior) -> None:
        """Warn of a result that is no better than a constant, and repeat the warnings of the best evaluation."""
        assert self.constant is not None
        if self.log_evidence[self.best_at] <= self.constant:
            gamma = float(best.effective_parameters())
            warnings.warn(
                f"Training found nothing that the evidence prefers to a constant prediction: log evidence "
                f"{self.log_evidence[self.best_at]:.4g} at best (epoch {self.evaluated[self.best_at]}), "
                f"{self.constant:.4g} for the best constant; gamma is {gamma:.3g} of {best.n_weights} weights. Either "
                f"the network does not fit yet (raise epochs or learning_rate, scale inputs and targets, begin from a "
                f"smaller prior precision), or the inputs do not tell the targets.",
                LapisWarning,
                stacklevel=3,
            )
        for note in self.notes:
            warnings.warn(note, LapisWarning, stacklevel=3)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The run as tensors and as facts for JSON; `load` takes both."""
        state, numbers = optimiser_parts(self.optimiser)
        tensors = {f"model.{name}": t for name, t in model_tensors(self.network.module).items()}
        tensors |= {f"optimiser.{name}": t for name, t in state.items()}
        tensors |= {f"best.{name}": t for name, t in self.best.items()} | {"precision": self.prior.precision}
        tensors |= {f"first.{name}": t for name, t in self.first.items()}
        if self.best_precision is not None:
            tensors["best_precision"] = self.best_precision
        facts = {name: getattr(self, name) for name in PLAIN}
        facts |= {"optimiser": numbers, "likelihood": self.likelihood.to_config()}
        facts["best_likelihood"] = self.best_likelihood and self.best_likelihood.to_config()
        return tensors, facts

    def load(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go on from a state that an earlier run left."""
        load_model(self.network.module, under("model.", tensors))
        load_optimiser(self.optimiser, under("optimiser.", tensors), facts["optimiser"])
        self.prior = self.prior.with_precision(tensors["precision"].to(self.network.device))
        self.best, self.first = under("best.", tensors), under("first.", tensors)
        self.best_precision = tensors["best_precision"].to(self.network.device) if "best_precision" in tensors else None
        for name in PLAIN:
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
    check_count("epochs", epochs)
    check_count("burn_in", burn_in)
    check_count("every", every)
    check_count("hyper_steps", steps)
    check_count("batch_size", batch_size)
    if patience is not None:
        check_count("patience", patience)
    check_choice("schedule", schedule, ("cosine", "constant"))
    if not callable(optimiser):
        check_choice("optimiser", optimiser, OPTIMISERS)
    if not (math.isfinite(rate) and rate > 0):
        raise OptionError("Bad learning_rate", expected="a positive number", got=str(rate), do="try 1e-3")
