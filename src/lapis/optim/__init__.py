"""Optimisers that leave a posterior behind: torch optimisers whose steps are those of the Bayesian learning rule."""

from lapis.optim.adaptive import Adam, RMSprop
from lapis.optim.bayesbinn import BayesBiNN
from lapis.optim.ivon import IVON
from lapis.optim.vogn import VOGN
from lapis.optim.von import VON

__all__ = ["IVON", "VOGN", "VON", "Adam", "BayesBiNN", "RMSprop"]
