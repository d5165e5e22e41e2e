"""Posteriors over a network's weights."""

from lapis.posteriors.base import Posterior
from lapis.posteriors.drawn import DrawnPosterior
from lapis.posteriors.fitting import laplace
from lapis.posteriors.implicit import ImplicitPosterior
from lapis.posteriors.laplace import LaplacePosterior
from lapis.posteriors.storage import load

__all__ = ["DrawnPosterior", "ImplicitPosterior", "LaplacePosterior", "Posterior", "laplace", "load"]
