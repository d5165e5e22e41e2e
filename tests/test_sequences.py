"""Sequences: hidden Markov models against all paths written out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapis
from lapis.latent import DiscreteEmissions, GaussianEmissions, HiddenMarkov
from lapis.latent.markov.chain import log_product
from lapis.latent.markov.emissions import Emissions
from lapis.latent.markov.graph import differentiable_states
from lapis.latent.markov.network import NetworkEmissions
from lapis.latent.markov.starts import clustered, random_rows
from lapis.learning_rule import Categorical, step

DOUBLE = torch.float64
NAN = math.nan


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def symbols_model(
    states: int = 3, symbols: int = 4, seed: int = 0, zeros: bool = False, dtype: torch.dtype = DOUBLE
) -> HiddenMarkov:
    source = generator_of(seed)
    steps = random_rows((states, states), source)
    if zeros:  # from left to right
        steps = steps.triu()
        steps = steps / steps.sum(1, keepdim=True)
    emitted = DiscreteEmissions(random_rows((states, symbols), source))
    return HiddenMarkov(states, emitted, initial=random_rows((states,), source), transitions=steps, dtype=dtype)


def gaussian_model(states: int = 2, width: int = 2, seed: int = 0, diagonal: bool = False) -> HiddenMarkov:
    source = generator_of(seed)
    means = 2 * torch.randn(states, width, generator=source, dtype=DOUBLE)
    root = torch.randn(states, width, width, generator=source, dtype=DOUBLE)
    spread = root @ root.mT + torch.eye(width, dtype=DOUBLE)
    emitted = GaussianEmissions(means, spread.diagonal(dim1=1, dim2=2).clone() if diagonal else spread)
    steps, first = random_rows((states, states), source), random_rows((states,), source)
    return HiddenMarkov(states, emitted, initial=first, transitions=steps)


def by_enumeration(model: HiddenMarkov, log_densities: Tensor) -> tuple[float, Tensor, tuple[int, ...]]:
    """log p(y), p(z_t | y) and the most probable path, from the joint of every path."""
    initial, steps = model.initial_, model.transitions_
    assert initial is not None
    assert steps is not None
    length, states = log_densities.shape
    paths = list(itertools.product(range(states), repeat=length))
    joint = torch.stack([
        initial[p[0]].log() + log_densities[0, p[0]]
        + sum(steps[p[t - 1], p[t]].log() + log_densities[t, p[t]] for t in range(1, length))
        for p in paths
    ])  # fmt: skip
    total = joint.logsumexp(0)
    posterior = torch.zeros(length, states, dtype=DOUBLE)
    for path, weight in zip(paths, (joint - total).exp(), strict=True):
        for t, z in enumerate(path):
            posterior[t, z] += weight
    return float(total), posterior, paths[int(joint.argmax())]


def emitted(model: HiddenMarkov) -> Emissions:
    assert model.emissions_ is not None
    return model.emissions_


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_forward_backward_and_viterbi_equal_the_enumeration_of_paths(seed: int, zeros: bool) -> None:
    model = symbols_model(seed=seed, zeros=zeros)
    sequence = torch.randint(4, (6,), generator=generator_of(seed)).double()
    if seed % 2:
        sequence[3] = NAN
    labels = torch.full((6,), -1)
    if seed == 2:
        labels[4] = 2
    found = emitted(model)
    assert isinstance(found, DiscreteEmissions)
    logs = torch.zeros(6, 3, dtype=DOUBLE)  # a missing symbol says nothing
    for t, symbol in enumerate(sequence.tolist()):
        if not math.isnan(symbol):
            logs[t] = found.probabilities[:, int(symbol)].log()
    logs[labels >= 0] += torch.eye(3, dtype=DOUBLE)[labels[labels >= 0]].log()
    total, posterior, path = by_enumeration(model, logs)
    assert float(model.log_likelihood(sequence, labels)) == pytest.approx(total, abs=1e-10)
    torch.testing.assert_close(model.posterior(sequence, labels), posterior, atol=1e-10, rtol=0)
    assert tuple(model.viterbi(sequence, labels).tolist()) == path


@pytest.mark.parametrize("diagonal", [False, True])
def test_gaussian_emissions_equal_the_enumeration_with_missing_rows(diagonal: bool) -> None:
    model = gaussian_model(diagonal=diagonal)
    y = torch.randn(5, 2, generator=generator_of(1), dtype=DOUBLE)
    y[2] = NAN
    if diagonal:
        y[3, 1] = NAN
    found = emitted(model)
    assert isinstance(found, GaussianEmissions)
    spread = torch.diag_embed(found.covariances) if diagonal else found.covariances
    logs = torch.zeros(5, 2, dtype=DOUBLE)
    for t, row in enumerate(y):
        seen = ~row.isnan()
        if seen.any():
            for k in range(2):
                marginal = torch.distributions.MultivariateNormal(found.means[k, seen], spread[k][seen][:, seen])
                logs[t, k] = marginal.log_prob(row[seen])
    total, posterior, path = by_enumeration(model, logs)
    assert float(model.log_likelihood(y)) == pytest.approx(total, abs=1e-10)
    torch.testing.assert_close(model.posterior(y), posterior, atol=1e-10, rtol=0)
    assert tuple(model.viterbi(y).tolist()) == path


def test_sequences_of_different_lengths_equal_one_by_one() -> None:
    model = symbols_model()
    sequences = [torch.randint(4, (n,), generator=generator_of(n)) for n in (3, 1, 7, 7, 2)]
    torch.testing.assert_close(
        model.log_likelihood(sequences), torch.stack([model.log_likelihood(s) for s in sequences])
    )
    for together, sequence in zip(model.posterior(sequences), sequences, strict=True):
        torch.testing.assert_close(together, model.posterior(sequence))
    for together, sequence in zip(model.viterbi(sequences), sequences, strict=True):
        assert together.tolist() == model.viterbi(sequence).tolist()


def test_log_space_is_exact_where_probabilities_underflow() -> None:
    logs = torch.tensor([[0.0, -2000.0], [0.0, 0.0], [-math.inf, -math.inf]], dtype=DOUBLE)
    matrix = torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=DOUBLE)
    found = log_product(logs, matrix)
    torch.testing.assert_close(found, (logs[:, :, None] + matrix.log()).logsumexp(1))
    assert float(found[0, 1]) == pytest.approx(-2000 + math.log(0.75))
    # The chain cannot change its state; the first half speaks for one by e^1000, the second for the other by e^2000.
    ends = HiddenMarkov(
        2, GaussianEmissions(torch.tensor([[0.0], [1.0]]).double(), torch.full((2, 1), 5e-4).double()),
        initial=torch.tensor([0.5, 0.5]), transitions=torch.eye(2),
    )  # fmt: skip
    y = torch.tensor([0.0, 1.0, 1.0], dtype=DOUBLE)
    assert ends.posterior(y).tolist() == [[0, 1]] * 3
    steps = torch.eye(2, dtype=DOUBLE).requires_grad_()
    moving = HiddenMarkov(2, emitted(ends), initial=torch.tensor([0.5, 0.5]), transitions=steps)
    moving.log_likelihood(torch.tensor([0.5, 0.52, 0.51]).double()).backward()
    assert steps.grad is not None
    assert bool(steps.grad.isfinite().all())


@pytest.mark.parametrize("kind", ["discrete", "full", "diagonal"])
def test_baum_welch_never_falls_and_ends_at_the_log_likelihood(kind: str) -> None:
    for seed in range(12):
        source = generator_of(seed)
        if kind == "discrete":
            truth = HiddenMarkov(3, pseudo_count=seed % 2 * 0.5)
            sequences = [torch.randint(3, (n,), generator=source) for n in (6, 3, 9)]
        else:
            truth = HiddenMarkov(2, "gaussian", covariance="diagonal" if kind == "diagonal" else "full")
            sequences = [1e4 + torch.randn(n, 2, generator=source, dtype=DOUBLE).cumsum(0) for n in (8, 5, 9)]
            sequences[0][2] = NAN
        labels = [torch.full((len(s),), -1) for s in sequences]
        labels[1][:2] = torch.tensor([0, 1])
        fitted = truth.fit(sequences, labels, restarts=1, rounds=30, tolerance=1e-1, generator=source)
        assert bool((torch.tensor(fitted.bounds_).diff() > -1e-8).all())
        total = float(fitted.log_likelihood(sequences, labels).sum())
        if fitted.pseudo_count:  # and the log prior
            rows = (fitted.initial_, fitted.transitions_, fitted.emissions_.probabilities)  # type: ignore[union-attr]
            total += fitted.pseudo_count * sum(float(each.log().sum()) for each in rows)
        assert fitted.bounds_[-1] == pytest.approx(total, abs=1e-7)


@pytest.mark.parametrize("kind", ["discrete", "full", "diagonal"])
def test_a_round_equals_averages_over_the_enumeration_of_paths(kind: str) -> None:
    """Three steps, one of them missing, and three states: each has less than a row and a half."""
    model = symbols_model() if kind == "discrete" else gaussian_model(states=3, diagonal=kind == "diagonal")
    y = torch.tensor([2.0, NAN, 1.0]) if kind == "discrete" else torch.tensor([[1.0, 2.0], [NAN, NAN], [0.5, -1.0]])
    before = emitted(model)
    logs = before.log_densities(before.read(y.double()))
    _, states, _ = by_enumeration(model, logs)
    initial, steps = model.initial_, model.transitions_
    assert initial is not None
    assert steps is not None
    first, second, third = initial.log() + logs[0], steps.log() + logs[1], steps.log() + logs[2]
    joint = first[:, None, None] + second[..., None] + third
    chances = joint.flatten().softmax(0).reshape(3, 3, 3)
    pairs = chances.sum(2) + chances.sum(0)
    model.fit(y, rounds=1, tolerance=1e9)
    torch.testing.assert_close(model.initial_, states[0])
    torch.testing.assert_close(model.transitions_, pairs / pairs.sum(1, keepdim=True))
    seen, weights = y[[0, 2]].double(), states[[0, 2]] / states[[0, 2]].sum(0)
    found = emitted(model)
    if isinstance(found, DiscreteEmissions):
        torch.testing.assert_close(found.probabilities, weights.mT @ torch.eye(4, dtype=DOUBLE)[seen.long()])
        return
    assert isinstance(found, GaussianEmissions)
    torch.testing.assert_close(found.means, weights.mT @ seen)
    gaps = seen[:, None] - found.means
    free = torch.einsum("tk,tki,tkj->kij", weights, gaps, gaps)
    if kind == "diagonal":
        torch.testing.assert_close(found.covariances, free.diagonal(dim1=1, dim2=2))
        return
    least, unit = 1e-6 * seen.var(0, correction=0), torch.eye(2, dtype=DOUBLE)
    for state in range(3):  # two rows lie on a line: beside it the variance is the smallest allowed
        torch.testing.assert_close(found.covariances[state], free[state], atol=1e-5, rtol=1e-5)
        assert float(torch.linalg.eigvalsh(found.covariances[state] - least * unit)[0]) > -1e-12


def test_known_states_are_counted_and_fits_repeat() -> None:
    sequence, states = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([0, 0, 1, 0, 1])
    model = HiddenMarkov(2).fit(sequence, states)
    torch.testing.assert_close(model.transitions_, torch.tensor([[1 / 3, 2 / 3], [1.0, 0.0]], dtype=DOUBLE))
    again = HiddenMarkov(2).fit(sequence.tolist(), states.tolist())
    assert model.bounds_ == again.bounds_ == again.fit(sequence, states).bounds_
    partly = [0.0, NAN, 1.0, -1.0, 1.0]
    assert HiddenMarkov(2).fit(sequence, partly).bounds_ == HiddenMarkov(2).fit(sequence, [0, -1, 1, -1, 1]).bounds_
    found = emitted(model)
    assert isinstance(found, DiscreteEmissions)
    torch.testing.assert_close(found.probabilities, torch.tensor([[2 / 3, 1 / 3], [0.0, 1.0]], dtype=DOUBLE))


def simulated(length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two states that last ten steps on average, with means 0 and 4."""
    source = generator_of(seed)
    states = (torch.rand(length, generator=source) < 0.1).cumsum(0) % 2
    return 4.0 * states[:, None] + torch.randn(length, 2, generator=source, dtype=DOUBLE), states


