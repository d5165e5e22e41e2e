"""Active learning: choose the examples whose labels are worth most, and a loop that trains, asks, and goes on."""

from lapis.decisions.active.acquisition import acquire, scores
from lapis.decisions.active.loop import History, Round, learn

__all__ = ["History", "Round", "acquire", "learn", "scores"]
