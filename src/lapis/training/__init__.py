"""Training with the evidence in the loop, and choosing between models by it."""

from lapis.training.by_evidence import train
from lapis.training.comparison import Comparison, compare

__all__ = ["Comparison", "compare", "train"]
