"""What to do with uncertainty: which labels to ask for (`active`), which action to take (Thompson sampling, bounds)."""

from lapis.decisions import active
from lapis.decisions.bandits import thompson, upper_confidence

__all__ = ["active", "thompson", "upper_confidence"]
