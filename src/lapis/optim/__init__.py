"""Optimisers that leave a posterior behind: torch optimisers whose steps are those of the Bayesian learning rule."""

from lapis.optim.adaptive import Adam, RMSprop
from lapis.optim.ivon import IVON
from lapis.optim.vogn import VOGN

__all__ = ["IVON", "VOGN", "Adam", "RMSprop"]
