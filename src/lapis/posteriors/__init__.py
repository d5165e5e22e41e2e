"""Posteriors over a network's weights."""

from lapis.posteriors.laplace import LaplacePosterior, laplace
from lapis.posteriors.storage import load

__all__ = ["LaplacePosterior", "laplace", "load"]
