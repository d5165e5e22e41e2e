"""Algorithms that follow from the rule, each run beside the same algorithm written without it."""

from __future__ import annotations

from collections.abc import Callable

from lapis.learning_rule.algorithms.derivation import Derivation, Derivations
from lapis.options import check_arguments
from lapis.progress import track


def algorithms() -> tuple[Callable[[], Derivation], ...]:
    """The functions behind the table, in the order of docs/learning_rule.md; imported only when asked for."""
    from lapis.learning_rule.algorithms import conjugate, descent, discrete, inference

    return (
        descent.gradient_descent,
        descent.stationary_covariance,
        descent.newton,
        descent.ensemble_of_newton,
        descent.rmsprop,
        descent.adam,
        discrete.dropout,
        discrete.straight_through,
        conjugate.ridge_regression,
        conjugate.kalman_filter,
        conjugate.exponential_weights,
        conjugate.message_passing,
        conjugate.stochastic_variational_inference,
        inference.laplace,
        inference.variational_inference,
        inference.evolution_strategies,
    )


def derivations(*, progress: bool | None = None) -> Derivations:
    """Run every algorithm that the rule is said to contain, beside the rule; takes a few seconds.

    Args:
        progress: show a bar; by default on a terminal only.

    >>> table = derivations()
    >>> len(table), table.hold
    (16, True)
    >>> table[0].algorithm, table[0].family, table[0].expectation
    ('gradient descent (torch SGD)', 'Gaussian, fixed covariance', 'local')
    """
    check_arguments(derivations, locals())
    known = algorithms()
    return Derivations(tuple(derive() for derive in track(known, "Derivations", len(known), progress)))


__all__ = ["Derivation", "Derivations", "algorithms", "derivations"]
