"""Models with latent variables: expectation-maximisation and what is fitted by it."""

from lapis.latent.em import Expected, Fit, LatentModel, em
from lapis.latent.gaussian_mixture import GaussianMixture

__all__ = ["Expected", "Fit", "GaussianMixture", "LatentModel", "em"]
