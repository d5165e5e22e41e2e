"""Models with latent variables: expectation-maximisation and what is fitted by it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lapis.latent.driver import Expected, Fit, LatentModel, em
from lapis.latent.dynamics.linear_dynamics import Forecast, LinearDynamics, States
from lapis.latent.markov.discrete import DiscreteEmissions
from lapis.latent.markov.gaussian import GaussianEmissions
from lapis.latent.markov.hidden_markov import HiddenMarkov
from lapis.latent.variational.fit import VariationalFit, variational_em

if TYPE_CHECKING:
    from lapis.latent.bayesian_mixture import BayesianGaussianMixture, choose_components
    from lapis.latent.gaussian_mixture import GaussianMixture
else:

    def __getattr__(name: str) -> Any:
        """Mixtures, imported when first used: they are estimators, and scikit-learn takes a second to import."""
        if name == "GaussianMixture":
            return import_module("lapis.latent.gaussian_mixture").GaussianMixture
        if name in ("BayesianGaussianMixture", "choose_components"):
            return getattr(import_module("lapis.latent.bayesian_mixture"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "BayesianGaussianMixture",
    "DiscreteEmissions",
    "Expected",
    "Fit",
    "Forecast",
    "GaussianEmissions",
    "GaussianMixture",
    "HiddenMarkov",
    "LatentModel",
    "LinearDynamics",
    "States",
    "VariationalFit",
    "choose_components",
    "em",
    "variational_em",
]
