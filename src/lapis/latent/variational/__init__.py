"""Variational EM, for models whose posterior has no closed form."""
