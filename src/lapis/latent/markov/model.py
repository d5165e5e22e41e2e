"""A hidden Markov model as a model for EM (Baum-Welch), with states that may be known for some steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lapis.errors import DataError
from lapis.latent.driver import Expected, LatentModel
from lapis.latent.markov.chain import Paths, forward, log_likelihoods, most_probable, paths
from lapis.latent.markov.emissions import Emissions, normalised
from lapis.latent.markov.graph import differentiable_states
from lapis.latent.sequences import Layout


@dataclass(frozen=True)
class Observed:
    """Sequences one after the other: rows as the emissions read them, and states that are known."""

    rows: Tensor
    lengths: tuple[int, ...]
    states: Tensor | None = None
    """State of each row, (N,), -1 where unknown."""

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, chosen: Tensor) -> Observed:
        """Some of the sequences."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        picked = torch.cat([torch.arange(starts[int(i)], starts[int(i) + 1]) for i in chosen])
        states = None if self.states is None else self.states[picked]
        return Observed(self.rows[picked], tuple(self.lengths[int(i)] for i in chosen), states)


@dataclass(frozen=True)
class MarkovModel(LatentModel):
    """pi (K,), A (K, K), emissions; a prior proportional to prod p^pseudo_count on each of their probabilities."""

    initial: Tensor
    transitions: Tensor
    emissions: Emissions
    pseudo_count: float = 0.0

    def log_densities(self, data: Observed) -> Tensor:
        """log b, minus infinity for states other than a known one, (T, B, K)."""
        layout, rows, states = data.layout, data.rows, data.states
        if layout.equal:  # to transpose observations is less work than to transpose densities of all states
            rows = layout.in_time(rows).flatten(0, 1)
            states = None if states is None else layout.in_time(states).flatten()
        logs = self.emissions.log_densities(rows).to(self.initial.dtype)
        if states is not None:
            states = states.to(logs.device)
            excluded = (states[:, None] >= 0) & (states[:, None] != torch.arange(logs.shape[1], device=logs.device))
            logs = logs.masked_fill(excluded, -torch.inf)
        return logs.view(-1, len(data), logs.shape[1]) if layout.equal else layout.in_time(logs)

    def paths(self, data: Observed, *, pairs: bool = True) -> Paths:
        """Expectations under p(z | y); without `pairs` those of single states only."""
        found = paths(self.initial, self.transitions, lambda: self.log_densities(data), data.layout, pairs=pairs)
        self._possible(found.log_likelihoods, data)
        return found

    def states(self, data: Observed) -> Tensor:
        """p(z_t = k | y) of each row, (N, K), with the graph of the parameters."""
        logs = self.log_densities(data)
        with torch.no_grad():
            self._possible(log_likelihoods(self.initial, self.transitions, logs, data.layout), data)
        return differentiable_states(self.initial, self.transitions, logs, data.layout).to(self.initial.dtype)

    def log_likelihoods(self, data: Observed) -> Tensor:
        """(B,), with the graph of the parameters."""
        logs = self.log_densities(data)
        found = log_likelihoods(self.initial, self.transitions, logs, data.layout)
        self._possible(found, data)
        return found

    def most_probable(self, data: Observed) -> tuple[Tensor, Tensor]:
        """States of rows (N,), and log p(y, z) of each sequence, (B,)."""
        logs = self.log_densities(data)
        states, joint = most_probable(self.initial, self.transitions, logs, data.layout)
        self._possible(joint, data)
        return states, joint

    def _possible(self, log_likelihood: Tensor, data: Observed) -> None:
        """Raise if a sequence has probability zero, and say where it first has."""
        bad = ~log_likelihood.detach().isfinite()
        if not bool(bad.any()):
            return
        number = int(bad.float().argmax())
        with torch.no_grad():
            alphas, _ = forward(self.initial, self.transitions, self.log_densities(data), data.layout)
            alphas = alphas[:, int(data.layout.places[number])]
        step = int((alphas.amax(-1) == -torch.inf).float().argmax())
        raise DataError(
            f"Sequence {number} has probability zero",
            expected="observations (and known states) that some path of states can produce",
            got=f"none that reaches step {step}",
            do="check the sequence, or "
            + ("start from probabilities above zero" if self.pseudo_count else "fit with pseudo_count > 0"),
        )

    def expectation(self, data: Observed) -> Expected:
        with torch.no_grad():
            found = self.paths(data)
            assert found.pairs is not None
            sums = {"first": found.first, "pairs": found.pairs}
            sums.update(self.emissions.statistics(data.rows, found.states))
            # H(q) = log p(y) - E_q[log p(y, z)], as q is p(z | y); the prior of theta is no part of it
            unknown = Expected(sums, found.log_likelihoods.new_zeros(()), float(len(data.rows)))
            entropy = found.log_likelihoods.sum() - self._log_joint(unknown, 0.0)
        return Expected(sums, entropy, float(len(data.rows)))

    def maximisation(self, expected: Expected) -> MarkovModel:
        sums = expected.statistics
        return MarkovModel(
            normalised(sums["first"] + self.pseudo_count, self.initial),
            normalised(sums["pairs"] + self.pseudo_count, self.transitions),
            self.emissions.maximised(sums, self.pseudo_count),
            self.pseudo_count,
        )

    def log_joint(self, expected: Expected) -> Tensor:
        with torch.no_grad():
            return self._log_joint(expected, self.pseudo_count)

    def _log_joint(self, expected: Expected, pseudo_count: float) -> Tensor:
        sums = expected.statistics
        chain = torch.xlogy(sums["first"] + pseudo_count, self.initial).sum()
        chain = chain + torch.xlogy(sums["pairs"] + pseudo_count, self.transitions).sum()
        return chain + self.emissions.expected(sums, pseudo_count)

    def to(self, dtype: torch.dtype) -> MarkovModel:
        """In another precision."""
        return MarkovModel(
            self.initial.to(dtype), self.transitions.to(dtype), self.emissions.to(dtype), self.pseudo_count
        )
