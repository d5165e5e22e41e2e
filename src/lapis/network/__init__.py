"""A torch module as a function of its chosen weights: their choice and order, calls, and restoring the module after."""

from lapis.network.choice import Weights
from lapis.network.network import Network, flat_gradient, split_vector
from lapis.network.untouched import evaluating, restored_modes

__all__ = ["Network", "Weights", "evaluating", "flat_gradient", "restored_modes", "split_vector"]
