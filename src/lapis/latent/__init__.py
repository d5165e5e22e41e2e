"""Models with latent variables: expectation-maximisation and what is fitted by it."""

from lapis.latent.em import Expected, Fit, LatentModel, em

__all__ = ["Expected", "Fit", "LatentModel", "em"]
