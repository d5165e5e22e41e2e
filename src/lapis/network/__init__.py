"""A torch module as a function of its chosen weights: which, in what order, called how, left as it was found."""

from lapis.network.choice import Weights
from lapis.network.network import Network, flat_gradient, split_vector
from lapis.network.untouched import evaluating

__all__ = ["Network", "Weights", "evaluating", "flat_gradient", "split_vector"]
