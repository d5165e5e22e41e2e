"""Posteriors over a network's weights."""

from lapis.posteriors.base import Posterior
from lapis.posteriors.laplace.drawn import DrawnPosterior
from lapis.posteriors.laplace.implicit import ImplicitPosterior
from lapis.posteriors.laplace.stored import LaplacePosterior
from lapis.posteriors.storage import load

__all__ = ["DrawnPosterior", "ImplicitPosterior", "LaplacePosterior", "Posterior", "load"]
