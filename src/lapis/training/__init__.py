"""Training with the evidence in the loop, and choosing between models by it."""

from lapis.training.by_evidence import train
from lapis.training.comparison import Comparison, compare
from lapis.training.members import ensemble
from lapis.training.snapshots import swag

__all__ = ["Comparison", "compare", "ensemble", "swag", "train"]
