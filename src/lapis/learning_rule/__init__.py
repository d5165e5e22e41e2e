"""The Bayesian learning rule: families of distributions over weights, and the one update from which algorithms follow.

Families are float64 values over flat weight vectors; `docs/learning_rule.md` is the guide. Optimisers of the rule for
networks are in `lapis.optim`.
"""

from __future__ import annotations

from lapis.learning_rule.algorithms import Derivation, Derivations, derivations
from lapis.learning_rule.dirichlet import Dirichlet
from lapis.learning_rule.discrete import Bernoulli, Categorical
from lapis.learning_rule.family import Family
from lapis.learning_rule.gaussian import DiagonalGaussian, FixedGaussian, FullGaussian
from lapis.learning_rule.kronecker import KroneckerGaussian
from lapis.learning_rule.mixture import GaussianMixture
from lapis.learning_rule.rule import Run, expected_gradient, run, step
from lapis.learning_rule.spike_and_slab import FixedSpikeAndSlab, SpikeAndSlab

__all__ = [
    "Bernoulli",
    "Categorical",
    "Derivation",
    "Derivations",
    "DiagonalGaussian",
    "Dirichlet",
    "Family",
    "FixedGaussian",
    "FixedSpikeAndSlab",
    "FullGaussian",
    "GaussianMixture",
    "KroneckerGaussian",
    "Run",
    "SpikeAndSlab",
    "derivations",
    "expected_gradient",
    "run",
    "step",
]
