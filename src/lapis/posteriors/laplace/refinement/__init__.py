"""Refinement: Gaussian variational inference in the tangent model."""