def test_starts_have_known_states_where_their_rows_are() -> None:
    rows = torch.randn(40, 1, generator=generator_of(0), dtype=DOUBLE)
    rows[20:] += 10
    known = torch.full((40,), -1)
    known[0], known[20] = 1, 0
    for seed in range(6):
        means = clustered(rows, known, 2, False, 1e-6, generator_of(seed)).means[:, 0]
        torch.testing.assert_close(means, torch.tensor([10.0, 0.0], dtype=DOUBLE), atol=1.0, rtol=0)


def test_states_far_apart_are_found() -> None:
    sequences, states = zip(*(simulated(n, n) for n in (40, 55, 30)), strict=True)
    model = HiddenMarkov(2, "gaussian").fit([s.numpy() for s in sequences])
    path = torch.cat(model.viterbi(list(sequences)))
    wrong = (path != torch.cat(states)).double().mean()
    assert min(float(wrong), 1 - float(wrong)) < 0.03
    batches = HiddenMarkov(2, "gaussian").fit(list(sequences), tolerance=1e-4, batch_size=1, restarts=1)
    assert float(batches.log_likelihood(list(sequences)).sum()) > model.bounds_[-1] - 0.05 * 125


def test_network_emissions_climb_and_leave_the_network_as_found() -> None:
    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.means = nn.Parameter(torch.tensor([[0.5, 0.0], [1.5, 1.0]], dtype=DOUBLE))
            self.drop = nn.Dropout(0.5)

        def forward(self, y: Tensor) -> Tensor:
            return -0.5 * (self.drop(y[:, None]) - self.means).square().sum(-1) - math.log(2 * math.pi)

    network = Means()
    before = network.means.detach().clone()
    y = simulated(30, 3)[0]
    y[5] = NAN
    model = HiddenMarkov(2, network).fit(y, restarts=1, tolerance=1e-4)
    assert bool((torch.tensor(model.bounds_).diff() > -1e-8).all())
    assert torch.equal(network.means, before)
    assert network.training
    same = GaussianEmissions(before, torch.ones(2, 2, dtype=DOUBLE))
    plain = HiddenMarkov(2, same, initial=torch.tensor([0.5, 0.5]), transitions=torch.full((2, 2), 0.5))
    direct = HiddenMarkov(2, network, initial=torch.tensor([0.5, 0.5]), transitions=torch.full((2, 2), 0.5))
    torch.testing.assert_close(direct.log_likelihood(y), plain.log_likelihood(y))
    direct.log_likelihood(y).backward()
    assert network.means.grad is not None


