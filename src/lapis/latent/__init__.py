"""Models with latent variables: expectation-maximisation and what is fitted by it."""

from lapis.latent.bayesian_mixture import BayesianGaussianMixture, choose_components
from lapis.latent.em import Expected, Fit, LatentModel, em
from lapis.latent.gaussian_mixture import GaussianMixture

__all__ = [
    "BayesianGaussianMixture",
    "Expected",
    "Fit",
    "GaussianMixture",
    "LatentModel",
    "choose_components",
    "em",
]
