"""Optimisers that leave a posterior behind: torch optimisers whose steps are those of the Bayesian learning rule."""

from lapis.optim.adaptive import Adam, RMSprop
from lapis.optim.ivon import IVON

__all__ = ["IVON", "Adam", "RMSprop"]