def test_a_network_that_got_worse_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def astray(optimiser: torch.optim.LBFGS, closure: object) -> None:
        for weight in optimiser.param_groups[0]["params"]:
            weight.data.sub_(100.0)

    monkeypatch.setattr(torch.optim.LBFGS, "step", astray)
    network = nn.Sequential(nn.Linear(1, 2), nn.LogSigmoid()).double()
    rows = torch.randn(9, 1, generator=generator_of(0), dtype=DOUBLE)
    emissions = NetworkEmissions(network, 2)
    sums = emissions.statistics(rows, torch.eye(2, dtype=DOUBLE)[(rows[:, 0] > 0).long()])
    with torch.no_grad():
        after = emissions.maximised(sums, 0.0)
        assert float(after.expected(sums, 0.0)) >= float(emissions.expected(sums, 0.0))


def test_gradients_are_those_of_finite_differences() -> None:
    sequences = [torch.tensor([0, 1, 3, NAN, 2]), torch.tensor([2.0]), torch.tensor([1.0, 1, 0])]
    model = symbols_model()
    leaves = [t.clone().requires_grad_() for t in (model.initial_, model.transitions_, emitted(model).probabilities)]  # type: ignore[union-attr,attr-defined]

    def likelihood(initial: Tensor, steps: Tensor, symbols: Tensor) -> Tensor:
        parts = (initial / initial.sum(), steps / steps.sum(1, keepdim=True), symbols / symbols.sum(1, keepdim=True))
        free = HiddenMarkov(3, DiscreteEmissions(parts[2]), initial=parts[0], transitions=parts[1])
        return free.log_likelihood(sequences)

    def posterior(initial: Tensor, steps: Tensor, symbols: Tensor) -> Tensor:
        parts = (initial / initial.sum(), steps / steps.sum(1, keepdim=True), symbols / symbols.sum(1, keepdim=True))
        free = HiddenMarkov(3, DiscreteEmissions(parts[2]), initial=parts[0], transitions=parts[1])
        return torch.cat(free.posterior(sequences, graph=True))

    assert torch.autograd.gradcheck(likelihood, leaves)
    assert torch.autograd.gradcheck(posterior, leaves)


