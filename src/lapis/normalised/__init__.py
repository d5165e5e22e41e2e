"""Which weights are scale-free because a normalisation follows: traced through the network, confirmed by rescaling."""

from lapis.normalised.groups import find_normalised, normalised_groups

__all__ = ["find_normalised", "normalised_groups"]
