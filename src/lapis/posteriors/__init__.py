"""Posteriors over a network's weights."""

from lapis.posteriors.fitting import laplace
from lapis.posteriors.laplace import LaplacePosterior
from lapis.posteriors.storage import load

__all__ = ["LaplacePosterior", "laplace", "load"]
