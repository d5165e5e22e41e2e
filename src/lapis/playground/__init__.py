"""A page to play with: draw points, choose a network and a prior, and watch the posterior follow."""

from __future__ import annotations

from lapis.playground.server import serve

__all__ = ["serve"]
