"""Hidden Markov models for people: fitting, probabilities of states, the most probable path, the likelihood."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapis.errors import DataError, OptionError
from lapis.latent.driver import em
from lapis.latent.floor import constant_columns
from lapis.latent.markov.discrete import among, read_symbols
from lapis.latent.markov.emissions import Emissions, check_distributions, whole_rows_missing
from lapis.latent.markov.gaussian import GaussianEmissions, read_vectors
from lapis.latent.markov.model import MarkovModel, Observed
from lapis.latent.markov.network import NetworkEmissions
from lapis.latent.markov.starts import clustered, random_rows, random_symbols, random_transitions, smallest_variances
from lapis.latent.sequences import as_sequences
from lapis.options import check_arguments, check_positive, shown

DOUBLE = torch.float64


class HiddenMarkov:
    """p(y, z) = pi(z_1) b(y_1 | z_1) prod_t A(z_{t-1}, z_t) b(y_t | z_t), states z_t in 0 to K - 1.

    Args:
        n_states: K.
        emissions: "discrete" (symbols 0, 1, ...) or "gaussian" (vectors), to be fitted from a start by the data;
            `DiscreteEmissions(probabilities)` or `GaussianEmissions(means, covariances)`; or a module that maps
            observations (T, D) to log densities (T, K). `fit` trains a copy of it.
        covariance: of "gaussian" emissions.
        symbols: how many there are; by default as many as the data show.
        initial: pi (K,), to use as it is or to start from.
        transitions: A (K, K), rows sum to 1. Probabilities that are zero stay zero.
        pseudo_count: added to every expected count of probabilities in the M-step (a Dirichlet prior): with some, no
            sequence of known symbols has probability zero.
        floor: smallest variance of "gaussian" emissions, relative to that of the data.
        dtype: of parameters and results; fits are in float64 whatever it is.

    Attributes:
        initial_, transitions_, emissions_: the parameters, given or fitted.
        bounds_: log likelihood (plus log prior) at the start and after every round; it never falls.
        restarts_: the last bound of every start. converged_.

    A sequence is an array (T,) or (T, D); several are a list of them, of any lengths. NaN is a missing observation.
    Parameters that require gradients keep their graph in `log_likelihood`, and in `posterior(..., graph=True)`.

    >>> model = HiddenMarkov(2).fit([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    >>> states = model.viterbi([0, 0, 1, 1])
    >>> bool(states[0] == states[1] != states[2])
    True
    """

    initial_: Tensor | None
    transitions_: Tensor | None
    emissions_: Emissions | None
    bounds_: tuple[float, ...]
    restarts_: tuple[float, ...]
    converged_: bool

    def __init__(
        self,
        n_states: int,
        emissions: Literal["discrete", "gaussian"] | Emissions | nn.Module = "discrete",
        *,
        covariance: Literal["full", "diagonal"] = "full",
        symbols: int | None = None,
        initial: Tensor | None = None,
        transitions: Tensor | None = None,
        pseudo_count: float = 0.0,
        floor: float = 1e-6,
        dtype: torch.dtype = DOUBLE,
    ) -> None:
        check_arguments(HiddenMarkov, locals(), apart=("pseudo_count",))
        check_positive("pseudo_count", pseudo_count, or_zero=True)
        if dtype not in (torch.float32, DOUBLE):
            raise OptionError("Bad dtype", expected="torch.float32 or torch.float64", got=str(dtype), do="pass one")
        self.n_states, self.kind = n_states, emissions if isinstance(emissions, str) else None
        self.covariance, self.symbols = covariance, symbols
        self.pseudo_count, self.floor, self.dtype = pseudo_count, floor, dtype
        for name, value, axes in (("initial", initial, 1), ("transitions", transitions, 2)):
            if value is None:
                continue
            if value.shape != (n_states,) * axes:
                expected = f"a tensor {(n_states,) * axes}"
                raise OptionError(f"Bad {name}", expected=expected, got=shown(value), do="one entry a state")
            check_distributions(name, value, axes)
        self.initial_ = None if initial is None else initial.to(dtype)
        self.transitions_ = None if transitions is None else transitions.to(dtype)
        if isinstance(emissions, nn.Module):
            emissions = NetworkEmissions(emissions, n_states)
        self.emissions_ = None if isinstance(emissions, str) else emissions.to(dtype)
        if self.emissions_ is not None and self.emissions_.n_states != n_states:
            got = str(self.emissions_.n_states)
            raise OptionError(
                "The emissions do not fit", expected=f"{n_states} states", got=got, do="give each its own"
            )
        self._given = (self.initial_, self.transitions_, self.emissions_)

    def __repr__(self) -> str:
        return f"HiddenMarkov({self.n_states}, {self.kind or type(self.emissions_).__name__})"

    def fit(
        self,
        sequences: Any,
        labels: Any = None,
        *,
        rounds: int = 200,
        tolerance: float = 1e-6,
        restarts: int | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        progress: bool | None = None,
    ) -> HiddenMarkov:
        """Fit by EM (Baum-Welch), from the parameters that were given, and random starts for others.

        Args:
            sequences: one, or a list.
            labels: states that are known, like `sequences`: whole numbers (T,), -1 (or NaN) where unknown.
            rounds: at most this many rounds of EM from each start.
            tolerance: EM ends when a round raises the bound by less than this many nats a step of the sequences.
            restarts: starts, of which the best is kept; by default 3, or 1 if nothing is left to chance.
            batch_size: sequences a step, for stochastic EM.
            generator: source of randomness; seeded with 0 when not given.
            progress: show a bar; by default on a terminal only.
        """
        check_arguments(HiddenMarkov.fit, locals())
        data, _ = self._observed(sequences, labels, self._given[2], DOUBLE)
        self._enough(data)
        if batch_size is not None and isinstance(self._given[2], NetworkEmissions):
            raise OptionError(
                "Networks have no sums that minibatches could add to", expected="no batch_size", got=str(batch_size),
                do="leave it out",
            )  # fmt: skip
        complete = all(part is not None for part in self._given)
        with torch.no_grad():
            found = em(
                self._start(data, torch.Generator()) if complete else lambda source: self._start(data, source),
                data,
                rounds=rounds,
                tolerance=tolerance,
                restarts=restarts or (1 if complete else 3),
                batch_size=batch_size,
                generator=generator,
                progress=progress,
            )
        model = found.model.to(self.dtype)
        self.initial_, self.transitions_, self.emissions_ = model.initial, model.transitions, model.emissions
        self.bounds_, self.restarts_, self.converged_ = found.bounds, found.restarts, found.converged
        return self

    def posterior(self, sequence: Any, labels: Any = None, *, graph: bool = False) -> Any:
        """p(z_t = k | y), (T, K); for a list of sequences a list of these.

        Args:
            sequence: one, or a list.
            labels: states that are known, as in `fit`.
            graph: keep the graph of parameters that require gradients; slower.
        """
        check_arguments(HiddenMarkov.posterior, locals(), apart=("sequence", "labels"))
        data, alone = self._seen(sequence, labels)
        if graph:
            states = self._model().states(data)
        else:
            with torch.no_grad():
                states = self._model().paths(data, pairs=False).states
        found = data.layout.split(states)
        return found[0] if alone else found

    def viterbi(self, sequence: Any, labels: Any = None) -> Any:
        """The most probable path of states, (T,); for a list of sequences a list of these."""
        data, alone = self._seen(sequence, labels)
        with torch.no_grad():
            found = data.layout.split(self._model().most_probable(data)[0])
        return found[0] if alone else found

    def log_likelihood(self, sequence: Any, labels: Any = None) -> Tensor:
        """log p(y), 0-d; for a list of sequences (B,). With known states, log p(y, known states)."""
        data, alone = self._seen(sequence, labels)
        found = self._model().log_likelihoods(data)
        return found[0] if alone else found

    def _model(self) -> MarkovModel:
        if self.initial_ is None or self.transitions_ is None or self.emissions_ is None:
            missing = [n for n in ("initial", "transitions", "emissions") if getattr(self, n + "_") is None]
            raise OptionError(
                "The model has no parameters yet", expected=", ".join(missing), got="none", do="call fit, or pass them"
            )
        return MarkovModel(self.initial_, self.transitions_, self.emissions_, self.pseudo_count)

    def _seen(self, sequence: Any, labels: Any) -> tuple[Observed, bool]:
        return self._observed(sequence, labels, self._model().emissions, self.dtype)

    def _enough(self, data: Observed) -> None:
        """Raise unless there are observations, and where the emissions are to be found, no fewer than states."""
        seen = data.rows >= 0 if data.rows.dim() == 1 else ~data.rows.isnan().all(1)
        least = self.n_states if self._given[2] is None else 1
        if int(seen.sum()) < least:
            raise DataError(
                "There are too few observations to fit",
                expected=f"at least {least} that are not missing",
                got=f"{int(seen.sum())}",
                do="pass more, or ask for fewer states",
            )
        if self.kind == "gaussian" or isinstance(self._given[2], GaussianEmissions):
            constant_columns(data.rows, "they say nothing about the states, and their variance is the floor")

    def _observed(
        self, sequences: Any, labels: Any, emissions: Emissions | None, dtype: torch.dtype
    ) -> tuple[Observed, bool]:
        """Checked rows of all sequences, and whether one came alone."""
        width = emissions.means.shape[1] if isinstance(emissions, GaussianEmissions) else 1
        parts, alone = as_sequences(sequences, width)
        widths = {tuple(part.shape[1:]) for part in parts}
        if len(widths) > 1:
            got = " and ".join(str(width) for width in sorted(widths))
            raise DataError("Sequences differ in width", expected="rows of one shape", got=got, do="check the data")
        lengths = tuple(len(part) for part in parts)
        rows = torch.cat(parts)
        if emissions is not None:
            rows = emissions.to(dtype).read(rows)
        else:
            rows = read_symbols(rows) if self.kind == "discrete" else read_vectors(rows, dtype)
            if self.kind == "gaussian" and self.covariance == "full":
                whole_rows_missing(rows)
        states = None if labels is None else self._states(labels, lengths, alone)
        return Observed(rows, lengths, states), alone

    def _states(self, labels: Any, lengths: tuple[int, ...], alone: bool) -> Tensor:
        """Known states of all rows, (N,)."""
        parts, single = as_sequences(labels)
        if single != alone or tuple(len(part) for part in parts) != lengths or any(part.dim() > 1 for part in parts):
            raise DataError(
                "Labels do not go with the sequences", expected=f"{len(lengths)} of the same lengths, (T,)",
                got=f"{len(parts)} of lengths {[len(part) for part in parts][:5]}", do="pass -1 where unknown",
            )  # fmt: skip
        states = torch.cat(parts)
        states = torch.where(states.isnan(), -1, states)
        if not bool(((states >= -1) & (states < self.n_states) & (states == states.long())).all()):
            raise DataError(
                "A label is no state", expected=f"whole numbers 0 to {self.n_states - 1}, or -1", got=shown(states),
                do="number the states",
            )  # fmt: skip
        return states.long()

    def _start(self, data: Observed, source: torch.Generator) -> MarkovModel:
        """Parameters that were given, others by chance."""
        states, (initial, transitions, given) = self.n_states, self._given
        pi = random_rows((states,), source) if initial is None else initial.to(DOUBLE)
        steps = random_transitions(states, source) if transitions is None else transitions.to(DOUBLE)
        if given is None and self.kind == "discrete":
            count = max(int(data.rows.max()) + 1, 1) if self.symbols is None else self.symbols
            emissions: Emissions = random_symbols(among(data.rows, count), data.states, states, count, source)
        elif given is None:
            emissions = clustered(data.rows, data.states, states, self.covariance == "diagonal", self.floor, source)
        elif isinstance(given, GaussianEmissions):
            emissions = given.to(DOUBLE).with_least(*smallest_variances(data.rows, self.floor))
        else:
            emissions = given.to(DOUBLE)
        return MarkovModel(pi, steps, emissions, self.pseudo_count)
