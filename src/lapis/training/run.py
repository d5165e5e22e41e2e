"""The state of a training run by the evidence: its epochs, its evaluations, what is kept of them, its checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lapis.batches import Batch
from lapis.errors import FileError, LapisWarning, users_level
from lapis.evidence import Training
from lapis.likelihoods import Likelihood, from_config
from lapis.network import Network
from lapis.posteriors import LaplacePosterior
from lapis.priors import WeightPrior
from lapis.proofs import close
from lapis.schema import entry, sound, tensor, under, wrong
from lapis.training.constant import constant_log_likelihood
from lapis.training.convergence import has_converged
from lapis.training.state import load_model, load_optimiser, model_tensors, optimiser_parts, probe
from lapis.training.step import set_rate, take_step

Fit = Callable[[Likelihood, WeightPrior], LaplacePosterior]

PLAIN: dict[str, Any] = {
    "epoch": int, "reason": str, "loss": list[float], "evaluated": list[int], "log_evidence": list[float],
    "kept_at": int, "constant": float | None, "held": list[int], "steps": int, "spread": float,
}  # fmt: skip
"""Entries of a run that a checkpoint keeps as JSON, and their types."""

LOOSEN, LOOSEST = 100.0, 1e-4
"""At each evaluation that does not beat a constant, precisions are divided by LOOSEN; never below LOOSEST times the
first ones."""

SQUASHED = 0.5
"""When |theta - m|^2 has fallen below this share of its first value, the weights are reset to their first values under
the looser prior: weights close to zero are nearly symmetric, and would take long to grow again."""


@contextmanager
def _held_back() -> Iterator[list[str]]:
    """Collect the messages of LapisWarnings raised inside; warnings of others pass through at the end."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LapisWarning)
        yield told
    for each in caught:
        if issubclass(each.category, LapisWarning):
            told.append(str(each.message))
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _penalty(pulls: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """1/2 |theta - m|^2_Lambda."""
    parts = [(precision * (parameter - mean).square()).sum() for parameter, precision, mean in pulls]
    return 0.5 * torch.stack(parts).sum()


@dataclass
class Run:
    """The state of a training run; everything that a checkpoint holds."""

    network: Network
    likelihood: Likelihood
    prior: WeightPrior
    make: Callable[[], torch.optim.Optimizer]
    n_data: int
    patient: bool = False
    """Whether the epoch with the highest evidence is kept, instead of the last."""
    epoch: int = 0
    steps: int = 0
    reason: str = ""
    loss: list[float] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    log_evidence: list[float] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)
    kept_at: int = -1
    """Index of the evaluation that the result is taken from."""
    kept_precision: Tensor | None = None
    kept_likelihood: Likelihood | None = None
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

    def __post_init__(self) -> None:
        self.optimiser = self.make()
        self.loosest = LOOSEST * self.prior.precision.detach()
        self.first = model_tensors(self.network.module)
        self.spread = self._spread()

    def _spread(self) -> float:
        return float(self.prior.squared_distance(self.network.flat()).sum())

    def waited(self) -> int:
        """Evaluations since the best one, without those that did not tune."""
        return sum(epoch not in self.held for epoch in self.evaluated[self.kept_at + 1 :])

    def one_epoch(self, stream: Iterable[Batch], rate: float, noise: bool) -> None:
        """One optimiser step a batch, on -log p(y | theta) / batch size - log p(theta) / N."""
        network, pulls = self.network, self._pulls()

        def penalty() -> Tensor:
            return _penalty(pulls) / self.n_data

        targets: list[Tensor] = []
        outputs = 0
        network.module.train()
        set_rate(self.optimiser, rate)
        total, count = 0.0, 0
        for batch in stream:
            step = take_step(network, self.likelihood, batch, self.optimiser, penalty, self.epoch + 1)
            if self.constant is None:
                targets.append(step.y)
                outputs = step.f.shape[-1]
            total, count = total + step.loss * len(batch), count + len(batch)
            self.steps += 1
        self.optimiser.zero_grad()
        self.epoch += 1
        self.loss.append(total / count)
        if self.constant is None:
            self.constant = self.n_data * constant_log_likelihood(self.likelihood, targets, outputs, noise)

    def _pulls(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Each parameter with its prior precision and mean, ready for `_penalty`."""
        found = []
        for name, parameter in self.network.parameters.items():
            mean = self.prior.mean
            if mean.dim():
                mean = mean[self.network.span(name)].reshape(parameter.shape)
            precision = self.prior.of(name).detach()
            if precision.dim():
                precision = precision.reshape(parameter.shape)
            found.append((parameter, precision.to(parameter), mean.to(parameter)))
        return found

    def tune(self, fit: Fit, steps: int, noise: bool, guarded: bool) -> None:
        """Raise the evidence in prior and noise, and keep this epoch, or only if it is the best so far when `patient`.

        While `guarded` and no better than a constant, training goes on under a looser prior instead.
        """
        assert self.constant is not None
        # a few steps need not converge: the next evaluation goes on from there, and the last of all says what is left
        with _held_back():
            tuned = fit(self.likelihood, self.prior).tune(noise=noise, max_iterations=steps, tolerated_loss=None)
        evidence = float(tuned.log_evidence())
        self.evaluated.append(self.epoch)
        self.log_evidence.append(evidence)
        precision = tuned.weight_prior.precision.detach()
        if not self.patient or self.kept_at < 0 or evidence > self.log_evidence[self.kept_at]:
            self.kept_at = len(self.evaluated) - 1
            self.kept = model_tensors(self.network.module)
            self.kept_precision, self.kept_likelihood = precision, tuned.likelihood
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

    def posterior(self, fit: Fit, noise: bool, remaining: Callable[[LaplacePosterior], float]) -> LaplacePosterior:
        """The posterior of the evaluation that was kept, whose weights the model has now, tuned until it converges.

        Args:
            remaining: nats by which the loss could still fall; see `convergence`.
        """
        assert self.kept_precision is not None
        assert self.kept_likelihood is not None
        assert self.constant is not None
        with _held_back() as told:
            result = fit(self.kept_likelihood, self.prior.with_precision(self.kept_precision)).tune(noise=noise)
        left, gamma = remaining(result), float(result.effective_parameters().detach())
        gain = float(result.log_evidence().detach()) - self.constant
        record = Training(
            epochs=self.epoch,
            best_epoch=self.evaluated[self.kept_at],
            evaluated=tuple(self.evaluated),
            log_evidence=tuple(self.log_evidence),
            loss=tuple(self.loss),
            reason=self.reason or f"all {self.epoch} epochs were trained",
            constant=self.constant,
            held=tuple(self.held),
            steps=self.steps,
            remaining=left,
            converged=has_converged(left, gamma, gain),
        )
        for message in (*self._doubts(record, result.n_weights, gamma, gain), *told):
            warnings.warn(message, LapisWarning, stacklevel=users_level())
        return replace(result, training=record)

    def _doubts(self, record: Training, n_weights: int, gamma: float, gain: float) -> list[str]:
        """Reasons to distrust the result: no better than a constant, or far from converged."""
        found = []
        if gain <= 0:
            found.append(
                f"Training found nothing that the evidence prefers to a constant prediction: log evidence "
                f"{gain + record.constant:.4g} (epoch {record.best_epoch}), {record.constant:.4g} for the best "
                f"constant; gamma is {gamma:.3g} of {n_weights} weights. Either the network does not fit yet "
                f"(raise epochs or learning_rate, scale inputs and targets, begin from a smaller prior precision), or "
                f"the inputs do not tell the targets."
            )
        elif not record.converged:
            found.append(
                f"Training is far from converged: after {record.steps:,} steps ({record.epochs} epochs) the loss could "
                f"still fall by about {record.remaining:.3g} nats ({record.remaining / self.n_data:.2g} an example), "
                f"where the evidence has gained {gain:.3g} over a constant prediction. Raise epochs or learning_rate "
                f"(or leave both out), or scale inputs and targets to standard deviations of one."
            )
        return found

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The run as tensors and as facts for JSON; `load` takes both."""
        state, numbers = optimiser_parts(self.optimiser)
        tensors = {f"model.{name}": t for name, t in model_tensors(self.network.module).items()}
        tensors |= {f"optimiser.{name}": t for name, t in state.items()}
        tensors |= {f"kept.{name}": t for name, t in self.kept.items()} | {"precision": self.prior.precision}
        tensors["loosest"] = self.loosest
        tensors |= {f"first.{name}": t for name, t in self.first.items()}
        if self.kept_precision is not None:
            tensors["kept_precision"] = self.kept_precision
        facts = {name: getattr(self, name) for name in PLAIN}
        facts |= {"optimiser": numbers, "likelihood": self.likelihood.to_config()}
        facts["probe"] = probe(self.network, self.network.example)
        facts["kept_likelihood"] = self.kept_likelihood and self.kept_likelihood.to_config()
        return tensors, facts

    def load(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go on from a state that an earlier run left; FileError, and the model as it was, unless it fits this run."""
        before = model_tensors(self.network.module)
        try:
            with sound("training run"):
                self._load(tensors, facts)
        except BaseException:
            load_model(self.network.module, before)
            raise

    def _load(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        size, device = (len(self.prior.precision),), self.network.device
        for name, hint in PLAIN.items():
            setattr(self, name, entry(facts, name, hint))
        if not -1 <= self.kept_at < len(self.evaluated) == len(self.log_evidence):
            raise wrong("kept_at", "one of the evaluations", repr(self.kept_at))
        if len(self.loss) != self.epoch or self.epoch < 1 or self.steps < self.epoch or self.constant is None:
            raise wrong("epoch", f"that of {len(self.loss)} losses", repr(self.epoch))
        for prefix in ("model.", "first.", *(("kept.",) if self.kept_at >= 0 else ())):
            for name, found in under(prefix, tensors).items():
                tensor(tensors, prefix + name, found.shape, None)
            load_model(self.network.module, under(prefix, tensors))
        load_model(self.network.module, under("model.", tensors))
        seen, then = probe(self.network, self.network.example), entry(facts, "probe", list[float])
        if len(seen) != len(then) or not close(torch.tensor(then, dtype=torch.float32), torch.tensor(seen)):
            raise FileError(
                "The checkpoint belongs to another network",
                expected="the outputs that it had with the weights of the checkpoint",
                got="others, from the same weights",
                do="build the network that the run was started with, or delete the checkpoint",
            )
        load_optimiser(self.optimiser, under("optimiser.", tensors), entry(facts, "optimiser", dict))
        self.prior = self.prior.with_precision(tensor(tensors, "precision", size, least=0, above=True).to(device))
        self.loosest = tensor(tensors, "loosest", size, least=0, above=True).to(device)
        self.kept, self.first = under("kept.", tensors), under("first.", tensors)
        self.kept_precision = None
        if self.kept_at >= 0:
            self.kept_precision = tensor(tensors, "kept_precision", size, least=0, above=True).to(device)
        noisy = self.likelihood.noise is not None
        if noisy:
            self.likelihood = self._read_likelihood(facts, "likelihood")
        if self.kept_at >= 0:
            self.kept_likelihood = self._read_likelihood(facts, "kept_likelihood") if noisy else self.likelihood

    def _read_likelihood(self, facts: dict[str, Any], name: str) -> Likelihood:
        """The likelihood with another noise, from a checkpoint."""
        found = from_config(entry(facts, name, dict))
        noise, own = found.noise, self.likelihood.noise
        if found.name != self.likelihood.name or noise is None or own is None or noise.dim() > 1:
            raise wrong(name, repr(self.likelihood), repr(found))
        return found