def test_a_posterior_with_its_graph_is_the_posterior() -> None:
    model = symbols_model(zeros=True)
    sequences = [torch.randint(4, (n,), generator=generator_of(n)) for n in (3, 1, 7, 7)]
    labels = [torch.full((len(sequence),), -1) for sequence in sequences]
    labels[2][4] = 2
    for graph, plain in zip(
        model.posterior(sequences, labels, graph=True), model.posterior(sequences, labels), strict=True
    ):
        torch.testing.assert_close(graph, plain, atol=1e-12, rtol=0)
    with pytest.raises(lapis.LapisError, match="probability zero"):
        model.posterior([0, 1, 2], [2, 0, -1], graph=True)  # the chain never goes back
    # The derivative in a probability that is zero, from one side.
    data, _ = model._seen(sequences, labels)
    logs = model._model().log_densities(data)
    assert model.initial_ is not None
    assert model.transitions_ is not None
    steps = model.transitions_.clone().requires_grad_()
    weights = torch.randn(len(data.rows), 3, generator=generator_of(0), dtype=DOUBLE)
    (weights * differentiable_states(model.initial_, steps, logs, data.layout)).sum().backward()
    moved = model.transitions_.clone()
    moved[1, 0] = 1e-7
    there, here = (differentiable_states(model.initial_, a, logs, data.layout) for a in (moved, model.transitions_))
    assert steps.grad is not None
    assert float(steps.grad[1, 0]) == pytest.approx(float((weights * (there - here)).sum()) / 1e-7, rel=1e-4)


