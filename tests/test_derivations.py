"""Algorithms that follow from the Bayesian learning rule: their iterates, and that the comparison can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import lapis
from lapis.cli import app
from lapis.learning_rule.algorithms import algorithms
from lapis.learning_rule.algorithms.derivation import TOLERANCE, Derivation, Derivations
from lapis.learning_rule.losses import Loss

Derive = Callable[[], Derivation]


def name_of(derive: Derive) -> str:
    return derive.__name__


@pytest.mark.parametrize("derive", algorithms(), ids=name_of)
def test_iterates_of_the_rule_are_those_of_the_algorithm(derive: Derive) -> None:
    state = torch.get_rng_state()
    found = derive()
    assert found.difference <= TOLERANCE, found
    assert found.limit or found.difference < 1e-12, "without a limit there is rounding only"
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("derive", algorithms(), ids=name_of)
def test_a_rule_that_is_wrong_by_a_thousandth_is_noticed(derive: Derive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loss that the rule sees is multiplied by 1.001; the algorithms beside it see their own."""
    plain = Loss.values

    def wrong(self: Loss, points: Tensor) -> Tensor:
        return 1.001 * plain(self, points)

    monkeypatch.setattr(Loss, "values", wrong)
    assert derive().difference > 10 * TOLERANCE


@pytest.mark.parametrize(("difference", "code"), [(1e-9, 0), (1e-3, 1)])
def test_the_command_prints_the_table_and_fails_if_it_does_not_hold(
    difference: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Derivations((Derivation("Newton", "Gaussian", "local", 8, difference),))
    monkeypatch.setattr(lapis.learning_rule, "derivations", lambda: table)
    result = CliRunner().invoke(app, ["learning-rule"])
    assert result.exit_code == code, result.output
    heads, row = (line.split() for line in result.stdout.splitlines() if line.startswith(("algorithm", "Newton")))
    assert heads == ["algorithm", "distribution", "q", "expectation", "difference", "limit"]
    assert row == ["Newton", "Gaussian", "local", f"{difference:.1e}"]


def test_a_table_with_a_difference_does_not_hold() -> None:
    row = Derivation("one", "q", "local", 1, 1e-9)
    assert Derivations((row,)).hold
    bad = Derivations((row, Derivation("two", "q", "local", 1, 1e-3, "a limit")))
    assert not bad.hold
    assert str(bad).splitlines()[-1].split() == ["two", "q", "local", "1", "1.0e-03", "a", "limit"]
    assert bad[1].algorithm == "two"
    assert lapis.learning_rule.Derivations is Derivations
