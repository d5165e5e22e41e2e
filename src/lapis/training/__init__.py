"""Training with the evidence in the loop, and choosing between models by it."""

from lapis.training.comparison import Comparison, compare
from lapis.training.train import train

__all__ = ["Comparison", "compare", "train"]