@pytest.mark.parametrize("gaps", [False, True])
def test_sequences_of_one_length_equal_one_by_one(gaps: bool) -> None:
    model = gaussian_model(states=3, width=2)
    y = torch.randn(4, 6, 2, generator=generator_of(2), dtype=DOUBLE)
    kept = y.clone()
    labels = torch.full((4, 6), -1)
    labels[1, 3] = 2
    if gaps:
        y[2, 4] = NAN
    for graph in (False, True):
        for sequence, known, together in zip(y, labels, model.posterior(y, list(labels), graph=graph), strict=True):
            torch.testing.assert_close(together, model.posterior(sequence, known), atol=1e-12, rtol=0)
    torch.testing.assert_close(model.log_likelihood(y), torch.stack([model.log_likelihood(sequence) for sequence in y]))
    assert torch.equal(y.nan_to_num(), kept.masked_fill(y.isnan(), 0))  # what was passed stays as it was


def test_float32_is_near_float64() -> None:
    sequence = torch.randint(4, (400,), generator=generator_of(5))
    exact, single = symbols_model(), symbols_model(dtype=torch.float32)
    assert single.posterior(sequence).dtype == torch.float32
    torch.testing.assert_close(single.posterior(sequence).double(), exact.posterior(sequence), atol=2e-6, rtol=0)
    assert float(single.log_likelihood(sequence)) == pytest.approx(float(exact.log_likelihood(sequence)), rel=1e-6)


def test_symbols_that_are_missing_are_fitted_over() -> None:
    """NaN in place of symbols that say nothing: the counts are those of the others."""
    one = HiddenMarkov(1, symbols=3).fit([[0, 1, 1, NAN], [NAN, 2]])
    found = emitted(one)
    assert isinstance(found, DiscreteEmissions)
    torch.testing.assert_close(found.probabilities, torch.tensor([[0.25, 0.5, 0.25]], dtype=DOUBLE))


def test_a_list_is_one_sequence_or_many() -> None:
    model, y = gaussian_model(), torch.randn(4, 2, generator=generator_of(3), dtype=DOUBLE)
    whole = model.posterior(y)
    torch.testing.assert_close(model.posterior(y.tolist()), whole)  # rows have two columns: it is one
    torch.testing.assert_close(model.posterior([y.tolist()])[0], whole)
    symbols = symbols_model()
    assert symbols.viterbi(list(np.array([0, 2, 1]))).tolist() == symbols.viterbi([0, 2, 1]).tolist()
    assert [len(path) for path in symbols.viterbi([[0, 2], [1, 1]])] == [2, 2]


