"""Finds weights whose scale does not affect the outputs because a normalisation follows: by tracing, and rescaling."""

from lapis.normalised.groups import find_normalised, normalised_groups

__all__ = ["find_normalised", "normalised_groups"]
