"""Integrals of densities and links over Gaussian outputs: closed forms, fixed points, one-dimensional quadrature."""
