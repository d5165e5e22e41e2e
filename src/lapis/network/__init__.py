"""A torch module as a function of its chosen weights: their choice and order, calls, and restoring the module after."""

from lapis.network.choice import Weights
from lapis.network.flat import flat_gradient, split_vector
from lapis.network.locking import held
from lapis.network.network import Network
from lapis.network.untouched import differentiating, evaluating, full_precision, outside_inference_mode, restored_modes

__all__ = [
    "Network",
    "Weights",
    "differentiating",
    "evaluating",
    "flat_gradient",
    "full_precision",
    "held",
    "outside_inference_mode",
    "restored_modes",
    "split_vector",
]
