"""The evidence log p(D) as a function of prior and noise, and its maximisation."""

from lapis.evidence.gradient import Tuning, maximise

__all__ = ["Tuning", "maximise"]
