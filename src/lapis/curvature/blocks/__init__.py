"""Structures: sums over data about blocks of weights, and the Gaussians that they make with a prior."""