def test_bad_sequences_are_refused() -> None:
    model = symbols_model(2, 3)
    for bad, words in (([0, 3], "symbol"), ([0, -1], "whole number"), ([0.5], "whole number"), ([], "no sequence"),
                       ("abc", "no sequence"), (np.zeros((2, 2)), "symbols")):  # fmt: skip
        with pytest.raises(lapis.DataError, match=words):
            model.viterbi(bad)
    with pytest.raises(lapis.DataError, match="label"):
        model.posterior([0, 1], [0, 2])
    with pytest.raises(lapis.DataError, match="label"):
        model.posterior([0, 1], [0.5, 1])
    with pytest.raises(lapis.DataError, match="Labels"):
        model.posterior([0, 1], [0])
    with pytest.raises(lapis.DataError, match="not among"):
        HiddenMarkov(2, symbols=2).fit([0, 1, 2])
    with pytest.raises(lapis.DataError, match="overflow"):
        HiddenMarkov(2, "gaussian").fit([1e200, 0.0, 1.0])
    with pytest.raises(lapis.DataError, match=r"Columns \[1\] were never observed"):
        HiddenMarkov(2, "gaussian", covariance="diagonal").fit([[[0.0, NAN], [1.0, NAN], [3.0, NAN]]])
    with pytest.warns(lapis.LapisWarning, match=r"Columns \[1\] are constant"):
        HiddenMarkov(2, "gaussian").fit([[[0.0, 0.1], [1.0, 0.1], [3.0, 0.1], [0.1, 0.1]]])
    with pytest.raises(lapis.DataError, match="width"):
        HiddenMarkov(2, "gaussian").fit([np.zeros((3, 2)), np.zeros((3, 1))])
    with pytest.raises(lapis.DataError, match="infinite"):
        HiddenMarkov(2, "gaussian").fit([0.0, math.inf])
    with pytest.raises(lapis.DataError, match="in part"):
        HiddenMarkov(2, "gaussian").fit([[[0.0, NAN], [1.0, 2.0]]])
    for kind, bad in (("gaussian", [1.0, 2.0]), ("discrete", [0, 1]), ("gaussian", [NAN] * 5), ("discrete", [NAN] * 5)):
        with pytest.raises(lapis.DataError, match="too few"):
            HiddenMarkov(3, kind).fit(bad)  # type: ignore[arg-type]
    never = HiddenMarkov(2, DiscreteEmissions(torch.eye(2)), initial=torch.tensor([1.0, 0.0]), transitions=torch.eye(2))
    for call in (never.posterior, never.viterbi, never.log_likelihood, never.fit):
        with pytest.raises(lapis.DataError, match=r"Sequence 1 has probability zero.* step 2"):
            call([[0, 0], [0, 0, 1, 0]])
    with pytest.raises(lapis.OptionError, match="no parameters"):
        HiddenMarkov(2).viterbi([0, 1])
    with pytest.raises(lapis.OptionError, match="sum"):
        HiddenMarkov(2, transitions=torch.ones(2, 2))
    with pytest.raises(lapis.OptionError, match="states"):
        HiddenMarkov(3, DiscreteEmissions(torch.eye(2)))
    with pytest.raises(lapis.ModelError, match="log densities"):
        HiddenMarkov(3, nn.Linear(1, 2)).fit([1.0, 2.0])


def test_an_observation_is_a_step_of_the_learning_rule() -> None:
    """The last state's probabilities, given the sequence so far: conjugate steps with a categorical q."""
    model, y = gaussian_model(states=3), torch.randn(6, 2, generator=generator_of(8), dtype=DOUBLE)
    assert model.transitions_ is not None
    assert model.initial_ is not None
    assert isinstance(model.emissions_, GaussianEmissions)
    densities = model.emissions_.log_densities(y)
    expected = model.initial_
    for t in range(len(y)):
        prior = Categorical(expected.log())
        q = step(prior, lambda z, t=t, prior=prior: -z @ densities[t] - prior.log_prob(z[None])[0], 1, "quadrature")
        torch.testing.assert_close(model.posterior(y[: t + 1])[-1], q.mean)
        expected = q.mean @ model.transitions_
