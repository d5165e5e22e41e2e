"""Linear models with very many weights and observations: exact posteriors through products with the features alone."""

from lapis.linear_models.fit import linear
from lapis.linear_models.fourier import RandomFourierFeatures
from lapis.linear_models.posterior import LinearPosterior

__all__ = ["LinearPosterior", "RandomFourierFeatures", "linear"]
