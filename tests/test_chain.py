"""Sums over paths with scaled probabilities: equal to log space, which takes over where they underflow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lapis.latent.markov import chain, scaled
from lapis.latent.markov.chain import Paths, paths_in_log_space
from lapis.latent.markov.starts import random_rows
from lapis.latent.sequences import Layout

DOUBLE = torch.float64


def problem(
    seed: int, lengths: tuple[int, ...], spread: float = 1.0, zeros: bool = False
) -> tuple[Tensor, Tensor, Tensor, Layout]:
    """pi, A, log densities (T, B, K) and the layout of a chain of 4 states; with `zeros` it goes from left to right."""
    source = torch.Generator().manual_seed(seed)
    steps = random_rows((4, 4), source)
    if zeros:
        steps = steps.triu() / steps.triu().sum(1, keepdim=True)
    layout = Layout(lengths)
    logs = spread * torch.randn(sum(lengths), 4, generator=source, dtype=DOUBLE)
    if zeros:
        logs[::3, 0] = -math.inf
    return random_rows((4,), source), steps, layout.in_time(logs), layout


def paths(initial: Tensor, transitions: Tensor, logs: Tensor, layout: Layout, *, pairs: bool = True) -> Paths:
    return chain.paths(initial, transitions, logs.clone, layout, pairs=pairs)


def failures(initial: Tensor, transitions: Tensor, logs: Tensor, layout: Layout) -> Tensor:
    """Sequences that scaled probabilities do not serve, (B,)."""
    return scaled.scaled_paths(initial, transitions, logs.clone(), layout, pairs=True)[3]


def assert_same(found: Paths, exact: Paths, tolerance: float = 1e-12) -> None:
    for name in ("log_likelihoods", "states", "first", "pairs"):
        one, other = (getattr(each, name).double() for each in (found, exact))
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("spread", [1.0, 6.0])
@pytest.mark.parametrize("lengths", [(7,), (1, 1), (60, 60, 60), (3, 40, 1, 40, 12)])
def test_scaled_probabilities_equal_log_space(lengths: tuple[int, ...], spread: float, zeros: bool) -> None:
    given = problem(len(lengths), lengths, spread, zeros)
    assert not bool(failures(*given).any())
    assert_same(paths(*given), paths_in_log_space(*given), 1e-10 if spread > 1 else 1e-12)
    assert paths(*given, pairs=False).pairs is None


def test_rounding_does_not_grow_with_the_length() -> None:
    given = problem(0, (3000, 2999))
    single = [each.float() if isinstance(each, Tensor) else each for each in given]
    found = paths(*single)  # type: ignore[arg-type]
    assert found.states.dtype == torch.float32
    exact = paths_in_log_space(*given)
    torch.testing.assert_close(found.states.double(), exact.states, atol=3e-6, rtol=0)
    torch.testing.assert_close(found.pairs.double(), exact.pairs, atol=0, rtol=3e-6)  # type: ignore[union-attr]
    torch.testing.assert_close(found.log_likelihoods.double(), exact.log_likelihoods, atol=0, rtol=1e-6)


@pytest.mark.parametrize("gradual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("lengths", [(12, 15, 12, 2), (12, 12, 12, 12)])
def test_sequences_that_underflow_go_through_log_space_and_others_do_not(
    lengths: tuple[int, ...], dtype: torch.dtype, gradual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain stays where it is; the beginning speaks for one state, the end for the other by more.

    At once, c becomes small; by and by, no c is, but w grows.
    """
    layout = Layout(lengths)
    steps, initial = torch.eye(2, dtype=dtype), torch.tensor([0.3, 0.7], dtype=dtype)
    rows = torch.zeros(sum(lengths), 2, dtype=dtype)
    rows[:, 1] = 0.5 * torch.randn(len(rows), generator=torch.Generator().manual_seed(0), dtype=dtype)
    turned = 2
    start = sum(lengths[:turned])
    if gradual:
        gap = 9.0 if dtype == torch.float32 else 100.0
        rows[start : start + 4], rows[start + 4 : start + 9] = torch.tensor([0.0, -gap]), torch.tensor([-gap, 0.0])
    else:
        rows[start], rows[start + 3] = torch.tensor([0.0, -400.0]), torch.tensor([-801.0, 0.0])
    logs = layout.in_time(rows)
    failed = failures(initial, steps, logs, layout)
    assert failed.tolist() == [slot == int(layout.places[turned]) for slot in range(4)]
    seen = []

    def told(*arguments: Tensor | Layout, pairs: bool) -> Paths:
        seen.append(arguments[3].lengths)  # type: ignore[union-attr]
        return paths_in_log_space(*arguments, pairs=pairs)  # type: ignore[arg-type]

    monkeypatch.setattr(chain, "paths_in_log_space", told)
    found = paths(initial, steps, logs, layout)
    assert seen == [(lengths[turned],)]
    assert_same(found, paths_in_log_space(initial, steps, logs, layout), 1e-12 if dtype == DOUBLE else 1e-5)
    assert float(found.states[start, 1]) > 0.99
    alone = paths(initial, steps, logs[:12, failed], Layout((12,)))  # every sequence fails
    torch.testing.assert_close(alone.states, found.states[start : start + 12])


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_state_that_was_excluded_cannot_drown_others(dtype: torch.dtype) -> None:
    """One state has by far the largest density where it cannot be: others keep their ratio."""
    low = -95.0 if dtype == torch.float32 else -740.0
    logs = torch.tensor([[-math.inf, 0, 0], [0, low, low - 0.7], [2 * low, 0, 0]], dtype=dtype)[:, None]
    found = paths(torch.full((3,), 1 / 3, dtype=dtype), torch.eye(3, dtype=dtype), logs, Layout((3,)))
    expected = torch.tensor([-math.inf, 0, -0.7], dtype=dtype).softmax(0).expand(3, 3)
    torch.testing.assert_close(found.states, expected, atol=0, rtol=1e-4 if dtype != DOUBLE else 1e-12)


def test_the_margin_is_where_underflow_begins_to_matter() -> None:
    """Evidence first for one state, then for the other, by e^gap each: right for every gap, on either side."""
    for dtype in (torch.float32, DOUBLE):
        for gap in (20.0, 30.0, 80.0, 100.0, 300.0, 340.0, 700.0, 760.0, 1500.0):
            logs = torch.tensor([[0.0, -gap], [-gap, 0.5], [0.0, 0.0]], dtype=dtype)[:, None]
            found = paths(torch.full((2,), 0.5, dtype=dtype), torch.eye(2, dtype=dtype), logs, Layout((3,)))
            expected = torch.tensor([0.0, 0.5], dtype=dtype).softmax(0).expand(3, 2)
            torch.testing.assert_close(found.states, expected, atol=0, rtol=1e-4 if dtype != DOUBLE else 1e-12)
