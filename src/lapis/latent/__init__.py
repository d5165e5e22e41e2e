"""Models with latent variables: expectation-maximisation and what is fitted by it."""

from lapis.latent.bayesian_mixture import BayesianGaussianMixture, choose_components
from lapis.latent.driver import Expected, Fit, LatentModel, em
from lapis.latent.dynamics.linear_dynamics import Forecast, LinearDynamics, States
from lapis.latent.gaussian_mixture import GaussianMixture
from lapis.latent.markov.discrete import DiscreteEmissions
from lapis.latent.markov.gaussian import GaussianEmissions
from lapis.latent.markov.hidden_markov import HiddenMarkov
from lapis.latent.variational.fit import VariationalFit, variational_em

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
